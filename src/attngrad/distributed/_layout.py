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
from typing import NamedTuple

from attngrad._arrays import kind_of
from attngrad._options import fail

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
        length = self.lengths[rank]
        if self.name == "contiguous":
            return [Run(0, sum(self.lengths[:rank]), length)] if length else []
        out, back = [(n + 1) // 2 for n in self.lengths], [n // 2 for n in self.lengths]
        first, second = sum(out[:rank]), sum(out) + sum(back[rank + 1 :])
        if first + out[rank] == second:
            return [Run(0, first, length)] if length else []
        runs = [Run(0, first, out[rank]), Run(out[rank], second, back[rank])]
        return [run for run in runs if run.length]


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
