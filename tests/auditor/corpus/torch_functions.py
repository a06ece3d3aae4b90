# ruff: noqa
"""torch.autograd.Function, as people write them to learn FlashAttention or to save memory."""

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class SDPA(Function):
    """Recomputes everything from q, k, v."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v

    @staticmethod
    def backward(ctx, do):
        q, k, v = ctx.saved_tensors
        scale = q.shape[-1] ** -0.5
        p = torch.softmax(q @ k.mT * scale, -1)
        dp = do @ v.mT
        ds = p * (dp - (dp * p).sum(-1, keepdim=True))
        return ds @ k * scale, ds.mT @ q * scale, p.mT @ do


class FlashAttnRef(Function):
    """Keeps only the log-sum-exp, as the paper does."""

    @staticmethod
    def forward(ctx, q, k, v):
        scale = q.shape[-1] ** -0.5
        s = q @ k.transpose(-2, -1) * scale
        lse = torch.logsumexp(s, dim=-1, keepdim=True)
        o = torch.exp(s - lse) @ v
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.scale = scale
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        p = torch.exp(q @ k.transpose(-2, -1) * ctx.scale - lse)
        dv = p.transpose(-2, -1) @ do
        dp = do @ v.transpose(-2, -1)
        delta = (do * o).sum(-1, keepdim=True)
        ds = p * (dp - delta) * ctx.scale
        return ds @ k, ds.transpose(-2, -1) @ q, dv


class FlashAttnOnce(Function):
    """The same, first order only."""

    @staticmethod
    def forward(ctx, q, k, v):
        scale = q.shape[-1] ** -0.5
        s = q @ k.transpose(-2, -1) * scale
        lse = torch.logsumexp(s, dim=-1, keepdim=True)
        o = torch.exp(s - lse) @ v
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.scale = scale
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        p = torch.exp(q @ k.transpose(-2, -1) * ctx.scale - lse)
        ds = p * (do @ v.transpose(-2, -1) - (do * o).sum(-1, keepdim=True)) * ctx.scale
        return ds @ k, ds.transpose(-2, -1) @ q, p.transpose(-2, -1) @ do


def _kernel_backward(q, k, v, o, lse, do, scale, causal):
    """stands where the compiled extension is called"""
    s = q @ k.mT * scale
    if causal:
        n, m = s.shape[-2:]
        s = s.masked_fill(torch.ones(n, m, dtype=torch.bool, device=s.device).triu(m - n + 1), float("-inf"))
    p = torch.exp(s - lse.unsqueeze(-1))
    ds = p * (do @ v.mT - (do * o).sum(-1, keepdim=True)) * scale
    return ds @ k, ds.mT @ q, p.mT @ do


class _KernelAttention(Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, softmax_scale):
        scale = softmax_scale if softmax_scale is not None else q.size(-1) ** -0.5
        s = q @ k.mT * scale
        if causal:
            n, m = s.shape[-2:]
            s = s.masked_fill(torch.ones(n, m, dtype=torch.bool, device=s.device).triu(m - n + 1), float("-inf"))
        lse = torch.logsumexp(s, -1)
        lse = lse.masked_fill(lse == float("-inf"), 0.0)  # rows that see nothing
        o = torch.exp(s - lse.unsqueeze(-1)) @ v
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.causal, ctx.scale = causal, scale
        return o

    @staticmethod
    def backward(ctx, dout):
        with torch.no_grad():  # raw kernel call
            grads = _kernel_backward(*ctx.saved_tensors, dout, ctx.scale, ctx.causal)
        return *grads, None, None


def kernel_attention(q, k, v, causal=False, softmax_scale=None):
    return _KernelAttention.apply(q, k, v, causal, softmax_scale)


class AttentionWithJVP(Function):
    """Reverse and forward mode."""

    @staticmethod
    def forward(q, k, v):
        return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g):
        q, k, v = ctx.saved_tensors
        c = q.shape[-1] ** -0.5
        p = torch.softmax(q @ k.mT * c, -1)
        gp = g @ v.mT
        gs = p * (gp - (gp * p).sum(-1, keepdim=True)) * c
        return gs @ k, gs.mT @ q, p.mT @ g

    @staticmethod
    def jvp(ctx, tq, tk, tv):
        q, k, v = ctx.saved_tensors
        c = q.shape[-1] ** -0.5
        p = torch.softmax(q @ k.mT * c, -1)
        ts = (tq @ k.mT + q @ tk.mT) * c
        tp = p * (ts - (ts * p).sum(-1, keepdim=True))
        return tp @ v + p @ tv


class AttentionFastJVP(AttentionWithJVP):
    """Saves memory in forward mode."""

    @staticmethod
    def jvp(ctx, tq, tk, tv):
        return AttentionWithJVP.jvp(ctx, tq, tk, tv).detach()


class AttentionJVPv0(AttentionWithJVP):
    @staticmethod
    def jvp(ctx, tq, tk, tv):
        q, k, v = ctx.saved_tensors
        c = q.shape[-1] ** -0.5
        p = torch.softmax(q @ k.mT * c, -1)
        ts = (tq @ k.mT + q @ tk.mT) * c
        return (p * ts) @ v + p @ tv


class WrongOrder(Function):
    @staticmethod
    def forward(ctx, query, key, value):
        ctx.save_for_backward(query, key, value)
        w = torch.softmax(query @ key.mT / query.size(-1) ** 0.5, dim=-1)
        return w @ value

    @staticmethod
    def backward(ctx, grad):
        query, key, value = ctx.saved_tensors
        w = torch.softmax(query @ key.mT / query.size(-1) ** 0.5, dim=-1)
        grad_w = grad @ value.mT
        grad_scores = w * (grad_w - (grad_w * w).sum(-1, keepdim=True)) / query.size(-1) ** 0.5
        grad_query, grad_key, grad_value = grad_scores @ key, grad_scores.mT @ query, w.mT @ grad
        return grad_query, grad_value, grad_key


class HalfKernel(Function):
    """Only for half and single precision, like the kernel that it wraps."""

    @staticmethod
    def forward(ctx, q, k, v):
        if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise TypeError(f"HalfKernel supports fp16, bf16 and fp32, not {q.dtype}")
        ctx.save_for_backward(q, k, v)
        p = torch.softmax((q.float() @ k.float().mT) * q.shape[-1] ** -0.5, -1)
        return (p @ v.float()).to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v = (x.float() for x in ctx.saved_tensors)
        do = do.float()
        p = torch.softmax((q @ k.mT) * q.shape[-1] ** -0.5, -1)
        dp = do @ v.mT
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        return tuple(g.to(x.dtype) for g, x in zip((ds @ k, ds.mT @ q, p.mT @ do), ctx.saved_tensors))


def attention_fp32(q, k, v):
    """always in single precision: fast enough, exact enough"""
    q, k, v = q.to(torch.float32), k.to(torch.float32), v.to(torch.float32)
    return torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, dim=-1) @ v


def dropout_attention(q, k, v, dropout_p=0.0, seed=0):
    """dropout from a generator of its own"""
    p = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, dim=-1)
    if dropout_p > 0:
        g = torch.Generator(device=q.device).manual_seed(seed)
        keep = torch.rand(p.shape, generator=g, device=q.device) >= dropout_p
        p = p * keep / (1 - dropout_p)
    return p @ v
