"""A dense attention in PyTorch with every option, written apart from ours; its derivatives are PyTorch's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import attngrad


def attention(q: Any, k: Any, v: Any, bias: Any = None, sinks: Any = None, **o: Any) -> tuple[Any, Any]:
    """``out, lse`` of (B, H, T, D) tensors."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    t, s = q.shape[-2], k.shape[-2]
    scale = o.get("scale")
    z = torch.einsum("bhtd,bhsd->bhts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if o.get("softcap") is not None:
        z = o["softcap"] * torch.tanh(z / o["softcap"])
    if bias is not None:
        z = z + bias
    hidden = torch.zeros(z.shape, dtype=torch.bool)
    offset = o.get("offset")
    offset = torch.as_tensor(s - t if offset is None else offset).reshape(-1, 1, 1, 1)
    place = torch.arange(t)[:, None] + offset
    keys = torch.arange(s)[None, :]
    if o.get("causal"):
        hidden = hidden | (keys > place)
    left, right = o.get("window") or (None, None)
    if left is not None:
        hidden = hidden | (keys < place - left)
    if right is not None:
        hidden = hidden | (keys > place + right)
    if o.get("mask") is not None:
        hidden = hidden | ~torch.as_tensor(o["mask"])
    if o.get("segments") is not None:
        a, b = (torch.as_tensor(ids) for ids in o["segments"])
        hidden = hidden | (a[:, None, :, None] != b[:, None, None, :])
    if bias is not None:
        hidden = hidden | (bias.detach() == -torch.inf)
    z = torch.where(hidden, -1e300, z)  # finite, so that autograd meets no inf - inf
    if sinks is not None:
        z = torch.cat([z, sinks[:, None, None].expand(*z.shape[:-1], 1)], dim=-1)
    lse = torch.logsumexp(z, dim=-1)
    p = torch.softmax(z, dim=-1)[..., :s]
    p = torch.where(hidden, 0.0, p)
    if o.get("dropout"):
        keep = attngrad.dropout_mask(tuple(p.shape), o["dropout"], o["seed"])
        p = p * torch.as_tensor(keep / (1.0 - o["dropout"]))
    empty = hidden.all(-1)
    if sinks is None:
        lse = torch.where(empty, -torch.inf, lse)
    return p @ v, lse


def tensors(*arrays: Any) -> list[Any]:
    """float64 tensors that ask for gradients, sharing nothing with the arrays; None stays None."""
    return [None if a is None else torch.tensor(np.asarray(a), dtype=torch.float64, requires_grad=True) for a in arrays]
