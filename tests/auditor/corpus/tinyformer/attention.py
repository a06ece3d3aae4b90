# ruff: noqa
import numpy as np

from .ops import softmax, softmax_vjp, transpose


def attention_vjp(q, k, v, g):
    """out and (dq, dk, dv) for q (B, H, T, D)"""
    scale = 1 / np.sqrt(q.shape[-1])
    p = softmax(scale * q @ transpose(k))
    ds = scale * softmax_vjp(p, g @ transpose(v))
    return p @ v, (ds @ k, transpose(ds) @ q, transpose(p) @ g)


class Weight:
    def __init__(self, data):
        self.data = data
        self.grad = None


class Attention:
    """Single head over (T, C); weights in Weight objects, (in, out)."""

    def __init__(self, dim=8, seed=4):
        rng = np.random.default_rng(seed)
        self.wq, self.wk, self.wv = (Weight(rng.normal(size=(dim, dim)) / np.sqrt(dim)) for _ in range(3))

    def forward(self, x):
        self.x = x
        return self._attend(x @ self.wq.data, x @ self.wk.data, x @ self.wv.data)

    def _attend(self, q, k, v):
        self.qkv = q, k, v
        self.p = softmax(q @ k.T / np.sqrt(q.shape[-1]))
        return self.p @ v

    def backward(self, dy):
        q, k, v = self.qkv
        ds = softmax_vjp(self.p, dy @ v.T) / np.sqrt(q.shape[-1])
        dq, dk, dv = ds @ k, ds.T @ q, self.p.T @ dy
        self.wq.grad, self.wk.grad, self.wv.grad = self.x.T @ dq, self.x.T @ dk, self.x.T @ dv
        return dq @ self.wq.data.T + dk @ self.wk.data.T + dv @ self.wv.data.T
