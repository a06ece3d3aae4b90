"""Peak memory of one head, work by work and size by size: each in a fresh process, so that nothing is left over.

Growth is the highest resident set during the call less the resident set before it, inputs and libraries excluded.
``/proc/self/clear_refs`` resets the high-water mark; where that is not to be had, getrusage gives the mark since start.
"""

from __future__ import annotations

import contextlib
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.cases import Case, dims
from benchmarks.machine import ROOT
from benchmarks.passes import PASSES
from benchmarks.quiet import DISTURBED, Watch

D = 64
BACKWARD, HVP = "forward + backward", "hvp"

QUICK_SIZES = (2048, 4096, 8192)
SIZES = {BACKWARD: (4096, 8192, 16384, 32768, 65536), HVP: (2048, 4096, 8192, 16384, 32768)}
"""The works, and the lengths of each; QUICK_SIZES at the quick level."""

MOST_OF_PEERS = {HVP: 8192}
"""The largest length that a peer is asked for: torch's HVP holds ten matrices of n x n, 2.8 GB at this length."""


@dataclass(frozen=True)
class Usage:
    """Bytes beyond the inputs and seconds, of one call (the first at this size, in a process of its own).

    ``others``: how many cores other processes used meanwhile.
    """

    peer: str
    n: int
    bytes: int
    seconds: float
    others: float = 0.0
    work: str = BACKWARD

    @property
    def disturbed(self) -> bool:
        """Whether other processes took so much that the time says little; the memory does not mind."""
        return self.others > DISTURBED

    @property
    def multiple(self) -> float:
        """Of the size of q."""
        return self.bytes / (self.n * D * 4)


def _status(field: str) -> int | None:
    """A field of /proc/self/status in bytes, or None."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":")), None)


def _reset() -> int:
    """Reset the high-water mark where the system can; the mark."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _highest()


def _highest() -> int:
    mark = _status("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if mark is None else mark


def child(peer: str, n: int, threads: int, work: str) -> Usage:
    """What the subprocess does: warm up on a short sequence, then one call of length ``n``."""
    import attngrad
    from benchmarks.peers import OURS, Ours, load

    attngrad.set_num_threads(threads)
    contender = Ours() if peer == OURS else load(peer, threads)
    case, tangents = Case("memory", dims(1, 1, 256, D)), PASSES[work].tangents
    contender.prepare(case, work, case.inputs(tangents)).call()
    case = replace(case, n=dims(1, 1, n, D))
    call = contender.prepare(case, work, case.inputs(tangents)).call
    before, watch = _reset(), Watch.begin()
    call()
    seconds, others = time.perf_counter() - watch.start, watch.others()
    return Usage(peer, n, max(_highest() - before, 0), seconds, others, work)


def measure(peer: str, n: int, threads: int, work: str) -> Usage:
    """``child`` in a fresh interpreter."""
    arguments = json.dumps([peer, n, threads, work])
    command = [sys.executable, "-m", "benchmarks.memory", arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603 our own module
    if result.returncode != 0:
        raise RuntimeError(f"bench: measuring the memory of {peer}, {work} at n = {n} failed:\n{result.stderr.strip()}")
    taken, seconds, others = json.loads(result.stdout.splitlines()[-1])
    return Usage(peer, n, taken, seconds, others, work)


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The slope of log(values) over log(sizes), by least squares: how values grow with sizes.

    >>> round(exponent([1, 2, 4], [3, 12, 48]), 6)
    2.0
    """
    x, y = [math.log(n) for n in sizes], [math.log(v) for v in values]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


if __name__ == "__main__":
    found = child(*json.loads(sys.argv[1]))
    sys.stdout.write(json.dumps([found.bytes, found.seconds, found.others]) + "\n")
