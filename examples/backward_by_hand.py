"""The backward pass of attention by hand, in NumPy: a dozen lines, each checked.

For whoever has to write it, or wants to see why FlashAttention's backward keeps no T x S matrix: every line of
``backward`` inverts the line of ``forward`` that it quotes. ``main`` compares the results with attngrad's kernels, and
with finite differences, which know nothing of either; then with a whole layer, its weights included.

Run it: ``python examples/backward_by_hand.py`` (NumPy alone; a second)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import attngrad

NDArray = npt.NDArray[Any]
Arrays = dict[str, NDArray]


class Kept(NamedTuple):
    """What the backward pass needs of the forward pass."""

    q: NDArray
    k: NDArray
    v: NDArray
    a: NDArray
    scale: float


def forward(q: NDArray, k: NDArray, v: NDArray, causal: bool = True) -> tuple[NDArray, Kept]:
    """O = softmax(scale Q K^T) V, for q, k and v of shape ``(..., tokens, features)``."""
    scale = q.shape[-1] ** -0.5
    s = scale * q @ k.mT
    if causal:
        s = np.where(np.tri(*s.shape[-2:], dtype=bool), s, -np.inf)
    a = np.exp(s - s.max(axis=-1, keepdims=True))  # no overflow, the same softmax
    a = a / a.sum(axis=-1, keepdims=True)
    return a @ v, Kept(q, k, v, a, scale)


def backward(kept: Kept, dout: NDArray) -> Arrays:
    """Every gradient of <dout, O>, in the order in which it is computed."""
    q, k, v, a, scale = kept
    # O = A V
    dv = a.mT @ dout
    da = dout @ v.mT
    # A = softmax(S), row by row; delta is rowsum(dO * O) too, which is FlashAttention's way
    delta = np.sum(a * da, axis=-1, keepdims=True)
    ds = a * (da - delta)  # where the mask hid a score, A is 0 and so is dS
    # S = scale Q K^T
    dq = scale * ds @ k
    dk = scale * ds.mT @ q
    return {"dV": dv, "dA": da, "delta": delta, "dS": ds, "dQ": dq, "dK": dk}


def layer(x: NDArray, w: Arrays, heads: int, dy: NDArray) -> tuple[NDArray, Arrays]:
    """y = merge(attention(split(x Wq), split(x Wk), split(x Wv))) Wo; the gradients of <dy, y>."""

    def split(z: NDArray) -> NDArray:  # (batch, tokens, d_model) -> (batch, heads, tokens, features)
        return z.reshape(*z.shape[:-1], heads, -1).swapaxes(-2, -3)

    def merge(z: NDArray) -> NDArray:
        z = z.swapaxes(-2, -3)
        return z.reshape(*z.shape[:-2], -1)

    def summed(left: NDArray, right: NDArray) -> NDArray:  # left^T right, over batch and tokens
        return np.tensordot(left, right, axes=((0, 1), (0, 1)))

    out, kept = forward(*(split(x @ w[name]) for name in ("w_q", "w_k", "w_v")))
    merged = merge(out)
    # y = merged Wo
    grads = {"w_o": summed(merged, dy)}
    found = backward(kept, split(dy @ w["w_o"].T))
    dx = np.zeros_like(x)
    for name, gradient in (("w_q", "dQ"), ("w_k", "dK"), ("w_v", "dV")):
        # Q = x Wq, and K and V alike: x is used three times, so its gradient has three terms
        flat = merge(found[gradient])
        grads[name] = summed(x, flat)
        dx += flat @ w[name].T
    return merged @ w["w_o"], {"x": dx, **grads}


def differences(q: NDArray, k: NDArray, v: NDArray, dout: NDArray, h: float = 1e-5) -> Arrays:
    """dQ, dK and dV by central differences of <dout, O>, one entry at a time."""
    found = {}
    for place, name in enumerate(("dQ", "dK", "dV")):
        arrays = [q.copy(), k.copy(), v.copy()]
        x, gradient = arrays[place], np.zeros_like(arrays[place])
        for index in np.ndindex(*x.shape):
            kept, ends = x[index], []
            for end in (kept + h, kept - h):
                x[index] = end
                ends.append(np.sum(dout * forward(*arrays)[0]))
            x[index] = kept
            gradient[index] = (ends[0] - ends[1]) / (2 * h)
        found[name] = gradient
    return found


def example(seed: int = 0) -> tuple[NDArray, ...]:
    """q, k, v and dout of shape (batch 2, heads 3, tokens 6, features 4)."""
    return tuple(np.random.default_rng(seed).standard_normal((4, 2, 3, 6, 4)))


def errors(seed: int = 0) -> dict[str, dict[str, float]]:
    """The largest differences: of the hand from attngrad, from finite differences, and of the layer from attngrad's."""
    q, k, v, dout = example(seed)
    out, kept = forward(q, k, v)
    hand = backward(kept, dout)
    expected, pullback = attngrad.vjp(q, k, v, causal=True)
    grads = pullback(dout)
    kernels = {"O": expected - out, "dQ": grads.q - hand["dQ"], "dK": grads.k - hand["dK"], "dV": grads.v - hand["dV"]}
    slopes = {name: hand[name] - x for name, x in differences(q, k, v, dout).items()}

    rng = np.random.default_rng(seed)
    module = attngrad.MultiHeadAttention(d_model=12, num_heads=3, rng=rng, dtype=np.float64)
    x, dy = rng.standard_normal((2, 2, 6, 12))
    y, found = layer(x, module.params, 3, dy)
    whole = {"y": module(x, causal=True) - y, "x": module.backward(dy) - found["x"]}
    whole |= {name: module.grads[name] - found[name] for name in module.grads}
    parts = {"attngrad.vjp": kernels, "finite differences": slopes, "attngrad.MultiHeadAttention": whole}
    return {part: {name: float(np.abs(e).max()) for name, e in found.items()} for part, found in parts.items()}


def main() -> None:
    """Print the largest difference of every result from each judge."""
    for judge, found in errors().items():
        print(f"largest difference from {judge}:")
        print("  " + "   ".join(f"{name} {error:.0e}" for name, error in found.items()))


if __name__ == "__main__":
    main()
