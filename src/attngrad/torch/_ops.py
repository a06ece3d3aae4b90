"""Attention for ``torch.compile``: operators with shapes of their own and registered derivatives.

An autograd function with a ``jvp`` cannot be traced, an operator can; but an operator knows no forward mode, and would
pass over tangents in silence. So the operators serve traced code alone, and refuse to run under forward-mode AD.

The backward of ``forward`` is ``backward``; that of ``backward`` is ``forward_tangent`` and ``backward_tangent``, as in
``_functions``; those two have none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.autograd import forward_ad

import torch
from attngrad.core.options import Options
from attngrad.torch import _functions, _passes
from attngrad.torch._functions import N_DIFFERENTIABLE
from attngrad.torch._passes import Inputs
from torch import Tensor

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? sinks, Tensor? mask, Tensor? q_segments, Tensor? k_segments, "
    "Tensor? offset_tensor, Tensor? seed_tensor, int? offset, int? seed, float? scale, bool causal, int? left, "
    "int? right, float? softcap, float dropout"
)
_N = _ARGUMENTS.count(",") + 1
_TANGENTS = ", ".join(f"Tensor? {name}_dot" for name in Inputs._fields[:N_DIFFERENTIABLE])


def attention(q: Tensor, k: Tensor, v: Tensor, options: Any) -> tuple[Tensor, Tensor]:
    """``out, lse`` as part of a graph."""
    get = options.get
    flat = q.ndim == 2
    if flat:
        q, k, v = q[None], k[None], v[None]
    q_segments, k_segments = get("segments") or (None, None)
    x = Inputs(q, k, v, get("bias"), get("sinks"), get("mask"), q_segments, k_segments, get("offset"), get("seed"))
    # Unchecked, for these may be symbols here; the operator checks what it is given.
    o = Options(get("scale"), get("causal", False), get("window"), get("softcap"), get("dropout", 0.0))
    out, lse, *_ = forward(*_arguments(o, x))
    return (out[0], lse[0]) if flat else (out, lse)


def _signed(seed: int | None) -> int | None:
    """A seed below 2**64 in the 64 bits, with a sign, that an operator's int has."""
    return seed - 2**64 if seed is not None and seed >= 2**63 else seed


def _bind(args: Sequence[Any]) -> tuple[Options, Inputs]:
    """Options and inputs from the arguments of an operator."""
    *tensors, offset_tensor, seed_tensor, offset, seed, scale, causal, left, right, softcap, dropout = args[:_N]
    window = None if left is None and right is None else (left, right)
    o = _passes.settings("attention", args[0].shape[-1], scale, causal, window, softcap, dropout)
    if offset_tensor is not None:
        offset = offset_tensor
    seed = seed_tensor if seed is None else seed % 2**64
    if seed is not None or o.dropout > 0.0:
        seed = _passes.check_seed("attention", o.dropout, seed)
    return o, Inputs(*(*tensors, offset, seed))


def _arguments(o: Options, x: Inputs) -> tuple[Any, ...]:
    """The common arguments of an operator, from options and inputs."""
    offsets = (x.offset, None) if isinstance(x.offset, Tensor) else (None, x.offset)
    seeds = (x.seed, None) if isinstance(x.seed, Tensor) else (None, _signed(x.seed))
    left, right = o.window or (None, None)
    scalars = (o.scale, o.causal, left, right, o.softcap, o.dropout)
    return *x[:-2], offsets[0], seeds[0], offsets[1], seeds[1], *scalars


def _operator(name: str, more: str, results: int) -> Callable[[Callable[..., Any]], Any]:
    """An operator of the common arguments and ``more``."""
    schema = f"({_ARGUMENTS}{', ' + more if more else ''}) -> ({', '.join(['Tensor'] * results)})"
    return lambda run: torch.library.custom_op(f"attngrad::{name}", run, mutates_args=(), schema=schema)


def _refuse_forward_mode() -> None:
    # Tangents are out of sight inside an operator, so the mere presence of forward mode must do.
    if forward_ad._current_level >= 0:
        _functions.refuse("forward mode through torch.ops.attngrad is")


