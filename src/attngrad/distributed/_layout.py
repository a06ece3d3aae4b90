"""Which tokens a rank holds.

::

    contiguous, 3 ranks           zigzag, 3 ranks: 6 chunks, dealt out and back
    | 0 0 0 0 | 1 1 1 1 | 2 2 2 2 |     | 0 0 | 1 1 | 2 2 | 2 2 | 1 1 | 0 0 |

Under a causal mask late queries have more to do than early ones. In zigzag every rank has early and late ones, so that
all have the same to do. A layout follows from the number of tokens on each rank, whatever those numbers are: in zigzag
a rank with L tokens holds ceil(L / 2) of them on the way out and floor(L / 2) on the way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from attngrad.core.arrays import kind_of
from attngrad.core.checks import fail

LAYOUTS = ("zigzag", "contiguous")


class Run(NamedTuple):
    """``length`` tokens that stand together: from ``local`` on in the shard, from ``start`` on in the whole."""

    local: int
    start: int
    length: int

    @property
    def here(self) -> slice:
        """Where they are in the shard."""
        return slice(self.local, self.local + self.length)

    @property
    def there(self) -> slice:
        """Where they are in the whole."""
        return slice(self.start, self.start + self.length)


class Layout(NamedTuple):
    """The name of a layout, and how many tokens each rank holds."""

    name: str
    lengths: tuple[int, ...]

    @property
    def total(self) -> int:
        """The number of tokens on all ranks."""
        return sum(self.lengths)

    def runs(self, rank: int) -> list[Run]:
        """The tokens of ``rank``, in the order of its shard; runs that meet are one.

        >>> Layout("zigzag", (4, 3)).runs(0)
        [Run(local=0, start=0, length=2), Run(local=2, start=5, length=2)]
        >>> Layout("zigzag", (4, 3)).runs(1)
        [Run(local=0, start=2, length=3)]
        """
        return _merged(self._ways(rank))

    def pieces(self, rank: int, count: int) -> list[list[Run]]:
        """The tokens of ``rank`` in ``count`` pieces, which travel one after the other.

        In zigzag piece i has part i of the way out and part count - 1 - i of the way back: what a causal mask lets the
        queries of a rank see of it is as much for every rank, so pieces are balanced as the whole is.

        >>> Layout("zigzag", (4, 4)).pieces(0, 2)[0]
        [Run(local=0, start=0, length=1), Run(local=3, start=7, length=1)]
        >>> Layout("zigzag", (4, 4)).pieces(0, 2)[1]
        [Run(local=1, start=1, length=1), Run(local=2, start=6, length=1)]
        """
        ways = self._ways(rank)
        return [
            _merged([_part(way, count - 1 - i if turned else i, count) for turned, way in enumerate(ways)])
            for i in range(count)
        ]

    def _ways(self, rank: int) -> list[Run]:
        """The way out and, in zigzag, the way back."""
        length = self.lengths[rank]
        if self.name == "contiguous":
            return [Run(0, sum(self.lengths[:rank]), length)]
        out, back = [(n + 1) // 2 for n in self.lengths], [n // 2 for n in self.lengths]
        return [
            Run(0, sum(out[:rank]), out[rank]),
            Run(out[rank], sum(out) + sum(back[rank + 1 :]), back[rank]),
        ]


def _part(run: Run, i: int, count: int) -> Run:
    begin, end = run.length * i // count, run.length * (i + 1) // count
    return Run(run.local + begin, run.start + begin, end - begin)


def _merged(runs: list[Run]) -> list[Run]:
    """Without empty runs, and one where two meet in the shard and in the whole."""
    merged: list[Run] = []
    for run in runs:
        if merged and merged[-1].here.stop == run.local and merged[-1].there.stop == run.start:
            last = merged.pop()
            run = Run(last.local, last.start, last.length + run.length)
        if run.length:
            merged.append(run)
    return merged


def packed(runs: list[Run]) -> list[Run]:
    """The runs with their places in a block that holds them one after the other.

    >>> packed([Run(0, 10, 2), Run(6, 30, 3)])
    [Run(local=0, start=10, length=2), Run(local=2, start=30, length=3)]
    """
    ends = accumulate((run.length for run in runs), initial=0)
    return [run._replace(local=at) for run, at in zip(runs, ends, strict=False)]


def check_layout(function: str, layout: object) -> str:
    """``layout``, if it is the name of one."""
    if not isinstance(layout, str):
        fail(TypeError, function, "layout", f"be one of {', '.join(map(repr, LAYOUTS))}", kind_of(layout))
    if layout not in LAYOUTS:
        fail(ValueError, function, "layout", f"be one of {', '.join(map(repr, LAYOUTS))}", repr(layout))
    return layout


def even(n: int, ranks: int, layout: str) -> tuple[int, ...]:
    """The lengths that differ by 1 at most: those of ``shard``.

    >>> even(11, 3, "contiguous"), even(11, 3, "zigzag")
    ((4, 4, 3), (3, 4, 4))
    """
    if layout == "contiguous":
        return tuple(n // ranks + (rank < n % ranks) for rank in range(ranks))
    chunks = [n // (2 * ranks) + (c < n % (2 * ranks)) for c in range(2 * ranks)]
    return tuple(chunks[rank] + chunks[2 * ranks - 1 - rank] for rank in range(ranks))


def words(ranks: Sequence[int]) -> str:
    """Ranks as an error names them.

    >>> words([2]), words([0, 1, 3])
    ('rank 2', 'ranks 0, 1 and 3')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
