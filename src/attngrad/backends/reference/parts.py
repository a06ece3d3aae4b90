"""Passes over parts of the keys by the dense reference: parts of a row are merged by their lse."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from attngrad.backends.merge import NumpyTangents, compute_dtype, wide_part, widen
from attngrad.backends.reference.passes import backward_of, forward, forward_tangent, quiet
from attngrad.core.arrays import Array
from attngrad.core.operands import Gradients, Operands, Tangents
from attngrad.core.options import Options
from attngrad.reference.dense import sum_sinks


class forward_parts:  # noqa: N801 - the protocol calls it as a function
    """out and lse so far; a sink is where they start."""

    def __init__(self, x: Operands, o: Options) -> None:
        self._options, self._dtype = o, x.q.dtype
        self._out = np.zeros(x.out_shape, compute_dtype(x))
        self._lse = np.full(x.q.shape[:-1], -np.inf, compute_dtype(x))
        if x.sinks is not None:
            self._lse[...] = widen(x.sinks)[:, None]

    @quiet
    def add(self, rows: slice, part: Operands) -> None:
        """The keys of ``part`` for ``rows``."""
        out_b, lse_b, _ = forward(wide_part(part), self._options, save=False)
        out, lse = self._out[..., rows, :], self._lse[..., rows]
        ahead = np.where(lse_b == -np.inf, lse_b, lse_b - lse)
        out *= (1 / (1 + np.exp(ahead)))[..., None]
        out += (1 / (1 + np.exp(-ahead)))[..., None] * out_b
        lse[...] = np.logaddexp(lse, lse_b)

    def finish(self) -> tuple[Array, Array, Sequence[Array]]:
        """``out, lse, residuals``."""
        with np.errstate(over="ignore"):
            return self._out.astype(self._dtype, copy=False), self._lse.copy(), (self._out, self._lse)


class backward_parts:  # noqa: N801
    """Each part from the out and lse of the whole row; dq and the gradient of the sinks are sums."""

    def __init__(
        self, x: Operands, o: Options, residuals: Sequence[Array], dout: Array | None, dlse: Array | None
    ) -> None:
        self._x, self._options, self._residuals, self._dout, self._dlse = x, o, residuals, dout, dlse
        self._dq = np.zeros(x.q.shape, compute_dtype(x))
        self._seen = np.zeros(x.q.shape[:-1], bool)

    @quiet
    def add(self, rows: slice, part: Operands) -> Gradients:
        """The gradients of the part."""
        x = wide_part(part)
        residuals = self._residuals[0][..., rows, :], self._residuals[1][..., rows]
        dout = None if self._dout is None else self._dout[..., rows, :]
        g: Gradients = backward_of(
            x, self._options, residuals, dout, None if self._dlse is None else self._dlse[..., rows]
        ).grads
        self._dq[..., rows, :] += g.q
        self._seen[..., rows] |= forward(x, self._options, save=False)[1] > -np.inf
        return g

    @quiet
    def finish(self) -> tuple[Array, Array | None]:
        """dq, and the gradient of the sinks (R6)."""
        x, (out, lse) = self._x, self._residuals
        dq = self._dq.astype(x.q.dtype, copy=False)
        if x.sinks is None:
            return dq, None
        delta = np.zeros_like(lse) if self._dout is None else np.sum(widen(self._dout) * out, axis=-1)
        delta = np.where(self._seen, delta, 0)
        if self._dlse is not None:
            delta = delta - self._dlse
        sigma = widen(x.sinks)[:, None]
        share = np.where(sigma > -np.inf, np.exp(sigma - lse), 0)
        return dq, sum_sinks(-(share * delta), x.sinks).astype(x.sinks.dtype, copy=False)


def tangent_parts(x: Operands, o: Options, t: Tangents) -> NumpyTangents:
    """The tangent of a forward pass."""
    return NumpyTangents(x, o, t, forward_tangent)
