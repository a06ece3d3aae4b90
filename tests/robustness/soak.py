"""Memory and results under load, for minutes. Run by `make soak`.

1. 100,000 small calls of every pass in turn: the resident memory stays within 5 MB of what it was after 2,000.
2. Five minutes of mixed load from 8 threads, with set_num_threads called in between: every result is bit for bit what
   it is alone, and the resident memory stays within 5 MB of what it was after the first 30 seconds.

The memory is read every second after a garbage collection; it is its largest value that counts. Exit status 1 where one
of these does not hold.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import resource
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np

import attngrad

sys.path.append(str(Path(__file__).parents[1] / "support"))

from cases import make
from load import jobs, same

LIMIT = 5e6
PAGE = resource.getpagesize()


def resident() -> int:
    """Bytes of memory that this process has now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


def verdict(what: str, before: int, most: int) -> bool:
    """Print the growth, and whether it is within the limit."""
    grown = most - before
    print(
        f"{what}: {before / 1e6:.1f} MB, at most {most / 1e6:.1f} MB later, grown by {grown / 1e6:.2f} MB", flush=True
    )
    return grown <= LIMIT


def small_calls(count: int, warm: int = 2000) -> bool:
    """Every pass in turn, on a few tokens."""
    c = make(("causal",)).cast(np.float32)
    layer = attngrad.MultiHeadAttention(8, 2)
    x = np.ones((3, 8), np.float32)

    def vjp() -> None:
        _, pullback = attngrad.vjp(*c.qkv, **c.options)
        pullback(c.dout)

    calls = [
        lambda: attngrad.attention(*c.qkv, **c.options),
        vjp,
        lambda: attngrad.jvp(c.qkv, c.t[:3], **c.options),
        lambda: attngrad.hvp(c.qkv, c.t[:3], c.dout, c.dout_dot, **c.options),
        lambda: layer.backward(layer(x)),
    ]
    before = most = 0
    for i in range(count + warm):
        calls[i % len(calls)]()
        if i == warm:
            gc.collect()
            before = most = resident()
        elif i > warm and i % 1000 == 0:
            most = max(most, resident())
    return verdict(f"{count} small calls", before, most)


def mixed(minutes: float, threads: int, warm: float) -> bool:
    """Every job from many threads, in an order of their own."""
    work = jobs()
    attngrad.set_num_threads(1)
    alone = [job.run() for job in work]
    stop, wrong = threading.Event(), []
    done: list[Counter[str]] = [Counter() for _ in range(threads)]

    def run(number: int) -> None:
        rng = random.Random(number)  # noqa: S311
        while not stop.is_set():
            i = rng.randrange(len(work))
            if work[i].name.startswith("layer") and i % threads != number % threads:
                continue  # a layer is for one thread
            attngrad.set_num_threads(rng.choice([1, 2, 3, 8]))
            try:
                right = same(work[i].run(), alone[i])
            except Exception as error:
                right = False
                print(f"{work[i].name}: {error!r}", flush=True)
            if not right:
                wrong.append(work[i].name)
                stop.set()
            done[number][work[i].name] += 1

    workers = [threading.Thread(target=run, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    start, before, most, told = time.monotonic(), 0, 0, 0.0
    while (passed := time.monotonic() - start) < 60 * minutes and not stop.is_set():
        stop.wait(1.0)
        gc.collect()
        now = resident()
        if passed < warm:
            before = now
        most = max(most, now) if passed >= warm else before
        if passed - told > 30:
            told = passed
            print(f"  {passed:.0f} s: {now / 1e6:.1f} MB", flush=True)
    stop.set()
    for worker in workers:
        worker.join()
    total = sum((c for c in done), Counter())
    print(f"  {sum(total.values())} calls from {threads} threads: {dict(sorted(total.items()))}")
    print(f"  results that differ from those alone: {', '.join(wrong) or 'none'}")
    return verdict(f"{minutes:g} minutes of mixed load", before, most) and not wrong


def main() -> None:
    """Both, or as much of them as is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--warm", type=float, default=30.0, help="seconds before the memory is measured")
    given = parser.parse_args()
    print(f"{os.cpu_count()} processors, {attngrad.get_num_threads()} threads a call")
    flat = small_calls(given.calls)
    held = mixed(given.minutes, given.threads, given.warm)
    raise SystemExit(0 if flat and held else 1)


if __name__ == "__main__":
    main()
