# ruff: noqa: D103 - a step is its formula; where that does not say it, it has a docstring
"""The steps of the layer, around those of attention: y = merge(attention(split(x w))) w_o."""

from __future__ import annotations

from typing import Any

import numpy as np

from attngrad.auditor.pipeline import Pipeline, Undefined, layer_step
from attngrad.reference.dense import matmul, transpose


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


@layer_step
def split(p: Pipeline) -> Any:
    """How heads are split, as a function."""
    return split_heads


@layer_step
def merge(p: Pipeline) -> Any:
    """How heads are merged, as a function."""
    return merge_heads


@layer_step
def split_back(p: Pipeline) -> Any:
    """How the backward splits, which inverts the merge."""
    return split_heads


@layer_step
def merge_back(p: Pipeline) -> Any:
    return merge_heads


@layer_step
def q(p: Pipeline) -> Any:
    return p.split(per_token(p.query, p.w_q), p.num_heads)


@layer_step
def k(p: Pipeline) -> Any:
    return p.split(per_token(p.key, p.w_k), p.num_kv_heads)


@layer_step
def v(p: Pipeline) -> Any:
    return p.split(per_token(p.value, p.w_v), p.num_kv_heads)


@layer_step
def merged(p: Pipeline) -> Any:
    return p.merge(p.out)


@layer_step
def y(p: Pipeline) -> Any:
    return per_token(p.merged, p.w_o)


@layer_step
def dmerged(p: Pipeline) -> Any:
    return per_token(p.dy, transpose(p.w_o))


@layer_step
def dout(p: Pipeline) -> Any:
    return p.split_back(p.dmerged, p.num_heads)


def outer(x: Any, dx: Any) -> Any:
    """x^T dx, summed over batch and tokens."""
    return per_token(transpose(x.reshape(-1, x.shape[-1])), dx.reshape(-1, dx.shape[-1]))


@layer_step
def weight_gradient(p: Pipeline) -> Any:
    """How dW comes from an input and an output gradient, as a function."""
    return outer


@layer_step
def input_gradient(p: Pipeline) -> Any:
    """How dX comes from an output gradient, W and dW, as a function."""
    return lambda dx, w, dw: per_token(dx, transpose(w))


@layer_step
def dq_flat(p: Pipeline) -> Any:
    return p.merge_back(p.dq)


@layer_step
def dk_flat(p: Pipeline) -> Any:
    return p.merge_back(p.dk)


@layer_step
def dv_flat(p: Pipeline) -> Any:
    return p.merge_back(p.dv)


@layer_step
def dw_o(p: Pipeline) -> Any:
    return p.weight_gradient(p.merged, p.dy)


@layer_step
def dw_q(p: Pipeline) -> Any:
    return p.weight_gradient(p.query, p.dq_flat)


@layer_step
def dw_k(p: Pipeline) -> Any:
    return p.weight_gradient(p.key, p.dk_flat)


@layer_step
def dw_v(p: Pipeline) -> Any:
    return p.weight_gradient(p.value, p.dv_flat)


@layer_step
def dquery(p: Pipeline) -> Any:
    return p.input_gradient(p.dq_flat, p.w_q, lambda: p.dw_q)


@layer_step
def dkey(p: Pipeline) -> Any:
    return p.input_gradient(p.dk_flat, p.w_k, lambda: p.dw_k)


@layer_step
def dvalue(p: Pipeline) -> Any:
    return p.input_gradient(p.dv_flat, p.w_v, lambda: p.dw_v)


@layer_step
def dx(p: Pipeline) -> Any:
    """The gradient of the one input of self-attention."""
    if p.key.shape != p.query.shape or not (np.array_equal(p.key, p.query) and np.array_equal(p.value, p.query)):
        raise Undefined
    return p.dquery + p.dkey + p.dvalue
