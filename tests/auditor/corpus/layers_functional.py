# ruff: noqa
"""Layers as pairs of functions, and layers that return all their gradients."""

import numpy as np


def _softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def attention_layer_forward(x, params, n_head):
    """params: {"w_q", "w_k", "w_v", "w_o"}, each (C, C)"""
    B, T, C = x.shape

    def heads(z):
        return z.reshape(B, T, n_head, C // n_head).transpose(0, 2, 1, 3)

    q, k, v = heads(x @ params["w_q"]), heads(x @ params["w_k"]), heads(x @ params["w_v"])
    att = _softmax(q @ k.transpose(0, 1, 3, 2) / np.sqrt(C // n_head))
    y = (att @ v).transpose(0, 2, 1, 3).reshape(B, T, C)
    return y @ params["w_o"], (x, params, q, k, v, att, y)


def attention_layer_backward(dout, cache):
    x, params, q, k, v, att, y = cache
    B, H, T, D = q.shape
    C = H * D

    def merge(z):
        return z.transpose(0, 2, 1, 3).reshape(B * T, C)

    x2, dout2 = x.reshape(-1, C), dout.reshape(-1, C)
    grads = {"w_o": y.reshape(-1, C).T @ dout2}
    dy = (dout2 @ params["w_o"].T).reshape(B, T, H, D).transpose(0, 2, 1, 3)
    dv = merge(att.transpose(0, 1, 3, 2) @ dy)
    datt = dy @ v.transpose(0, 1, 3, 2)
    ds = att * (datt - (datt * att).sum(-1, keepdims=True)) / np.sqrt(D)
    dq, dk = merge(ds @ k), merge(ds.transpose(0, 1, 3, 2) @ q)
    grads["w_q"], grads["w_k"], grads["w_v"] = x2.T @ dq, x2.T @ dk, x2.T @ dv
    dx = dq @ params["w_q"].T + dk @ params["w_k"].T + dv @ params["w_v"].T
    return dx.reshape(B, T, C), grads


class Attention:
    """x (T, C); backward returns dx and a dict"""

    def __init__(self, c_in=8, c_head=8, rng=None):
        rng = rng or np.random.default_rng(3)
        self.w = {n: rng.standard_normal((c_in, c_head)) / np.sqrt(c_in) for n in "qkv"}

    def forward(self, x):
        self.x = x
        self.q, self.k, self.v = (x @ self.w[n] for n in "qkv")
        self.a = _softmax(self.q @ self.k.T / np.sqrt(self.q.shape[1]))
        return self.a @ self.v

    def backward(self, dy):
        da = dy @ self.v.T
        ds = self.a * (da - (da * self.a).sum(1, keepdims=True)) / np.sqrt(self.q.shape[1])
        d = {"q": ds @ self.k, "k": ds.T @ self.q, "v": self.a.T @ dy}
        grads = {n: self.x.T @ d[n] for n in "qkv"}
        dx = sum(d[n] @ self.w[n].T for n in "qkv")
        return dx, grads


class AttentionTwoTerms(Attention):
    def backward(self, dy):
        da = dy @ self.v.T
        ds = self.a * (da - (da * self.a).sum(1, keepdims=True)) / np.sqrt(self.q.shape[1])
        dq, dk, dv = ds @ self.k, ds.T @ self.q, self.a.T @ dy
        grads = {"q": self.x.T @ dq, "k": self.x.T @ dk, "v": self.x.T @ dv}
        dx = dq @ self.w["q"].T + dk @ self.w["k"].T
        return dx, grads


class CrossAttention:
    """x (B, T, C) looks at memory (B, S, C); gradients come back as a tuple"""

    def __init__(self, W_q, W_k, W_v):
        self.W_q, self.W_k, self.W_v = W_q, W_k, W_v

    def forward(self, x, memory):
        self.x, self.m = x, memory
        self.q, self.k, self.v = x @ self.W_q, memory @ self.W_k, memory @ self.W_v
        self.a = _softmax(np.einsum("btd,bsd->bts", self.q, self.k) / np.sqrt(self.W_q.shape[1]))
        return np.einsum("bts,bsd->btd", self.a, self.v)

    def backward(self, dy):
        dv = np.einsum("bts,btd->bsd", self.a, dy)
        da = np.einsum("btd,bsd->bts", dy, self.v)
        ds = self.a * (da - (da * self.a).sum(-1, keepdims=True)) / np.sqrt(self.W_q.shape[1])
        dq, dk = np.einsum("bts,bsd->btd", ds, self.k), np.einsum("bts,btd->bsd", ds, self.q)
        dx = dq @ self.W_q.T
        dmem = dk @ self.W_k.T + dv @ self.W_v.T
        dW_q = np.einsum("btc,btd->cd", self.x, dq)
        dW_k = np.einsum("bsc,bsd->cd", self.m, dk)
        dW_v = np.einsum("bsc,bsd->cd", self.m, dv)
        return dx, dmem, dW_q, dW_k, dW_v


class CrossAttentionMean(CrossAttention):
    def backward(self, dy):
        dx, dmem, dW_q, dW_k, dW_v = super().backward(dy)
        n = dy.shape[0]
        return dx, dmem, dW_q / n, dW_k / n, dW_v / n
