# ruff: noqa: D103 - a step is its formula; where that does not say it, it has a docstring
"""The steps of the layer, around those of attention: y = merge(attention(split(x w))) w_o."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attngrad.auditor.steps import Undefined
from attngrad.reference.dense import matmul, transpose
from attngrad.reference.table import Step, parameters

LAYER_STEPS: dict[str, Step] = {}
"""The steps that the layer adds, by name; their parameters are what they read."""


def layer_step(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a step of the layer under its own name."""
    LAYER_STEPS[function.__name__] = Step(function, parameters(function))
    return function


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


@layer_step
def split() -> Any:
    """How heads are split, as a function."""
    return split_heads


@layer_step
def merge() -> Any:
    """How heads are merged, as a function."""
    return merge_heads


@layer_step
def split_back() -> Any:
    """How the backward splits, which inverts the merge."""
    return split_heads


@layer_step
def merge_back() -> Any:
    return merge_heads


@layer_step
def q(query: Any, w_q: Any, split: Any, num_heads: int) -> Any:
    return split(per_token(query, w_q), num_heads)


@layer_step
def k(key: Any, w_k: Any, split: Any, num_kv_heads: int) -> Any:
    return split(per_token(key, w_k), num_kv_heads)


@layer_step
def v(value: Any, w_v: Any, split: Any, num_kv_heads: int) -> Any:
    return split(per_token(value, w_v), num_kv_heads)


@layer_step
def merged(out: Any, merge: Any) -> Any:
    return merge(out)


@layer_step
def y(merged: Any, w_o: Any) -> Any:
    return per_token(merged, w_o)


@layer_step
def dmerged(dy: Any, w_o: Any) -> Any:
    return per_token(dy, transpose(w_o))


@layer_step
def dout(dmerged: Any, split_back: Any, num_heads: int) -> Any:
    return split_back(dmerged, num_heads)


@layer_step
def weight_gradient() -> Any:
    """How dW comes from an input and an output gradient, as a function."""
    return outer


@layer_step
def input_gradient() -> Any:
    """How dX comes from an output gradient and W, as a function."""
    return lambda dx, w: per_token(dx, transpose(w))


@layer_step
def dq_flat(dq: Any, merge_back: Any) -> Any:
    return merge_back(dq)


@layer_step
def dk_flat(dk: Any, merge_back: Any) -> Any:
    return merge_back(dk)


@layer_step
def dv_flat(dv: Any, merge_back: Any) -> Any:
    return merge_back(dv)


@layer_step
def dw_o(weight_gradient: Any, merged: Any, dy: Any) -> Any:
    return weight_gradient(merged, dy)


@layer_step
def dw_q(weight_gradient: Any, query: Any, dq_flat: Any) -> Any:
    return weight_gradient(query, dq_flat)


@layer_step
def dw_k(weight_gradient: Any, key: Any, dk_flat: Any) -> Any:
    return weight_gradient(key, dk_flat)


@layer_step
def dw_v(weight_gradient: Any, value: Any, dv_flat: Any) -> Any:
    return weight_gradient(value, dv_flat)


@layer_step
def dquery(input_gradient: Any, dq_flat: Any, w_q: Any) -> Any:
    return input_gradient(dq_flat, w_q)


@layer_step
def dkey(input_gradient: Any, dk_flat: Any, w_k: Any) -> Any:
    return input_gradient(dk_flat, w_k)


@layer_step
def dvalue(input_gradient: Any, dv_flat: Any, w_v: Any) -> Any:
    return input_gradient(dv_flat, w_v)


@layer_step
def dx(query: Any, key: Any, value: Any, dquery: Any, dkey: Any, dvalue: Any) -> Any:
    """The gradient of the one input of self-attention."""
    if key.shape != query.shape or not (np.array_equal(key, query) and np.array_equal(value, query)):
        raise Undefined
    return dquery + dkey + dvalue
