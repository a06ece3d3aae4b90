"""Numbers for options, where nothing looks on: the short way from tensors to the kernels and back.

For a small problem the arrays between a tensor and the kernels cost more than the attention; and within a model, whose
other layers take the caches, so does every line of Python. So here the kernels read the tensors as they are, and
results are tensors from the start. What does not fit (no axis for heads, several leading axes, an option that is a
tensor, a transform, a hook) takes the way of ``_functions``, to the same results; so does everything in PyTorch before
2.10, whose tensors are not for others to read.
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
from attngrad.torch._tensors import wide_dtype

COMPUTED = {getattr(torch, d.name): d.compute for d in TABLE}
"""By dtype, what the kernels compute in."""
_TENSORS = (Tensor, Parameter)  # a subclass may be anything


class KeptMemory(NamedTuple):
    """A forward pass, for its backward pass: the counterpart of ``KeptArrays``."""

    passes: Passes
    saved: object

    def residuals(self) -> tuple[Tensor, ...]:
        """As tensors."""
        return tuple(map(torch.from_numpy, self.passes.tensors.residuals(self.saved)))

    def backward(self, inputs: Sequence[Any], dout: Any, dlse: Any, wanted: Sequence[bool]) -> tuple[Any, ...]:
        """The gradients of q, k and v."""
        return (*backward(self, inputs, dout, dlse), *(None for _ in wanted[3:]))


def fits(q: Any, k: Any, v: Any) -> bool:
    """Whether q, k and v are tensors that nothing looks at, and hold their own numbers."""
    for x in (q, k, v):
        if type(x) not in _TENSORS or x.is_neg():
            return False
    return q.dtype in COMPUTED and not _private.watched()


def attention(passes: Passes, q: Tensor, k: Tensor, v: Tensor, want_lse: bool = False) -> Any:
    """``out``, or ``(out, lse)``, of tensors that ``fits``; None where dtypes, shapes or strides do not.

    Axes of out lie in the order of those of q, as in PyTorch's own: where (B, T, H, D) was transposed, out is
    transposed back without a copy.
    """
    out = torch.empty_like(q) if q.shape[-1:] == v.shape[-1:] else q.new_empty(q.shape[:-1] + v.shape[-1:])
    lse = q.new_empty(q.shape[:-1], dtype=wide_dtype(q.dtype)) if want_lse else None
    recorded = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    saved = passes.tensors.forward(q, k, v, passes.fields, out, lse, recorded, torch.get_num_threads())
    if saved is False:
        return None
    results: tuple[Any, ...] = (out,) if lse is None else (out, lse)
    if saved:
        results = _functions.direct(KeptMemory(passes, saved), results, q, k, v)
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
    passes, saved = kept
    grads = _like(q), _like(k), _like(v)
    if not passes.tensors.backward(saved, q, k, v, passes.fields, dout, dlse, *grads, torch.get_num_threads()):
        refuse_replaced()
    return grads


def _in_memory(x: Tensor, fits: bool) -> Tensor:
    """``x`` where its memory says what it is, and the strides fit; else a copy."""
    if fits and not x.is_neg() and not _private.has_no_memory(x):
        return x
    return _like(x).copy_(x)


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
