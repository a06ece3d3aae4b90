"""The passes: each rank keeps its queries, and the keys and values go round, piece by piece.

At every step a rank holds a piece of the keys of some rank, sends it on and receives the next while it computes. Every
pair of runs of queries and keys is one call of the kernels, with the offset and origin that it has in the whole; a pair
that causal or window hides is left out. Results of steps are merged by the statistics of the rows, in float32 or wider.
In the backward pass the sums for dk and dv follow their keys, and take one step more to come home. The statistics are
those of the whole row, so what each step gives is exact.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from attngrad.backends.cpu import kernels
from attngrad.backends.cpu.kernels import Saved
from attngrad.core.arrays import Array
from attngrad.core.dtypes import ACCUMULATE
from attngrad.core.options import Gradients, Operands, Options, Tangents
from attngrad.distributed import _travel
from attngrad.distributed._layout import Layout, Run
from attngrad.distributed._transport import Ring
from attngrad.distributed._travel import Keys, Route, Sums, empty


class Tile(NamedTuple):
    """A run of queries beside a run of keys, and their offset."""

    rows: Run
    columns: Run
    offset: Array | int


@dataclass(frozen=True)
class Job:
    """What all ranks have agreed on."""

    options: Options
    queries: Layout
    keys: Layout

    def tiles(self, x: Operands, rank: int, keys: list[Run], cut_keys: bool = False) -> Iterator[Tile]:
        """What queries of ``rank`` may see of ``keys``; results the size of keys ask for ``cut_keys``."""
        o, queries = self.options, self.queries.runs(rank)
        if not o.causal and o.window is None and o.dropout == 0.0 and x.bias is None and x.mask is None:
            queries, keys = _joined(queries), _joined(keys)  # positions do not matter: one tile
        for rows in _cut(queries):
            for columns in _cut(keys) if cut_keys else keys:
                offset = x.offset + rows.start - columns.start
                if sees(o, offset, rows.length, columns.length):
                    yield Tile(rows, columns, offset)


def _cut(runs: list[Run]) -> Iterator[Run]:
    """In runs of ``TILE`` tokens at most: results of a tile stay small beside what a rank holds."""
    for run in runs:
        for at in range(0, run.length, _travel.TILE):
            yield Run(run.local + at, run.start + at, min(_travel.TILE, run.length - at))


def _joined(runs: list[Run]) -> list[Run]:
    """One run where one begins as the other ends; positions are lost."""
    joined: list[Run] = []
    for run in runs:
        first = joined.pop() if joined and joined[-1].here.stop == run.local else Run(run.local, 0, 0)
        joined.append(Run(first.local, 0, first.length + run.length))
    return joined


def sees(o: Options, offset: Array | int, queries: int, keys: int) -> bool:
    """Whether causal and window let any of the queries see any of the keys.

    >>> sees(Options(1.0, causal=True), -4, 4, 4), sees(Options(1.0, causal=True), -3, 4, 4)
    (False, True)
    """
    left, right = o.window or (None, None)
    if o.causal:
        right = 0 if right is None else min(right, 0)
    low, high = (int(np.min(offset)), int(np.max(offset))) if np.size(offset) else (0, 0)
    if right is not None and queries - 1 + high + right < 0:
        return False
    return left is None or low - left <= keys - 1


# --- one tile -------------------------------------------------------------------------------------------------------


def widened(dtype: Any) -> Any:
    """What ``dtype`` is computed in."""
    return ACCUMULATE.get(dtype, dtype)


def wide(x: Array) -> Array:
    """``x`` in the dtype that it is computed in: 16-bit inputs are widened, so that no step rounds."""
    return x.astype(widened(x.dtype), copy=False)


def _travelling(x: Operands, *more: Array) -> list[Array]:
    """k, v, tangents or nothing, and the ids of the keys where there are segments."""
    return [x.k, x.v, *more, *([] if x.segments is None else [x.segments[1][..., None]])]


def _slice(plane: Array, tile: Tile) -> tuple[Any, ...]:
    """Where the scores of a tile are in a mask or bias, whose axes may have length 1."""
    rows = tile.rows.here if plane.shape[-2] != 1 else slice(None)
    columns = tile.columns.there if plane.shape[-1] != 1 else slice(None)
    return ..., rows, columns


def _operands(x: Operands, tile: Tile, block: Sequence[Array]) -> Operands:
    k, v = block[0], block[1]
    rows, columns = tile.rows.here, tile.columns.here
    # Sinks enter once, where the steps are merged; here they stand for the unit of the scores (see Saved) alone.
    sinks = None if x.sinks is None else np.full(x.q.shape[-3], -np.inf, widened(x.q.dtype))
    return Operands(
        wide(x.q[..., rows, :]),
        wide(k[..., columns, :]),
        wide(v[..., columns, :]),
        None if x.bias is None else wide(x.bias[_slice(x.bias, tile)]),
        sinks,
        None if x.mask is None else x.mask[_slice(x.mask, tile)],
        None if x.segments is None else (x.segments[0][..., rows], block[-1][..., columns, 0]),
        tile.offset,
        (0, 0, tile.rows.start, tile.columns.start),
    )


# --- forward --------------------------------------------------------------------------------------------------------


def forward(ring: Ring, job: Job, x: Operands) -> tuple[Array, Array, Saved]:
    """``out`` and ``lse`` of the own queries over all keys, and the statistics of the rows."""
    route = Route(ring, job.keys)
    total, keys = _Merger(x), Keys(route, _travelling(x))
    for ring.step in range(1, route.steps + 1):
        ring.start(*keys.depart())
        for tile in job.tiles(x, ring.rank, keys.runs):
            _, _, part = kernels.forward_saving(_operands(x, tile, keys.here), job.options)
            total.add(tile.rows.here, part)
        ring.wait()
        keys.arrive()
    lse, saved = total.finish()
    with np.errstate(over="ignore"):
        return saved.out.astype(x.q.dtype, copy=False), lse, saved


class _Merger:
    """The running sums of rows: ``out = sum_j base(s_j - top) v_j``, the same of ones, and top.

    A sink is where they start: one more key, whose value is zero.
    """

    def __init__(self, x: Operands) -> None:
        natural = x.bias is not None or x.sinks is not None
        self._base: Any = np.exp if natural else np.exp2
        self._log = 1.0 if natural else float(np.log(2.0))
        rows, dtype = x.q.shape[:-1], widened(x.q.dtype)
        self.out = empty(x.out_shape, dtype)
        self.out.fill(0)
        self.top = np.full(rows, -np.inf, dtype)
        self._sink = None if x.sinks is None else wide(x.sinks)[:, None]
        if self._sink is not None:
            self.top[...] = self._sink
        self.sum = (self.top > -np.inf).astype(dtype)

    def add(self, rows: slice, part: Saved) -> None:
        out, top, total = self.out[..., rows, :], self.top[..., rows], self.sum[..., rows]
        with np.errstate(all="ignore"):
            seen = part.inverse != 0
            other = np.where(seen, part.top, -np.inf)
            highest = np.maximum(top, other)
            level = np.where(highest == -np.inf, highest.dtype.type(0), highest)
            old, new = self._base(top - level), self._base(other - level)
            new *= np.where(seen, 1 / part.inverse, highest.dtype.type(0))
            out *= old[..., None]
            np.multiply(part.out, new[..., None], out=part.out)
            out += part.out
            total *= old
            total += new
        top[...] = highest

    def finish(self) -> tuple[Array, Saved]:
        """lse, and what the backward pass needs; the sums are used up."""
        with np.errstate(all="ignore"):
            blind = self.sum == 0
            dtype = self.top.dtype.type
            inverse = np.where(blind, dtype(0), 1 / self.sum)
            self.out *= inverse[..., None]
            lse = np.where(blind, dtype(-np.inf), self.top * dtype(self._log) + np.log(self.sum))
            if self._sink is not None:
                # The kernels' own test (write_statistics): no key has added to the sum of the sink.
                blind |= (self.sum == 1) & (self.top == self._sink)
            return lse, Saved(self.out, *(np.where(blind, dtype(0), x) for x in (self.top, inverse)))


# --- backward -------------------------------------------------------------------------------------------------------


def backward(ring: Ring, job: Job, x: Operands, saved: Saved, dout: Array | None, dlse: Array | None) -> Gradients:
    """The gradients of the own inputs, of the sum over ranks of <dout, out> + <dlse, lse>.

    Those of bias and sinks come from the own rows; where ranks share one, theirs add up to its gradient.
    """
    dtype = widened(x.q.dtype)
    dq = empty(x.q.shape, dtype)
    dq.fill(0)
    dbias = None if x.bias is None else np.zeros(x.bias.shape, dtype)
    route = Route(ring, job.keys)
    keys, sums = Keys(route, _travelling(x)), Sums(route, x.k, x.v, dtype)
    for ring.step in range(1, route.steps + 1):
        ring.start(*map(operator.add, keys.depart(), sums.depart()))
        rows, of_rows = slice(0), saved
        for tile in job.tiles(x, ring.rank, keys.runs, cut_keys=True):
            if tile.rows.here != rows:
                rows = tile.rows.here
                # in a row that saw nothing, inverse = 0: there the kernels give zero
                of_rows = _of_rows(saved, rows)
            g = kernels.backward(
                _operands(x, tile, keys.here),
                job.options,
                of_rows,
                None if dout is None else wide(dout[..., rows, :]),
                None if dlse is None else dlse[..., rows],
            )
            dq[..., rows, :] += g.q
            if dbias is not None:
                dbias[_slice(dbias, tile)] += g.bias
            sums.add(tile.columns.here, g)
            del g
        ring.wait()
        keys.arrive()
        sums.arrive()
    dk, dv = sums.finish()
    dsinks = None if x.sinks is None else _sink_gradient(x, saved, dout, dlse)
    with np.errstate(over="ignore"):
        found = (dq, dk, dv, dbias, dsinks)
        return Gradients(
            *(None if g is None else g.astype(p.dtype, copy=False) for g, p in zip(found, x, strict=False))
        )


def _of_rows(saved: Saved, rows: slice) -> Saved:
    return Saved(*map(np.ascontiguousarray, (saved.out[..., rows, :], *(x[..., rows] for x in saved[1:]))))


def _sink_gradient(x: Operands, saved: Saved, dout: Array | None, dlse: Array | None) -> Array:
    """(R6): -sum_i exp(sigma - lse_i) delta_i over the own rows."""
    sigma = wide(x.sinks)[:, None]
    with np.errstate(all="ignore"):
        delta = np.zeros_like(saved.top)
        if dout is not None:
            for rows in (run.here for run in _cut([Run(0, 0, x.q.shape[-2])])):
                np.einsum("...e,...e->...", wide(dout[..., rows, :]), saved.out[..., rows, :], out=delta[..., rows])
        blind = saved.inverse == 0
        delta[blind] = 0  # as in the kernels: dout of such a row may be NaN
        if dlse is not None:
            delta -= dlse
        share = np.where(blind, 1, np.exp(sigma - saved.top) * saved.inverse)
        rows = -(np.where(sigma > -np.inf, share, 0) * delta)
        return rows.sum(axis=(*range(rows.ndim - 2), -1), dtype=rows.dtype)


# --- forward mode ---------------------------------------------------------------------------------------------------


def tangent(ring: Ring, job: Job, x: Operands, t: Tangents) -> tuple[Array, Array]:
    """``out_dot`` and ``lse_dot`` along ``t``; all ranks give k_dot, or none, and so with v_dot."""
    route = Route(ring, job.keys)
    total, keys = _TangentMerger(x, t), Keys(route, _travelling(x, *(d for d in (t.k, t.v) if d is not None)))
    for ring.step in range(1, route.steps + 1):
        ring.start(*keys.depart())
        dots = iter(keys.here[2:])
        k_dot, v_dot = (None if d is None else next(dots) for d in (t.k, t.v))
        for tile in job.tiles(x, ring.rank, keys.runs):
            rows, columns = tile.rows.here, tile.columns.here
            moved = Tangents(
                None if t.q is None else wide(t.q[..., rows, :]),
                None if k_dot is None else wide(k_dot[..., columns, :]),
                None if v_dot is None else wide(v_dot[..., columns, :]),
                None if t.bias is None else wide(t.bias[_slice(t.bias, tile)]),
            )
            total.add(rows, *kernels.forward_tangent(_operands(x, tile, keys.here), job.options, moved))
        ring.wait()
        keys.arrive()
    with np.errstate(over="ignore"):
        return total.out_dot.astype(x.q.dtype, copy=False), total.lse_dot


class _TangentMerger:
    """Tangents of rows: parts a and b of a row have shares w_a + w_b = 1, sigmoids of the difference of their lse.

    ::

        out     = w_a out_a + w_b out_b
        lse_dot = lse_dot_a + w_b (lse_dot_b - lse_dot_a)
        out_dot = w_a out_dot_a + w_b out_dot_b + w_a w_b (lse_dot_b - lse_dot_a) (out_b - out_a)
    """

    def __init__(self, x: Operands, t: Tangents) -> None:
        rows, dtype = x.q.shape[:-1], widened(x.q.dtype)
        self.out, self.out_dot = (np.zeros(x.out_shape, dtype) for _ in range(2))
        self.lse, self.lse_dot = np.full(rows, -np.inf, dtype), np.zeros(rows, dtype)
        if x.sinks is not None:
            self.lse[...] = wide(x.sinks)[:, None]
            if t.sinks is not None:
                self.lse_dot[...] = np.where(self.lse > -np.inf, wide(t.sinks)[:, None], 0)

    def add(self, rows: slice, out_b: Array, lse_b: Array, out_dot_b: Array, lse_dot_b: Array) -> None:
        out, out_dot = self.out[..., rows, :], self.out_dot[..., rows, :]
        lse, lse_dot = self.lse[..., rows], self.lse_dot[..., rows]
        with np.errstate(all="ignore"):
            ahead = np.where(lse_b == -np.inf, lse_b, lse_b - lse)
            b = (1 / (1 + np.exp(-ahead)))[..., None]
            a = (1 / (1 + np.exp(ahead)))[..., None]
            gap = (lse_dot_b - lse_dot)[..., None]
            lse[...] = np.logaddexp(lse, lse_b)
            lse_dot += (b * gap)[..., 0]
            out_dot *= a
            out_dot += b * out_dot_b
            out_dot += a * b * gap * (out_b - out)
            out *= a
            out += b * out_b
