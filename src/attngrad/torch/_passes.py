"""The passes of the kernels over CPU tensors: no copy in, no copy out, no autograd.

``Inputs`` are the tensors of one call, q, k and v with a heads axis. Each pass gives tensors in the dtype that autograd
expects: out and its tangent in the dtype of q, lse and its tangent in float32 beside 16-bit inputs, else in that of q;
gradients in the dtype of their input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attngrad import _kernels
from attngrad._arrays import BFLOAT16, kind_of
from attngrad._options import Array, Gradients, Operands, Options, Tangents, bind, check_dropout, fail

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Inputs(NamedTuple):
    """What one call is given. The first five are differentiable; offset and seed may be numbers or tensors."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    sinks: Tensor | None = None
    mask: Tensor | None = None
    q_segments: Tensor | None = None
    k_segments: Tensor | None = None
    offset: Tensor | int = 0
    seed: Tensor | int | None = None


# --- tensors and arrays ---------------------------------------------------------------------------------------------


def to_array(x: Tensor | None) -> Array:
    """The memory of ``x`` as a NumPy array; a copy only where a negative bit must be resolved."""
    if x is None:
        return None
    if x.dtype is torch.bfloat16:  # which NumPy does not know
        return x.detach().resolve_neg().view(torch.int16).numpy().view(BFLOAT16)
    return x.numpy(force=True)


def to_tensor(x: Array) -> Tensor:
    """The memory of ``x`` as a tensor."""
    if not x.flags.writeable:
        x = x.copy()
    if x.dtype == BFLOAT16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    tensor: Tensor = torch.from_numpy(x)
    return tensor


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What ``dtype`` accumulates in, and the dtype of lse."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


# --- checks ---------------------------------------------------------------------------------------------------------


def check_tensor(function: str, name: str, x: object) -> None:
    """``x`` is a strided tensor in the memory of the CPU."""
    if not isinstance(x, Tensor):
        remedy = "Convert it with torch.as_tensor; attngrad.attention takes NumPy arrays."
        fail(TypeError, function, name, "be a torch.Tensor", kind_of(x), remedy)
    if not x.is_cpu:
        remedy = "Move it with .cpu(); attngrad.reference computes, densely, on any device."
        fail(ValueError, function, name, "be on the CPU", f"device {x.device}", remedy)
    if x.layout is not torch.strided:
        fail(TypeError, function, name, "be a strided tensor", f"layout {x.layout}", "Convert it with .to_dense().")
    if x.is_quantized:
        fail(TypeError, function, name, "not be quantized", x.dtype, "Convert it with .dequantize().")


@lru_cache(maxsize=1024, typed=True)
def _settings(function: str, features: int, *scalars: Any) -> Options:
    names = ("scale", "causal", "window", "softcap", "dropout")
    one = np.zeros((1, features))
    o = bind(function, one, one, one, {**dict(zip(names, scalars, strict=True)), "seed": 0})[1]
    return replace(o, seed=None)


def settings(function: str, features: int, scale: Any, causal: Any, window: Any, softcap: Any, dropout: Any) -> Options:
    """The options that are not arrays, checked; the seed goes its own way, for it may be a tensor."""
    window = tuple(window) if isinstance(window, list) else window
    arguments = (function, features, scale, causal, window, softcap, dropout)
    try:
        hash(arguments)
    except TypeError:  # nothing that hashes wrongly is valid: let the check say so
        return _settings.__wrapped__(*arguments)
    return _settings(*arguments)


def check_seed(function: str, dropout: float, seed: Any) -> Any:
    """The seed, checked: a number, or a tensor that holds one."""
    if isinstance(seed, Tensor):
        if seed.dtype is not torch.int64:
            fail(TypeError, function, "seed", "be an integer or an int64 tensor", seed.dtype)
        return seed
    return check_dropout(function, dropout, seed)[1]


