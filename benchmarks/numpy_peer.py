"""Dense attention in plain NumPy: its gradients by the five products, its tangents by central differences.

Central differences are what is left to whoever has no forward mode: two evaluations, and an approximation, verified
with a tolerance of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from attngrad.core.arrays import NDArray
from benchmarks.cases import Case, Inputs
from benchmarks.passes import Arrays
from benchmarks.peers import Peer, Prepared, gradients

STEP = {"float32": 2.0**-9, "float64": 2.0**-17}
"""Of the differences, near the cube root of eps: there truncation, step^2, and rounding, eps / step, are alike."""


class NumPy(Peer):
    """Dense attention and its gradients: the code of the errata's ``back-pass``, corrected, without the layer."""

    name = "numpy"
    most_pairs = 10_000_000
    approximate = frozenset({"jvp", "hvp"})

    def __init__(self, _threads: int = 1) -> None:  # its BLAS has read the number of threads from the environment
        passes = {"forward": _forward, "forward + backward": _backward, "jvp": _jvp, "hvp": _hvp}
        super().__init__(np.__version__, passes)

    def refuses(self, case: Case, name: str) -> str | None:  # noqa: D102 as above
        if case.dtype not in ("float32", "float64"):
            return f"computes {case.dtype} in software"
        return "has no grouped heads" if case.n.group > 1 else super().refuses(case, name)


def _forward(case: Case, x: Inputs) -> Prepared:
    hidden = _hidden(case, x)
    return Prepared(lambda: dense_attention(x, hidden)[0], lambda out: {"out": out})


def _backward(case: Case, x: Inputs) -> Prepared:
    hidden = _hidden(case, x)

    def call() -> Any:
        out, a = dense_attention(x, hidden)
        return out, dense_gradients(x, a)

    return Prepared(call, gradients)


def _jvp(case: Case, x: Inputs) -> Prepared:
    hidden, step = _hidden(case, x), STEP[case.dtype]
    call = lambda: central(lambda y: (dense_attention(y, hidden)[0],), x, step)  # noqa: E731 as the others are
    return Prepared(call, lambda found: _named(("out",), found))


def _hvp(case: Case, x: Inputs) -> Prepared:
    hidden, step = _hidden(case, x), STEP[case.dtype]
    call = lambda: central(lambda y: dense_gradients(y, dense_attention(y, hidden)[1]), x, step)  # noqa: E731
    return Prepared(call, lambda found: _named(("dq", "dk", "dv"), found))


def _named(names: Sequence[str], found: list[tuple[NDArray, NDArray]]) -> Arrays:
    values = {name: value for name, (value, _) in zip(names, found, strict=True)}
    return values | {f"{name}_dot": tangent for name, (_, tangent) in zip(names, found, strict=True)}


def central(evaluate: Callable[[Inputs], Sequence[NDArray]], x: Inputs, step: float) -> list[tuple[NDArray, NDArray]]:
    """Value and tangent of every result of ``evaluate`` along the tangents of ``x``: mean and slope of two results.

    f(x) = (f(x + h x_dot) + f(x - h x_dot)) / 2, f_dot = (f(x + h x_dot) - f(x - h x_dot)) / 2h, both up to O(h^2).
    """
    h = x.q.dtype.type(step)

    def at(h: Any) -> Sequence[NDArray]:
        return evaluate(x._replace(**{name: getattr(x, name) + h * x_dot for name, x_dot in x.given().items()}))

    return [((up + down) / 2, (up - down) / (2 * h)) for up, down in zip(at(h), at(-h), strict=True)]


def _hidden(case: Case, x: Inputs) -> NDArray | None:
    """What may not be attended to, of causal, window and mask together."""
    planes = [p for p in (case.visible(np.arange(case.n.t)), x.mask) if p is not None]
    return ~np.logical_and.reduce(planes) if planes else None


def dense_attention(x: Inputs, hidden: NDArray | None) -> tuple[NDArray, NDArray]:
    """O = A V with A = softmax(Q K^T / sqrt(D)); returns O and A."""
    s = x.q @ x.k.swapaxes(-1, -2) / x.q.dtype.type(math.sqrt(x.q.shape[-1]))
    if x.bias is not None:
        s += x.bias
    if hidden is not None:
        np.copyto(s, -np.inf, where=hidden)
    a = np.exp(s - s.max(axis=-1, keepdims=True))
    a /= a.sum(axis=-1, keepdims=True)
    return a @ x.v, a


def dense_gradients(x: Inputs, a: NDArray) -> tuple[NDArray, NDArray, NDArray]:
    """dQ, dK, dV, with dS = A o (dA - rowsum(A o dA)): the row sum, where the document takes a mean."""
    root = x.q.dtype.type(math.sqrt(x.q.shape[-1]))
    dv = a.swapaxes(-1, -2) @ x.dout
    da = x.dout @ x.v.swapaxes(-1, -2)
    ds = a * (da - np.sum(a * da, axis=-1, keepdims=True))
    return ds @ x.k / root, ds.swapaxes(-1, -2) @ x.q / root, dv


PEER = NumPy
