"""Attention for ``torch.compile``: operators with shapes of their own and registered derivatives.

An autograd function with a ``jvp`` cannot be traced, an operator can; but an operator knows no forward mode, and would
pass over tangents in silence. So the operators serve traced code alone, and refuse to run under forward-mode AD.

The backward of ``forward`` is ``backward``; that of ``backward`` is ``forward_tangent`` and ``backward_tangent``, as in
``_functions``; those two have none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from attngrad import backends
from attngrad.core.dtypes import TABLE
from attngrad.core.operands import DIFFERENTIABLE, INPUTS, NUMBERS, Input, Operands, flatten, unflatten
from attngrad.core.options import STATIC, Kind, Option, Options, reject_not_flat
from attngrad.core.spec import Spec
from attngrad.torch import _functions, _private
from attngrad.torch._choice import forced
from attngrad.torch._functions import N_DIFFERENTIABLE
from attngrad.torch._passes import Passes, bind_inputs, passes_of
from attngrad.torch._tensors import Inputs, wide_dtype

_NUMPY = {getattr(torch, d.name): d.numpy for d in TABLE}


def _arguments_of(i: Input) -> list[tuple[str, str]]:
    """What an input is in a schema: type and name; one that may be a number is two arguments."""
    if i.kind is None:
        return [("Tensor", i.name)]
    return [("Tensor?", f"{i.name}_tensor"), ("int?", i.name)] if i.name in NUMBERS else [("Tensor?", i.name)]


def _arguments_of_number(row: Option) -> list[tuple[str, str]]:
    if row.kind is Kind.PAIR:
        return [("int?", f"{row.name}_{i}") for i in range(2)]
    kind = {Kind.NUMBER: "float", Kind.FLAG: "bool"}[row.kind]
    return [(kind if row.default is not None else f"{kind}?", row.name)]


_ROWS = tuple(row for row in STATIC if row.kind not in (Kind.SEED, Kind.FUNCTION))
_SCHEMA = [
    *(argument for i in INPUTS for argument in _arguments_of(i)),
    *(argument for row in _ROWS for argument in _arguments_of_number(row)),
    ("str?", "backend"),
]
_ARGUMENTS = ", ".join(f"{kind} {name}" for kind, name in _SCHEMA)
_N = len(_SCHEMA)
_TANGENTS = ", ".join(f"Tensor? {name}_dot" for name in DIFFERENTIABLE)


def _residual_specs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Spec, ...]:
    """They are the same for every backend, and do not depend on options, which may be symbols."""
    x = Operands(*(Spec(tuple(y.shape), _NUMPY[y.dtype]) for y in (q, k, v)))
    return backends.get("cpu").residual_specs(x, Options(scale=1.0))


_N_RESIDUALS = len(_residual_specs(*torch.empty(3, 1, 1, 1)))
_RESIDUALS = "".join(f", Tensor residual_{i}" for i in range(_N_RESIDUALS))


def attention(q: Tensor, k: Tensor, v: Tensor, options: Any) -> tuple[Tensor, Tensor]:
    """``out, lse`` as part of a graph."""
    reject_not_flat("attention", options)
    flat = q.ndim == 2
    if flat:
        q, k, v = q[None], k[None], v[None]
    # Unchecked, for these may be symbols here; the operator checks what it is given.
    numbers = {row.name: options.get(row.name, row.default) for row in _ROWS}
    out, lse, *_ = forward(*_arguments(numbers, Inputs(q, k, v, **flatten(options)), forced()))
    return (out[0], lse[0]) if flat else (out, lse)


def _signed(seed: int | None) -> int | None:
    """A seed below 2**64 in the 64 bits, with a sign, that an operator's int has."""
    return seed - 2**64 if seed is not None and seed >= 2**63 else seed


def _bind(args: Sequence[Any]) -> tuple[Passes, Inputs]:
    """Passes and inputs from the arguments of an operator."""
    given = {name: x for (_, name), x in zip(_SCHEMA, args, strict=False)}
    numbers = {}
    for row in _ROWS:
        if row.kind is Kind.PAIR:
            pair = given[f"{row.name}_0"], given[f"{row.name}_1"]
            numbers[row.name] = None if pair == (None, None) else pair
        else:
            numbers[row.name] = given[row.name]
    x = {i.name: given[i.name] for i in INPUTS}
    for i in INPUTS:
        if i.kind is Kind.SEED and x[i.name] is not None:
            x[i.name] %= 2**64
        if i.name in NUMBERS and given[f"{i.name}_tensor"] is not None:
            x[i.name] = given[f"{i.name}_tensor"]
    q = given["q"]
    passes = passes_of("attention", q, numbers, given["backend"])
    return passes, bind_inputs("attention", q, given["k"], given["v"], passes.options, unflatten(x))


def _arguments(numbers: Mapping[str, Any], x: Inputs, backend: str | None) -> tuple[Any, ...]:
    """The common arguments of an operator, from options that are numbers, inputs, and the name of a backend."""
    found: list[Any] = []
    for i, value in zip(INPUTS, x, strict=True):
        if i.name in NUMBERS:
            is_tensor = isinstance(value, Tensor)
            number = None if is_tensor else value
            found += [value if is_tensor else None, _signed(number) if i.kind is Kind.SEED else number]
        else:
            found.append(value)
    for row in _ROWS:
        value = numbers[row.name]
        found += (value or (None, None)) if row.kind is Kind.PAIR else [value]
    return (*found, backend)


