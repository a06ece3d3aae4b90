"""Attention for eager autograd: four functions, each the derivative of another.

=============  ======================================  ============================  =======================
function       value                                   backward                      forward mode
=============  ======================================  ============================  =======================
Attention      out, lse                                Gradient                      Tangent
Gradient       the VJP of (dout, dlse)                 Tangent and Curvature         Curvature
Tangent        out_dot, lse_dot along t                Curvature (or Gradient)       error: second tangents
Curvature      the VJP, and its tangent (the HVP)      error: third derivatives      error: third derivatives
=============  ======================================  ============================  =======================

Gradient is linear in (dout, dlse), so its cotangent u meets them as the JVP along u; and the Hessian of <dout, out> is
symmetric, so u meets q, k, v, bias and sinks as the HVP along u. Nothing else is needed for double backward.

vmap folds the mapped axis into the leading axes, which the kernels loop over in any case. Where samples would see each
other (sinks are shared by the leading axes, and dropout counts them) it runs a loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch.autograd import forward_ad

import torch
from attngrad.core.options import Operands, Options
from attngrad.torch import _passes
from attngrad.torch._passes import Inputs
from torch import Tensor

N_INPUTS = len(Inputs._fields)
N_DIFFERENTIABLE = 5
_NOTHING: tuple[None, ...] = (None,) * N_DIFFERENTIABLE

Tensors = Sequence[Tensor | None]


def transforms_active() -> bool:
    """Whether torch.func or forward-mode AD may be looking at what is computed."""
    # The level stands where unpack_dual itself looks; neither question has a public form.
    level: int = forward_ad._current_level
    return level >= 0 or torch._C._are_functorch_transforms_active()


def hooks_active() -> bool:
    """Whether what is saved for backward goes through hooks, as activation checkpointing has it."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def watched() -> bool:
    """Whether anything but autograd looks on: a transform, hooks on what is saved, or a mode that sees operators."""
    return transforms_active() or hooks_active() or torch._C._len_torch_dispatch_stack() > 0


def recorded(tensors: Sequence[Any]) -> bool:
    """Whether a derivative of what is computed from ``tensors`` may be asked for."""
    if torch.is_grad_enabled():
        for x in tensors:
            if isinstance(x, Tensor) and x.requires_grad:
                return True
    return transforms_active()


def mapped_by_dispatcher(tensors: Tensors) -> bool:
    """Whether a tensor is of the older vmap, of ``is_grads_batched``, which sees operators only, not functions."""
    # It hides the mapped axis from Python; the dispatcher's loop over samples is the one way through.
    is_mapped = torch._C._functorch.is_legacy_batchedtensor
    return any(x is not None and is_mapped(x) for x in tensors)


def refuse(what: str) -> NoReturn:
    """The error beyond the derivatives that the kernels have."""
    raise NotImplementedError(
        f"attngrad.torch.attention: {what} not available: the kernels have first and second derivatives. "
        "Use attngrad.reference.attention, which is dense and which PyTorch differentiates to any order."
    )


# --- entry points: the autograd function where a derivative may be asked for, else the bare pass --------------------


def attention(o: Options, x: Inputs) -> tuple[Tensor, Tensor]:
    """``out, lse``."""
    if not recorded(x[:N_DIFFERENTIABLE]):
        return _passes.forward(x, o)
    if watched():
        out, lse, *_ = Attention.apply(o, *x)
    else:
        out, lse = _direct(o, *x)
    return out, lse


def gradient(
    o: Options, x: Inputs, dout: Tensor | None, dlse: Tensor | None, saved: Sequence[Any] = (None, None, None)
) -> tuple[Any, ...]:
    """The five gradients, None for an input that is not given."""
    if mapped_by_dispatcher((dout, dlse)):
        return tuple(_operators().gradient(o, x, dout, dlse, saved))
    if recorded((*x, dout, dlse)):
        return spread(x, Gradient.apply(o, *x, dout, dlse, *saved))
    return spread(x, _passes.backward(x, o, saved, dout, dlse))


