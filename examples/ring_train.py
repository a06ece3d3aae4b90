"""A causal transformer layer trains on a sequence that no rank holds whole.

Each rank has its shard of one long sequence of tokens, which goes round a fixed cycle with noise. Attention runs around
the ring; everything else is local to a token. Parameters stand on every rank, so their gradients are shares, which an
all-reduce adds up; sinks are a parameter like any other. The loss is that of one process, whatever the number of ranks.

Run it: ``torchrun --nproc-per-node 2 examples/ring_train.py --tokens 512 --steps 60``
"""

from __future__ import annotations

import argparse
import sys
from datetime import timedelta

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional

from attngrad.distributed import ring_attention, shard

VOCABULARY, WIDTH, HEADS = 17, 32, 4


class Model(nn.Module):
    """Embedding, one layer of attention over all ranks, a residual, logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.merge = nn.Linear(WIDTH, WIDTH)
        self.logits = nn.Linear(WIDTH, VOCABULARY)
        self.sinks = nn.Parameter(torch.zeros(HEADS))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (tokens of this rank, VOCABULARY)."""
        x = self.embed(tokens)
        q, k, v = self.qkv(x).reshape(-1, 3, HEADS, WIDTH // HEADS).permute(1, 2, 0, 3)
        out = ring_attention(q, k, v, causal=True, sinks=self.sinks, timeout=30.0)
        logits: Tensor = self.logits(x + self.merge(out.transpose(0, 1).reshape(-1, WIDTH)))
        return logits


def sample(n: int) -> tuple[Tensor, Tensor]:
    """Tokens that step through the vocabulary by 3, one in ten of them random; and their successors."""
    generator = torch.Generator().manual_seed(0)
    sequence = 3 * torch.arange(n + 1) % VOCABULARY
    noise = torch.randint(VOCABULARY, (n + 1,), generator=generator)
    sequence = torch.where(torch.rand(n + 1, generator=generator) < 0.1, noise, sequence)
    return sequence[:-1], sequence[1:]


def main() -> None:
    """Train, and let rank 0 print the loss."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.manual_seed(0)  # the same parameters on every rank
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    tokens, successors = (shard(x, dim=-1) for x in sample(arguments.tokens))
    for step in range(arguments.steps):
        loss = functional.cross_entropy(model(tokens), successors, reduction="sum") / arguments.tokens
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach()
        for x in (total, *(p.grad for p in model.parameters())):
            dist.all_reduce(x)
        optimizer.step()
        if dist.get_rank() == 0 and (step % 10 == 0 or step + 1 == arguments.steps):
            sys.stdout.write(f"step {step + 1:4}   loss {total.item():.6f}\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
