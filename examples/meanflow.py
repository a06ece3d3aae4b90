"""MeanFlow: a generator that samples in one step, trained by forward mode through attention.

MeanFlow learns the average velocity u(z, r, t) of a flow between the times r and t, by the identity
u = v - (t - r) du/dt. Its du/dt is one ``torch.func.jvp`` through the whole network, attention included. With attngrad
that runs on the kernels. PyTorch's fused attention raises (torch 2.13: "NotImplementedError: Trying to use forward AD
with _scaled_dot_product_flash_attention_for_cpu that does not support it"); its math backend does it with dense T x S
weights.

The data: sets of eight points in the plane, all near one place of a ring. The place is drawn anew for every set, so
points have to ask each other where to go. One step takes noise to such sets. With ``--alone`` each point sees itself
only: they find the ring, and not each other.

Run it: ``python examples/meanflow.py`` (PyTorch; half a minute)
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import attngrad.torch

RADIUS, SPREAD, POINTS = 2.0, 0.1, 8
BATCH, STEPS = 64, 800
WIDTH, HEADS, BLOCKS = 64, 4, 2


class Judged(NamedTuple):
    """Of sets of points: the median distance of a point from the ring, and the spread of the points of a set."""

    distance: float
    spread: float


def sample(sets: int) -> Tensor:
    """Data ``(sets, POINTS, 2)``: a place on the ring for each set, and its points around it."""
    angle = 2 * math.pi * torch.rand(sets, 1)
    return RADIUS * torch.stack([angle.cos(), angle.sin()], -1) + SPREAD * torch.randn(sets, POINTS, 2)


class Block(nn.Module):
    """x += attention(norm(x)); x += mlp(norm(x))."""

    def __init__(self, attention: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attention = attention
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.merge = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """x ``(B, T, WIDTH)``."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.merge(self.attention(q, k, v).transpose(1, 2).flatten(-2))
        out: Tensor = x + self.mlp(self.norms[1](x))
        return out


class Velocity(nn.Module):
    """The average velocity u(z, r, t) of sets of points: a transformer without positions."""

    def __init__(self, attention: Callable[..., Tensor] = attngrad.torch.attention) -> None:
        super().__init__()
        self.points, self.out = nn.Linear(2, WIDTH), nn.Linear(WIDTH, 2)
        self.times = nn.Sequential(nn.Linear(10, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.Sequential(*(Block(attention) for _ in range(BLOCKS)))

    def forward(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        """z ``(B, T, 2)``, r and t ``(B,)``."""
        times = torch.stack([t, t - r], -1)
        waves = [wave(times * f * math.pi) for f in (0.5, 1.0) for wave in (torch.sin, torch.cos)]
        h = self.points(z) + self.times(torch.cat([times, *waves], -1))[:, None]
        out: Tensor = self.out(self.blocks(h))
        return out


def errors(model: nn.Module, data: Tensor, noise: Tensor, r: Tensor, t: Tensor) -> Tensor:
    """The squared error of each set: of u against v - (t - r) du/dt, which is held fixed."""
    t_, r_ = t[:, None, None], r[:, None, None]
    z, v = (1 - t_) * data + t_ * noise, noise - data
    u, du_dt = torch.func.jvp(model, (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t)))
    target = v - (t_ - r_) * du_dt
    return (u - target.detach()).square().mean((1, 2))


def times(sets: int) -> tuple[Tensor, Tensor]:
    """r <= t for every set; equal for half of them, which then learn the velocity of the moment."""
    r, t = torch.rand(2, sets).sort(0).values
    return torch.where(torch.rand(sets) < 0.5, t, r), t


def train(steps: int = STEPS, seed: int = 0, device: str = "cpu", **options: Any) -> tuple[Velocity, list[float]]:
    """The trained model, and the median squared error at every step; the options are those of attention."""
    torch.manual_seed(seed)
    model = Velocity(lambda q, k, v: attngrad.torch.attention(q, k, v, **options)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    losses = []
    for _ in range(steps):
        data = sample(BATCH)
        batch = (data, torch.randn_like(data), *times(BATCH))
        squares = errors(model, *(x.to(device) for x in batch))
        optimizer.zero_grad()
        (squares / (squares.detach() + 0.05).sqrt()).mean().backward()  # sets that are far off count for less
        optimizer.step()
        schedule.step()
        losses.append(squares.median().item())
    return model, losses


@torch.no_grad()
def generate(model: nn.Module, noise: Tensor) -> Tensor:
    """Sets of points from noise ``(sets, POINTS, 2)``, in one step: z(0) = z(1) - u(z(1), 0, 1)."""
    r = noise.new_zeros(len(noise))
    out: Tensor = noise - model(noise, r, r + 1)
    return out


def judge(points: Tensor) -> Judged:
    """How good sets of points ``(sets, POINTS, 2)`` are."""
    off = (points.norm(dim=-1) - RADIUS).abs().median()
    return Judged(off.item(), (points - points.mean(1, keepdim=True)).square().mean().sqrt().item())


def main() -> None:
    """Train, make 500 sets in one step, and say how good they are."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", help="cpu or blocked; by the device otherwise")
    parser.add_argument("--alone", action="store_true", help="each point sees itself only")
    arguments = parser.parse_args()
    with attngrad.torch.use_backend(arguments.backend):
        options = {"window": (0, 0)} if arguments.alone else {}
        model, losses = train(arguments.steps, arguments.seed, arguments.device, **options)
        for step in range(0, len(losses), max(1, len(losses) // 8)):
            print(f"step {step + 1:5}   median squared error {losses[step]:.3f}")
        noise = torch.randn(500, POINTS, 2).to(arguments.device)
        for name, points in (("noise", noise), ("data", sample(500)), ("made in one step", generate(model, noise))):
            judged = judge(points)
            print(f"{name:>16}: {judged.distance:.3f} from the ring, sets spread by {judged.spread:.3f}")


if __name__ == "__main__":
    main()