def check_segments(function: str, segments: Any) -> tuple[Tensor, Tensor]:
    """``segments``, if it is a pair of tensors."""
    if not isinstance(segments, (tuple, list)):
        fail(TypeError, function, "segments", "be a pair (q_segments, k_segments)", kind_of(segments))
    if len(segments) != 2:
        fail(ValueError, function, "segments", "be a pair (q_segments, k_segments)", f"{len(segments)} values")
    for name, ids in zip(("q_segments", "k_segments"), segments, strict=True):
        check_tensor(function, name, ids)
    return segments[0], segments[1]


def check_arrays(function: str, x: Inputs) -> None:
    """The shapes and dtypes of all that is given, by the rules of the NumPy functions."""
    options: dict[str, Any] = {"bias": to_array(x.bias), "sinks": to_array(x.sinks), "mask": to_array(x.mask)}
    if x.q_segments is not None:
        options["segments"] = (to_array(x.q_segments), to_array(x.k_segments))
    options["offset"] = to_array(x.offset) if isinstance(x.offset, Tensor) else x.offset
    given = {name: value for name, value in options.items() if value is not None}
    if len(given) == 1 and type(x.offset) is int and abs(x.offset) < 2**61:
        given = {}
    bind(function, to_array(x.q), to_array(x.k), to_array(x.v), given)


# --- passes ---------------------------------------------------------------------------------------------------------


def _operands(x: Inputs, o: Options) -> tuple[Operands, Options]:
    segments = None if x.q_segments is None else (to_array(x.q_segments), to_array(x.k_segments))
    offset = to_array(x.offset) if isinstance(x.offset, Tensor) else x.offset
    q, k, v, bias, sinks, mask = map(to_array, x[:6])
    operands = Operands(q, k, v, bias, sinks, mask, segments, offset)
    return operands, o if x.seed is None else replace(o, seed=int(x.seed) % 2**64)


def forward(x: Inputs, o: Options) -> tuple[Tensor, Tensor]:
    """``out, lse``."""
    out, lse = _kernels.forward(*_operands(x, o))
    return to_tensor(out), to_tensor(lse)


def forward_saving(x: Inputs, o: Options) -> tuple[Tensor, ...]:
    """``out, lse``, and the three tensors that ``backward`` needs."""
    out, lse, saved = _kernels.forward_saving(*_operands(x, o))
    return to_tensor(out), to_tensor(lse), *map(to_tensor, saved)


def backward(
    x: Inputs, o: Options, saved: Sequence[Tensor], dout: Tensor | None, dlse: Tensor | None
) -> tuple[Tensor, ...]:
    """The gradients of the inputs that are given, of <dout, out> + <dlse, lse>."""
    kept = _kernels.Saved(*(to_array(y.contiguous()) for y in saved))  # vmap may have given them other strides
    return _given(_kernels.backward(*_operands(x, o), kept, to_array(dout), to_array(dlse)))


def forward_tangent(x: Inputs, o: Options, t: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
    """``out_dot, lse_dot`` along ``t``, the tangents of the five differentiable inputs."""
    _, _, out_dot, lse_dot = _kernels.forward_tangent(*_operands(x, o), Tangents(*map(to_array, t)))
    return to_tensor(out_dot).to(x.q.dtype), to_tensor(lse_dot)


def backward_tangent(
    x: Inputs, o: Options, t: Sequence[Tensor | None], cotangents: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """The gradients, then their tangents along ``t``; ``cotangents`` are dout, dlse, dout_dot, dlse_dot."""
    dout, dlse, dout_dot, dlse_dot = map(to_array, cotangents)
    grads, grads_dot = _kernels.backward_tangent(
        *_operands(x, o), Tangents(*map(to_array, t)), dout, dout_dot, dlse, dlse_dot
    )
    return *_given(grads), *_given(grads_dot)


def _given(grads: Gradients) -> tuple[Tensor, ...]:
    return tuple(to_tensor(g) for g in grads if g is not None)