def tangent(o: Options, x: Inputs, t: Tensors) -> tuple[Tensor, Tensor]:
    """``out_dot, lse_dot``."""
    if mapped_by_dispatcher(t):
        out_dot, lse_dot = _operators().tangent(o, x, t)
        return out_dot, lse_dot
    run = Tangent.apply if recorded((*x, *t)) else Tangent.forward
    out_dot, lse_dot = run(o, *x, *t)
    return out_dot, lse_dot


def curvature(o: Options, x: Inputs, t: Tensors, *cotangents: Tensor | None) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The five gradients and their five tangents; ``cotangents`` are dout, dlse, dout_dot, dlse_dot."""
    cotangents = (*cotangents, *(None,) * (4 - len(cotangents)))
    if mapped_by_dispatcher((*t, *cotangents)):
        grads, grads_dot = _operators().curvature(o, x, t, cotangents)
        return grads, grads_dot
    arguments = (*x, *t, *cotangents)
    run = Curvature.apply if recorded(arguments) else Curvature.forward
    both = run(o, *arguments)
    half = len(both) // 2
    return spread(x, both[:half]), spread(x, both[half:])


def _operators() -> Any:
    from attngrad.torch import _ops  # which builds on this module

    return _ops


def spread(x: Inputs | Operands, given: Sequence[Any]) -> tuple[Any, ...]:
    """One entry for each differentiable input, None where it is not given."""
    if x[3] is None and x[4] is None:
        return (*given, None, None)
    rest = iter(given)
    return tuple(None if primal is None else next(rest) for primal in x[:N_DIFFERENTIABLE])


# --- the functions --------------------------------------------------------------------------------------------------


class _Function(torch.autograd.Function):
    """What the four share: a quick ``apply``, what is kept for the derivatives, and vmap."""

    kinds: tuple[str, ...]
    """How each argument after the options follows the leading axes of q; see ``_fold``."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)  # type: ignore[no-untyped-call]
        # Past Function.apply, which inspects the signature of forward at every call, to the C++ one below it.
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]

    @classmethod
    def keep(cls, ctx: Any, inputs: tuple[Any, ...], saved: Sequence[Tensor] = ()) -> None:
        """Keep the arguments for both modes: tensors as such, so that writing to them in between is noticed."""
        ctx.options, *tensors = inputs
        ctx.numbers = {}
        for i, x in enumerate(tensors):
            if x is not None and not isinstance(x, Tensor):
                ctx.numbers[i], tensors[i] = x, None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *saved)
        if transforms_active():
            ctx.save_for_forward(*tensors)

    @staticmethod
    def kept(ctx: Any) -> tuple[Options, Inputs, tuple[Any, ...]]:
        """The options, the inputs, and all else that was kept."""
        values = list(ctx.saved_tensors)
        for i, x in ctx.numbers.items():
            values[i] = x
        return ctx.options, Inputs(*values[:N_INPUTS]), tuple(values[N_INPUTS:])

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[Any, ...], o: Options, *args: Any) -> tuple[Any, Any]:
        size = info.batch_size
        if args[4] is not None or o.dropout > 0.0:
            samples = [
                cls.apply(o, *(_sample(x, d, i) for x, d in zip(args, in_dims[1:], strict=True))) for i in range(size)
            ]
            outputs = tuple(torch.stack(parts) for parts in zip(*samples, strict=True))
        else:
            axes = args[0].ndim - (in_dims[1] is not None)
            folded = (_fold(x, d, k, axes, size) for x, d, k in zip(args, in_dims[1:], cls.kinds, strict=True))
            bias, bias_dim = args[3], in_dims[4]
            shape = () if bias is None else tuple(n for i, n in enumerate(bias.shape) if i != _axis(bias, bias_dim))
            outputs = cls.unfold(cls.apply(o, *folded), (size, *shape), bias is not None)
        return outputs, (0,) * len(outputs)

    @classmethod
    def unfold(cls, outputs: tuple[Tensor, ...], bias_shape: tuple[int, ...], has_bias: bool) -> tuple[Tensor, ...]:
        """The outputs, gradients of the bias in the shape of the mapped bias."""
        return outputs


