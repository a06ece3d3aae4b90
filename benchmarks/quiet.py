"""Whether other processes disturb the clock.

Two threads that wait for each other at a barrier lose whole time slices when a third process wants a core: torch's
(32,4,10,32) forward was seen to take 8 ms in place of 0.12. Contenders suffer unequally, so ratios from a busy machine
are wrong, and mostly in favour of whoever uses fewer barriers. So each row says how much processor time others took;
disturbed rows are timed again, marked, and never judged.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

DISTURBED = 0.1
"""Cores used by others while a row was timed, beyond which it is disturbed."""

UNSTEADY = 0.3
"""Distance of the quartiles over the median beyond which a row is disturbed too: neighbours on the same host."""

TICKS = 0.05
"""Seconds that the system's count, by ticks, may be off by."""


def _busy_seconds() -> float | None:
    """Processor time of everybody, stolen time included, on the processors this process may use; None if unknown."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
        own = {f"cpu{i}" for i in os.sched_getaffinity(0)}
    except (OSError, AttributeError):
        return None
    total = 0
    for line in lines:
        name, *ticks = line.split()
        if name in own:  # user nice system idle iowait irq softirq steal
            total += sum(int(x) for i, x in enumerate(ticks[:8]) if i not in (3, 4))
    return total / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    """Processor time of this process and of its children that have ended."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


@dataclass
class Watch:
    """Started when made; ``others()`` is how many cores others have used since, on average. NaN if unknown."""

    busy: float | None
    own: float
    start: float

    @staticmethod
    def begin() -> Watch:
        """Start watching now."""
        return Watch(_busy_seconds(), _own_seconds(), time.perf_counter())

    def others(self) -> float:
        """Cores used by other processes since the start."""
        busy = _busy_seconds()
        if busy is None or self.busy is None:
            return float("nan")
        wall = time.perf_counter() - self.start
        taken = busy - self.busy - (_own_seconds() - self.own)
        return max(taken - TICKS, 0.0) / max(wall, 1e-9)


TELL_EVERY = 10.0
"""Seconds of waiting after which it is told again."""


class Patience:
    """Waits for a quiet machine, up to ``limit`` seconds in all over a run; ``tell`` is told why, in words."""

    def __init__(self, limit: float, tell: Callable[[str], None] = lambda text: None) -> None:
        self.left, self.tell = limit, tell

    def wait(self, window: float = 0.3) -> bool:
        """Sleep until others leave the processors alone for ``window`` seconds; False where patience ran out."""
        told = self.left + TELL_EVERY
        while True:
            watch = Watch.begin()
            time.sleep(window)
            others = watch.others()
            if not others > DISTURBED:
                return True
            self.left -= window
            if self.left <= 0.0:
                return False
            if self.left <= told - TELL_EVERY:
                told = self.left
                self.tell(f"waiting: other processes use {others:.1f} cores; at most {self.left:.0f} s more")
