# ruff: noqa
"""Layers with forward(x) and backward(dy), from frameworks written over a weekend."""

import numpy as np


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


class SelfAttention:
    """One head; x (B, T, C)."""

    def __init__(self, dim, seed=0):
        rng = np.random.default_rng(seed)
        self.Wq, self.Wk, self.Wv = (rng.normal(0, dim**-0.5, (dim, dim)) for _ in range(3))

    def forward(self, x):
        self.x = x
        self.q, self.k, self.v = x @ self.Wq, x @ self.Wk, x @ self.Wv
        self.scale = 1 / np.sqrt(self.q.shape[-1])
        self.att = softmax(self.q @ self.k.transpose(0, 2, 1) * self.scale)
        return self.att @ self.v

    def grad_qkv(self, dy):
        dv = self.att.transpose(0, 2, 1) @ dy
        datt = dy @ self.v.transpose(0, 2, 1)
        ds = self.att * (datt - (datt * self.att).sum(-1, keepdims=True)) * self.scale
        return ds @ self.k, ds.transpose(0, 2, 1) @ self.q, dv

    def backward(self, dy):
        dq, dk, dv = self.grad_qkv(dy)
        self.dWq = np.einsum("btc,btd->cd", self.x, dq)
        self.dWk = np.einsum("btc,btd->cd", self.x, dk)
        self.dWv = np.einsum("btc,btd->cd", self.x, dv)
        return dq @ self.Wq.T + dk @ self.Wk.T + dv @ self.Wv.T


class SelfAttentionNoW(SelfAttention):
    def backward(self, dy):
        dq, dk, dv = self.grad_qkv(dy)
        self.dWq = np.einsum("btc,btd->cd", self.x, dq)
        self.dWk = np.einsum("btc,btd->cd", self.x, dk)
        self.dWv = np.einsum("btc,btd->cd", self.x, dv)
        return dq + dk + dv


class SelfAttentionFlat(SelfAttention):
    """Weight gradients as one big product over all tokens."""

    def backward(self, dy):
        B, T, C = self.x.shape
        dq, dk, dv = self.grad_qkv(dy)
        xt = self.x.transpose(0, 2, 1).reshape(C, B * T)
        self.dWq = xt @ dq.reshape(B * T, -1)
        self.dWk = xt @ dk.reshape(B * T, -1)
        self.dWv = xt @ dv.reshape(B * T, -1)
        return dq @ self.Wq.T + dk @ self.Wk.T + dv @ self.Wv.T


class SelfAttentionSGD(SelfAttention):
    """Learns while it goes."""

    lr = 0.1

    def backward(self, dy):
        dq, dk, dv = self.grad_qkv(dy)
        self.dWq = np.einsum("btc,btd->cd", self.x, dq)
        self.dWk = np.einsum("btc,btd->cd", self.x, dk)
        self.dWv = np.einsum("btc,btd->cd", self.x, dv)
        self.Wq = self.Wq - self.lr * self.dWq
        self.Wk = self.Wk - self.lr * self.dWk
        self.Wv = self.Wv - self.lr * self.dWv
        return dq @ self.Wq.T + dk @ self.Wk.T + dv @ self.Wv.T


class Parameter:
    def __init__(self, value):
        self.value = value
        self.grad = np.zeros_like(value)


class Linear:
    """y = x weight^T + bias, weight (out, in) as in torch"""

    def __init__(self, n_in, n_out, rng):
        self.weight = rng.uniform(-1, 1, (n_out, n_in)) / np.sqrt(n_in)
        self.bias = rng.uniform(-1, 1, n_out) / np.sqrt(n_in)

    def forward(self, x):
        self.x = x
        return x @ self.weight.T + self.bias

    def backward(self, dy):
        dy2, x2 = dy.reshape(-1, dy.shape[-1]), self.x.reshape(-1, self.x.shape[-1])
        self.grad_weight = dy2.T @ x2
        self.grad_bias = dy2.sum(0)
        return dy @ self.weight


