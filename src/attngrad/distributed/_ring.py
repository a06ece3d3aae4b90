"""The passes: each rank keeps its queries, and the keys and values go round.

At step s a rank holds the keys of rank - s, sends them on and receives the next while it computes. Every pair of runs
of queries and keys is one call of the kernels, with the offset and origin that it has in the whole; a pair that causal
or window hides is left out. Results of steps are merged by the statistics of the rows, in float32 or wider. In the
backward pass the sums for dk and dv follow their keys, and take one step more to come home. The statistics are those of
the whole row, so what each step gives is exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attngrad import _kernels, _native
from attngrad._arrays import ACCUMULATE
from attngrad._kernels import Saved
from attngrad._options import Array, Gradients, Operands, Options, Tangents
from attngrad.distributed._layout import Layout, Run
from attngrad.distributed._transport import Ring
from attngrad.torch._passes import to_array, to_tensor


class Inputs(NamedTuple):
    """The arrays of a rank: q, k and v ``(..., H, tokens, features)``, rows of bias and mask its own, columns all."""

    q: Array
    k: Array
    v: Array
    bias: Array | None = None
    sinks: Array | None = None
    mask: Array | None = None
    q_segments: Array | None = None
    k_segments: Array | None = None


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
    offset: Array | int

    def tiles(self, x: Inputs, rank: int, source: int, cut_keys: bool = False) -> Iterator[Tile]:
        """What queries of ``rank`` may see of the keys of ``source``; results the size of keys ask for ``cut_keys``."""
        o = self.options
        queries, keys = self.queries.runs(rank), self.keys.runs(source)
        if not o.causal and o.window is None and o.dropout == 0.0 and x.bias is None and x.mask is None:
            # Positions do not matter: one tile.
            queries, keys = _joined(self.queries.lengths[rank]), _joined(self.keys.lengths[source])
        for rows in _pieces(queries):
            for columns in _pieces(keys) if cut_keys else keys:
                offset = self.offset + rows.start - columns.start
                if sees(o, offset, rows.length, columns.length):
                    yield Tile(rows, columns, offset)


PIECE = 1024
"""Tokens of a tile at most, on the sides that its results have: they stay small beside what a rank holds."""


def _pieces(runs: list[Run]) -> Iterator[Run]:
    for run in runs:
        for at in range(0, run.length, PIECE):
            yield Run(run.local + at, run.start + at, min(PIECE, run.length - at))


def _joined(length: int) -> list[Run]:
    return [Run(0, 0, length)] if length else []


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


# --- what travels ---------------------------------------------------------------------------------------------------


class _Conveyor:
    """Blocks that go round: the one that is here, and the one that is coming, in two sets of buffers."""

    def __init__(self, ring: Ring, layout: Layout, own: Sequence[Tensor], axes: Sequence[int]) -> None:
        self._ring, self._layout, self._axes = ring, layout, axes
        self.here = list(own)
        self._coming: list[Tensor] = []
        self._spare: list[list[Tensor]] = []

    def depart(self, step: int) -> tuple[list[Tensor], list[Tensor]]:
        """What to send and to receive during ``step``; nothing in the last one."""
        if step + 1 >= self._ring.size:
            return [], []
        if len(self._spare) < 2:  # the own block is not ours to write to
            largest = max(self._layout.lengths)
            self._spare.append(
                [
                    _memory(_shape(x, axis, largest), x.dtype).view(-1)
                    for x, axis in zip(self.here, self._axes, strict=True)
                ]
            )
        flat = self._spare[step % 2]
        length = self._layout.lengths[self._ring.source(step + 1)]
        shapes = [_shape(x, axis, length) for x, axis in zip(self.here, self._axes, strict=True)]
        self._coming = [f[: shape.numel()].view(shape) for f, shape in zip(flat, shapes, strict=True)]
        return self.here, self._coming

    def arrive(self) -> None:
        """What was coming is here."""
        if self._coming:
            self.here, self._coming = self._coming, []


def _shape(x: Tensor, axis: int, length: int) -> torch.Size:
    shape = list(x.shape)
    shape[axis] = length
    return torch.Size(shape)


def _memory(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor, in memory that earlier results have left: so steps and passes use the same again."""
    size = shape.numel() * dtype.itemsize
    return torch.from_numpy(_native.buffer(size)).view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)


