"""What travels around the ring: keys and values, and in the backward pass the sums for dk and dv, piece by piece.

A shard of keys is cut into pieces, and each makes the whole way round before the next sets out. So what a rank holds
of others is a few pieces, whatever the shard: two of keys and values (one that is here and leaves, one that comes) and
three of sums (one that leaves, one that comes, and the part of this step). What a rank's own queries give its own keys
stays at home.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from attngrad.core.operands import Gradients
from attngrad.distributed._layout import Layout, Run, packed
from attngrad.distributed._memory import Memory
from attngrad.distributed._transport import Ring
from attngrad.torch._tensors import to_tensor

TILE = 1024
"""Tokens of a tile at most, on the sides that its results have; smaller ones would cost time."""
PIECES = 8
"""Of a shard at most."""
_LINE = 64  # bytes: where a tensor of a block may begin


def pieces(largest: int) -> int:
    """How many pieces the shards are cut into, when the largest has so many keys.

    In zigzag a piece has two runs, and each should fill a tile.
    """
    return max(1, min(PIECES, largest // (2 * TILE)))


class Route:
    """Which keys are where: in the step that the ring is in, a rank has ``piece`` of the keys of rank ``source``."""

    def __init__(self, ring: Ring, keys: Layout) -> None:
        self.ring, self.count = ring, pieces(max(keys.lengths))
        self.steps = ring.steps = ring.size * self.count
        self._runs = [keys.pieces(rank, self.count) for rank in range(ring.size)]
        self.largest = max(self.length(rank, i) for rank in range(ring.size) for i in range(self.count))

    @property
    def piece(self) -> int:
        return (self.ring.step - 1) // self.ring.size

    @property
    def hops(self) -> int:
        """How many the keys that are here have made."""
        return (self.ring.step - 1) % self.ring.size

    @property
    def source(self) -> int:
        return self.ring.source(self.hops)

    def runs(self, rank: int, piece: int) -> list[Run]:
        """The tokens of a piece, by their place in the shard."""
        return self._runs[rank][piece]

    def length(self, rank: int, piece: int) -> int:
        return sum(run.length for run in self._runs[rank][piece])


@dataclass(frozen=True)
class Block:
    """Tensors ``(..., tokens, features)`` one after the other in one piece of memory, that goes as one message."""

    memory: Tensor
    parts: list[Tensor]
    message: Tensor


class Blocks:
    """Blocks of one kind, each ``(..., tokens, features)`` as the tensors ``like``; memory is used again."""

    def __init__(self, memory: Memory, like: Sequence[tuple[tuple[int, ...], torch.dtype]], largest: int) -> None:
        self._memory, self._like, self._free = memory, like, list[Tensor]()
        self._size = self._ends(largest)[-1]

    def _ends(self, tokens: int) -> list[int]:
        """Where tensors begin, and where the last one ends, each at a multiple of a cache line."""
        ends = [0]
        for shape, dtype in self._like:
            size = prod(shape[:-2]) * tokens * shape[-1] * dtype.itemsize
            ends.append(ends[-1] + -(-size // _LINE) * _LINE)
        return ends

    def take(self, tokens: int) -> Block:
        memory = self._free.pop() if self._free else self._memory.empty((self._size,), torch.uint8)
        ends, parts = self._ends(tokens), []
        for at, (shape, dtype) in zip(ends, self._like, strict=False):
            sizes = (*shape[:-2], tokens, shape[-1])
            parts.append(memory[at : at + prod(sizes) * dtype.itemsize].view(dtype).view(sizes))
        return Block(memory, parts, memory[: ends[-1]])

    def give(self, block: Block) -> None:
        """Back, to be taken again."""
        self._free.append(block.memory)


def _like(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(tuple(x.shape), dtype or x.dtype) for x in tensors]


class Keys:
    """k, v and what else belongs to keys, on their way: ``here`` are the tensors of this step, ``runs`` theirs.

    In the first step of a piece these are the own tensors, while a copy of the piece leaves.
    """

    def __init__(self, route: Route, memory: Memory, own: Sequence[Tensor]) -> None:
        self._route, self._own = route, own
        self._blocks = Blocks(memory, _like(own), route.largest)
        self._here: Block | None = None
        self._coming: Block | None = None
        self.here: Sequence[Tensor] = []
        self.runs: list[Run] = []

    def depart(self) -> tuple[list[Tensor], list[Tensor]]:
        """What to send and to receive during this step."""
        route = self._route
        runs = route.runs(route.source, route.piece)
        if self._here is None:
            self.here, self.runs = self._own, runs
        else:
            self.here, self.runs = self._here.parts, packed(runs)
        if route.hops + 1 == route.ring.size:
            return [], []
        if self._here is None:
            self._here = self._blocks.take(route.length(route.source, route.piece))
            for x, part in zip(self._own, self._here.parts, strict=True):
                for run, place in zip(runs, packed(runs), strict=True):
                    part[..., place.here, :] = x[..., run.here, :]
        self._coming = self._blocks.take(route.length(route.ring.source(route.hops + 1), route.piece))
        return [self._here.message], [self._coming.message]

    def arrive(self) -> None:
        """What was here has left, and what was coming is here."""
        if self._here is not None:
            self._blocks.give(self._here)
        self._here, self._coming = self._coming, None


class Sums:
    """dk and dv from all ranks: they follow the keys, one step behind, and every rank adds its part.

    The part of the own rank stays at home, where it meets what the others give: after its last step a piece makes one
    hop more and is home, while the next one sets out.
    """

    def __init__(self, route: Route, memory: Memory, k: Tensor, v: Tensor, dtype: torch.dtype) -> None:
        self._route = route
        self._blocks = Blocks(memory, _like([k, v], dtype), route.largest)
        self._home = [memory.zeros(tuple(x.shape), dtype) for x in (k, v)]
        self._leaving: Block | None = None
        self._coming: Block | None = None
        self._part: Block | None = None

    def depart(self) -> tuple[list[Tensor], list[Tensor]]:
        """What to send and to receive during this step; and its part, which begins at zero."""
        route = self._route
        if not route.hops:
            return self._hop(route.source, route.piece - 1)
        self._part = self._blocks.take(route.length(route.source, route.piece))
        for x in self._part.parts:
            x.zero_()
        return self._hop(route.source, route.piece)

    def add(self, columns: slice, g: Gradients) -> None:
        """What a tile gives; ``columns`` are places in the tensors that ``Keys`` has here."""
        for part, x in zip(self._home if self._part is None else self._part.parts, (g.k, g.v), strict=True):
            part[..., columns, :].add_(to_tensor(x))

    def arrive(self) -> None:
        """What has come is home, or takes the part of this step; what is here leaves in the next."""
        coming, part = self._arrived(), self._part
        self._part, self._leaving = None, part
        if coming is not None and part is None:
            self._unload(coming, self._route.piece - 1)
        elif coming is not None and part is not None:
            for total, x in zip(coming.parts, part.parts, strict=True):
                total.add_(x)
            self._blocks.give(part)
            self._leaving = coming

    def finish(self) -> list[Tensor]:
        """The last hop of the last piece; then dk and dv of the own keys, in the dtype of the sums."""
        ring, last = self._route.ring, self._route.count - 1
        ring.start(*self._hop(ring.rank, last))
        ring.wait()
        coming = self._arrived()
        if coming is not None:
            self._unload(coming, last)
        return self._home

    def _hop(self, source: int, piece: int) -> tuple[list[Tensor], list[Tensor]]:
        if self._leaving is None:
            return [], []
        self._coming = self._blocks.take(self._route.length(source, piece))
        return [self._leaving.message], [self._coming.message]

    def _arrived(self) -> Block | None:
        """What was coming; what was leaving has left."""
        if self._leaving is not None:
            self._blocks.give(self._leaving)
        coming, self._leaving, self._coming = self._coming, None, None
        return coming

    def _unload(self, block: Block, piece: int) -> None:
        runs = self._route.runs(self._route.ring.rank, piece)
        for total, x in zip(self._home, block.parts, strict=True):
            for run, place in zip(runs, packed(runs), strict=True):
                total[..., run.here, :].add_(x[..., place.here, :])
        self._blocks.give(block)
