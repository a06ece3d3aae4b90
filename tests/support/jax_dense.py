"""A dense attention in jax.numpy with every option, written apart from ours; its derivatives are JAX's own."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

import attngrad


def attention(q: Any, k: Any, v: Any, bias: Any = None, sinks: Any = None, **o: Any) -> tuple[Any, Any]:
    """``out, lse`` of (B, H, T, D) arrays; lse is 0 where a query sees nothing, so that it can be differentiated."""
    group = q.shape[1] // k.shape[1]
    k, v = jnp.repeat(k, group, 1), jnp.repeat(v, group, 1)
    t, s = q.shape[-2], k.shape[-2]
    scale = o.get("scale")
    z = jnp.einsum("bhtd,bhsd->bhts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if o.get("softcap") is not None:
        z = o["softcap"] * jnp.tanh(z / o["softcap"])
    if bias is not None:
        z = z + jnp.where(bias == -jnp.inf, 0.0, bias)
    hidden = jnp.zeros(z.shape, bool)
    offset = o.get("offset")
    offset = jnp.asarray(s - t if offset is None else offset).reshape(-1, 1, 1, 1)
    place, keys = jnp.arange(t)[:, None] + offset, jnp.arange(s)[None, :]
    if o.get("causal"):
        hidden = hidden | (keys > place)
    left, right = o.get("window") or (None, None)
    if left is not None:
        hidden = hidden | (keys < place - left)
    if right is not None:
        hidden = hidden | (keys > place + right)
    if o.get("mask") is not None:
        hidden = hidden | ~o["mask"]
    if o.get("segments") is not None:
        a, b = o["segments"]
        hidden = hidden | (a[:, None, :, None] != b[:, None, None, :])
    if bias is not None:
        hidden = hidden | (bias == -jnp.inf)
    e = jnp.where(hidden, 0.0, jnp.exp(z))  # the scores of the table are small
    total = e.sum(-1)
    if sinks is not None:
        total = total + jnp.exp(sinks)[:, None]
    empty = total == 0
    total = jnp.where(empty, 1.0, total)
    p = e / total[..., None]
    if o.get("dropout"):
        keep = attngrad.dropout_mask(tuple(p.shape), o["dropout"], o["seed"])
        p = p * np.asarray(keep / (1.0 - o["dropout"]))
    return p @ v, jnp.where(empty, 0.0, jnp.log(total))
