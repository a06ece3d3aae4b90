"""Ranks that stay alive from test to test: processes, with groups of some of them."""

from __future__ import annotations

import multiprocessing
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np


def serve(rank: int, sizes: tuple[int, ...], path: str, pipe: Any) -> None:
    """What a rank does: call what it is sent, with its group, and send the result or the error back."""
    import torch
    from torch import distributed as dist

    torch.set_num_threads(1)
    world = max(sizes)
    store = dist.FileStore(path, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=300))
    groups = {n: dist.new_group(list(range(n))) for n in sizes}
    while (task := pipe.recv()) is not None:
        function, ranks, args = task
        try:
            pipe.send((True, function(groups[ranks], rank, *args)))
        except Exception as error:
            pipe.send((False, (type(error), str(error), traceback.format_exc())))
    dist.barrier()
    dist.destroy_process_group()


def forks() -> Any:
    """Processes forked from one that has imported PyTorch and computed nothing: ranks that start at once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "attngrad.distributed", "cases"])
    return context


class Metronome(threading.Thread):
    """How long the machine has kept this process from running: ticks that come late, added up."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.withheld = 0.0

    def run(self) -> None:
        while True:
            begin = time.monotonic()
            time.sleep(0.05)
            late = time.monotonic() - begin - 0.05
            self.withheld += late if late > 0.2 else 0.0


class Pool:
    """The ranks, as many as the largest of ``sizes``, seen from the test."""

    def __init__(self, sizes: tuple[int, ...] = (1, 2, 3, 4)) -> None:
        context = forks()
        self._directory = tempfile.TemporaryDirectory()
        path = str(Path(self._directory.name) / "store")
        self._pipes, self._processes = [], []
        for rank in range(max(sizes)):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(rank, sizes, path, there), daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)

    def outcomes(self, ranks: int, function: Callable[..., Any], *args: Any) -> list[tuple[bool, Any]]:
        """What each of ``ranks`` ranks returned, or (type, message, traceback) of what it raised."""
        for pipe in self._pipes[:ranks]:
            pipe.send((function, ranks, args))
        found = []
        for rank, pipe in enumerate(self._pipes[:ranks]):
            assert pipe.poll(300), f"rank {rank} does not answer"
            found.append(pipe.recv())
        return found

    def run(self, ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What each rank returned; none may have raised."""
        found = self.outcomes(ranks, function, *args)
        for fine, result in found:
            assert fine, result[2]
        return [result for _, result in found]

    def errors(self, ranks: int, function: Callable[..., Any], *args: Any) -> list[tuple[type, str]]:
        """What each rank raised; all must have."""
        found = self.outcomes(ranks, function, *args)
        assert not any(fine for fine, _ in found), found
        return [(kind, message) for _, (kind, message, _) in found]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(30)
            assert process.exitcode == 0, process.exitcode
        self._directory.cleanup()


# --- what the ranks are asked to do ---------------------------------------------------------------------------------


def positions(n: int, ranks: int, layout: str, lengths: tuple[int, ...] | None = None) -> list[np.ndarray]:
    """Where the tokens of each rank stand in the whole: said a second time, apart from ``_layout``."""
    everything = np.arange(n)
    if layout == "contiguous":
        cuts = None if lengths is None else np.cumsum(lengths)[:-1]
        return np.array_split(everything, ranks if cuts is None else cuts)
    if lengths is None:
        chunks = np.array_split(everything, 2 * ranks)
    else:
        halves = [(m + 1) // 2 for m in lengths] + [m // 2 for m in reversed(lengths)]
        chunks = np.split(everything, np.cumsum(halves)[:-1])
    return [np.concatenate([chunks[r], chunks[-1 - r]]) for r in range(ranks)]


def take_rows(plane: np.ndarray | None, rows: np.ndarray) -> np.ndarray | None:
    """The rows of a mask or bias, unless they broadcast."""
    if plane is None or plane.ndim < 2 or plane.shape[-2] == 1:
        return plane
    return plane[..., rows, :]


def run_case(
    group: Any,
    rank: int,
    case: Any,
    layout: str,
    lengths: tuple[Any, Any] = (None, None),
    backend: str | None = None,
) -> dict[str, Any]:
    """Every result of ``ring_attention``, by a backend, for this rank's part of ``case``."""
    import torch
    from torch import distributed as dist
    from torch.autograd import forward_ad

    from attngrad.distributed import ring_attention
    from attngrad.torch import use_backend
    from attngrad.torch._tensors import to_array, to_tensor

    ranks = dist.get_world_size(group)
    rows = positions(case.q.shape[-2], ranks, layout, lengths[0])[rank]
    columns = positions(case.k.shape[-2], ranks, layout, lengths[1])[rank]

    def tensor(x: Any) -> Any:
        return None if x is None else to_tensor(np.ascontiguousarray(x))

    def part(x: Any) -> list[Any]:
        """q, k, v, bias and sinks of this rank."""
        own = x[0][..., rows, :], x[1][..., columns, :], x[2][..., columns, :], take_rows(x[3], rows), x[4]
        return [tensor(y) for y in own]

    options = {name: x for name, x in case.options.items() if name not in ("bias", "sinks", "mask", "segments")}
    if isinstance(options.get("offset"), np.ndarray):
        options["offset"] = tensor(options["offset"])
    if "mask" in case.options:
        options["mask"] = tensor(take_rows(case.options["mask"], rows))
    if "segments" in case.options:
        q_ids, k_ids = case.options["segments"]
        options["segments"] = (tensor(q_ids[..., rows]), tensor(k_ids[..., columns]))
    options |= {"group": group, "layout": layout, "return_lse": True, "timeout": 600.0}
    names = ("q", "k", "v", "bias", "sinks")
    inputs = part((*case.qkv, case.options.get("bias"), case.options.get("sinks")))

    def call(x: list[Any]) -> Any:
        with use_backend(backend):
            return ring_attention(*x[:3], bias=x[3], sinks=x[4], **options)

    leaves = [None if x is None else x.clone().requires_grad_() for x in inputs]
    out, lse = call(leaves)
    dout, dlse = tensor(case.dout[..., rows, :]), tensor(case.dlse[..., rows])
    given = [x for x in leaves if x is not None]
    grads = iter(torch.autograd.grad([out, lse], given, [dout, dlse]))
    found = {"out": out, "lse": lse}
    found |= {f"d{name}": next(grads) for name, x in zip(names, leaves, strict=True) if x is not None}
    with forward_ad.dual_level():
        duals = [None if x is None else forward_ad.make_dual(x, t) for x, t in zip(inputs, part(case.t), strict=True)]
        moved = [forward_ad.unpack_dual(y).tangent for y in call(duals)]
    found |= {"out_dot": moved[0], "lse_dot": moved[1]}
    return {name: to_array(x.detach()) for name, x in found.items()}