_X = ("rows", "rows", "rows", "plane", "sinks", "mask", "ids", "ids", "offset", "seed")
_T = _X[:N_DIFFERENTIABLE]


class Attention(_Function):
    """(F1) to (F5): ``out, lse``, and what the backward pass needs of the forward."""

    kinds = _X

    @staticmethod
    def forward(o: Options, *args: Any) -> tuple[Tensor, ...]:
        return _passes.forward_saving(Inputs(*args), o)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.mark_non_differentiable(*output[2:])
        Attention.keep(ctx, inputs, output[2:])

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Any, ...]:
        o, x, saved = Attention.kept(ctx)
        grads = _NOTHING if dout is None and dlse is None else gradient(o, x, dout, dlse, saved)
        return None, *grads, *(None,) * (N_INPUTS - N_DIFFERENTIABLE)

    @staticmethod
    def jvp(ctx: Any, _: None, *dots: Any) -> tuple[Any, ...]:
        o, x, _saved = Attention.kept(ctx)
        return *tangent(o, x, dots[:N_DIFFERENTIABLE]), None, None, None


class Direct(_Function):
    """Attention where neither transforms nor hooks look on: it keeps the arrays of the kernels, and spares tensors."""

    @staticmethod
    def forward(ctx: Any, o: Options, *args: Any) -> tuple[Tensor, Tensor]:
        out, lse, ctx.arrays = _passes.forward_keeping(Inputs(*args), o)
        Direct.keep(ctx, (o, *args))
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        _ = ctx.saved_tensors  # an error where an input was written to, or where the graph is gone
        arrays, given = ctx.arrays, (dout, dlse)
        if dout is None and dlse is None:
            grads: Any = _NOTHING
        elif torch.is_grad_enabled() or transforms_active() or mapped_by_dispatcher(given):
            o, x, _ = Direct.kept(ctx)
            grads = gradient(o, x, dout, dlse, tuple(map(_passes.to_tensor, arrays.saved)))
        else:
            grads = arrays.backward(dout, dlse, ctx.needs_input_grad[1 : 1 + N_DIFFERENTIABLE])
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.arrays = None  # as autograd does with saved tensors
        return None, *grads, *(None,) * (N_INPUTS - N_DIFFERENTIABLE)


# The C++ apply, once and for all; see _Function.apply.
_direct = super(torch.autograd.Function, Direct).apply


class Gradient(_Function):
    """(R1) to (R9): the gradients of the inputs that are given."""

    kinds = (*_X, "rows", "rows", "rows", "rows", "rows")

    @staticmethod
    def forward(o: Options, *args: Any) -> tuple[Tensor, ...]:
        x, (dout, dlse, *saved) = Inputs(*args[:N_INPUTS]), args[N_INPUTS:]
        return _passes.backward(x, o, saved, dout, dlse)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        Gradient.keep(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, *u: Tensor | None) -> tuple[Any, ...]:
        o, x, (dout, dlse, *_) = Gradient.kept(ctx)
        needs = ctx.needs_input_grad[1:]
        u = spread(x, u)
        grads_dot, out_dot, lse_dot = _NOTHING, None, None
        if any(c is not None for c in u):
            if any(needs[N_INPUTS : N_INPUTS + 2]):
                out_dot, lse_dot = tangent(o, x, u)
            if any(needs[:N_DIFFERENTIABLE]):
                _grads, grads_dot = curvature(o, x, u, dout, dlse)
        cotangents = (None if dout is None else out_dot, None if dlse is None else lse_dot)
        return None, *grads_dot, *(None,) * (N_INPUTS - N_DIFFERENTIABLE), *cotangents, None, None, None

    @staticmethod
    def jvp(ctx: Any, _: None, *dots: Any) -> tuple[Any, ...]:
        o, x, (dout, dlse, *saved) = Gradient.kept(ctx)
        t, (dout_dot, dlse_dot) = dots[:N_DIFFERENTIABLE], dots[N_INPUTS : N_INPUTS + 2]
        if all(dot is None for dot in t):
            grads_dot = gradient(o, x, dout_dot, dlse_dot, saved)
        else:
            _grads, grads_dot = curvature(o, x, t, dout, dlse, dout_dot, dlse_dot)
        return tuple(g for g in grads_dot if g is not None)

    @classmethod
    def unfold(cls, outputs: tuple[Tensor, ...], bias_shape: tuple[int, ...], has_bias: bool) -> tuple[Tensor, ...]:
        return (*outputs[:3], outputs[3].reshape(bias_shape), *outputs[4:]) if has_bias else outputs


