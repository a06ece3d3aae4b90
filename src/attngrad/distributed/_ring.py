"""The passes: each rank keeps its queries, and the keys and values go round, piece by piece.

At every step a rank holds a piece of the keys of some rank, sends it on and receives the next while it computes. Every
pair of runs of queries and keys is a part for the backend, with the offset and origin that it has in the whole; a pair
that causal or window hides is left out. The backend merges what parts give. In the backward pass the sums for dk and dv
follow their keys, and take one step more to come home.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from attngrad.backends.protocol import Backend
from attngrad.core.arrays import Array
from attngrad.core.operands import Gradients, Operands, Tangents
from attngrad.core.options import ARRAYS, Kind, Options
from attngrad.distributed import _travel
from attngrad.distributed._layout import Layout, Run
from attngrad.distributed._memory import Memory
from attngrad.distributed._transport import Ring
from attngrad.distributed._travel import Keys, Route, Sums
from attngrad.torch._tensors import to_tensor, wide_dtype


class Tile(NamedTuple):
    """A run of queries beside a run of keys."""

    rows: Run
    columns: Run

    @property
    def shift(self) -> int:
        """What the offset of the tile has beyond that of the whole."""
        return self.rows.start - self.columns.start


@dataclass(frozen=True)
class Job:
    """What all ranks have agreed on."""

    options: Options
    backend: Backend
    queries: Layout
    keys: Layout
    offset: Array | int = 0
    """That of the whole, in numbers that can be read: an array of NumPy, wherever the tensors are."""

    def memory(self, x: Operands) -> Memory:
        """Where the tensors of ``x`` are."""
        return Memory(self.backend, x.q.device)

    def tiles(self, x: Operands, rank: int, keys: list[Run], cut_keys: bool = False) -> Iterator[Tile]:
        """What queries of ``rank`` may see of ``keys``; results the size of keys ask for ``cut_keys``."""
        o, queries = self.options, self.queries.runs(rank)
        if not o.causal and o.window is None and o.dropout == 0.0 and x.bias is None and x.mask is None:
            queries, keys = _joined(queries), _joined(keys)  # positions do not matter: one tile
        for rows in _cut(queries):
            for columns in _cut(keys) if cut_keys else keys:
                tile = Tile(rows, columns)
                if sees(o, self.offset + tile.shift, rows.length, columns.length):
                    yield tile


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


def _ids(x: Operands) -> list[str]:
    """The options that are ids, of those that are given."""
    return [row.name for row in ARRAYS if row.kind is Kind.IDS and getattr(x, row.name) is not None]


def _travelling(x: Operands, *more: Tensor) -> list[Tensor]:
    """k, v, tangents or nothing, and the ids of the keys."""
    return [x.k, x.v, *more, *(getattr(x, name)[1][..., None] for name in _ids(x))]


def _slice(plane: Tensor, tile: Tile) -> tuple[Any, ...]:
    """Where the scores of a tile are in a plane, whose axes may have length 1."""
    rows = tile.rows.here if plane.shape[-2] != 1 else slice(None)
    columns = tile.columns.there if plane.shape[-1] != 1 else slice(None)
    return ..., rows, columns


def _operands(x: Operands, tile: Tile, block: Sequence[Tensor]) -> Operands:
    """The part of a tile."""
    rows, columns = tile.rows.here, tile.columns.here
    cut: dict[str, Any] = {"offset": x.offset + tile.shift, "origin": (0, 0, tile.rows.start, tile.columns.start)}
    key_ids = dict(zip(reversed(_ids(x)), reversed(block), strict=False))
    for row in ARRAYS:
        value = getattr(x, row.name)
        if value is None or row.kind is Kind.OFFSET:
            continue
        if row.kind is Kind.PLANE:
            cut[row.name] = value[_slice(value, tile)]
        elif row.kind is Kind.IDS:
            cut[row.name] = (value[0][..., rows], key_ids[row.name][..., columns, 0])
        else:
            cut[row.name] = value
    return Operands(x.q[..., rows, :], block[0][..., columns, :], block[1][..., columns, :], **cut)


# --- passes ---------------------------------------------------------------------------------------------------------


def forward(ring: Ring, job: Job, x: Operands) -> tuple[Tensor, ...]:
    """``out`` and ``lse`` of the own queries over all keys, and the residuals."""
    route, memory = Route(ring, job.keys), job.memory(x)
    parts = job.backend.forward_parts(memory.taken(x), job.options)
    keys = Keys(route, memory, _travelling(x))
    for ring.step in range(1, route.steps + 1):
        ring.start(*keys.depart())
        for tile in job.tiles(x, ring.rank, keys.runs):
            parts.add(tile.rows.here, memory.taken(_operands(x, tile, keys.here)))
        ring.wait()
        keys.arrive()
    out, lse, residuals = parts.finish()
    return to_tensor(out), to_tensor(lse), *map(to_tensor, residuals)


def backward(
    ring: Ring, job: Job, x: Operands, residuals: Sequence[Tensor], dout: Tensor | None, dlse: Tensor | None
) -> Gradients:
    """The gradients of the own inputs, of the sum over ranks of <dout, out> + <dlse, lse>.

    Those of bias and sinks come from the own rows; where ranks share one, theirs add up to its gradient.
    """
    dtype, memory = wide_dtype(x.q.dtype), job.memory(x)
    dbias = None if x.bias is None else memory.zeros(tuple(x.bias.shape), dtype)
    kept = [memory.taken(r) for r in residuals]
    parts = job.backend.backward_parts(memory.taken(x), job.options, kept, memory.taken(dout), memory.taken(dlse))
    route = Route(ring, job.keys)
    keys, sums = Keys(route, memory, _travelling(x)), Sums(route, memory, x.k, x.v, dtype)
    for ring.step in range(1, route.steps + 1):
        ring.start(*map(operator.add, keys.depart(), sums.depart()))
        for tile in job.tiles(x, ring.rank, keys.runs, cut_keys=True):
            g = parts.add(tile.rows.here, memory.taken(_operands(x, tile, keys.here)))
            if dbias is not None:
                dbias[_slice(dbias, tile)].add_(to_tensor(g.bias))
            sums.add(tile.columns.here, g)
            del g
        ring.wait()
        keys.arrive()
        sums.arrive()
    dk, dv = sums.finish()
    dq, dsinks = parts.finish()
    found = (dq, dk, dv, dbias, dsinks)
    return Gradients(*(None if g is None else to_tensor(g).to(p.dtype) for g, p in zip(found, x, strict=False)))


def tangent(ring: Ring, job: Job, x: Operands, t: Tangents) -> tuple[Tensor, Tensor]:
    """``out_dot`` and ``lse_dot`` along ``t``; all ranks give k_dot, or none, and so with v_dot."""
    route, memory = Route(ring, job.keys), job.memory(x)
    parts = job.backend.tangent_parts(memory.taken(x), job.options, memory.taken(t))
    keys = Keys(route, memory, _travelling(x, *(d for d in (t.k, t.v) if d is not None)))
    for ring.step in range(1, route.steps + 1):
        ring.start(*keys.depart())
        dots = iter(keys.here[2:])
        k_dot, v_dot = (None if d is None else next(dots) for d in (t.k, t.v))
        for tile in job.tiles(x, ring.rank, keys.runs):
            rows, columns = tile.rows.here, tile.columns.here
            moved = Tangents(
                None if t.q is None else t.q[..., rows, :],
                None if k_dot is None else k_dot[..., columns, :],
                None if v_dot is None else v_dot[..., columns, :],
                None if t.bias is None else t.bias[_slice(t.bias, tile)],
            )
            parts.add(rows, memory.taken(_operands(x, tile, keys.here)), memory.taken(moved))
        ring.wait()
        keys.arrive()
    out_dot, lse_dot = map(to_tensor, parts.finish())
    return out_dot, lse_dot