class MultiHeadAttention:
    """x (B, T, d_model)"""

    def __init__(self, d_model, n_heads, seed=1):
        rng = np.random.default_rng(seed)
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (Linear(d_model, d_model, rng) for _ in range(4))

    def split(self, x):
        B, T, _ = x.shape
        return x.reshape(B, T, self.n_heads, self.d_head).transpose(0, 2, 1, 3)

    def merge(self, x):
        B, H, T, D = x.shape
        return x.transpose(0, 2, 1, 3).reshape(B, T, H * D)

    def forward(self, x):
        self.q, self.k, self.v = (self.split(p.forward(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
        self.p = softmax(self.q @ self.k.swapaxes(2, 3) / np.sqrt(self.d_head))
        return self.out_proj.forward(self.merge(self.p @ self.v))

    def backward(self, dy):
        do = self.split(self.out_proj.backward(dy))
        dv = self.p.swapaxes(2, 3) @ do
        dp = do @ self.v.swapaxes(2, 3)
        ds = self.p * (dp - (dp * self.p).sum(-1, keepdims=True)) / np.sqrt(self.d_head)
        dq, dk = ds @ self.k, ds.swapaxes(2, 3) @ self.q
        return (
            self.q_proj.backward(self.merge(dq))
            + self.k_proj.backward(self.merge(dk))
            + self.v_proj.backward(self.merge(dv))
        )


class MultiHeadAttentionReshape(MultiHeadAttention):
    def merge(self, x):
        B, H, T, D = x.shape
        return x.reshape(B, T, H * D)


class PackedAttention:
    """wqkv (C, 3C) and wo (C, C) in Parameters; gradients go to .grad"""

    def __init__(self, dim=16, heads=2, seed=2):
        rng = np.random.default_rng(seed)
        self.dim, self.heads = dim, heads
        self.wqkv = Parameter(rng.normal(size=(dim, 3 * dim)) / np.sqrt(dim))
        self.wo = Parameter(rng.normal(size=(dim, dim)) / np.sqrt(dim))

    def forward(self, x):
        B, T, C = x.shape
        qkv = (x @ self.wqkv.value).reshape(B, T, 3, self.heads, C // self.heads)
        q, k, v = qkv.transpose(2, 0, 3, 1, 4)
        att = softmax(q @ k.swapaxes(-1, -2) * (C // self.heads) ** -0.5)
        y = (att @ v).transpose(0, 2, 1, 3).reshape(B, T, C)
        self.cache = x, q, k, v, att, y
        return y @ self.wo.value

    def backward(self, dout):
        x, q, k, v, att, y = self.cache
        B, T, C = x.shape
        self.wo.grad = np.tensordot(y, dout, axes=((0, 1), (0, 1)))
        dy = (dout @ self.wo.value.T).reshape(B, T, self.heads, -1).transpose(0, 2, 1, 3)
        datt = dy @ v.swapaxes(-1, -2)
        ds = att * (datt - (att * datt).sum(-1, keepdims=True)) * q.shape[-1] ** -0.5
        dqkv = np.stack([ds @ k, ds.swapaxes(-1, -2) @ q, att.swapaxes(-1, -2) @ dy])
        dqkv = dqkv.transpose(1, 3, 0, 2, 4).reshape(B, T, 3 * C)
        self.wqkv.grad = np.tensordot(x, dqkv, axes=((0, 1), (0, 1)))
        return dqkv @ self.wqkv.value.T


class PackedAttentionShort(PackedAttention):
    def backward(self, dout):
        x, q, k, v, att, y = self.cache
        B, T, C = x.shape
        self.wo.grad = np.tensordot(y, dout, axes=((0, 1), (0, 1)))
        dy = dout.reshape(B, T, self.heads, -1).transpose(0, 2, 1, 3)
        datt = dy @ v.swapaxes(-1, -2)
        ds = att * (datt - (att * datt).sum(-1, keepdims=True)) * q.shape[-1] ** -0.5
        dqkv = np.stack([ds @ k, ds.swapaxes(-1, -2) @ q, att.swapaxes(-1, -2) @ dy])
        dqkv = dqkv.transpose(1, 3, 0, 2, 4).reshape(B, T, 3 * C)
        self.wqkv.grad = np.tensordot(x, dqkv, axes=((0, 1), (0, 1)))
        return dqkv @ self.wqkv.value.T