def _arguments_of_passes(passes: Passes, x: Inputs) -> tuple[Any, ...]:
    numbers = {row.name: getattr(passes.options, row.name) for row in _ROWS}
    return _arguments(numbers, x, passes.backend.NAME)


def _operator(name: str, more: str, results: int) -> Callable[[Callable[..., Any]], Any]:
    """An operator of the common arguments and ``more``."""
    schema = f"({_ARGUMENTS}{', ' + more if more else ''}) -> ({', '.join(['Tensor'] * results)})"
    return lambda run: torch.library.custom_op(f"attngrad::{name}", run, mutates_args=(), schema=schema)


def _refuse(what: str) -> NoReturn:
    raise NotImplementedError(f"attngrad.torch.attention: {what} not available. Without torch.compile it is.")


def _refuse_forward_mode() -> None:
    # Tangents are out of sight inside an operator, so the mere presence of forward mode must do.
    if _private.forward_mode_active():
        _refuse("forward mode through torch.ops.attngrad is")


def _filled(x: Inputs, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Five gradients: operators cannot return None, so an input that is not given has an empty one."""
    return tuple(x.q.new_empty(0) if g is None else g for g in _functions.spread(x, given))


@_operator("forward", "", 2 + _N_RESIDUALS)
def forward(*args: Any) -> tuple[Tensor, ...]:
    """``out, lse``, and what the backward pass needs."""
    _refuse_forward_mode()
    passes, x = _bind(args)
    return passes.forward(x)


@_operator("backward", f"Tensor? dout, Tensor? dlse{_RESIDUALS}", N_DIFFERENTIABLE)
def backward(*args: Any) -> tuple[Tensor, ...]:
    """The gradients of q, k, v, bias and sinks."""
    _refuse_forward_mode()
    passes, x = _bind(args)
    dout, dlse, *residuals = args[_N:]
    return _filled(x, passes.backward(x, residuals, dout, dlse))


@_operator("forward_tangent", _TANGENTS, 2)
def forward_tangent(*args: Any) -> tuple[Tensor, ...]:
    """``out_dot, lse_dot``."""
    passes, x = _bind(args)
    return passes.forward_tangent(x, args[_N:])


@_operator(
    "backward_tangent",
    f"{_TANGENTS}, Tensor? dout, Tensor? dlse, Tensor? dout_dot, Tensor? dlse_dot",
    2 * N_DIFFERENTIABLE,
)
def backward_tangent(*args: Any) -> tuple[Tensor, ...]:
    """The gradients, then their tangents."""
    passes, x = _bind(args)
    t, cotangents = args[_N : _N + N_DIFFERENTIABLE], args[_N + N_DIFFERENTIABLE :]
    both = passes.backward_tangent(x, t, cotangents)
    half = len(both) // 2
    return *_filled(x, both[:half]), *_filled(x, both[half:])


# --- the passes, for tensors that only the dispatcher can map over ---------------------------------------------------


def gradient(passes: Passes, x: Inputs, dout: Any, dlse: Any, residuals: Sequence[Any]) -> tuple[Any, ...]:
    """The five gradients, None for an input that is not given."""
    args = _arguments_of_passes(passes, x)
    residuals = residuals or forward(*args)[2:]
    return tuple(_masked(x, backward(*args, dout, dlse, *residuals)))


def tangent(passes: Passes, x: Inputs, t: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """``out_dot, lse_dot``."""
    out_dot, lse_dot = forward_tangent(*_arguments_of_passes(passes, x), *t)
    return out_dot, lse_dot


def curvature(passes: Passes, x: Inputs, t: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
    """The five gradients and their five tangents."""
    both = backward_tangent(*_arguments_of_passes(passes, x), *t, *cotangents)
    return tuple(_masked(x, both[:N_DIFFERENTIABLE])), tuple(_masked(x, both[N_DIFFERENTIABLE:]))


# --- shapes ---------------------------------------------------------------------------------------------------------


def _shape_forward(*args: Any) -> tuple[Tensor, ...]:
    q, k, v = args[:3]
    out, lse = _shape_forward_tangent(*args)
    specs = _residual_specs(q, k, v)
    return out, lse, *(q.new_empty(s.shape, dtype=getattr(torch, s.dtype.name)) for s in specs)


def _shape_forward_tangent(*args: Any) -> tuple[Tensor, ...]:
    q, v = args[0], args[2]
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=wide_dtype(q.dtype))


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
        *(None,) * _N_RESIDUALS,
    )


def _no_backward(ctx: Any, *u: Tensor | None) -> tuple[Any, ...]:
    _refuse("the third derivative inside torch.compile is")


forward.register_autograd(_backward_of_forward, setup_context=_setup_forward)
backward.register_autograd(_backward_of_backward, setup_context=_setup_backward)
forward_tangent.register_autograd(_no_backward)
backward_tangent.register_autograd(_no_backward)