def _filled(x: Inputs, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Five gradients: operators cannot return None, so an input that is not given has an empty one."""
    return tuple(x.q.new_empty(0) if g is None else g for g in _functions.spread(x, given))


@_operator("forward", "", 5)
def forward(*args: Any) -> tuple[Tensor, ...]:
    """``out, lse``, and what the backward pass needs."""
    _refuse_forward_mode()
    o, x = _bind(args)
    return _passes.forward_saving(x, o)


@_operator("backward", "Tensor? dout, Tensor? dlse, Tensor wide, Tensor top, Tensor inverse", 5)
def backward(*args: Any) -> tuple[Tensor, ...]:
    """The gradients of q, k, v, bias and sinks."""
    _refuse_forward_mode()
    o, x = _bind(args)
    dout, dlse, *saved = args[_N:]
    return _filled(x, _passes.backward(x, o, saved, dout, dlse))


@_operator("forward_tangent", _TANGENTS, 2)
def forward_tangent(*args: Any) -> tuple[Tensor, ...]:
    """``out_dot, lse_dot``."""
    o, x = _bind(args)
    return _passes.forward_tangent(x, o, args[_N:])


@_operator("backward_tangent", f"{_TANGENTS}, Tensor? dout, Tensor? dlse, Tensor? dout_dot, Tensor? dlse_dot", 10)
def backward_tangent(*args: Any) -> tuple[Tensor, ...]:
    """The gradients, then their tangents."""
    o, x = _bind(args)
    t, cotangents = args[_N : _N + N_DIFFERENTIABLE], args[_N + N_DIFFERENTIABLE :]
    both = _passes.backward_tangent(x, o, t, cotangents)
    half = len(both) // 2
    return *_filled(x, both[:half]), *_filled(x, both[half:])


# --- the passes, for tensors that only the dispatcher can map over ---------------------------------------------------


def gradient(o: Options, x: Inputs, dout: Any, dlse: Any, saved: Sequence[Any]) -> tuple[Any, ...]:
    """The five gradients, None for an input that is not given."""
    args = _arguments(o, x)
    if saved[0] is None:
        saved = forward(*args)[2:]
    return tuple(_masked(x, backward(*args, dout, dlse, *saved)))


def tangent(o: Options, x: Inputs, t: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """``out_dot, lse_dot``."""
    out_dot, lse_dot = forward_tangent(*_arguments(o, x), *t)
    return out_dot, lse_dot


def curvature(o: Options, x: Inputs, t: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
    """The five gradients and their five tangents."""
    both = backward_tangent(*_arguments(o, x), *t, *cotangents)
    return tuple(_masked(x, both[:N_DIFFERENTIABLE])), tuple(_masked(x, both[N_DIFFERENTIABLE:]))


# --- shapes ---------------------------------------------------------------------------------------------------------


def _shape_forward(*args: Any) -> tuple[Tensor, ...]:
    q, v = args[0], args[2]
    wide = _passes.wide_dtype(q.dtype)
    rows = q.shape[:-1]
    out = q.new_empty((*rows, v.shape[-1]))
    return (
        out,
        q.new_empty(rows, dtype=wide),
        torch.empty_like(out, dtype=wide),
        *(q.new_empty(rows, dtype=wide) for _ in range(2)),
    )


def _shape_forward_tangent(*args: Any) -> tuple[Tensor, ...]:
    q, v = args[0], args[2]
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=_passes.wide_dtype(q.dtype))


def _shape_backward(*args: Any) -> tuple[Tensor, ...]:
    return tuple(args[0].new_empty(0) if x is None else x.new_empty(x.shape) for x in args[:N_DIFFERENTIABLE])


def _shape_backward_tangent(*args: Any) -> tuple[Tensor, ...]:
    return *_shape_backward(*args), *_shape_backward(*args)


forward.register_fake(_shape_forward)
backward.register_fake(_shape_backward)
forward_tangent.register_fake(_shape_forward_tangent)
backward_tangent.register_fake(_shape_backward_tangent)


# --- derivatives ----------------------------------------------------------------------------------------------------


def _keep(ctx: Any, inputs: tuple[Any, ...], saved: Sequence[Tensor] = ()) -> None:
    ctx.arguments = [None if isinstance(x, Tensor) else x for x in inputs]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in inputs), *saved)


def _kept(ctx: Any) -> tuple[list[Any], list[Tensor]]:
    tensors = list(ctx.saved_tensors)
    n = len(ctx.arguments)
    return [x if t is None else t for x, t in zip(ctx.arguments, tensors[:n], strict=True)], tensors[n:]


def _masked(args: Sequence[Any], grads: Sequence[Any]) -> list[Any]:
    return [None if x is None else g for x, g in zip(args[:N_DIFFERENTIABLE], grads, strict=True)]


def _setup_forward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.mark_non_differentiable(*output[2:])
    _keep(ctx, inputs, output[2:])


def _backward_of_forward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Any, ...]:
    args, saved = _kept(ctx)
    grads = [None] * N_DIFFERENTIABLE
    if dout is not None or dlse is not None:
        grads = _masked(args, backward(*args, dout, dlse, *saved))
    return *grads, *(None,) * (_N - N_DIFFERENTIABLE)


def _setup_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _keep(ctx, inputs)


def _backward_of_backward(ctx: Any, *u: Tensor | None) -> tuple[Any, ...]:
    kept, _ = _kept(ctx)
    args, dout, dlse = kept[:_N], kept[_N], kept[_N + 1]
    t = _masked(args, u)
    grads_dot, out_dot, lse_dot = [None] * N_DIFFERENTIABLE, None, None
    if any(x is not None for x in t):
        out_dot, lse_dot = forward_tangent(*args, *t)
        grads_dot = _masked(args, backward_tangent(*args, *t, dout, dlse, None, None)[N_DIFFERENTIABLE:])
    return (
        *grads_dot,
        *(None,) * (_N - N_DIFFERENTIABLE),
        None if dout is None else out_dot,
        None if dlse is None else lse_dot,
        *(None,) * 3,
    )


def _no_backward(ctx: Any, *u: Tensor | None) -> tuple[Any, ...]:
    _functions.refuse("the third derivative inside torch.compile is")


forward.register_autograd(_backward_of_forward, setup_context=_setup_forward)
backward.register_autograd(_backward_of_backward, setup_context=_setup_backward)
forward_tangent.register_autograd(_no_backward)
backward_tangent.register_autograd(_no_backward)
