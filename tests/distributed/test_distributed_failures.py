"""A rank that dies, stalls or fails: every survivor raises an error in time that names it, and exits with 1."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ring_workers import Metronome, forks
from tiers import only

TIMEOUT = 10.0
"""Of a stall. A death is noticed at once, so there the timeout is far away."""
SLOW = 5.0


def timeout_of(what: str) -> float:
    return 90.0 if what.startswith("death") else TIMEOUT


def open_store(path: str, rank: int, ranks: int, what: str) -> Any:
    """A file; or kept by rank 0, which stalls with it."""
    from torch import distributed as dist

    if "store" not in what:
        return dist.FileStore(path, ranks)
    port = Path(path)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, ranks, True, wait_for_workers=False)
        port.with_suffix(".part").write_text(str(store.port))
        port.with_suffix(".part").rename(port)
        return store
    while not port.exists():
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int(port.read_text()), ranks, False)


def stop_when_noted(key: str) -> None:
    """Stop this process as soon as it has told the others that it waits."""
    from torch import distributed as dist

    store = dist.distributed_c10d._get_process_group_store(dist.group.WORLD)
    while not store.check([key]):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGSTOP)


def rank_main(rank: int, ranks: int, path: str, pipe: Any, what: str, victim: int, step: int) -> None:
    """Forward and backward; the victim is struck by ``what`` in its tile number ``step`` of a pass."""
    import torch
    from torch import distributed as dist

    from attngrad.backends.cpu import parts
    from attngrad.distributed import RingError, ring_attention

    torch.set_num_threads(1)
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 2)  # the traceback is expected
    store = open_store(path, rank, ranks, what)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    torch.manual_seed(rank)
    q, k, v = (torch.randn(2, 6, 4, requires_grad=True) for _ in range(3))
    ring_attention(q, k, v).sum().backward()  # connects all
    for x in (q, k, v):
        x.grad = None
    dist.barrier()

    cause, _, stage = what.partition(" in ")
    cause = cause.removesuffix(" with the store")
    if rank == victim and cause == "stop while it waits":
        threading.Thread(target=stop_when_noted, args=(f"attngrad/ring/waits/{rank}",), daemon=True).start()
    elif (rank == victim and cause != "absence") or (rank == (victim - 1) % ranks and cause == "stop while it waits"):
        name = {"forward": "forward", "backward": "backward", "tangent": "forward_tangent"}[stage]
        whole, calls = getattr(parts, name), 0

        def struck(*args: Any, **how: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == step:
                if cause == "error":
                    raise MemoryError("no memory")
                if rank != victim:
                    time.sleep(SLOW)
                else:
                    os.kill(os.getpid(), signal.SIGKILL if cause == "death" else signal.SIGSTOP)
            return whole(*args, **how)

        setattr(parts, name, struck)
    timeout, metronome, begin = timeout_of(what), Metronome(), time.monotonic()
    metronome.start()
    try:
        for _ in range(2):  # who had all it needed of the first notices in the second
            out = ring_attention(q, k, v, timeout=timeout)
            if rank == victim and cause == "absence":
                time.sleep(3 * TIMEOUT)
            out.backward(torch.ones_like(out))
            q.grad = k.grad = v.grad = None
    except RingError as error:
        untouched = q.grad is None and k.grad is None and v.grad is None
        pipe.send((error.rank, error.step, str(error), time.monotonic() - begin - metronome.withheld, untouched))
        try:
            ring_attention(q, k, v, timeout=timeout)
        except RingError as again:
            pipe.send(str(again))
        raise


@pytest.fixture
def job(tmp_path: Path) -> Any:
    """Start ranks; afterwards none is left."""
    started: list[Any] = []

    def start(ranks: int, *args: Any) -> tuple[list[Any], list[Any]]:
        pipes = []
        for rank in range(ranks):
            here, there = forks().Pipe()
            process = forks().Process(target=rank_main, args=(rank, ranks, str(tmp_path / "store"), there, *args))
            process.start()
            there.close()
            started.append(process)
            pipes.append(here)
        return started, pipes

    yield start
    for process in started:
        if process.is_alive():
            process.kill()
        process.join(30)
        assert process.exitcode is not None


CASES = [
    (2, "death in forward", 1, 1),
    (4, "death in forward", 2, 2),
    (3, "death in backward", 0, 2),
    (4, "death in backward", 3, 4),
    (4, "stop in forward", 1, 2),
    (3, "stop in backward", 2, 1),
    (4, "error in backward", 1, 3),
    (3, "absence in backward", 1, 0),
    (4, "stop while it waits in forward", 2, 2),
]


@pytest.mark.parametrize(("ranks", "what", "victim", "step"), only([CASES[0], CASES[6]], CASES), ids=lambda x: str(x))
def test_every_survivor_names_the_rank_that_failed(job, ranks, what, victim, step):
    processes, pipes = job(ranks, what, victim, step)
    for rank, (process, pipe) in enumerate(zip(processes, pipes, strict=True)):
        if rank == victim:
            continue
        assert pipe.poll(120), f"rank {rank} says nothing"
        named, at, message, seconds, untouched = pipe.recv()
        assert named == victim, (rank, message)
        assert f"ring_attention: rank {victim} {REASONS[what.split()[0]]}" in message
        assert f"This is rank {rank}" in message
        assert "ward pass" in message
        assert 0 <= at <= ranks
        # in time, with something for a busy machine
        assert seconds < 1.2 * TIMEOUT + (SLOW if "while" in what else 0.0)
        assert untouched
        assert "this group is broken" in pipe.recv()
        process.join(30)
        assert process.exitcode == 1
    if "death" in what:
        processes[victim].join(30)
        assert processes[victim].exitcode == -signal.SIGKILL


REASONS = {
    "death": "is gone: its connection is closed",
    "stop": f"has not answered for {TIMEOUT:g} s",
    "error": "failed: MemoryError: no memory",
    "absence": f"has not answered for {TIMEOUT:g} s",
}


def test_a_store_that_stalls_with_the_rank_that_keeps_it_delays_nobody(job):
    processes, pipes = job(3, "stop with the store in forward", 0, 1)
    for rank in (1, 2):
        assert pipes[rank].poll(120), f"rank {rank} says nothing"
        named, _, message, seconds, untouched = pipes[rank].recv()
        assert named == 0 or rank == 2
        assert "the store of the group, where it would say who failed first, does not answer" in message
        assert seconds < 1.2 * TIMEOUT
        assert untouched
        processes[rank].join(30)
        assert processes[rank].exitcode == 1