def _zeros(shape: tuple[int, ...], dtype: Any) -> Array:
    return to_array(_memory(torch.Size(shape), _torch(dtype)).zero_())


def _block(x: Inputs, extra: Sequence[Array] = ()) -> tuple[list[Tensor], list[int]]:
    """k, v, tangents or nothing, and the ids of the keys where there are segments; and their token axes."""
    arrays = [x.k, x.v, *extra]
    axes = [-2] * len(arrays)
    if x.k_segments is not None:
        arrays.append(x.k_segments)
        axes.append(-1)
    return [to_tensor(np.ascontiguousarray(a)) for a in arrays], axes


# --- one tile -------------------------------------------------------------------------------------------------------


def wide(x: Array) -> Array:
    """``x`` in the dtype that it is computed in: 16-bit inputs are widened, so that no step rounds."""
    return x.astype(ACCUMULATE.get(x.dtype, x.dtype), copy=False)


def _slice(plane: Array, tile: Tile) -> tuple[Any, ...]:
    """Where the scores of a tile are in a mask or bias, whose axes may have length 1."""
    rows = tile.rows.here if plane.shape[-2] != 1 else slice(None)
    columns = tile.columns.there if plane.shape[-1] != 1 else slice(None)
    return ..., rows, columns


def _operands(x: Inputs, tile: Tile, block: Sequence[Array]) -> Operands:
    k, v = block[0], block[1]
    rows, columns = tile.rows.here, tile.columns.here
    segments = None
    if x.q_segments is not None:
        segments = (x.q_segments[..., rows], block[-1][..., columns])
    # Sinks enter once, where the steps are merged; here they stand for the unit of the scores (see Saved) alone.
    sinks = None if x.sinks is None else np.full(x.q.shape[-3], -np.inf, x.q.dtype)
    return Operands(
        x.q[..., rows, :],
        wide(k[..., columns, :]),
        wide(v[..., columns, :]),
        None if x.bias is None else wide(x.bias[_slice(x.bias, tile)]),
        sinks,
        None if x.mask is None else x.mask[_slice(x.mask, tile)],
        segments,
        tile.offset,
        (0, 0, tile.rows.start, tile.columns.start),
    )


# --- forward --------------------------------------------------------------------------------------------------------


def forward(ring: Ring, job: Job, x: Inputs) -> tuple[Array, Array, Saved]:
    """``out`` and ``lse`` of the own queries over all keys, and the statistics of the rows."""
    x, dtype = x._replace(q=wide(x.q)), x.q.dtype
    total = _Merger(x)
    conveyor = _Conveyor(ring, job.keys, *_block(x))
    for step in range(ring.size):
        ring.step = step + 1
        ring.start(*conveyor.depart(step))
        block = list(map(to_array, conveyor.here))
        for tile in job.tiles(x, ring.rank, ring.source(step)):
            _, _, part = _kernels.forward_saving(_operands(x, tile, block), job.options)
            total.add(tile.rows.here, part)
        ring.wait()
        conveyor.arrive()
    lse, saved = total.finish()
    with np.errstate(over="ignore"):
        return saved.out.astype(dtype, copy=False), lse, saved


class _Merger:
    """The running sums of rows: ``out = sum_j base(s_j - top) v_j``, the same of ones, and top.

    A sink is where they start: one more key, whose value is zero.
    """

    def __init__(self, x: Inputs) -> None:
        natural = x.bias is not None or x.sinks is not None
        self._base: Any = np.exp if natural else np.exp2
        self._log = 1.0 if natural else float(np.log(2.0))
        rows, dtype = x.q.shape[:-1], x.q.dtype
        self.out = _zeros((*rows, x.v.shape[-1]), dtype)
        self.top = np.full(rows, -np.inf, dtype)
        if x.sinks is not None:
            self.top[...] = wide(x.sinks)[:, None]
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
            return lse, Saved(self.out, np.where(blind, dtype(0), self.top), inverse)


