"""Test-time training: the model takes gradient steps on its own context, and is trained through them.

Every sequence has a rule of its own: the target is the mean of the last four points, turned by an angle that no input
shows. The model sees targets in the first half only, takes two gradient steps on them (the inner loop), and is judged
on the second half. Its initial weights and inner step sizes are trained by differentiating the inner gradients again.
Attention is causal, with a window of four keys and two query heads for every key head: with attngrad each of these has
its second derivatives on the kernels. PyTorch's fused attention raises (torch 2.13: "RuntimeError: derivative for
aten::_scaled_dot_product_flash_attention_for_cpu_backward is not implemented"), and has no window.

Run it: ``python examples/test_time_training.py`` (PyTorch; about ten seconds)
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import attngrad.torch

TOKENS, WINDOW, BATCH = 32, 4, 32
WIDTH, HEADS, KEY_HEADS = 32, 4, 2
OPTIONS: dict[str, Any] = {"causal": True, "window": (WINDOW - 1, 0)}
SHAPES = {
    "inward": (2, WIDTH),
    "q": (WIDTH, WIDTH),
    "k": (WIDTH, WIDTH * KEY_HEADS // HEADS),
    "v": (WIDTH, WIDTH * KEY_HEADS // HEADS),
    "merge": (WIDTH, WIDTH),
    "out": (WIDTH, 2),
}
Weights = dict[str, Tensor]


def initial(device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Weights, Weights]:
    """Weights, and the logarithm of the inner step size of each."""
    made = {name: torch.randn(shape, dtype=dtype) * shape[0] ** -0.5 for name, shape in SHAPES.items()}
    rates = {name: torch.tensor(-4.0, dtype=dtype) for name in SHAPES}
    weights, rates = ({name: x.to(device).requires_grad_() for name, x in d.items()} for d in (made, rates))
    return weights, rates


def sample(batch: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Points ``(B, TOKENS, 2)`` and targets: the mean of the last WINDOW points, turned by an angle per sequence."""
    x = torch.randn(batch, TOKENS, 2, dtype=dtype)
    sums = x.cumsum(1)
    sums[:, WINDOW:] = sums[:, WINDOW:] - sums[:, :-WINDOW].clone()
    mean = sums / torch.arange(1, TOKENS + 1, dtype=dtype).clamp(max=WINDOW)[:, None]
    angle = 2 * math.pi * torch.rand(batch, dtype=dtype)
    turn = torch.stack([angle.cos(), angle.sin(), -angle.sin(), angle.cos()], -1).unflatten(-1, (2, 2))
    return x, mean @ turn


def predict(w: Weights, x: Tensor, attention: Callable[..., Tensor] = attngrad.torch.attention) -> Tensor:
    """Predictions ``(B, T, 2)``; the weights ``(B, ...)`` are those of each sequence."""

    def heads(z: Tensor, number: int) -> Tensor:
        return z.unflatten(-1, (number, -1)).transpose(1, 2)

    h = x @ w["inward"]
    q, k, v = heads(h @ w["q"], HEADS), heads(h @ w["k"], KEY_HEADS), heads(h @ w["v"], KEY_HEADS)
    h = attention(q, k, v, **OPTIONS).transpose(1, 2).flatten(-2) @ w["merge"]
    return h @ w["out"]


def adapted(weights: Weights, rates: Weights, x: Tensor, y: Tensor, steps: int = 2, **how: Any) -> Weights:
    """The weights of each sequence ``(B, ...)`` after gradient steps on it, differentiable by the initial ones."""
    own = {name: w.expand(len(x), *w.shape) for name, w in weights.items()}
    for _ in range(steps):
        loss = (predict(own, x, **how) - y).square().mean((1, 2)).sum()
        grads = torch.autograd.grad(loss, list(own.values()), create_graph=True)
        own = {n: w - rates[n].exp() * g for (n, w), g in zip(own.items(), grads, strict=True)}
    return own


def loss_of(weights: Weights, rates: Weights, x: Tensor, y: Tensor, steps: int = 2, **how: Any) -> Tensor:
    """Adapt to the first half; the mean squared error on the second."""
    half = TOKENS // 2
    own = adapted(weights, rates, x[:, :half], y[:, :half], steps, **how)
    return (predict(own, x[:, half:], **how) - y[:, half:])[:, WINDOW - 1 :].square().mean()


def train(steps: int = 400, seed: int = 0, device: str = "cpu") -> tuple[list[float], dict[int, float]]:
    """The losses; and, on fresh sequences, the loss after 0, 1 and 2 inner steps."""
    torch.manual_seed(seed)
    weights, rates = initial(device)
    parameters = [*weights.values(), *rates.values()]
    optimizer = torch.optim.Adam(parameters)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    losses = []
    for _ in range(steps):
        loss = loss_of(weights, rates, *(x.to(device) for x in sample(BATCH)))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    fresh = [x.to(device) for x in sample(256)]
    return losses, {inner: loss_of(weights, rates, *fresh, inner).item() for inner in range(3)}


def main() -> None:
    """Train, and show what the inner steps are worth."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", help="cpu or blocked; by the device otherwise")
    arguments = parser.parse_args()
    with attngrad.torch.use_backend(arguments.backend):
        losses, found = train(arguments.steps, device=arguments.device)
        print(f"training loss: {losses[0]:.4f} at first, {losses[-1]:.4f} at last")
        for inner, loss in found.items():
            print(f"fresh sequences, {inner} inner steps: {loss:.4f}")


if __name__ == "__main__":
    main()
