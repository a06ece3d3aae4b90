"""The passes of the kernels over NumPy arrays, as the primitives hand them over: flat lists, results ``into`` one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attngrad.backends.cpu import kernels
from attngrad.core.arrays import Array
from attngrad.core.dtypes import ACCUMULATE
from attngrad.core.options import Gradients, Operands, Options, Tangents

DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks")
INPUTS = (*DIFFERENTIABLE, "mask", "q_segments", "k_segments", "offset", "seed")
SAVED = ("wide", "top", "inverse")


@dataclass(frozen=True)
class Call:
    """All that is known when a call is traced: the options, which inputs are given, the offset where it is a number."""

    options: Options
    names: tuple[str, ...]
    offset: int = 0

    @property
    def differentiable(self) -> tuple[str, ...]:
        """The given inputs that have a gradient, in order."""
        return tuple(name for name in self.names if name in DIFFERENTIABLE)


def lse_dtype(dtype: Any) -> Any:
    """The dtype of lse beside q of ``dtype``."""
    return ACCUMULATE.get(np.dtype(dtype), np.dtype(dtype))


def _bind(call: Call, arrays: Sequence[Array]) -> tuple[Operands, Options, list[Array]]:
    """Operands, options, and the arrays that come after the inputs."""
    n = len(call.names)
    given: dict[str, Any] = dict(zip(call.names, map(np.asarray, arrays[:n]), strict=True))
    segments = (given.pop("q_segments"), given.pop("k_segments")) if "q_segments" in given else None
    offset = given.pop("offset", call.offset)
    o = call.options
    if "seed" in given:
        o = replace(o, seed=int(given.pop("seed")) % 2**64)
    return Operands(**given, segments=segments, offset=offset), o, [np.asarray(x) for x in arrays[n:]]


def attention(*arrays: Array, call: Call, saving: bool, into: Sequence[Array]) -> None:
    """``out, lse``, and what the backward pass needs where ``saving``: ``out`` itself where it is wide enough."""
    x, o, _ = _bind(call, arrays)
    if not saving:
        kernels.forward(x, o, into)
    else:
        kernels.forward_saving(x, o, into if len(into) == 5 else (*into[:2], into[0], *into[2:]))


def gradient(*arrays: Array, call: Call, cotangents: tuple[str, ...], into: Sequence[Array]) -> None:
    """The gradients of the given inputs."""
    x, o, rest = _bind(call, arrays)
    saved = kernels.Saved(*map(np.ascontiguousarray, rest[:3]))
    c = dict(zip(cotangents, rest[3:], strict=True))
    _write(into, kernels.backward(x, o, saved, c.get("dout"), c.get("dlse"), into=into[:3]))


def tangent(*arrays: Array, call: Call, tangents: tuple[str, ...], into: Sequence[Array]) -> None:
    """``out_dot, lse_dot`` along the tangents of the inputs that ``tangents`` names."""
    x, o, rest = _bind(call, arrays)
    kernels.forward_tangent(x, o, Tangents(**dict(zip(tangents, rest[3:], strict=True))), into)


def hvp(
    *arrays: Array, call: Call, tangents: tuple[str, ...], cotangents: tuple[str, ...], into: Sequence[Array]
) -> None:
    """The tangents of the gradients."""
    x, o, rest = _bind(call, arrays)
    t = Tangents(**dict(zip(tangents, rest, strict=False)))
    c = dict(zip(cotangents, rest[len(tangents) :], strict=True))
    _, grads_dot = kernels.backward_tangent(x, o, t, c.get("dout"), None, c.get("dlse"))
    _write(into, grads_dot)


def _write(into: Sequence[Array], results: Gradients) -> None:
    """What is given, where it is not written already."""
    for place, result in zip(into, (g for g in results if g is not None), strict=True):
        if result is not place:
            place[...] = result
