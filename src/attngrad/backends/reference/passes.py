"""The four passes by the dense reference, in the accumulation dtype; residuals are out and lse."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np

from attngrad import reference
from attngrad.backends.merge import compute_dtype, wide_operands, widen
from attngrad.backends.protocol import FIRST_ORDER, SecondOrder
from attngrad.core.arrays import Array
from attngrad.core.operands import DIFFERENTIABLE, Gradients, Operands, Tangents
from attngrad.core.options import Options
from attngrad.core.spec import Spec
from attngrad.reference.dense import zeros_if_none

P = ParamSpec("P")
R = TypeVar("R")


def quiet(function: Callable[P, R]) -> Callable[P, R]:
    """Infinities and NaN travel as IEEE arithmetic has it, without a warning from NumPy."""

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with np.errstate(all="ignore"):
            return function(*args, **kwargs)

    return wrapped


def _rounded(found: Gradients, x: Operands, wanted: Collection[str] = DIFFERENTIABLE) -> Gradients:
    """In the dtypes of the arguments."""
    pairs = zip(DIFFERENTIABLE, found, strict=True)
    return Gradients(
        *(None if g is None or n not in wanted else g.astype(getattr(x, n).dtype, copy=False) for n, g in pairs)
    )


def _results(values: Sequence[Array], into: Sequence[Array] | None) -> tuple[Array, ...]:
    if into is None:
        return tuple(values)
    for place, value in zip(into, values, strict=True):
        place[...] = value
    return tuple(into)


def residual_specs(x: Operands, o: Options) -> tuple[Spec, ...]:
    """out and lse, in the accumulation dtype."""
    wide, shape = compute_dtype(x), x.out_shape
    return Spec(shape, wide), Spec(shape[:-1], wide)


@quiet
def forward(
    x: Operands, o: Options, *, save: bool = True, into: Sequence[Array] | None = None
) -> tuple[Array, Array, Sequence[Array]]:
    """``out, lse, residuals``."""
    f = reference.forward(wide_operands(x), o)
    out, lse, *kept = _results((f.out.astype(x.q.dtype), f.lse, *((f.out.copy(), f.lse.copy()) if save else ())), into)
    return out, lse, kept


def backward_of(x: Operands, o: Options, residuals: Sequence[Array], dout: Array | None, dlse: Array | None) -> Any:
    """The intermediates of the pass, of wide operands; the residuals may be those of more keys."""
    out, lse = residuals
    f = reference.forward(x, o)
    share = np.where(f.lse == -np.inf, 0, np.exp(f.lse - lse))
    f = f._replace(weights=f.weights * share[..., None], out=out, sink=None if f.sink is None else f.sink * share)
    return reference.backward(x, o, f, zeros_if_none(widen(dout), out), dlse)


@quiet
def backward(
    x: Operands,
    o: Options,
    residuals: Sequence[Array],
    dout: Array | None,
    dlse: Array | None = None,
    *,
    wanted: Collection[str] = DIFFERENTIABLE,
    into: Sequence[Array] = (),
) -> Gradients:
    """The VJP."""
    grads = _rounded(backward_of(wide_operands(x), o, residuals, dout, dlse).grads, x, wanted)
    return Gradients(*_results(grads[:3], into or None), *grads[3:])


@quiet
def forward_tangent(
    x: Operands,
    o: Options,
    t: Tangents,
    into: Sequence[Array] | None = None,
    *,
    wanted: Collection[str] = FIRST_ORDER,
) -> tuple[Array, Array, Array, Array]:
    """``out, lse, out_dot, lse_dot``."""
    wide = wide_operands(x)
    f = reference.forward(wide, o)
    ft = reference.forward_tangent(wide, o, f, Tangents(*map(widen, t)))
    out_dot, lse_dot = _results((ft.out_dot.astype(x.q.dtype), ft.lse_dot), into)
    return f.out.astype(x.q.dtype), f.lse, out_dot, lse_dot


@quiet
def backward_tangent(
    x: Operands,
    o: Options,
    t: Tangents,
    dout: Array | None,
    dout_dot: Array | None = None,
    dlse: Array | None = None,
    dlse_dot: Array | None = None,
    *,
    wanted: Collection[str] = SecondOrder._fields,
) -> SecondOrder:
    """The VJP and its tangent."""
    wide, t = wide_operands(x), Tangents(*map(widen, t))
    f = reference.forward(wide, o)
    dout = zeros_if_none(widen(dout), f.out)
    b, ft = reference.backward(wide, o, f, dout, dlse), reference.forward_tangent(wide, o, f, t)
    bt = reference.backward_tangent(wide, o, f, b, ft, t, dout, widen(dout_dot), dlse_dot)
    return SecondOrder(f.out, ft.out_dot, _rounded(b.grads, x), _rounded(bt.grads_dot, x), ft.lse_dot)
