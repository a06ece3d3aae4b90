"""Attention as primitives of JAX, each with its derivative among the others.

=============  ================================================  ====================================
primitive      value                                             linear in, and its transpose
=============  ================================================  ====================================
attention      out, lse, and what the backward pass needs        (not linear)
tangent        out_dot, lse_dot along t                          t: gradient
gradient       the VJP of c = (dout, dlse)                       c: tangent
hvp            the tangent of the VJP of c along t               t: hvp (the Hessian is symmetric)
second         the second tangent of out, lse along t and s      t, s: hvp
=============  ================================================  ====================================

The JVP of attention is tangent; of gradient, hvp (and gradient again, for it is linear); of tangent, second (and
tangent). No kernel computes second, but reverse over forward mode never runs it: it only transposes it, into hvp. What
would run it, forward over forward mode, and what would differentiate hvp, the third order, is an error that names the
reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from attngrad.core.operands import DIFFERENTIABLE, INPUTS
from attngrad.core.options import Kind
from attngrad.jax import _passes
from attngrad.jax._ffi import lowering
from attngrad.jax._passes import Call, lse_dtype, residual_specs
from attngrad.jax._private import (
    Primitive,
    ShapedArray,
    Zero,
    batchers,
    is_undefined,
    jvps,
    register_lowering,
    transposes,
)

Values = Sequence[Any]
_KINDS: dict[str | None, Kind | None] = {i.name: i.kind for i in INPUTS}


def refuse(what: str) -> NoReturn:
    """The error beyond the derivatives that the kernels have."""
    raise NotImplementedError(
        f"attngrad.jax.attention: {what} not available: the kernels have first and second derivatives. "
        "Use attngrad.reference.attention, which is dense and which JAX differentiates to any order."
    )


# --- what an argument list holds ------------------------------------------------------------------------------------


def _split(arrays: Values, *sizes: int) -> list[list[Any]]:
    """The list cut into parts of these sizes and the rest."""
    parts, start = [], 0
    for size in sizes:
        parts.append(list(arrays[start : start + size]))
        start += size
    return [*parts, list(arrays[start:])]


def _parts(call: Call, arrays: Values, last: Values) -> list[list[Any]]:
    """Inputs, residuals, and as many as ``last``."""
    n = len(call.names)
    return _split(arrays, n, len(arrays) - n - len(last))


def _nonzero(names: Values, values: Values) -> tuple[tuple[str, ...], list[Any]]:
    """The names and values that are not symbolic zeros."""
    found = [(name, x) for name, x in zip(names, values, strict=True) if type(x) is not Zero]
    return tuple(name for name, _ in found), [x for _, x in found]


def _differentiable(call: Call, dots: Values) -> tuple[tuple[str, ...], list[Any]]:
    """The nonzero tangents among those of the inputs; integers have none."""
    given = {name: dot for name, dot in zip(call.names, dots, strict=True) if name in DIFFERENTIABLE}
    return _nonzero(tuple(given), tuple(given.values()))


def _zeros(values: Values) -> list[Any]:
    return [Zero(jax.typeof(x).to_tangent_aval()) for x in values]


def _added(a: Values | None, b: Values | None, like: Values) -> list[Any]:
    if a is None:
        return _zeros(like) if b is None else list(b)
    return list(a) if b is None else [x + y for x, y in zip(a, b, strict=True)]


def _picked(wanted: Values, names: tuple[str, ...], values: Values) -> list[Any]:
    """For each wanted name its value."""
    found = dict(zip(names, values, strict=True))
    return [found[name] for name in wanted]


# --- the primitives -------------------------------------------------------------------------------------------------


def _primitive(name: str, run: Callable[..., Any], shapes: Callable[..., Any], kinds: Callable[..., Any]) -> Any:
    """A primitive that ``run`` computes, NumPy arrays in and out; ``kinds`` tells vmap what each argument is."""
    primitive: Any = Primitive(f"attngrad_{name}")
    primitive.multiple_results = True

    def implementation(*arrays: Any, **params: Any) -> list[Any]:
        for x in arrays:
            if isinstance(x, jax.Array) and any(device.platform != "cpu" for device in x.devices()):
                _refuse_device()
        results = [np.empty(a.shape, a.dtype) for a in shapes(*arrays, **params)]
        run(*map(np.asarray, arrays), **params, into=results)
        return [jnp.asarray(x) for x in results]

    primitive.def_impl(implementation)
    primitive.def_abstract_eval(shapes)
    register_lowering(primitive, lambda *_, **__: _refuse_device())
    register_lowering(primitive, lowering(name), platform="cpu")
    batchers[primitive] = lambda args, dims, **params: _batched(primitive, kinds, args, dims, params)
    return primitive


def _refuse_device() -> NoReturn:
    raise NotImplementedError(
        "attngrad.jax.attention: arrays must be on the CPU. Move them with jax.device_put; "
        "attngrad.reference.attention computes, densely, on any device."
    )


def _shapes_attention(*x: Any, call: Call, saving: bool) -> list[Any]:
    q, v = x[0], x[2]
    wide = lse_dtype(q.dtype)
    out, rows = (*q.shape[:-1], v.shape[-1]), q.shape[:-1]
    results = [ShapedArray(out, q.dtype), ShapedArray(rows, wide)]
    if not saving:
        return results
    specs = residual_specs(call, x)
    return results + [ShapedArray(*s) for s in specs[specs[0].dtype == q.dtype :]]


def _residuals(call: Call, x: Values, results: Values) -> list[Any]:
    """Of the results of attention; the first residual is out itself where it has its dtype."""
    residuals = list(results[2:])
    return residuals if len(residuals) == len(residual_specs(call, x)) else [results[0], *residuals]


def _shapes_tangent(*x: Any, call: Call, **_: Any) -> list[Any]:
    return _shapes_attention(*x, call=call, saving=False)


def _shapes_gradient(*x: Any, call: Call, **_: Any) -> list[Any]:
    return [
        ShapedArray(a.shape, a.dtype) for name, a in zip(call.names, x, strict=False) if name in call.differentiable
    ]


def _no_second(*_: Any, **__: Any) -> NoReturn:
    refuse("forward mode over forward mode is")


attention_p = _primitive("attention", _passes.attention, _shapes_attention, lambda call, saving: (call.names, ()))
tangent_p = _primitive("tangent", _passes.tangent, _shapes_tangent, lambda call, tangents: (call.names, tangents))
gradient_p = _primitive(
    "gradient", _passes.gradient, _shapes_gradient, lambda call, cotangents: (call.names, cotangents)
)
hvp_p = _primitive(
    "hvp", _passes.hvp, _shapes_gradient, lambda call, tangents, cotangents: (call.names, (*tangents, *cotangents))
)
second_p = _primitive(
    "second", _no_second, _shapes_tangent, lambda call, first, second: (call.names, (*first, *second))
)

register_lowering(second_p, _no_second, platform="cpu")  # an error when it is compiled, before anything runs


# --- derivatives ----------------------------------------------------------------------------------------------------


def _attention_jvp(x: Values, dots: Values, *, call: Call, saving: bool) -> tuple[Any, Any]:
    results = attention_p.bind(*x, call=call, saving=True)
    names, t = _differentiable(call, dots)
    out_dots = _zeros(results[:2])
    if names:
        out_dots = tangent_p.bind(*x, *_residuals(call, x, results), *t, call=call, tangents=names)
    if not saving:
        return results[:2], out_dots
    # Zero, for what reads them has derivatives that count the inputs alone.
    return results, [*out_dots, *_zeros(results[2:])]


def _tangent_jvp(primals: Values, dots: Values, *, call: Call, tangents: tuple[str, ...]) -> tuple[Any, Any]:
    results = tangent_p.bind(*primals, call=call, tangents=tangents)
    x, saved, t = _parts(call, primals, tangents)
    x_dots, _, t_dots = _parts(call, dots, tangents)
    names, s = _differentiable(call, x_dots)
    second = second_p.bind(*x, *t, *s, call=call, first=tangents, second=names) if names else None
    names, t = _nonzero(tangents, t_dots)
    first = tangent_p.bind(*x, *saved, *t, call=call, tangents=names) if names else None
    return results, _added(first, second, results)


def _gradient_jvp(primals: Values, dots: Values, *, call: Call, cotangents: tuple[str, ...]) -> tuple[Any, Any]:
    results = gradient_p.bind(*primals, call=call, cotangents=cotangents)
    x, saved, c = _parts(call, primals, cotangents)
    x_dots, _, c_dots = _parts(call, dots, cotangents)
    names, t = _differentiable(call, x_dots)
    curved = hvp_p.bind(*x, *t, *c, call=call, tangents=names, cotangents=cotangents) if names else None
    names, c = _nonzero(cotangents, c_dots)
    linear = gradient_p.bind(*x, *saved, *c, call=call, cotangents=names) if names else None
    return results, _added(curved, linear, results)


def _hvp_jvp(
    primals: Values, dots: Values, *, call: Call, tangents: tuple[str, ...], cotangents: tuple[str, ...]
) -> tuple[Any, Any]:
    x_dots, t_dots, c_dots = _split(dots, len(call.names), len(tangents))
    if _differentiable(call, x_dots)[0]:
        refuse("the third derivative is")
    results = hvp_p.bind(*primals, call=call, tangents=tangents, cotangents=cotangents)
    x, t, c = _split(primals, len(call.names), len(tangents))
    names, s = _nonzero(tangents, t_dots)
    first = hvp_p.bind(*x, *s, *c, call=call, tangents=names, cotangents=cotangents) if names else None
    names, s = _nonzero(cotangents, c_dots)
    second = hvp_p.bind(*x, *t, *s, call=call, tangents=tangents, cotangents=names) if names else None
    return results, _added(first, second, results)


def _second_jvp(primals: Values, dots: Values, **_: Any) -> NoReturn:
    refuse("the third derivative is")


def _tangent_transpose(cts: Values, *args: Any, call: Call, tangents: tuple[str, ...]) -> list[Any]:
    x, saved, t = _parts(call, args, tangents)
    names, c = _nonzero(("dout", "dlse"), cts)
    if not names:
        return [None] * len(args)
    grads = gradient_p.bind(*x, *saved, *c, call=call, cotangents=names)
    found = _picked(tangents, call.differentiable, grads)
    return [
        *(None for _ in (*x, *saved)),
        *(g if is_undefined(a) else None for g, a in zip(found, t, strict=True)),
    ]


def _gradient_transpose(cts: Values, *args: Any, call: Call, cotangents: tuple[str, ...]) -> list[Any]:
    x, saved, _ = _parts(call, args, cotangents)
    names, u = _nonzero(call.differentiable, cts)
    if not names:
        return [None] * len(args)
    dots = tangent_p.bind(*x, *saved, *u, call=call, tangents=names)
    return [*(None for _ in (*x, *saved)), *_picked(cotangents, ("dout", "dlse"), dots)]


def _hvp_transpose(
    cts: Values, *args: Any, call: Call, tangents: tuple[str, ...], cotangents: tuple[str, ...]
) -> list[Any]:
    x, t, c = _split(args, len(call.names), len(tangents))
    names, u = _nonzero(call.differentiable, cts)
    if not names:
        return [None] * len(args)
    if any(is_undefined(a) for a in c):
        dots = second_p.bind(*x, *t, *u, call=call, first=tangents, second=names)
        return [*(None for _ in (*x, *t)), *_picked(cotangents, ("dout", "dlse"), dots)]
    grads_dot = hvp_p.bind(*x, *u, *c, call=call, tangents=names, cotangents=cotangents)
    return [*(None for _ in x), *_picked(tangents, call.differentiable, grads_dot), *(None for _ in c)]


def _second_transpose(
    cts: Values, *args: Any, call: Call, first: tuple[str, ...], second: tuple[str, ...]
) -> list[Any]:
    x, t, s = _split(args, len(call.names), len(first))
    names, c = _nonzero(("dout", "dlse"), cts)
    if not names:
        return [None] * len(args)
    if any(is_undefined(a) for a in t):
        grads_dot = hvp_p.bind(*x, *s, *c, call=call, tangents=second, cotangents=names)
        return [*(None for _ in x), *_picked(first, call.differentiable, grads_dot), *(None for _ in s)]
    grads_dot = hvp_p.bind(*x, *t, *c, call=call, tangents=first, cotangents=names)
    return [*(None for _ in (*x, *t)), *_picked(second, call.differentiable, grads_dot)]


jvps[attention_p] = _attention_jvp
jvps[tangent_p] = _tangent_jvp
jvps[gradient_p] = _gradient_jvp
jvps[hvp_p] = _hvp_jvp
jvps[second_p] = _second_jvp
transposes[tangent_p] = _tangent_transpose
transposes[gradient_p] = _gradient_transpose
transposes[hvp_p] = _hvp_transpose
transposes[second_p] = _second_transpose


# --- vmap -----------------------------------------------------------------------------------------------------------


def _batched(
    primitive: Any, kinds: Callable[..., Any], args: Values, dims: Values, params: dict[str, Any]
) -> tuple[Values, Values]:
    """The mapped axis becomes the first of the leading axes, over which the kernels loop in any case.

    Where samples would see each other it is a loop: leading axes share what is per head, and dropout counts them.
    """
    call: Call = params["call"]
    args = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
    mapped = [d is not None for d in dims]
    if any(_KINDS.get(name) is Kind.PER_HEAD for name in call.names) or call.options.dropout > 0.0:

        def one(samples: list[Any]) -> tuple[Any, ...]:
            rest = iter(samples)
            return tuple(primitive.bind(*(next(rest) if m else x for x, m in zip(args, mapped, strict=True)), **params))

        outputs = jax.lax.map(one, [x for x, m in zip(args, mapped, strict=True) if m])
    else:
        size = next(x.shape[0] for x, m in zip(args, mapped, strict=True) if m)
        axes = args[0].ndim - mapped[0]
        first, last = kinds(**params)
        names = (*first, *(None,) * (len(args) - len(first) - len(last)), *last)
        folded = [_fold(x, m, name, axes, size) for x, m, name in zip(args, mapped, names, strict=True)]
        outputs = primitive.bind(*folded, **params)
        if primitive in (gradient_p, hvp_p):
            planes = {name: i for i, name in enumerate(call.names) if _KINDS[name] is Kind.PLANE}
            outputs = [
                y.reshape(size, *args[planes[name]].shape[mapped[planes[name]] :]) if name in planes else y
                for name, y in zip(call.differentiable, outputs, strict=True)
            ]
    return outputs, [0] * len(outputs)


def _fold(x: Any, is_mapped: bool, name: str | None, axes: int, size: int) -> Any:
    """``x`` with the mapped axis first; q has ``axes`` without it.

    Where ``x`` is not mapped: what must agree with q on its leading axes is expanded, and so is a plane that has a
    gradient, so that each sample has its own; what broadcasts stays.
    """
    sizes: dict[Kind | None, int] = {Kind.PLANE: axes, Kind.IDS: axes - 2, Kind.OFFSET: axes - 3}
    full = sizes.get(_KINDS.get(name))
    if not is_mapped:
        if full is not None and name not in DIFFERENTIABLE:
            return x
        x = jnp.broadcast_to(x, (size, *x.shape))
    if full is None:
        return x
    return x.reshape(size, *(1,) * (full - (x.ndim - 1)), *x.shape[1:])
