"""The steps of the layer, around those of attention: y = merge(attention(split(x w))) w_o."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attngrad.auditor.steps import Undefined
from attngrad.reference.dense import matmul, transpose
from attngrad.reference.table import Step, parameters


def split_heads(x: Any, heads: int) -> Any:
    """(B, T, H D) to (B, H, T, D)."""
    batch, tokens, width = x.shape
    return x.reshape(batch, tokens, heads, width // heads).transpose(0, 2, 1, 3)


def merge_heads(x: Any) -> Any:
    """(B, H, T, D) to (B, T, H D)."""
    batch, heads, tokens, width = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch, tokens, heads * width)


def per_token(x: Any, w: Any) -> Any:
    """x w; a mistake before it may have given a factor another shape, and then there is no product."""
    if x.shape[-1] != w.shape[-2]:
        raise Undefined
    return matmul(x, w)


def outer(x: Any, dx: Any) -> Any:
    """x^T dx, summed over batch and tokens."""
    return per_token(transpose(x.reshape(-1, x.shape[-1])), dx.reshape(-1, dx.shape[-1]))


def _self_attention(query: Any, key: Any, value: Any, dquery: Any, dkey: Any, dvalue: Any) -> Any:
    """The gradient of the one input of self-attention."""
    if key.shape != query.shape or not (np.array_equal(key, query) and np.array_equal(value, query)):
        raise Undefined
    return dquery + dkey + dvalue


_STEPS: dict[str, Callable[..., Any]] = {
    # how heads are split and merged, as functions; in the backward each inverts the other
    "split": lambda: split_heads,
    "merge": lambda: merge_heads,
    "split_back": lambda: split_heads,
    "merge_back": lambda: merge_heads,
    # forward
    "q": lambda query, w_q, split, num_heads: split(per_token(query, w_q), num_heads),
    "k": lambda key, w_k, split, num_kv_heads: split(per_token(key, w_k), num_kv_heads),
    "v": lambda value, w_v, split, num_kv_heads: split(per_token(value, w_v), num_kv_heads),
    "merged": lambda out, merge: merge(out),
    "y": lambda merged, w_o: per_token(merged, w_o),
    # backward, with dW of an input and an output gradient, and dX of an output gradient and W, as functions
    "dmerged": lambda dy, w_o: per_token(dy, transpose(w_o)),
    "dout": lambda dmerged, split_back, num_heads: split_back(dmerged, num_heads),
    "weight_gradient": lambda: outer,
    "input_gradient": lambda: lambda dx, w: per_token(dx, transpose(w)),
    "dq_flat": lambda dq, merge_back: merge_back(dq),
    "dk_flat": lambda dk, merge_back: merge_back(dk),
    "dv_flat": lambda dv, merge_back: merge_back(dv),
    "dw_o": lambda weight_gradient, merged, dy: weight_gradient(merged, dy),
    "dw_q": lambda weight_gradient, query, dq_flat: weight_gradient(query, dq_flat),
    "dw_k": lambda weight_gradient, key, dk_flat: weight_gradient(key, dk_flat),
    "dw_v": lambda weight_gradient, value, dv_flat: weight_gradient(value, dv_flat),
    "dquery": lambda input_gradient, dq_flat, w_q: input_gradient(dq_flat, w_q),
    "dkey": lambda input_gradient, dk_flat, w_k: input_gradient(dk_flat, w_k),
    "dvalue": lambda input_gradient, dv_flat, w_v: input_gradient(dv_flat, w_v),
    "dx": _self_attention,
}

LAYER_STEPS = {name: Step(function, parameters(function)) for name, function in _STEPS.items()}
"""The steps that the layer adds, by name; their parameters are what they read."""
