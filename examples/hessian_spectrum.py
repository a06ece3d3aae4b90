"""The spectrum of the Hessian of an attention layer, by Hessian-vector products and Lanczos.

How sharp is the minimum, how many directions matter, is there negative curvature left? The Hessian of n parameters has
n x n entries; Lanczos needs its product with a few vectors only: ``torch.func.jvp(torch.func.grad(loss), ...)``. With
attngrad that runs on the kernels. PyTorch's fused attention raises (torch 2.13: "NotImplementedError: Trying to use
forward AD with _scaled_dot_product_flash_attention_for_cpu that does not support it").

The layer learns to repeat the token before. At 256 parameters the estimate is
checked against all eigenvalues of the dense Hessian; at 16,384, whose Hessian would take 2 GB, Lanczos stands alone.

Run it: ``python examples/hessian_spectrum.py`` (PyTorch; about ten seconds)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import attngrad.torch

TOKENS, BATCH, HEADS = 16, 32, 4
Product = Callable[[Tensor], Tensor]


class Problem(NamedTuple):
    """A loss of a flat vector of parameters, and where it starts."""

    loss: Callable[[Tensor], Tensor]
    start: Tensor


class Spectrum(NamedTuple):
    """Ritz values and their weights: the density of eigenvalues is about sum_i weight_i delta(value_i)."""

    values: Tensor
    weights: Tensor


def problem(width: int, seed: int = 0, device: str = "cpu", attention: Any = attngrad.torch.attention) -> Problem:
    """A causal layer x + attention(x Wq, x Wk, x Wv) Wo; its target is the sequence of x, moved by one token."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(BATCH, TOKENS, width, generator=generator, dtype=torch.float64)
    place = torch.randn(TOKENS, width, generator=generator, dtype=torch.float64)
    start = torch.randn(4 * width * width, generator=generator, dtype=torch.float64) * width**-0.5
    inputs, target = (x + place).to(device), x.roll(1, 1).to(device)

    def loss(flat: Tensor) -> Tensor:
        w = flat.unflatten(0, (4, width, width))
        q, k, v = ((inputs @ w[i]).unflatten(-1, (HEADS, -1)).transpose(1, 2) for i in range(3))
        y = attention(q, k, v, causal=True).transpose(1, 2).flatten(-2) @ w[3]
        return (y - target)[:, 1:].square().mean()

    return Problem(loss, start.to(device))


def hvp(loss: Callable[[Tensor], Tensor], at: Tensor) -> Product:
    """v -> H v, forward over reverse."""
    gradient = torch.func.grad(loss)
    return lambda v: torch.func.jvp(gradient, (at,), (v,))[1]


def minimised(p: Problem, steps: int = 300) -> tuple[Tensor, list[float]]:
    """The parameters after Adam, and the losses."""
    flat = p.start.clone().requires_grad_()
    optimizer = torch.optim.Adam([flat], lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = p.loss(flat)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return flat.detach(), losses


def lanczos(product: Product, probe: Tensor, steps: int) -> Spectrum:
    """Ritz values of a symmetric matrix, each weighted by how much of the probe it holds.

    H q_j = b_(j-1) q_(j-1) + a_j q_j + b_j q_(j+1); every q is made orthogonal to all before, twice.
    """
    basis = [probe / probe.norm()]
    a, b = [], []
    for _ in range(steps):
        w = product(basis[-1])
        a.append(torch.dot(w, basis[-1]))
        all_before = torch.stack(basis)
        for _ in range(2):
            w = w - all_before.T @ (all_before @ w)
        b.append(w.norm())
        if b[-1] < 1e-12 * a[0].abs():  # all that the probe reaches: Ritz values are eigenvalues
            break
        basis.append(w / b[-1])
    off = torch.stack(b[: len(a) - 1])
    tridiagonal = torch.diag(torch.stack(a)) + torch.diag(off, 1) + torch.diag(off, -1)
    values, vectors = torch.linalg.eigh(tridiagonal)
    return Spectrum(values, vectors[0].square())


def spectrum(product: Product, like: Tensor, steps: int = 60, probes: int = 4, seed: int = 0) -> list[Spectrum]:
    """Lanczos from random signs; their mean is the density of eigenvalues (stochastic Lanczos quadrature)."""
    generator = torch.Generator().manual_seed(seed)
    signs = [torch.randint(2, like.shape, generator=generator) * 2.0 - 1 for _ in range(probes)]
    return [lanczos(product, s.to(like), steps) for s in signs]


def dense(loss: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """Every eigenvalue, of the dense Hessian: for small problems."""
    return torch.linalg.eigvalsh(torch.vmap(hvp(loss, at), chunk_size=64)(torch.eye(len(at)).to(at)))


def ends(found: list[Spectrum]) -> tuple[float, float]:
    """The smallest and the largest Ritz value."""
    values = torch.cat([f.values for f in found])
    return values.min().item(), values.max().item()


def main() -> None:
    """Spectra before and after training; the small one beside the dense Hessian's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", help="cpu or blocked; by the device otherwise")
    arguments = parser.parse_args()
    with attngrad.torch.use_backend(arguments.backend):
        p = problem(8, device=arguments.device)
        trained, _ = minimised(p)
        for name, flat in (("at the start", p.start), ("trained", trained)):
            found, exact = spectrum(hvp(p.loss, flat), flat), dense(p.loss, flat)
            low, high = ends(found)
            print(f"{len(flat)} parameters, {name}: Lanczos, then the dense Hessian")
            print(f"  eigenvalues {low:.6f} to {high:.6f}")
            print(f"  eigenvalues {exact[0]:.6f} to {exact[-1]:.6f}")
        p = problem(arguments.width, device=arguments.device)
        low, high = ends(spectrum(hvp(p.loss, p.start), p.start, probes=1))
        print(f"{len(p.start)} parameters, at the start: Lanczos\n  eigenvalues {low:.6f} to {high:.6f}")


if __name__ == "__main__":
    main()
