"""What docs/works_with.md says of several processes: gradients under DDP and FSDP2 are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

RANKS, TOKENS, WIDTH, HEADS = 2, 192, 16, 2


def make_block() -> Any:
    import attngrad.torch

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
            self.out = torch.nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            y = attngrad.torch.scaled_dot_product_attention(q, k, v, is_causal=True)
            return x + self.out(y.transpose(1, 2).flatten(-2))

    torch.manual_seed(0)
    return Block()


def batch() -> Any:
    return torch.randn(2 * RANKS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))


def rank_main(rank: int, folder: str) -> None:
    """One process: its part of the batch under both wrappers; rank 0 writes the gradients."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import attngrad.torch
    from attngrad import _native

    torch.set_num_threads(2)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    mine = batch().chunk(RANKS)[rank]
    replicated = torch.nn.parallel.DistributedDataParallel(make_block())
    replicated(mine).square().mean().backward()
    found = {"ddp": {name: p.grad.clone() for name, p in replicated.module.named_parameters()}}
    sharded = fully_shard(make_block(), mesh=init_device_mesh("cpu", (RANKS,)))
    sharded(mine).square().mean().backward()
    found["fsdp"] = {name: p.grad.full_tensor() for name, p in sharded.named_parameters()}
    found["backend"] = attngrad.torch.backend_of(mine)
    found["borrowed"] = _native.worker_runs()["openmp"]
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")
    dist.barrier()
    del replicated, sharded
    dist.destroy_process_group()


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["cpu", "blocked"])
def test_gradients_in_two_processes_are_those_of_one(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNGRAD_TORCH_BACKEND", backend)  # which the processes read
    torch.multiprocessing.spawn(rank_main, args=(str(tmp_path),), nprocs=RANKS)
    block = make_block()
    block(batch()).square().mean().backward()
    found = torch.load(tmp_path / "found.pt")
    assert found["backend"] == backend
    assert (found["borrowed"] > 0) == (backend == "cpu")  # whose tasks PyTorch's workers run, in every process
    for kind in ("ddp", "fsdp"):
        for name, p in block.named_parameters():
            assert torch.allclose(found[kind][name], p.grad, atol=1e-6), (kind, name)
