"""The clock: contenders take turns call by call, A B C A B C, and the machine is quiet before each.

Thread pools keep spinning after a call, on the cores that the next contender needs: torch's for some 5 ms, XLA's for
20, OpenBLAS's for 120 (the command shortens that). Without a pause, whoever follows XLA was seen to lose a third. So
before each sample the process waits until it uses no processor time; short calls run once more, to wake their threads,
and then in a loop of ``loops`` calls that lasts long enough for the clock. The garbage collector is off.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from attngrad import _native
from benchmarks.quiet import DISTURBED, Watch

Call = Callable[[], object]

SAMPLE = 0.02
"""Seconds that one sample lasts at least."""

MOST_SAMPLES = 15

MOST_SECONDS = 12.0
"""Beyond which a slow contender gets fewer samples than its budget has at least; two it always gets."""


@dataclass(frozen=True)
class Timing:
    """Seconds a call: median, quartiles and best of ``samples`` samples, each the mean of ``loops`` calls."""

    median: float
    lower: float
    upper: float
    best: float
    samples: int
    loops: int

    @property
    def spread(self) -> float:
        """The distance of the quartiles, relative to the median."""
        return (self.upper - self.lower) / self.median


@dataclass(frozen=True)
class Budget:
    """How long a contender is timed: ``seconds``, but at least ``least`` samples.

    Of calls beyond a second half of them, and no more than fit into MOST_SECONDS.
    """

    seconds: float
    least: int

    def samples(self, call: float, loops: int) -> int:
        """How many samples of ``loops`` calls of ``call`` seconds.

        >>> budget = Budget(0.3, 7)
        >>> budget.samples(0.001, 30), budget.samples(0.2, 1), budget.samples(3.0, 1), budget.samples(10.0, 1)
        (10, 7, 4, 2)
        """
        least = math.ceil(self.least / 2) if call > 1.0 else self.least
        least = min(least, max(2, int(MOST_SECONDS / call)))
        return max(least, min(MOST_SAMPLES, math.ceil(self.seconds / (call * loops) - 1e-9)))


def summarise(samples: list[float], loops: int) -> Timing:
    """Median and quartiles of the seconds a call.

    >>> summarise([1.0, 2.0, 3.0, 4.0, 9.0], 1).median
    3.0
    """
    lower, median, upper = (float(x) for x in np.percentile(samples, [25, 50, 75]))
    return Timing(median, lower, upper, min(samples), len(samples), loops)


def due(turn: int, rounds: int, samples: int) -> bool:
    """Whether a contender with ``samples`` samples in ``rounds`` rounds runs in this one: evenly spread.

    >>> [due(turn, 6, 3) for turn in range(6)]
    [False, True, False, True, False, True]
    """
    return (turn + 1) * samples // rounds > turn * samples // rounds


def settle(limit: float = 0.25, pause: float = 0.005) -> None:
    """Wait until no thread of this process spins any more, or ``limit`` seconds.

    The system brings the time of a running thread up to date at its ticks, every 4 ms: shorter pauses would see none.
    """
    end = time.perf_counter() + limit
    while time.perf_counter() < end:
        before = time.process_time()
        time.sleep(pause)
        if time.process_time() - before < 0.1 * pause:
            return


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """The collector off, and on again where it was on."""
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _timed(call: Call, loops: int) -> float:
    start = time.perf_counter()
    for _ in range(loops):
        call()
    return (time.perf_counter() - start) / loops


def _estimate(call: Call) -> float:
    """Seconds a call, after warming up."""
    settle()
    first = _timed(call, 1)  # warm already: the verification has called it
    if first > SAMPLE:
        return first
    loops = max(1, min(100, math.ceil(SAMPLE / 2 / first)))
    return min(first, _timed(call, loops), _timed(call, loops))


def interleave(calls: Mapping[str, Call], budgets: Mapping[str, Budget]) -> dict[str, Timing]:
    """The timings of all contenders, taking turns."""
    with no_garbage_collection():
        estimates = {name: _estimate(call) for name, call in calls.items()}
        loops = {name: max(1, math.ceil(SAMPLE / seconds)) for name, seconds in estimates.items()}
        counts = {name: budgets[name].samples(estimates[name], loops[name]) for name in calls}
        found: dict[str, list[float]] = {name: [] for name in calls}
        rounds = max(counts.values())
        for turn in range(rounds):
            for name, call in calls.items():
                if due(turn, rounds, counts[name]):
                    settle()
                    if loops[name] > 1:
                        call()
                    found[name].append(_timed(call, loops[name]))
    return {name: summarise(samples, loops[name]) for name, samples in found.items()}


class Probe:
    """The FMA rate in registers, of all threads; a contender like the others, so that it is measured beside them.

    The clock of a shared machine moves by a sixth within seconds. A share of the best rate of a whole run would say
    more about when a row was timed than about the kernels.
    """

    rounds = 6_000_000
    """About 20 ms."""

    def __init__(self, double: bool) -> None:
        self.double = double
        self.operations = 0.0

    def measure(self) -> None:
        """Once more."""
        start = time.perf_counter()
        rate = _native.fma_rate(self.double, self.rounds)
        self.operations = rate * (time.perf_counter() - start)

    def rate(self, timing: Timing) -> float:
        """The median, in FLOP/s."""
        return self.operations / timing.median


def bandwidth(repeats: int = 8, megabytes: int = 512) -> float:
    """The rate of reading an array far larger than the caches; 0 while others use the machine."""
    data = np.ones(megabytes << 18, np.float32)
    watch = Watch.begin()
    rate: float = max(_native.read_rate(data) for _ in range(repeats))
    return 0.0 if watch.others() > DISTURBED else rate
