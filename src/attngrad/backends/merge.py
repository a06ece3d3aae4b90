"""What backends share: what they take, operands in the dtype of computation, and how tangents of parts are merged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from attngrad.core.arrays import Array
from attngrad.core.dtypes import ACCUMULATE
from attngrad.core.operands import DIFFERENTIABLE, Operands, Tangents
from attngrad.core.options import Options


def refuses(x: Operands, o: Options) -> str | None:
    """None: all that ``bind`` admits is computed."""
    return None


def compute_dtype(x: Operands) -> Any:
    """What the passes compute in."""
    return ACCUMULATE.get(x.q.dtype, x.q.dtype)


def widen(x: Array | None) -> Any:
    """``x``, an array or arrays by name, in the dtype it is computed in."""
    if isinstance(x, Mapping):
        return {name: widen(y) for name, y in x.items()}
    return x if x is None else x.astype(ACCUMULATE.get(x.dtype, x.dtype), copy=False)


def wide_operands(x: Operands) -> Operands:
    """The operands in the dtype they are computed in."""
    return Operands(**x._asdict() | {name: widen(getattr(x, name)) for name in DIFFERENTIABLE})


def wide_part(part: Operands) -> Operands:
    """A part in the dtype it is computed in, so that nothing is rounded; sinks enter once, where parts are merged."""
    return wide_operands(part._replace(sinks=None))


class TangentMerge:
    """Tangents of rows: parts a and b of a row have shares w_a + w_b = 1, sigmoids of the difference of their lse.

    ::

        out     = w_a out_a + w_b out_b
        lse_dot = lse_dot_a + w_b (lse_dot_b - lse_dot_a)
        out_dot = w_a out_dot_a + w_b out_dot_b + w_a w_b (lse_dot_b - lse_dot_a) (out_b - out_a)

    Rows begin as ``start``, which is written to: out, lse, out_dot and lse_dot of the sink alone.
    ``tangent_of(part, t)`` gives the same of a part, nothing rounded; ``xp`` is the module of the arrays.
    """

    def __init__(self, start: Sequence[Array], tangent_of: Callable[..., Any], xp: Any = np) -> None:
        self._out, self._lse, self._out_dot, self._lse_dot = start
        self._tangent_of, self._xp = tangent_of, xp

    def add(self, rows: slice, part: Operands, t: Tangents) -> None:
        """The keys of ``part`` for ``rows``, which move along ``t``."""
        xp, (out_b, lse_b, out_dot_b, lse_dot_b) = self._xp, self._tangent_of(part, t)
        out, out_dot = self._out[..., rows, :], self._out_dot[..., rows, :]
        lse, lse_dot = self._lse[..., rows], self._lse_dot[..., rows]
        with np.errstate(all="ignore"):
            ahead = xp.where(lse_b == -np.inf, lse_b, lse_b - lse)
            b = (1 / (1 + xp.exp(-ahead)))[..., None]
            a = (1 / (1 + xp.exp(ahead)))[..., None]
            gap = (lse_dot_b - lse_dot)[..., None]
            lse[...] = xp.logaddexp(lse, lse_b)
            lse_dot += (b * gap)[..., 0]
            out_dot *= a
            out_dot += b * out_dot_b
            out_dot += a * b * gap * (out_b - out)
            out *= a
            out += b * out_b

    def finish(self) -> tuple[Array, Array]:
        """``out_dot, lse_dot``, in the dtype of computation."""
        return self._out_dot, self._lse_dot


class NumpyTangents(TangentMerge):
    """Of NumPy arrays, by the ``forward_tangent`` of a backend."""

    def __init__(self, x: Operands, o: Options, t: Tangents, forward_tangent: Callable[..., Any]) -> None:
        self._dtype = x.q.dtype
        rows, dtype = x.q.shape[:-1], compute_dtype(x)
        out, out_dot = (np.zeros(x.out_shape, dtype) for _ in range(2))
        lse, lse_dot = np.full(rows, -np.inf, dtype), np.zeros(rows, dtype)
        if x.sinks is not None:
            lse[...] = widen(x.sinks)[:, None]
            if t.sinks is not None:
                lse_dot[...] = np.where(lse > -np.inf, widen(t.sinks)[:, None], 0)

        def tangent_of(part: Operands, t: Tangents) -> Any:
            return forward_tangent(wide_part(part), o, Tangents(*map(widen, t))._replace(sinks=None))

        super().__init__((out, lse, out_dot, lse_dot), tangent_of)

    def finish(self) -> tuple[Array, Array]:
        """``out_dot, lse_dot``."""
        with np.errstate(over="ignore"):
            return self._out_dot.astype(self._dtype, copy=False), self._lse_dot
