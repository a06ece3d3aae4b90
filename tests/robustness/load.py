"""Every pass as a job that can be run again and again, and what its results are when it runs alone.

``test_load.py`` runs them at once for seconds, ``soak.py`` for minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import attngrad
from cases import EVERYTHING, Shape, make
from layer_tools import randomise


class Job(NamedTuple):
    """Something to compute: every array it gives, in the same order each time."""

    name: str
    run: Callable[[], list[Any]]


def arrays(x: Any) -> list[Any]:
    """The arrays of nested tuples, lists and dicts."""
    if isinstance(x, dict):
        x = list(x.values())
    if isinstance(x, tuple | list):
        return [a for part in x for a in arrays(part)]
    return [] if x is None else [x]


def _passes(label: str, c: Any) -> list[Job]:
    lse, dlse = {"dlse": c.dlse, "dlse_dot": c.dlse_dot}, c.dlse

    def vjp() -> list[Any]:
        out, pullback = attngrad.vjp(*c.qkv, **c.options)
        return arrays((out, pullback(c.dout, dlse)))

    return [
        Job(f"attention {label}", lambda: arrays(attngrad.attention(*c.qkv, return_lse=True, **c.options))),
        Job(f"vjp {label}", vjp),
        Job(f"jvp {label}", lambda: arrays(attngrad.jvp(c.qkv, c.t[:3], **c.tangents, **c.options))),
        Job(
            f"hvp {label}",
            lambda: arrays(attngrad.hvp(c.qkv, c.t[:3], c.dout, c.dout_dot, **lse, **c.tangents, **c.options)),
        ),
    ]


def _layer(seed: int) -> Job:
    layer = randomise(attngrad.MultiHeadAttention(24, 4, 2, bias=True, rope=100.0), seed)
    x, dy = np.random.default_rng(seed).standard_normal((2, 2, 40, 24)).astype(np.float32)

    def step() -> list[Any]:
        layer.zero_grad()  # each job has a layer of its own: one layer is for one thread
        y = layer(x, causal=True)
        dx = layer.backward(dy)
        return [y, dx, *(g.copy() for g in layer.grads.values())]

    return Job(f"layer {seed}", step)


def _torch() -> list[Job]:
    import torch

    from attngrad.torch import attention

    generator = torch.Generator().manual_seed(0)
    values = [torch.randn((2, 3, 70, 16), generator=generator) for _ in range(6)]

    def step() -> list[Any]:
        q, k, v = (x.clone().requires_grad_() for x in values[:3])
        out = attention(q, k, v, causal=True)
        first = torch.autograd.grad(out, (q, k, v), values[3], create_graph=True)
        second = torch.autograd.grad(first, (q, k, v), values[3:])
        return [x.detach().numpy() for x in (out, *first, *second)]

    return [Job("torch", step)]


def jobs(bridges: bool = True) -> list[Job]:
    """Every pass, in several dtypes and sizes, with no options and with all of them."""
    small, tiles = Shape((2,), 4, 2, 40, 50, 8, 8), Shape((2,), 4, 2, 150, 200, 32, 16)
    found = [
        *_passes("plain float32", make((), tiles).cast(np.float32)),
        *_passes("everything float64", make(EVERYTHING, small)),
        *_passes("causal bias bfloat16", make(("causal", "bias of a head"), tiles).cast(ml_dtypes.bfloat16)),
        *(_layer(seed) for seed in range(3)),
    ]
    return found + (_torch() if bridges else [])


def same(a: list[Any], b: list[Any]) -> bool:
    """Whether two results are equal bit for bit."""
    return len(a) == len(b) and all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))