# --- backward -------------------------------------------------------------------------------------------------------


def backward(ring: Ring, job: Job, x: Inputs, saved: Saved, dout: Array | None, dlse: Array | None) -> Gradients:
    """The gradients of the own inputs, of the sum over ranks of <dout, out> + <dlse, lse>.

    Those of bias and sinks come from the own rows; where ranks share one, theirs add up to its gradient.
    """
    x, dtypes = x._replace(q=wide(x.q)), x
    dout = None if dout is None else wide(dout)
    dq = _zeros(x.q.shape, x.q.dtype)
    dbias = None if x.bias is None else np.zeros(x.bias.shape, x.q.dtype)
    conveyor = _Conveyor(ring, job.keys, *_block(x))
    sums = _Sums(x, ring, job.keys)
    for step in range(ring.size):
        ring.step = step + 1
        keys, sums_of = conveyor.depart(step), sums.depart(step)
        ring.start([*keys[0], *sums_of[0]], [*keys[1], *sums_of[1]])
        block = list(map(to_array, conveyor.here))
        sums.begin(step)
        for tile in job.tiles(x, ring.rank, ring.source(step), cut_keys=True):
            rows = tile.rows.here
            # in a row that saw nothing, inverse = 0: there the kernels give zero
            of_rows = Saved(*map(np.ascontiguousarray, (saved.out[..., rows, :], *(s[..., rows] for s in saved[1:]))))
            g = _kernels.backward(
                _operands(x, tile, block),
                job.options,
                of_rows,
                None if dout is None else dout[..., rows, :],
                None if dlse is None else dlse[..., rows],
            )
            dq[..., rows, :] += g.q
            if dbias is not None:
                dbias[_slice(dbias, tile)] += g.bias
            sums.add(tile.columns.here, g)
            del of_rows, g
        ring.wait()
        conveyor.arrive()
        sums.arrive()
    dk, dv = sums.home()
    dsinks = None if x.sinks is None else _sink_gradient(x, saved, dout, dlse)
    with np.errstate(over="ignore"):
        found = (dq, dk, dv, dbias, dsinks)
        return Gradients(
            *(None if g is None else g.astype(p.dtype, copy=False) for g, p in zip(found, dtypes, strict=False))
        )


class _Sums:
    """dk and dv of a block from all ranks: they follow the keys, one step behind, and every rank adds its part.

    Three sets of buffers: what leaves, what comes, and the part of this step.
    """

    def __init__(self, x: Inputs, ring: Ring, layout: Layout) -> None:
        self._ring, self._layout = ring, layout
        largest = max(layout.lengths)
        self._shapes = [(*a.shape[:-2], largest, a.shape[-1]) for a in (x.k, x.v)]
        dtype = _torch(x.q.dtype)
        self._free = [
            [_memory(torch.Size(shape), dtype).view(-1) for shape in self._shapes]
            for _ in range(3 if ring.size > 1 else 1)
        ]
        self._leaving: list[Tensor] = []
        self._coming: list[Tensor] = []
        self._part: list[Tensor] = []

    def _take(self, source: int) -> list[Tensor]:
        shapes = [torch.Size((*s[:-2], self._layout.lengths[source], s[-1])) for s in self._shapes]
        return [flat[: shape.numel()].view(shape) for flat, shape in zip(self._free.pop(), shapes, strict=True)]

    def _give(self, tensors: list[Tensor]) -> None:
        self._free.append([x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0) for x in tensors])

    def depart(self, step: int) -> tuple[list[Tensor], list[Tensor]]:
        """What to send and to receive during ``step``; nothing in the first one."""
        if step == 0:
            return [], []
        self._coming = self._take(self._ring.source(step))
        return self._leaving, self._coming

    def begin(self, step: int) -> None:
        """The part of ``step`` begins at zero."""
        self._part = [x.zero_() for x in self._take(self._ring.source(step))]

    def add(self, columns: slice, g: Gradients) -> None:
        """What a tile gives."""
        for total, part in zip(self._part, (g.k, g.v), strict=True):
            array = to_array(total)
            array[..., columns, :] += part

    def arrive(self) -> None:
        """To what has come, add the part; it leaves in the next step."""
        if not self._coming:
            self._leaving, self._part = self._part, []
            return
        for total, part in zip(self._coming, self._part, strict=True):
            total += part
        self._give(self._leaving)
        self._give(self._part)
        self._leaving, self._coming, self._part = self._coming, [], []

    def home(self) -> tuple[Array, Array]:
        """The last hop: from the rank before come the sums of the own keys."""
        mine = self._leaving
        if self._ring.size > 1:
            mine = self._take(self._ring.rank)
            self._ring.start(self._leaving, mine)
            self._ring.wait()
        self._free, self._leaving = [], []
        dk, dv = map(to_array, mine)
        return dk, dv


