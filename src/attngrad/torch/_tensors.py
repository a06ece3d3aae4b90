"""Tensors and arrays: one memory seen as either; and which tensors are taken."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attngrad.core.arrays import Array, kind_of
from attngrad.core.checks import fail
from attngrad.core.dtypes import BFLOAT16, SENTENCE, TABLE
from attngrad.core.operands import INPUT_NAMES, QKV, record

_COMPUTED: dict[torch.dtype, torch.dtype] = {getattr(torch, d.name): getattr(torch, d.compute.name) for d in TABLE}

_Inputs: Any = record("Inputs", INPUT_NAMES, len(QKV))


class Inputs(_Inputs):  # type: ignore[misc]
    """What one call is given, as one flat list; q, k and v with a heads axis. offset and seed may be numbers."""

    __slots__ = ()


def to_array(x: Any) -> Array:
    """The memory of a tensor as a NumPy array; a copy only where a negative bit must be resolved. Others stay."""
    if not isinstance(x, Tensor):
        return x
    if x.dtype is torch.bfloat16:  # which NumPy does not know
        return x.detach().resolve_neg().view(torch.int16).numpy().view(BFLOAT16)
    return x.numpy(force=True)


def to_tensor(x: Array | Tensor) -> Tensor:
    """The memory of ``x`` as a tensor."""
    if isinstance(x, Tensor):
        return x
    if not x.flags.writeable:
        x = x.copy()
    if x.dtype == BFLOAT16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    tensor: Tensor = torch.from_numpy(x)
    return tensor


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What ``dtype`` accumulates in, and the dtype of lse."""
    return _COMPUTED.get(dtype, dtype)


def check_tensor(function: str, name: str, x: object, beside: Tensor | None = None, called: str = "q") -> None:
    """``x`` is a strided tensor, on the device of ``beside``, which the function has ``called`` so."""
    if not isinstance(x, Tensor):
        remedy = "Convert it with torch.as_tensor; attngrad.attention takes NumPy arrays."
        fail(TypeError, function, name, "be a torch.Tensor", kind_of(x), remedy)
    if beside is not None and x.device != beside.device:
        fail(
            ValueError,
            function,
            name,
            f"be on the device of {called}, {beside.device}",
            x.device,
            "Move it with .to().",
        )
    if x.layout is not torch.strided:
        fail(TypeError, function, name, "be a strided tensor", f"layout {x.layout}", "Convert it with .to_dense().")
    if x.is_quantized:
        fail(TypeError, function, name, "not be quantized", x.dtype, "Convert it with .dequantize().")
    if (x.is_floating_point() and x.dtype.itemsize == 1) or x.dtype is torch.complex32:  # which NumPy does not know
        check_dtype(function, name, x)


def check_dtype(function: str, name: str, x: Tensor) -> None:
    """``x``, as one of q, k and v, is of a dtype that the passes compute in."""
    if x.dtype not in _COMPUTED:
        remedy = "attngrad.reference computes in complex." if x.is_complex() else "Convert it with .to(torch.float32)."
        fail(TypeError, function, name, f"have dtype {SENTENCE}", _name(x.dtype), remedy)


def check_additive(function: str, name: str, x: Tensor, q: Tensor) -> None:
    """``x``, which is added to scores, is of q's dtype or, beside 16-bit tensors, float32."""
    wide = wide_dtype(q.dtype)
    if x.dtype not in (q.dtype, wide):
        also = "" if wide is q.dtype else f" or {_name(wide)}"
        rule, remedy = f"have the dtype of q, {_name(q.dtype)}{also}", "Convert it with .to(q.dtype)."
        fail(TypeError, function, name, rule, _name(x.dtype), remedy)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@lru_cache
def _numpy_dtype(dtype: torch.dtype) -> Any:
    if dtype is torch.bfloat16:
        return BFLOAT16
    try:
        return np.dtype(_name(dtype))  # by name: a tensor would be on the default device, or belong to a mode
    except TypeError:
        return None


def numpy_dtype(function: str, x: Tensor) -> Any:
    """The dtype of ``x`` in NumPy."""
    found = _numpy_dtype(x.dtype)
    if found is None:
        fail(TypeError, function, "every input", "have a dtype that NumPy knows, or bfloat16", x.dtype)
    return found
