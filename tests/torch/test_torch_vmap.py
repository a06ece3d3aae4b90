"""torch.vmap of every pass, and over what is no number: what a loop gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import attngrad.torch as bridge
from cases import EVERYTHING, SINGLES, Shape, label, make
from torch_tools import close, problem


@pytest.mark.parametrize("names", [*SINGLES, EVERYTHING], ids=label)
def test_vmap_of_every_pass_equals_a_loop(names):
    case = make(names, Shape((2,), 4, 2, 2, 3, 2, 3))
    function, inputs = problem(case)
    inputs = tuple(x.detach() for x in inputs)
    mapped = tuple(torch.stack([x, x * 0.5 + 0.1, x - 0.2]) for x in inputs)

    def passes(*x):
        t = tuple(y * 0.3 + 0.1 for y in x)
        out, out_dot = torch.func.jvp(function, x, t)
        grads = torch.func.vjp(function, *x)[1](out)
        grads_dot = torch.func.jvp(lambda *x: torch.func.vjp(function, *x)[1](out), x, t)[1]
        return *out, *out_dot, *grads, *grads_dot

    samples = [passes(*x) for x in zip(*mapped, strict=True)]
    close(torch.vmap(passes)(*mapped), [torch.stack(parts) for parts in zip(*samples, strict=True)], 1e-13)
    # One input mapped, along another axis than the first; the others shared.
    moved = (inputs[0], mapped[1].movedim(0, 2), *inputs[2:])
    samples = [passes(inputs[0], k, *inputs[2:]) for k in mapped[1]]
    dims = (None, 2, *(None,) * (len(inputs) - 2))
    close(torch.vmap(passes, dims)(*moved), [torch.stack(parts) for parts in zip(*samples, strict=True)], 1e-13)


def test_vmap_over_masks_offsets_segments_and_seeds():
    case = make(())
    q, k, v = (torch.tensor(x) for x in case.qkv)
    rng = np.random.default_rng(0)
    masks = torch.tensor(rng.random((3, 3, 5)) > 0.4)
    close(
        [torch.vmap(lambda m: bridge.attention(q, k, v, mask=m))(masks)],
        [torch.stack([bridge.attention(q, k, v, mask=m) for m in masks])],
    )
    offsets = torch.tensor([[0, 1], [2, 1], [3, 0]])
    close(
        [torch.vmap(lambda n: bridge.attention(q, k, v, offset=n, causal=True))(offsets)],
        [torch.stack([bridge.attention(q, k, v, offset=n, causal=True) for n in offsets])],
    )
    ids = torch.tensor(rng.integers(0, 2, (3, 5)))
    close(
        [torch.vmap(lambda n: bridge.attention(q, k, v, segments=(n[:3], n)))(ids)],
        [torch.stack([bridge.attention(q, k, v, segments=(n[:3], n)) for n in ids])],
    )
    seeds = torch.tensor([1, 2, 3])
    close(
        [torch.vmap(lambda n: bridge.attention(q, k, v, dropout=0.5, seed=n))(seeds)],
        [torch.stack([bridge.attention(q, k, v, dropout=0.5, seed=int(n)) for n in seeds])],
    )


def test_nested_vmap_equals_two_loops():
    q = torch.randn(2, 3, 2, 4, 5, dtype=torch.float64)
    k = torch.randn(3, 2, 4, 5, dtype=torch.float64)
    inner = torch.vmap(lambda q, k: bridge.attention(q, k, k, causal=True))
    expected = torch.stack(
        [torch.stack([bridge.attention(a, b, b, causal=True) for a, b in zip(x, k, strict=True)]) for x in q]
    )
    close([torch.vmap(inner, (0, None))(q, k)], [expected])