def _torch(dtype: Any) -> torch.dtype:
    found: torch.dtype = to_tensor(np.zeros(0, dtype)).dtype
    return found


def _sink_gradient(x: Inputs, saved: Saved, dout: Array | None, dlse: Array | None) -> Array:
    """(R6): -sum_i exp(sigma - lse_i) delta_i over the own rows."""
    sigma = wide(x.sinks)[:, None]
    with np.errstate(all="ignore"):
        delta = np.zeros_like(saved.top) if dout is None else np.einsum("...e,...e->...", dout, saved.out)
        if dlse is not None:
            delta = delta - dlse
        share = np.where(sigma > -np.inf, np.exp(sigma - saved.top) * saved.inverse, 0)
        rows = -(share * delta)
        return rows.sum(axis=(*range(rows.ndim - 2), -1), dtype=rows.dtype)


# --- forward mode ---------------------------------------------------------------------------------------------------


def tangent(ring: Ring, job: Job, x: Inputs, t: Tangents) -> tuple[Array, Array]:
    """``out_dot`` and ``lse_dot`` along ``t``; all ranks give k_dot, or none, and so with v_dot."""
    dtype = x.q.dtype
    x = x._replace(q=wide(x.q))
    given = [d for d in (t.k, t.v) if d is not None]
    conveyor = _Conveyor(ring, job.keys, *_block(x, given))
    total = _TangentMerger(x, t)
    for step in range(ring.size):
        ring.step = step + 1
        ring.start(*conveyor.depart(step))
        block = list(map(to_array, conveyor.here))
        dots = iter(block[2:])
        k_dot, v_dot = (None if d is None else next(dots) for d in (t.k, t.v))
        for tile in job.tiles(x, ring.rank, ring.source(step)):
            rows, columns = tile.rows.here, tile.columns.here
            moved = Tangents(
                None if t.q is None else wide(t.q[..., rows, :]),
                None if k_dot is None else wide(k_dot[..., columns, :]),
                None if v_dot is None else wide(v_dot[..., columns, :]),
                None if t.bias is None else wide(t.bias[_slice(t.bias, tile)]),
            )
            total.add(rows, *_kernels.forward_tangent(_operands(x, tile, block), job.options, moved))
        ring.wait()
        conveyor.arrive()
    with np.errstate(over="ignore"):
        return total.out_dot.astype(dtype, copy=False), total.lse_dot


class _TangentMerger:
    """Tangents of rows: parts a and b of a row have shares w_a + w_b = 1, sigmoids of the difference of their lse.

    ::

        out     = w_a out_a + w_b out_b
        lse_dot = lse_dot_a + w_b (lse_dot_b - lse_dot_a)
        out_dot = w_a out_dot_a + w_b out_dot_b + w_a w_b (lse_dot_b - lse_dot_a) (out_b - out_a)
    """

    def __init__(self, x: Inputs, t: Tangents) -> None:
        rows, dtype = x.q.shape[:-1], x.q.dtype
        self.out, self.out_dot = (np.zeros((*rows, x.v.shape[-1]), dtype) for _ in range(2))
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
