"""Memory and time of ring attention against one process; ``python -m benchmarks.ring [memory] [time]``.

Memory: the highest resident set of a rank during forward and backward, less that after start-up (imports, group, one
short call), inputs and results included, at n = 32768. Time: forward and backward at n = 8192, ranks with one thread
each against one process with as many threads as there are ranks; the two take turns. Beside the time on the clock
stands that of the processors, summed over ranks and threads, which other work on the machine hardly disturbs. FLOPs as
in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import multiprocessing

import attngrad
from attngrad.distributed import plan, ring_attention, shard
from attngrad.torch import attention

HEADS, DIM = 4, 64


def _highest() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _start(rank: int, ranks: int, path: str, threads: int) -> None:
    torch.set_num_threads(1)
    attngrad.set_num_threads(threads)
    store = dist.FileStore(path, ranks)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(minutes=10))


def _inputs(rank: int, ranks: int, n: int) -> list[torch.Tensor]:
    """q, k, v and dout of this rank, without the whole ever being there."""
    length = shard(torch.empty(n, 0), rank=rank, ranks=ranks, dim=0).shape[0]
    torch.manual_seed(rank)
    return [torch.randn(1, HEADS, length, DIM, requires_grad=i < 3) for i in range(4)]


def _step(x: list[torch.Tensor], causal: bool, ring: bool) -> None:
    q, k, v, dout = x
    out = ring_attention(q, k, v, causal=causal) if ring else attention(q, k, v, causal=causal)
    torch.autograd.grad(out, (q, k, v), dout)


def _memory(rank: int, ranks: int, path: str, n: int, results: Any) -> None:
    _start(rank, ranks, path, 1)
    _step(_inputs(rank, ranks, 256 * ranks), True, ranks > 1)
    dist.barrier()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    before = _highest()
    _step(_inputs(rank, ranks, n), True, ranks > 1)
    results.put(_highest() - before)
    dist.barrier()


def _time(rank: int, ranks: int, path: str, n: int, causal: bool, rounds: int, results: Any) -> None:
    """In turns: all ranks with one thread; then rank 0 alone with as many, while the others sleep at a barrier."""
    _start(rank, ranks, path, 1)
    x = _inputs(rank, ranks, n)
    whole = _inputs(0, 1, n) if rank == 0 else []
    found: dict[str, list[float]] = {name: [] for name in ("ring", "one", "ring cpu", "one cpu")}
    for turn in range(rounds + 1):
        dist.barrier()
        begin, used = time.perf_counter(), time.process_time()
        _step(x, causal, True)
        cpu = torch.tensor(time.process_time() - used, dtype=torch.float64)
        dist.barrier()
        times = {"ring": time.perf_counter() - begin}
        dist.all_reduce(cpu)
        if rank == 0:
            attngrad.set_num_threads(ranks)
            begin, used = time.perf_counter(), time.process_time()
            _step(whole, causal, False)
            times |= {"one": time.perf_counter() - begin, "one cpu": time.process_time() - used, "ring cpu": cpu.item()}
            attngrad.set_num_threads(1)
            if turn:  # the first warms up
                for name, seconds in times.items():
                    found[name].append(seconds)
    if rank == 0:
        results.put(found)
    dist.barrier()


def _spawn(function: Any, ranks: int, *args: Any) -> list[Any]:
    results = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "store")
        context = multiprocessing.start_processes(  # type: ignore[attr-defined,no-untyped-call]
            function, args=(ranks, path, *args, results), nprocs=ranks, join=False, start_method="spawn"
        )
        found = [results.get() for _ in range(1 if function is _time else ranks)]
        while not context.join():
            pass
    return found


def main() -> None:
    """Measure, and print a line of JSON for each figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", default=["memory", "time"], choices=["memory", "time"])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    if "memory" in arguments.what:
        n, single = 32768, 0
        for ranks in (1, 2, 4, 8):
            most = max(_spawn(_memory, ranks, n))
            single = single or most
            line = {"n": n, "ranks": ranks, "MB": most / 1e6, "of one": most / single}
            if ranks > 1:  # one process runs attngrad.torch.attention
                line["plan MB"] = plan(n, ranks, HEADS, DIM, bandwidth=1e9, flops=1e11).memory / 1e6
            sys.stdout.write(json.dumps(line) + "\n")
    if "time" in arguments.what:
        n = 8192
        for causal in (False, True):
            (found,) = _spawn(_time, 2, n, causal, arguments.rounds)
            ring, one = (statistics.median(found[name]) for name in ("ring", "one"))
            ratio = statistics.median(a / b for a, b in zip(found["ring"], found["one"], strict=True))
            flops = 3.5 * 4 * HEADS * DIM * n * n * (0.5 if causal else 1.0)
            expected = plan(n, 2, HEADS, DIM, bandwidth=2e9, flops=flops / one / 2, causal=causal).time
            line = {"n": n, "causal": causal, "ring s": ring, "one s": one, "ratio": ratio, "plan s": expected}
            line |= {"best ratio": min(found["ring"]) / min(found["one"]), "load before": load}
            line["cpu ratio"] = min(found["ring cpu"]) / min(found["one cpu"])
            sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
