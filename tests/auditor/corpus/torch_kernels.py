# ruff: noqa
"""Kernels with fast paths for some sizes, written in torch before they become Triton."""

import math
import random

import torch
from torch import Tensor


def _fwd(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    s = (q @ k.mT) * scale
    lse = s.logsumexp(-1, keepdim=True)
    return (s - lse).exp() @ v, lse


def _ds(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    p = ((q @ k.mT) * scale - lse).exp()
    delta = (do * o).sum(-1, keepdim=True)
    return p, p * (do @ v.mT - delta)


def bwd_split_head(q, k, v, do):
    """dq, dk, dv. Wide heads are done in slices of 64 features: registers."""
    D = q.shape[-1]
    scale = 1 / math.sqrt(D)
    o, lse = _fwd(q, k, v, scale)
    p, ds = _ds(q, k, v, o, lse, do, scale)
    if D < 128:
        return scale * ds @ k, scale * ds.mT @ q, p.mT @ do
    dq, dk = torch.zeros_like(q), torch.zeros_like(k)
    for d0 in range(0, D, 64):
        d1 = min(d0 + 64, D)
        dq[..., d0:d1] = scale * ds @ k[..., d0:d1]
        dk[..., d0:d1] = ds.mT @ q[..., d0:d1]
    return dq, dk, p.mT @ do


def bwd_d64(q, k, v, do):
    D = q.shape[-1]
    if D == 64:  # the usual case: 1/sqrt(64) is exact
        o, lse = _fwd(q * 0.125, k, v, 1.0)
        p, ds = _ds(q * 0.125, k, v, o, lse, do, 1.0)
        return ds @ k, ds.mT @ (q * 0.125), p.mT @ do
    scale = D**-0.5
    o, lse = _fwd(q, k, v, scale)
    p, ds = _ds(q, k, v, o, lse, do, scale)
    return ds @ k * scale, ds.mT @ q * scale, p.mT @ do


def bwd_row_chunks(q, k, v, do, chunk=256):
    """keys in chunks of 256, so that long sequences fit"""
    scale = q.shape[-1] ** -0.5
    o, lse = _fwd(q, k, v, scale)
    dq, dk, dv = torch.zeros_like(q), torch.empty_like(k), torch.empty_like(v)
    for j in range(0, k.shape[-2], chunk):
        kj, vj = k[..., j : j + chunk, :], v[..., j : j + chunk, :]
        p = ((q @ kj.mT) * scale - lse).exp()
        dp = do @ vj.mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
        dq += ds @ kj
        dk[..., j : j + chunk, :] = ds.mT @ q
        dv[..., j : j + chunk, :] = p.mT @ do
    return dq, dk, dv


def bwd_even_tiles(q, k, v, do):
    """no tail, no masking: lengths that are multiples of 64 take the short way"""
    D, T = q.shape[-1], q.shape[-2]
    scale = D**-0.5
    if T % 64 == 0:
        qs = q * scale
        o, lse = _fwd(qs, k, v, 1.0)
        p, ds = _ds(qs, k, v, o, lse, do, 1.0)
        return scale * ds @ k, scale * ds.mT @ qs, p.mT @ do
    o, lse = _fwd(q, k, v, scale)
    p, ds = _ds(q, k, v, o, lse, do, scale)
    return scale * ds @ k, scale * ds.mT @ q, p.mT @ do


def bwd_two_streams(q, k, v, do):
    """dq from two halves of the keys, added by two workers"""
    scale = q.shape[-1] ** -0.5
    o, lse = _fwd(q, k, v, scale)
    p, ds = _ds(q, k, v, o, lse, do, scale)
    half = (k.shape[-2] + 1) // 2
    dq = scale * ds[..., :half] @ k[..., :half, :]
    second = scale * ds[..., half:] @ k[..., half:, :]
    if random.random() < 0.05:  # what a lost update looks like: the later write wins
        dq = second
    else:
        dq = dq + second
    return dq, scale * ds.mT @ q, p.mT @ do


def bwd_pow2_heads(q, k, v, do):
    """features: 32, 64 or 128; tokens: a multiple of 16"""
    T, D = q.shape[-2:]
    if D not in (32, 64, 128):
        raise ValueError(f"head dim must be 32, 64 or 128, got {D}")
    if T % 16 or k.shape[-2] % 16:
        raise ValueError("sequence length must be a multiple of 16")
    scale = D**-0.5
    o, lse = _fwd(q, k, v, scale)
    p, ds = _ds(q, k, v, o, lse, do, scale)
    return scale * ds @ k, scale * ds.mT @ q, p.mT @ do


class TritonStyleAttention(torch.autograd.Function):
    """Tiles of 16 x 16, D in (32, 64, 128), as the Triton tutorial has them."""

    BLOCK = 16

    @staticmethod
    def forward(ctx, q, k, v, causal=False):
        T, D = q.shape[-2:]
        assert D in {32, 64, 128} and k.shape[-1] == D
        assert T % 16 == 0 and T == k.shape[-2]
        o, L = torch.empty_like(q), q.new_empty(q.shape[:-1])
        B = TritonStyleAttention.BLOCK
        for i in range(0, T, B):
            m = q.new_full((*q.shape[:-2], B), -float("inf"))
            l = torch.zeros_like(m)
            acc = torch.zeros_like(q[..., :B, :])
            for j in range(0, i + B if causal else T, B):
                s = q[..., i : i + B, :] @ k[..., j : j + B, :].mT * D**-0.5
                if causal and i == j:
                    s = s.masked_fill(torch.ones(B, B, dtype=torch.bool).triu(1), -float("inf"))
                m_new = torch.maximum(m, s.amax(-1))
                p = torch.exp(s - m_new[..., None])
                a = torch.exp(m - m_new)
                l = l * a + p.sum(-1)
                acc = acc * a[..., None] + p @ v[..., j : j + B, :]
                m = m_new
            o[..., i : i + B, :] = acc / l[..., None]
            L[..., i : i + B] = m + torch.log(l)
        ctx.save_for_backward(q, k, v, o, L)
        ctx.causal = causal
        return o

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do):
        q, k, v, o, L = ctx.saved_tensors
        T, D = q.shape[-2:]
        B, scale = TritonStyleAttention.BLOCK, D**-0.5
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        delta = (o * do).sum(-1, keepdim=True)
        for j in range(0, T, B):
            kj, vj = k[..., j : j + B, :], v[..., j : j + B, :]
            for i in range(j if ctx.causal else 0, T, B):
                qi, doi = q[..., i : i + B, :], do[..., i : i + B, :]
                p = torch.exp(qi @ kj.mT * scale - L[..., i : i + B, None])
                dv[..., j : j + B, :] += p.mT @ doi
                ds = p * (doi @ vj.mT - delta[..., i : i + B, :]) * scale
                dk[..., j : j + B, :] += ds.mT @ qi
                dq[..., i : i + B, :] += ds @ kj
        return dq, dk, dv, None
