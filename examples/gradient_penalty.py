"""A gradient penalty on a critic with attention: a loss that contains a gradient, trained by double backward.

WGAN-GP asks a critic for slopes of 1 between real and made data, R1 for flat ones at real data; robust and physical
models have such terms as well. All need ``torch.autograd.grad(..., create_graph=True)`` through the network, then
``backward``. With attngrad's attention that runs on the kernels, in memory linear in the number of tokens. With
PyTorch's fused attention the backward raises (torch 2.13: "RuntimeError: derivative for
aten::_scaled_dot_product_flash_attention_for_cpu_backward is not implemented").

Here a critic tells smooth sequences from shuffled ones, with and without the penalty.

Run it: ``python examples/gradient_penalty.py`` (PyTorch; a few seconds)
"""

from __future__ import annotations

import argparse
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

import attngrad.torch

TOKENS, WIDTH, HEADS, BATCH = 24, 32, 4, 32


class Found(NamedTuple):
    """The mean slope of the critic between real and shuffled data, and how far apart it puts the two."""

    slope: float
    gap: float


class Critic(nn.Module):
    """One number for a sequence ``(B, TOKENS, 2)``."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.qkv = nn.Linear(2, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.place = nn.Parameter(0.5 * torch.randn(TOKENS, WIDTH))
        self.score = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Scores ``(B,)``."""
        h = self.inward(x) + self.place
        q, k, v = self.qkv(h).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        out = nn.functional.scaled_dot_product_attention(q, k, v)  # within sdpa(), attngrad's
        h = h + out.transpose(1, 2).flatten(-2)
        return self.score(h).mean((1, 2))


def sample(batch: int) -> tuple[Tensor, Tensor]:
    """Circles, walked through from a random start; and the same points in random order."""
    start = 2 * math.pi * torch.rand(batch, 1)
    angle = start + torch.arange(TOKENS) * (2 * math.pi / TOKENS)
    real = torch.stack([angle.cos(), angle.sin()], -1) + 0.05 * torch.randn(batch, TOKENS, 2)
    order = torch.rand(batch, TOKENS).argsort(-1)
    return real, real.gather(1, order[..., None].expand_as(real))


def slopes(critic: nn.Module, real: Tensor, made: Tensor, mix: Tensor) -> Tensor:
    """The norm of the critic's gradient at points between the two ``(B,)``, differentiable once more."""
    x = (mix * real + (1 - mix) * made).requires_grad_()
    (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return slope.flatten(1).norm(dim=-1)


def train(penalty: float = 10.0, steps: int = 300, seed: int = 0, device: str = "cpu") -> Found:
    """Train a critic; measure it on fresh data."""
    torch.manual_seed(seed)
    critic = Critic().to(device)
    optimizer = torch.optim.Adam(critic.parameters(), lr=3e-3, betas=(0.5, 0.9))
    for _ in range(steps):
        real, made = (x.to(device) for x in sample(BATCH))
        loss = critic(made).mean() - critic(real).mean()
        if penalty:
            slope = slopes(critic, real, made, torch.rand(BATCH, 1, 1).to(device))
            loss = loss + penalty * (slope - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    real, made = (x.to(device) for x in sample(256))
    slope = slopes(critic, real, made, torch.rand(256, 1, 1).to(device)).mean()
    return Found(slope.item(), (critic(real).mean() - critic(made).mean()).item())


def main() -> None:
    """Train with and without the penalty."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", help="cpu or blocked; by the device otherwise")
    arguments = parser.parse_args()
    with attngrad.torch.use_backend(arguments.backend), attngrad.torch.sdpa():
        for penalty in (0.0, 10.0):
            found = train(penalty, arguments.steps, device=arguments.device)
            print(f"penalty {penalty:4}: mean slope {found.slope:8.3f}, real above shuffled by {found.gap:.3f}")


if __name__ == "__main__":
    main()
