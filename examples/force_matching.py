"""Force matching: a small interatomic potential whose attention has a bias that depends on distances.

Forces are -dE/dx, so a loss on forces is differentiated twice: once to get the forces, once more to train. Distances
enter attention by its bias, which therefore needs first and second derivatives. With attngrad both come from the
kernels: ``torch.autograd.grad(energy, x, create_graph=True)``, then ``loss.backward()``. PyTorch's fused attention has
neither: torch 2.13 gives up its kernel where a bias needs a gradient, and falls back to dense T x S weights; where no
bias needs one, the second derivative raises "derivative for aten::_scaled_dot_product_flash_attention_for_cpu_backward
is not implemented".

The data: clusters of ten atoms of two kinds, under a Morse potential whose depth and length depend on the pair of
kinds. The model sees positions, kinds and forces, never the potential.

Run it: ``python examples/force_matching.py`` (PyTorch; about ten seconds)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import attngrad.torch

ATOMS, KINDS, BATCH = 10, 2, 16
WIDTH, HEADS, WAVES, REACH = 32, 4, 12, 4.0
Energy = Callable[[Tensor, Tensor], Tensor]


class Clusters(NamedTuple):
    """Positions and forces ``(B, ATOMS, 3)``, kinds ``(B, ATOMS)``."""

    x: Tensor
    kinds: Tensor
    forces: Tensor


def distances(x: Tensor) -> Tensor:
    """r_ij ``(B, N, N)``; the diagonal is 1, for a square root has no derivative at 0. It is masked later."""
    squares = (x[:, :, None] - x[:, None]).square().sum(-1)
    return (squares + torch.eye(x.shape[1], dtype=x.dtype, device=x.device)).sqrt()


def morse(x: Tensor, kinds: Tensor) -> Tensor:
    """The true energy ``(B,)``: a sum over pairs of D (1 - exp(-(r - r0)))^2 - D."""
    pair = kinds[:, :, None] + kinds[:, None]  # 0, 1 or 2
    depth, length = (x.new_tensor(table)[pair] for table in ((0.5, 1.0, 0.3), (1.2, 1.5, 1.8)))
    energies = depth * ((1 - torch.exp(length - distances(x))).square() - 1)
    return energies.triu(1).sum((1, 2))


def forces_of(energy: Energy, x: Tensor, kinds: Tensor, graph: bool = False) -> Tensor:
    """-dE/dx; with ``graph``, a function of the parameters that can be differentiated again."""
    x = x if x.requires_grad else x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(energy(x, kinds).sum(), x, create_graph=graph)
    return -slope


def sample(clusters: int, dtype: torch.dtype = torch.float32) -> Clusters:
    """Atoms on a grid of side 1.6, shaken, with random kinds; and the forces of the true potential."""
    grid = torch.cartesian_prod(*[torch.arange(3)] * 3).to(dtype)
    places = torch.stack([torch.randperm(len(grid))[:ATOMS] for _ in range(clusters)])
    x = 1.6 * grid[places] + 0.15 * torch.randn(clusters, ATOMS, 3, dtype=dtype)
    kinds = torch.randint(KINDS, (clusters, ATOMS))
    return Clusters(x, kinds, forces_of(morse, x, kinds))


class Potential(nn.Module):
    """E = sum_i e(h_i): two layers of attention, whose bias is a learned function of distance and kinds.

    An atom does not see itself. A sink in each head takes what the neighbours leave, so that
    the weights of an atom with few neighbours add up to less, and vanish as the last moves away.
    """

    def __init__(self, attention: Callable[..., Any] = attngrad.torch.attention) -> None:
        super().__init__()
        self.attention = attention
        self.embed = nn.Embedding(KINDS, WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.merge = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.radial = nn.ModuleList(nn.Linear(WAVES, KINDS * KINDS * HEADS) for _ in range(2))
        self.sinks = nn.Parameter(torch.zeros(2, HEADS))
        self.energy = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1))

    def bias(self, layer: int, r: Tensor, kinds: Tensor) -> Tensor:
        """``(B, HEADS, N, N)``: learned sums of Gaussians of the distance; falls off beyond REACH."""
        centres = torch.linspace(0.5, REACH, WAVES, dtype=r.dtype, device=r.device)
        waves = torch.exp(-4.0 * (r[..., None] - centres).square())
        pair = KINDS * kinds[:, :, None] + kinds[:, None]
        by_pair = self.radial[layer](waves).unflatten(-1, (KINDS * KINDS, HEADS))
        index = pair[..., None, None].expand(*pair.shape, 1, HEADS)
        learned = by_pair.gather(-2, index).squeeze(-2)
        return (learned - 0.2 * (r[..., None] / REACH) ** 8).permute(0, 3, 1, 2)

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        """Energies ``(B,)`` of positions ``(B, N, 3)`` and kinds ``(B, N)``."""
        r, h = distances(x), self.embed(kinds)
        others = ~torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
        for layer in range(2):
            q, k, v = self.qkv[layer](h).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            bias = self.bias(layer, r, kinds)
            out = self.attention(q, k, v, bias=bias, mask=others, sinks=self.sinks[layer])
            h = h + self.merge[layer](out.transpose(1, 2).flatten(-2))
        return self.energy(h).sum((1, 2))


def loss_of(model: nn.Module, data: Clusters) -> Tensor:
    """The mean squared error of the forces."""
    return (forces_of(model, data.x, data.kinds, graph=True) - data.forces).square().mean()


def train(steps: int = 400, seed: int = 0, device: str = "cpu") -> tuple[Potential, list[float]]:
    """The trained model, and the root mean squared error of the forces at every step."""
    torch.manual_seed(seed)
    model = Potential().to(device)
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    found = []
    for _ in range(steps):
        loss = loss_of(model, Clusters(*(x.to(device) for x in sample(BATCH))))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        found.append(loss.item() ** 0.5)
    return model, found


def main() -> None:
    """Train, and compare the forces on fresh clusters with the true ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", help="cpu or blocked; by the device otherwise")
    arguments = parser.parse_args()
    with attngrad.torch.use_backend(arguments.backend):
        model, found = train(arguments.steps, arguments.seed, arguments.device)
        for step in range(0, len(found), max(1, len(found) // 8)):
            print(f"step {step + 1:5}   error of the forces {found[step]:.3f}")
        fresh = Clusters(*(x.to(arguments.device) for x in sample(64)))
        error = loss_of(model, fresh).item() ** 0.5
        print(
            f"on fresh clusters: error {error:.3f}, forces {fresh.forces.square().mean().sqrt():.3f} (root mean square)"
        )


if __name__ == "__main__":
    main()
