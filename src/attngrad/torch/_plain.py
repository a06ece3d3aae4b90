"""q, k and v alone, where nothing looks on: the short way from tensors to the kernels and back.

For a small problem the arrays between a tensor and the kernels cost more than the attention. So here the kernels read
the tensors by address, and results are tensors from the start. What does not fit (no axis for heads, several leading
axes, an option that is a tensor, a transform, a hook) takes the way of ``_functions``, to the same results.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.nn import Parameter

import torch
from attngrad import _native
from attngrad.core.dtypes import TABLE
from attngrad.core.options import Options
from attngrad.torch import _functions, _passes
from attngrad.torch._passes import Inputs
from torch import Tensor

_KINDS = {getattr(torch, d.name): d.code for d in TABLE}
COMPUTED = {d.code: d.compute for d in TABLE}
"""By kind, what the kernels compute in."""
_TYPES = (Tensor, Parameter)  # a subclass may be anything


class Kept(NamedTuple):
    """A forward pass, for its backward pass."""

    options: Options
    kind: int
    fields: dict[str, Any]
    saved: object  # a capsule of the bindings


def kind_of(q: Any, k: Any, v: Any) -> int | None:
    """The number of their dtype where q, k and v are plain tensors of one dtype that nothing looks at, else None."""
    for x in (q, k, v):
        if not (type(x) in _TYPES and x.is_cpu and x.layout is torch.strided) or x.is_neg():
            return None
    dtype = q.dtype
    return None if k.dtype is not dtype or v.dtype is not dtype or _functions.watched() else _KINDS.get(dtype)


def attention(o: Options, kind: int, q: Tensor, k: Tensor, v: Tensor, want_lse: bool) -> Any:
    """``out``, or ``(out, lse)``; None where shapes or strides do not fit. ``kind`` is that of ``kind_of``."""
    fields: dict[str, Any] = {"scale": o.scale}
    if o.softcap is not None:
        fields["softcap"] = o.softcap
    if o.causal:
        fields["causal"] = True
    if o.window is not None:
        fields["window"] = o.window
    rows, features = q.shape[:-1], v.shape[-1:]
    out = _like(q) if q.shape[-1:] == features else q.new_empty(rows + features)
    results: tuple[Tensor, ...] = (out,)
    if want_lse:
        results = (out, q.new_empty(rows, dtype=torch.float32 if kind > 1 else None))
    recorded = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    addresses = (out.data_ptr(), results[1].data_ptr() if want_lse else 0)
    saved = _native.forward_by_address(kind, q, k, v, fields, *addresses, recorded)
    if saved is False:
        return None
    if saved:
        results = _apply(Kept(o, kind, fields, saved), results, q, k, v)
    return results if want_lse else results[0]


class Plain(torch.autograd.Function):
    """Attention, its forward pass done; ``results`` are out, or out and lse."""

    @staticmethod
    def forward(ctx: Any, kept: Kept, results: tuple[Tensor, ...], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.kept = kept
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        return results

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Any, ...]:
        inputs = ctx.saved_tensors  # an error where one was written to, or where the graph is gone
        kept = ctx.kept
        grads: Any = (None, None, None)
        if dout is not None or dlse is not None:
            if torch.is_grad_enabled() or _functions.watched() or _functions.mapped_by_dispatcher((dout, dlse)):
                saved = map(torch.from_numpy, _native.residuals_of(kept.saved))
                grads = _functions.gradient(kept.options, Inputs(*inputs), dout, dlse, tuple(saved))[:3]
            else:
                grads = _backward(kept, inputs, dout, dlse)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.kept = None  # as autograd does with saved tensors
        return None, None, *grads


_apply: Any = super(torch.autograd.Function, Plain).apply  # see _functions._Function.apply


def _backward(
    kept: Kept, inputs: tuple[Tensor, Tensor, Tensor], dout: Tensor | None, dlse: Tensor | None
) -> tuple[Tensor, ...]:
    if dout is not None:
        dout = _solid(dout, dout.stride(-1) == 1)
    if dlse is not None:
        dlse = _solid(dlse, dlse.is_contiguous())
    q, k, v = inputs
    dq, dk, dv = _like(q), _like(k), _like(v)
    addresses = (0 if dlse is None else dlse.data_ptr(), dq.data_ptr(), dk.data_ptr(), dv.data_ptr())
    same = q.dtype is k.dtype is v.dtype and _KINDS.get(q.dtype) == kept.kind
    if not same or not _native.backward_by_address(kept.saved, kept.kind, q, k, v, kept.fields, dout, *addresses):
        _passes.refuse_replaced()
    return dq, dk, dv


def _solid(x: Tensor, fits: bool) -> Tensor:
    """``x`` where its memory says what it is, and the strides fit; else a copy."""
    if fits and not x.is_neg() and not x._is_zerotensor():
        return x
    return torch.empty_like(x, memory_format=torch.contiguous_format).copy_(x)


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x) if x.is_contiguous() else x.new_empty(x.shape)
