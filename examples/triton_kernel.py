"""A Triton kernel under audit, without a GPU: Triton's interpreter runs it, the auditor judges it.

One program per query (forward, dQ) and one per key (dK, dV), keys and queries in blocks: as plain as a kernel can be,
and with what goes wrong in real ones: sizes that no block divides, the maximum under exp, delta, and the scale.
``backward`` under ``create_graph=True`` raises: without that line it would return gradients that nothing can
differentiate, silently.

Run it: ``TRITON_INTERPRET=1 attngrad audit examples/triton_kernel.py:attention --framework torch`` (with triton)
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 16


@triton.jit
def forward_kernel(q, k, v, out, lse, scale, n_q, n_k, d, e, BLOCK: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """out_i = sum_j exp(s_ij - lse_i) v_j, with a running maximum."""
    i, head = tl.program_id(0), tl.program_id(1)
    f = tl.arange(0, WIDTH)
    row = tl.load(q + (head * n_q + i) * d + f, f < d, 0.0)
    top, total = row.to(row.dtype).sum() * 0.0 - 1e30, row.sum() * 0.0
    acc = row * 0.0
    for start in range(0, n_k, BLOCK):
        j = start + tl.arange(0, BLOCK)
        keys = tl.load(k + (head * n_k + j[:, None]) * d + f[None, :], (j[:, None] < n_k) & (f[None, :] < d), 0.0)
        vals = tl.load(v + (head * n_k + j[:, None]) * e + f[None, :], (j[:, None] < n_k) & (f[None, :] < e), 0.0)
        s = tl.where(j < n_k, scale * tl.sum(keys * row[None, :], 1), -1e30)
        new = tl.maximum(top, tl.max(s, 0))
        p = tl.where(j < n_k, tl.exp(s - new), 0.0)
        keep = tl.exp(top - new)
        total = total * keep + tl.sum(p, 0)
        acc = acc * keep + tl.sum(p[:, None] * vals, 0)
        top = new
    tl.store(out + (head * n_q + i) * e + f, acc / total, f < e)
    tl.store(lse + head * n_q + i, top + tl.log(total))


@triton.jit
def dq_kernel(q, k, v, dout, out, lse, dq, scale, n_q, n_k, d, e, BLOCK: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """dq_i = scale sum_j p_ij (dp_ij - delta_i) k_j."""
    i, head = tl.program_id(0), tl.program_id(1)
    f = tl.arange(0, WIDTH)
    at = head * n_q + i
    row = tl.load(q + at * d + f, f < d, 0.0)
    do = tl.load(dout + at * e + f, f < e, 0.0)
    delta = tl.sum(do * tl.load(out + at * e + f, f < e, 0.0), 0)
    acc = row * 0.0
    for start in range(0, n_k, BLOCK):
        j = start + tl.arange(0, BLOCK)
        keys = tl.load(k + (head * n_k + j[:, None]) * d + f[None, :], (j[:, None] < n_k) & (f[None, :] < d), 0.0)
        vals = tl.load(v + (head * n_k + j[:, None]) * e + f[None, :], (j[:, None] < n_k) & (f[None, :] < e), 0.0)
        s = scale * tl.sum(keys * row[None, :], 1)
        p = tl.where(j < n_k, tl.exp(s - tl.load(lse + at)), 0.0)
        ds = p * (tl.sum(vals * do[None, :], 1) - delta)
        acc += scale * tl.sum(ds[:, None] * keys, 0)
    tl.store(dq + at * d + f, acc, f < d)


@triton.jit
def dkv_kernel(q, k, v, dout, out, lse, dk, dv, scale, n_q, n_k, d, e, BLOCK: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """dk_j = scale sum_i ds_ij q_i, dv_j = sum_i p_ij do_i."""
    j, head = tl.program_id(0), tl.program_id(1)
    f = tl.arange(0, WIDTH)
    at = head * n_k + j
    key = tl.load(k + at * d + f, f < d, 0.0)
    val = tl.load(v + at * e + f, f < e, 0.0)
    acc_k, acc_v = key * 0.0, val * 0.0
    for start in range(0, n_q, BLOCK):
        i = start + tl.arange(0, BLOCK)
        rows = tl.load(q + (head * n_q + i[:, None]) * d + f[None, :], (i[:, None] < n_q) & (f[None, :] < d), 0.0)
        do = tl.load(dout + (head * n_q + i[:, None]) * e + f[None, :], (i[:, None] < n_q) & (f[None, :] < e), 0.0)
        o = tl.load(out + (head * n_q + i[:, None]) * e + f[None, :], (i[:, None] < n_q) & (f[None, :] < e), 0.0)
        s = scale * tl.sum(rows * key[None, :], 1)
        p = tl.where(i < n_q, tl.exp(s - tl.load(lse + head * n_q + i, i < n_q, 0.0)), 0.0)
        ds = p * (tl.sum(do * val[None, :], 1) - tl.sum(do * o, 1))
        acc_k += scale * tl.sum(ds[:, None] * rows, 0)
        acc_v += tl.sum(p[:, None] * do, 0)
    tl.store(dk + at * d + f, acc_k, f < d)
    tl.store(dv + at * e + f, acc_v, f < e)


class Attention(torch.autograd.Function):
    """softmax(q k^T / sqrt(d)) v by the kernels above."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Save what the backward reads."""
        if q.shape[:2] != k.shape[:2]:
            raise ValueError("attention: q and k must have equal batches and heads.")
        q, k, v = (x.contiguous() for x in (q, k, v))
        b, h, n_q, d = q.shape
        n_k, e = v.shape[-2:]
        out, lse = q.new_empty(b, h, n_q, e), q.new_empty(b, h, n_q)
        ctx.sizes = (d**-0.5, n_q, n_k, d, e, BLOCK, max(triton.next_power_of_2(d), triton.next_power_of_2(e)))
        forward_kernel[(n_q, b * h)](q, k, v, out, lse, *ctx.sizes)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """First order only, and it says so."""
        if torch.is_grad_enabled():
            raise NotImplementedError("attention: the backward pass has no derivative; use attngrad.torch.attention.")
        q, k, v, out, lse = ctx.saved_tensors
        dout = dout.contiguous()
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        heads = q.shape[0] * q.shape[1]
        dq_kernel[(q.shape[-2], heads)](q, k, v, dout, out, lse, dq, *ctx.sizes)
        dkv_kernel[(k.shape[-2], heads)](q, k, v, dout, out, lse, dk, dv, *ctx.sizes)
        return dq, dk, dv


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention on (batch, heads, tokens, features)."""
    return Attention.apply(q, k, v)  # type: ignore[no-any-return,no-untyped-call]