class Tangent(_Function):
    """(T1) to (T5): ``out_dot, lse_dot``."""

    kinds = (*_X, *_T)

    @staticmethod
    def forward(o: Options, *args: Any) -> tuple[Tensor, ...]:
        return _passes.forward_tangent(Inputs(*args[:N_INPUTS]), o, args[N_INPUTS:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        Tangent.keep(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        o, x, t = Tangent.kept(ctx)
        grads, grads_dot = _NOTHING, _NOTHING
        if dout is not None or dlse is not None:
            if any(ctx.needs_input_grad[1 : 1 + N_DIFFERENTIABLE]):
                grads, grads_dot = curvature(o, x, t, dout, dlse)
            else:
                grads = gradient(o, x, dout, dlse)
        t_grads = (None if dot is None else g for dot, g in zip(t, grads, strict=True))
        return None, *grads_dot, *(None,) * (N_INPUTS - N_DIFFERENTIABLE), *t_grads

    @staticmethod
    def jvp(ctx: Any, _: None, *dots: Any) -> tuple[Any, ...]:
        o, x, _t = Tangent.kept(ctx)
        if any(dot is not None for dot in dots[:N_DIFFERENTIABLE]):
            refuse("forward mode over forward mode is")
        return tangent(o, x, dots[N_INPUTS:])


class Curvature(_Function):
    """(H1) to (H9): the gradients, and their tangents along t, dout_dot and dlse_dot."""

    kinds = (*_X, *_T, "rows", "rows", "rows", "rows")

    @staticmethod
    def forward(o: Options, *args: Any) -> tuple[Tensor, ...]:
        x, rest = Inputs(*args[:N_INPUTS]), args[N_INPUTS:]
        return _passes.backward_tangent(x, o, rest[:N_DIFFERENTIABLE], rest[N_DIFFERENTIABLE:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.nothing = (None,) * len(inputs)

    @staticmethod
    def backward(ctx: Any, *u: Tensor | None) -> tuple[Any, ...]:
        if any(c is not None for c in u):
            refuse("the third derivative is")
        nothing: tuple[None, ...] = ctx.nothing
        return nothing

    @staticmethod
    def jvp(ctx: Any, *dots: Any) -> tuple[Any, ...]:
        refuse("the third derivative is")

    @classmethod
    def unfold(cls, outputs: tuple[Tensor, ...], bias_shape: tuple[int, ...], has_bias: bool) -> tuple[Tensor, ...]:
        half = len(outputs) // 2
        return tuple(
            x for part in (outputs[:half], outputs[half:]) for x in Gradient.unfold(part, bias_shape, has_bias)
        )


# --- vmap -----------------------------------------------------------------------------------------------------------


def _axis(x: Tensor, dim: int | None) -> int | None:
    return None if dim is None else dim % x.ndim


def _sample(x: Any, dim: int | None, i: int) -> Any:
    return x if dim is None else x.select(dim, i)


def _fold(x: Any, dim: int | None, kind: str, axes: int, size: int) -> Any:
    """``x`` with the mapped axis as the first of the leading axes of q, which has ``axes`` without it.

    Where ``x`` is not mapped: what must agree with q on its leading axes is expanded, and so is the bias, so that each
    sample has a gradient of its own; what broadcasts stays.
    """
    if not isinstance(x, Tensor):
        return x
    full = {"rows": 0, "plane": axes, "mask": axes, "ids": axes - 2, "offset": axes - 3}[kind]
    if dim is None:
        if kind not in ("rows", "plane"):
            return x
        x = x.expand(size, *x.shape)
    else:
        x = x.movedim(dim, 0)
    return x.reshape(size, *(1,) * (full - (x.ndim - 1)), *x.shape[1:]) if full else x
