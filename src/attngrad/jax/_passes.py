"""A backend's passes over NumPy arrays, as the primitives hand them over: flat lists, results ``into`` one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attngrad import backends
from attngrad.backends.protocol import Backend
from attngrad.core.arrays import Array
from attngrad.core.dtypes import ACCUMULATE
from attngrad.core.operands import DIFFERENTIABLE, Gradients, Operands, Tangents, assemble
from attngrad.core.options import Options
from attngrad.core.spec import Spec

DEVICE = "cpu"
"""Where primitives are lowered; XLA asks for a program per platform."""


@dataclass(frozen=True)
class Call:
    """All that is known when a call is traced: the options, which inputs are given, those that are numbers."""

    options: Options
    names: tuple[str, ...]
    numbers: tuple[tuple[str, int], ...] = ()

    @property
    def differentiable(self) -> tuple[str, ...]:
        """The given inputs that have a gradient, in order."""
        return tuple(name for name in self.names if name in DIFFERENTIABLE)


def backend() -> Backend:
    """That of this device."""
    return backends.find("jax", DEVICE)


def lse_dtype(dtype: Any) -> Any:
    """The dtype of lse beside q of ``dtype``."""
    return ACCUMULATE.get(np.dtype(dtype), np.dtype(dtype))


def residual_specs(call: Call, arrays: Sequence[Any]) -> tuple[Spec, ...]:
    """The residuals of a call; of ``arrays``, or what has their shapes, the first are q, k and v."""
    x = Operands(*(Spec(tuple(a.shape), np.dtype(a.dtype)) for a in arrays[:3]))
    return backend().residual_specs(x, call.options)


def _bind(call: Call, arrays: Sequence[Array]) -> tuple[Operands, Options, list[Array]]:
    """Operands, options, and the arrays that come after the inputs."""
    n = len(call.names)
    given = dict(zip(call.names, map(np.asarray, arrays[:n]), strict=True))
    return *assemble(call.options, {**dict(call.numbers), **given}), [np.asarray(x) for x in arrays[n:]]


def attention(*arrays: Array, call: Call, saving: bool, into: Sequence[Array]) -> None:
    """``out, lse``, and the residuals where ``saving``: the first is ``out`` itself where it has its dtype."""
    x, o, _ = _bind(call, arrays)
    if saving and len(into) < 2 + len(residual_specs(call, arrays)):
        into = (*into[:2], into[0], *into[2:])
    backend().forward(x, o, save=saving, into=into)


def gradient(*arrays: Array, call: Call, cotangents: tuple[str, ...], into: Sequence[Array]) -> None:
    """The gradients of the given inputs."""
    x, o, rest = _bind(call, arrays)
    n = len(rest) - len(cotangents)
    c = dict(zip(cotangents, rest[n:], strict=True))
    _write(into, backend().backward(x, o, rest[:n], c.get("dout"), c.get("dlse"), into=into[:3]))


def tangent(*arrays: Array, call: Call, tangents: tuple[str, ...], into: Sequence[Array]) -> None:
    """``out_dot, lse_dot`` along the tangents of the inputs that ``tangents`` names."""
    x, o, rest = _bind(call, arrays)
    dots = rest[len(rest) - len(tangents) :]
    backend().forward_tangent(x, o, Tangents(**dict(zip(tangents, dots, strict=True))), into)


def hvp(
    *arrays: Array, call: Call, tangents: tuple[str, ...], cotangents: tuple[str, ...], into: Sequence[Array]
) -> None:
    """The tangents of the gradients."""
    x, o, rest = _bind(call, arrays)
    t = Tangents(**dict(zip(tangents, rest, strict=False)))
    c = dict(zip(cotangents, rest[len(tangents) :], strict=True))
    _write(into, backend().backward_tangent(x, o, t, c.get("dout"), None, c.get("dlse")).grads_dot)


def _write(into: Sequence[Array], results: Gradients) -> None:
    """What is given, where it is not written already."""
    for place, result in zip(into, (g for g in results if g is not None), strict=True):
        if result is not place:
            place[...] = result
