# ruff: noqa
import numpy as np


def softmax(x):
    x = x - x.max(axis=-1, keepdims=True)
    e = np.exp(x)
    return e / e.sum(axis=-1, keepdims=True)


def softmax_vjp(p, g):
    return p * (g - np.sum(g * p, axis=-1, keepdims=True))


def transpose(x):
    return np.swapaxes(x, -1, -2)
