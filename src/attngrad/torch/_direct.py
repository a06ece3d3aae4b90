"""Numbers for options, where nothing looks on: the short way from tensors to the kernels and back.

For a small problem the arrays between a tensor and the kernels cost more than the attention. So here the kernels read
the tensors by address, and results are tensors from the start. What does not fit (no axis for heads, several leading
axes, an option that is a tensor, a transform, a hook) takes the way of ``_functions``, to the same results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from attngrad.core.dtypes import TABLE
from attngrad.torch import _functions, _private
from attngrad.torch._passes import Passes, refuse_replaced
from attngrad.torch._threads import lent

_TYPES = {getattr(torch, d.name): d.code for d in TABLE}
COMPUTED = {d.code: d.compute for d in TABLE}
"""By type, what the kernels compute in."""
_TENSORS = (Tensor, Parameter)  # a subclass may be anything


class KeptMemory(NamedTuple):
    """A forward pass, for its backward pass: the counterpart of ``KeptArrays``."""

    passes: Passes
    type: int
    saved: object

    def residuals(self) -> tuple[Tensor, ...]:
        """As tensors."""
        return tuple(map(torch.from_numpy, self.passes.by_address.residuals(self.saved)))

    def backward(self, inputs: Sequence[Any], dout: Any, dlse: Any, wanted: Sequence[bool]) -> tuple[Any, ...]:
        """The gradients of q, k and v."""
        return (*backward(self, inputs, dout, dlse), *(None for _ in wanted[3:]))


def type_of(q: Any, k: Any, v: Any) -> int | None:
    """The number of their dtype where q, k and v are tensors of one dtype that nothing looks at, else None."""
    for x in (q, k, v):
        if not (type(x) in _TENSORS and x.is_cpu and x.layout is torch.strided) or x.is_neg():
            return None
    dtype = q.dtype
    return None if k.dtype is not dtype or v.dtype is not dtype or _private.watched() else _TYPES.get(dtype)


def attention(passes: Passes, number: int, q: Tensor, k: Tensor, v: Tensor, want_lse: bool) -> Any:
    """``out``, or ``(out, lse)``; None where shapes or strides do not fit. ``number`` is that of ``type_of``."""
    rows, features = q.shape[:-1], v.shape[-1:]
    out, place = _empty_out(q, rows + features)
    results: tuple[Tensor, ...] = (out,)
    if want_lse:
        results = (out, q.new_empty(rows, dtype=torch.float32 if number > 1 else None))
    recorded = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    lse = results[1].data_ptr() if want_lse else 0
    run = passes.by_address.forward
    saved = lent(passes.backend, run, number, q, k, v, passes.fields, place, lse, recorded)
    if saved is False:
        return None
    if saved:
        results = _functions.direct(KeptMemory(passes, number, saved), results, q, k, v)
    return results if want_lse else results[0]


def backward(
    kept: KeptMemory, inputs: Sequence[Tensor], dout: Tensor | None, dlse: Tensor | None
) -> tuple[Tensor, ...]:
    """The gradients of q, k and v."""
    if dout is not None:
        dout = _in_memory(dout, dout.stride(-1) == 1)
    if dlse is not None:
        dlse = _in_memory(dlse, dlse.is_contiguous())
    q, k, v = inputs
    dq, dk, dv = _like(q), _like(k), _like(v)
    addresses = (0 if dlse is None else dlse.data_ptr(), dq.data_ptr(), dk.data_ptr(), dv.data_ptr())
    same = q.dtype is k.dtype is v.dtype and _TYPES.get(q.dtype) == kept.type
    run, fields = kept.passes.by_address.backward, kept.passes.fields
    if not same or not lent(kept.passes.backend, run, kept.saved, kept.type, q, k, v, fields, dout, *addresses):
        refuse_replaced()
    return dq, dk, dv


def _empty_out(q: Tensor, shape: Sequence[int]) -> tuple[Tensor, tuple[int, ...]]:
    """Memory for out; its address, and its strides unless it is contiguous.

    Axes lie in the order of those of q, as in PyTorch's own: where (B, T, H, D) was transposed, out is transposed back
    without a copy.
    """
    if q.shape == shape and not q.is_contiguous():
        out = torch.empty_like(q)
        if out.stride(-1) == 1 and not out.is_contiguous():
            return out, (out.data_ptr(), *out.stride())
    out = q.new_empty(shape)
    return out, (out.data_ptr(),)


def _in_memory(x: Tensor, fits: bool) -> Tensor:
    """``x`` where its memory says what it is, and the strides fit; else a copy."""
    if fits and not x.is_neg() and not _private.has_no_memory(x):
        return x
    return torch.empty_like(x, memory_format=torch.contiguous_format).copy_(x)


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x) if x.is_contiguous() else x.new_empty(x.shape)
