"""The passes of the kernels over CPU tensors: no copy in, no copy out, no autograd.

``Inputs`` are the tensors of one call, q, k and v with a heads axis. Each pass gives tensors in the dtype that autograd
expects: out and its tangent in the dtype of q, lse and its tangent in float32 beside 16-bit inputs, else in that of q;
gradients in the dtype of their input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import compress
from typing import Any, NamedTuple, NoReturn

import numpy as np

import torch
from attngrad.backends.cpu import kernels
from attngrad.core.arrays import Array, kind_of
from attngrad.core.checks import fail
from attngrad.core.dtypes import BFLOAT16, SENTENCE, TABLE
from attngrad.core.options import Gradients, Operands, Options, Tangents, bind, check_dropout, check_magnitudes
from torch import Tensor

_COMPUTED: dict[torch.dtype, torch.dtype] = {getattr(torch, d.name): getattr(torch, d.compute.name) for d in TABLE}


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
    offset: Tensor | int | None = None
    seed: Tensor | int | None = None

    @property
    def is_plain(self) -> bool:
        """Whether only q, k and v are given."""
        return self[3:] == _NONE


_NONE = (None,) * 7


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
    return _COMPUTED.get(dtype, dtype)


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
    if (x.is_floating_point() and x.dtype.itemsize == 1) or x.dtype is torch.complex32:  # which NumPy does not know
        rule, remedy = f"have dtype {SENTENCE}", "Convert it with .to(torch.float32)."
        fail(TypeError, function, name, rule, x.dtype, remedy)
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
        if seed.numel() != 1:
            fail(ValueError, function, "seed", "be one number", f"shape {tuple(seed.shape)}")
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


def refuse_replaced() -> NoReturn:
    """The error where the backward pass meets other inputs than the forward pass."""
    raise RuntimeError(
        "attngrad.torch.attention: q, k and v must be the same in the backward pass as in the forward pass; got "
        "others (.data, .set_ or .resize_ replaced them). Replace a copy."
    )


# --- passes ---------------------------------------------------------------------------------------------------------


def _operands(x: Inputs, o: Options) -> tuple[Operands, Options]:
    if x.is_plain:
        q, k, v = to_array(x.q), to_array(x.k), to_array(x.v)
        return Operands(q, k, v, offset=k.shape[-2] - q.shape[-2]), o
    q, k, v, bias, sinks, mask, q_segments, k_segments = map(to_array, x[:8])
    segments = None if q_segments is None else (q_segments, k_segments)
    offset: Any = x.offset
    if offset is None:
        offset = k.shape[-2] - q.shape[-2]
    elif isinstance(offset, Tensor):
        offset = to_array(offset)
    operands = Operands(q, k, v, bias, sinks, mask, segments, offset)
    return operands, o if x.seed is None else replace(o, seed=int(x.seed) % 2**64)


def _checked(function: str, x: Inputs, o: Options) -> tuple[Operands, Options]:
    """The operands, their shapes and dtypes checked by the rules of the NumPy functions."""
    if x.is_plain or min(x.q.ndim, x.k.ndim) < 2:  # the second is an error
        operands = bind(function, to_array(x.q), to_array(x.k), to_array(x.v), {})[0]
    else:
        operands, o = _operands(x, o)
        names = ("bias", "sinks", "mask", "segments", "offset")
        bind(function, *operands[:3], {name: getattr(operands, name) for name in names})
    check_magnitudes(function, o.scale, o.softcap, operands.q.dtype)
    return operands, o


def forward(x: Inputs, o: Options) -> tuple[Tensor, Tensor]:
    """``out, lse``; checks what it is given."""
    out, lse = kernels.forward(*_checked("attention", x, o))
    return to_tensor(out), to_tensor(lse)


def forward_saving(x: Inputs, o: Options) -> tuple[Tensor, ...]:
    """``out, lse``, and the three tensors that ``backward`` needs; checks what it is given."""
    out, lse, saved = kernels.forward_saving(*_checked("attention", x, o))
    return to_tensor(out), to_tensor(lse), *map(to_tensor, saved)


class Kept(NamedTuple):
    """A forward pass as the kernels know it: what its backward pass reads, as arrays."""

    operands: Operands
    options: Options
    saved: kernels.Saved

    def backward(self, dout: Tensor | None, dlse: Tensor | None, wanted: Sequence[bool]) -> tuple[Tensor | None, ...]:
        """The five gradients, None for an input that is not given or whose gradient is not ``wanted``."""
        wrt = tuple(compress(Gradients._fields, wanted))
        grads = kernels.backward(*self, to_array(dout), to_array(dlse), wrt=wrt)
        return tuple(None if g is None else to_tensor(g) for g in grads)


def forward_keeping(x: Inputs, o: Options) -> tuple[Tensor, Tensor, Kept]:
    """``out, lse``, and all that the backward pass needs; checks what it is given."""
    operands, o = _checked("attention", x, o)
    out, lse, saved = kernels.forward_saving(operands, o)
    return to_tensor(out), to_tensor(lse), Kept(operands, o, saved)


def backward(
    x: Inputs, o: Options, saved: Sequence[Any], dout: Tensor | None, dlse: Tensor | None
) -> tuple[Tensor, ...]:
    """The gradients of the inputs that are given, of <dout, out> + <dlse, lse>."""
    if saved[0] is None:
        saved = forward_saving(x, o)[2:]
    kept = kernels.Saved(*(y.numpy(force=True) for y in saved))
    if not (kept.out.flags.c_contiguous and kept.top.flags.c_contiguous and kept.inverse.flags.c_contiguous):
        kept = kernels.Saved(*map(np.ascontiguousarray, kept))  # vmap may have expanded them
    operands, o = _checked("attention", x, o)  # again: .data of an input may have been replaced since
    if kept.out.shape != operands.out_shape:
        refuse_replaced()
    return _given(kernels.backward(operands, o, kept, to_array(dout), to_array(dlse)))


def forward_tangent(x: Inputs, o: Options, t: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
    """``out_dot, lse_dot`` along ``t``, the tangents of the five differentiable inputs."""
    _, _, out_dot, lse_dot = kernels.forward_tangent(*_operands(x, o), Tangents(*map(to_array, t)))
    return to_tensor(out_dot).to(x.q.dtype), to_tensor(lse_dot)


def backward_tangent(
    x: Inputs, o: Options, t: Sequence[Tensor | None], cotangents: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """The gradients, then their tangents along ``t``; ``cotangents`` are dout, dlse, dout_dot, dlse_dot."""
    dout, dlse, dout_dot, dlse_dot = map(to_array, cotangents)
    grads, grads_dot = kernels.backward_tangent(
        *_operands(x, o), Tangents(*map(to_array, t)), dout, dout_dot, dlse, dlse_dot
    )
    return *_given(grads), *_given(grads_dot)


def _given(grads: Gradients) -> tuple[Tensor, ...]:
    q, k, v, bias, sinks = grads
    found: tuple[Tensor, ...] = (to_tensor(q), to_tensor(k), to_tensor(v))
    if bias is not None:
        found = (*found, to_tensor(bias))
    return found if sinks is None else (*found, to_tensor(sinks))
