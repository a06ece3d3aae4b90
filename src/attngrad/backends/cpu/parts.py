"""Passes over parts of the keys: results of parts are merged by the row statistics, in float32 or wider.

A part has no sinks: they enter once, where the parts are merged. Its scores are in the units of the whole (see Saved).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from attngrad.backends.cpu.arrays import empty
from attngrad.backends.cpu.passes import Saved, backward, forward, forward_tangent
from attngrad.backends.merge import NumpyTangents, compute_dtype, wide_part, widen
from attngrad.core.arrays import Array
from attngrad.core.operands import Gradients, Operands, Tangents
from attngrad.core.options import Options

_ROWS = 1024
"""Rows whose dout is widened at a time."""


def _is_natural(x: Operands) -> bool:
    return x.bias is not None or x.sinks is not None


def _zeros(shape: tuple[int, ...], dtype: Any) -> Array:
    found = empty(shape, dtype)
    found.fill(0)
    return found


class forward_parts:  # noqa: N801 - the protocol calls it as a function
    """The running sums of rows: ``out = sum_j base(s_j - row_max) v_j``, the same of ones, and row_max.

    A sink is where they start: one more key, whose value is zero.
    """

    def __init__(self, x: Operands, o: Options) -> None:
        self._options, self._natural, self._dtype = o, _is_natural(x), x.q.dtype
        self._base: Any = np.exp if self._natural else np.exp2
        self._log = 1.0 if self._natural else float(np.log(2.0))
        row_shape, dtype = x.q.shape[:-1], compute_dtype(x)
        self._out = _zeros(x.out_shape, dtype)
        self._row_max = np.full(row_shape, -np.inf, dtype)
        self._sink = None if x.sinks is None else widen(x.sinks)[:, None]
        if self._sink is not None:
            self._row_max[...] = self._sink
        self._sum = (self._row_max > -np.inf).astype(dtype)

    def add(self, rows: slice, part: Operands) -> None:
        """The keys of ``part`` for ``rows``."""
        _, _, residuals = forward(wide_part(part), self._options, natural=self._natural)
        saved = Saved(*residuals)
        out, row_max, total = self._out[..., rows, :], self._row_max[..., rows], self._sum[..., rows]
        with np.errstate(all="ignore"):
            seen = saved.inv_row_sum != 0
            other = np.where(seen, saved.row_max, -np.inf)
            highest = np.maximum(row_max, other)
            level = np.where(highest == -np.inf, highest.dtype.type(0), highest)
            old, new = self._base(row_max - level), self._base(other - level)
            new *= np.where(seen, 1 / saved.inv_row_sum, highest.dtype.type(0))
            out *= old[..., None]
            np.multiply(saved.out, new[..., None], out=saved.out)
            out += saved.out
            total *= old
            total += new
        row_max[...] = highest

    def finish(self) -> tuple[Array, Array, Sequence[Array]]:
        """``out, lse, residuals``; the sums are used up."""
        with np.errstate(all="ignore"):
            masked = self._sum == 0
            dtype = self._row_max.dtype.type
            inverse = np.where(masked, dtype(0), 1 / self._sum)
            self._out *= inverse[..., None]
            lse = np.where(masked, dtype(-np.inf), self._row_max * dtype(self._log) + np.log(self._sum))
            if self._sink is not None:
                # The kernels' own test (write_statistics): no key has added to the sum of the sink.
                masked |= (self._sum == 1) & (self._row_max == self._sink)
            saved = Saved(self._out, *(np.where(masked, dtype(0), x) for x in (self._row_max, inverse)))
            return self._out.astype(self._dtype, copy=False), lse, saved


class backward_parts:  # noqa: N801
    """Each part from the statistics of the whole row, so that what it gives is exact; dq is their sum."""

    def __init__(
        self, x: Operands, o: Options, residuals: Sequence[Array], dout: Array | None, dlse: Array | None
    ) -> None:
        self._x, self._options, self._saved = x, o, Saved(*residuals)
        self._dout, self._dlse = dout, dlse
        self._dq = _zeros(x.q.shape, compute_dtype(x))
        self._rows, self._of_rows = slice(0), self._saved

    def add(self, rows: slice, part: Operands) -> Gradients:
        """The gradients of the part."""
        if rows != self._rows:
            saved = self._saved
            of_rows = (saved.out[..., rows, :], *(y[..., rows] for y in saved[1:]))
            self._rows, self._of_rows = rows, Saved(*map(np.ascontiguousarray, of_rows))
        g = backward(
            wide_part(part),
            self._options,
            self._of_rows,
            None if self._dout is None else widen(self._dout[..., rows, :]),
            None if self._dlse is None else self._dlse[..., rows],
            natural=_is_natural(self._x),
        )
        self._dq[..., rows, :] += g.q
        return g

    def finish(self) -> tuple[Array, Array | None]:
        """dq, and the gradient of the sinks."""
        with np.errstate(over="ignore"):
            dq = self._dq.astype(self._x.q.dtype, copy=False)
            return dq, None if self._x.sinks is None else self._sinks().astype(self._x.sinks.dtype, copy=False)

    def _sinks(self) -> Array:
        """(R6): -sum_i exp(sigma - lse_i) delta_i."""
        x, saved = self._x, self._saved
        sigma = widen(x.sinks)[:, None]
        with np.errstate(all="ignore"):
            delta = np.zeros_like(saved.row_max)
            if self._dout is not None:
                for first in range(0, x.q.shape[-2], _ROWS):
                    rows = slice(first, first + _ROWS)
                    dout = widen(self._dout[..., rows, :])
                    np.einsum("...e,...e->...", dout, saved.out[..., rows, :], out=delta[..., rows])
            masked = saved.inv_row_sum == 0
            delta[masked] = 0  # as in the kernels: dout of such a row may be NaN
            if self._dlse is not None:
                delta -= self._dlse
            share = np.where(masked, 1, np.exp(sigma - saved.row_max) * saved.inv_row_sum)
            rows_of_sinks = -(np.where(sigma > -np.inf, share, 0) * delta)
            axes = (*range(rows_of_sinks.ndim - 2), -1)
            found: Array = rows_of_sinks.sum(axis=axes, dtype=rows_of_sinks.dtype)
            return found


def tangent_parts(x: Operands, o: Options, t: Tangents) -> NumpyTangents:
    """The tangent of a forward pass."""
    return NumpyTangents(x, o, t, forward_tangent)
