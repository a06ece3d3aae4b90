"""Blocks: some queries against the keys that they see; how arrays are cut into them, and results put together.

A function of a block is torch operations on its slices. ``run`` loops over the blocks, so that what a function makes on
its way, matrices of queries by keys, exists for one block at a time.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attngrad.core.options import Options

VARIABLE = "ATTNGRAD_BLOCK_MIB"


def _budget(text: str) -> int:
    try:
        mib = float(text)
    except ValueError:
        mib = math.nan
    if not 0.0 < mib < math.inf:
        raise ImportError(f"attngrad: {VARIABLE} must be a positive number of MiB; got {text!r}.")
    return int(mib * 2**20)


BUDGET = _budget(os.environ.get(VARIABLE, "64"))
"""Bytes that the matrices of one block may take together; more where the arrays of the call are larger than that."""
_TIMES_Q = 12
"""Bytes of q beyond which BUDGET stops to be enough: a long sequence gets this many times its q."""


@contextmanager
def small_blocks() -> Iterator[None]:
    """For a while, cut short sequences too: what only long ones would run is run by small ones."""
    global BUDGET
    before, BUDGET = BUDGET, 0
    try:
        yield
    finally:
        BUDGET = before


_ROWS = 32
"""Of which a block has a multiple, unless it is shorter: products like that."""


class Block(NamedTuple):
    """The queries and the keys of a block."""

    rows: range
    keys: range

    def origin(self, whole: Sequence[int]) -> tuple[int, int, int, int]:
        """Where its first score stands, when that of the call stands at ``whole``."""
        batch, head, query, key = whole
        return batch, head, query + self.rows.start, key + self.keys.start


class Layout(NamedTuple):
    """Which axes of an array, counted from the last, are queries and keys; None: none is.

    A plane has both, and either may be of length 1 and broadcast.
    """

    rows: int | None = None
    keys: int | None = None

    def take(self, x: Tensor, block: Block) -> Tensor:
        """The slice of ``x`` that belongs to ``block``."""
        plane = self.rows is not None and self.keys is not None
        for axis, span in ((self.rows, block.rows), (self.keys, block.keys)):
            if axis is not None and not (plane and x.shape[axis] == 1) and len(span) != x.shape[axis]:
                x = x.narrow(axis, span.start, len(span))
        return x


ROWS, ROW, KEYS, KEY, PLANE, WHOLE = (
    Layout(-2),
    Layout(-1),
    Layout(None, -2),
    Layout(None, -1),
    Layout(-2, -1),
    Layout(),
)


class Result(NamedTuple):
    """A result of a function of blocks: its layout, and the shape of the whole."""

    layout: Layout
    shape: tuple[int, ...]


def cut(q: Tensor, keys: int, offset: Any, o: Options, matrices: int) -> tuple[Block, ...]:
    """The blocks of a call whose function makes ``matrices`` of queries by keys.

    Keys that causal, window and a whole number for the offset hide from all queries of a block are not in it.
    """
    tokens, itemsize = q.shape[-2], max(q.dtype.itemsize, 4)
    row = math.prod(q.shape[:-2]) * max(keys, 1) * itemsize * matrices
    budget = max(BUDGET, _TIMES_Q * q.numel() * itemsize)
    step = max(1, min(tokens, budget // max(row, 1)))
    count = -(-tokens // step) if tokens else 1
    step = -(-tokens // count)  # all about as long
    step = -(-step // _ROWS) * _ROWS if step >= _ROWS else step
    return tuple(
        _block(first, min(first + step, tokens), keys, offset, o) for first in range(0, max(tokens, 1), step or 1)
    )


def _block(first: int, end: int, keys: int, offset: Any, o: Options) -> Block:
    low, high = 0, keys
    if isinstance(offset, int):
        left, right = o.window or (None, None)
        if left is not None:
            low = max(low, first + offset - left)
        for side in ((0,) if o.causal else ()) + (() if right is None else (right,)):
            high = min(high, end + offset + side)
    low = min(max(low, 0), keys)
    return Block(range(first, end), range(low, max(low, high)))


def as_given(x: Tensor) -> AbstractContextManager[Any]:
    """Within it ``torch.autocast`` casts nothing on the device of ``x``: it would round what is computed wider."""
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def run(
    function: Callable[..., Sequence[Tensor]],
    blocks: Sequence[Block],
    layouts: Sequence[Layout],
    results: Sequence[Result],
    tensors: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """``function(block, *slices)`` over all blocks: results of different rows side by side, all others added up."""
    found: list[Tensor] = []
    with as_given(tensors[0]):
        for block in blocks:
            slices = (layout.take(x, block) for layout, x in zip(layouts, tensors, strict=True))
            parts = function(block, *slices)
            found = found or [x.new_zeros(result.shape) for x, result in zip(parts, results, strict=True)]
            for place, part, result in zip(found, parts, results, strict=True):
                result.layout.take(place, block).add_(part)
            del parts
    return tuple(found)
