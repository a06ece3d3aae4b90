"""What formulas are judged on: random inputs of awkward sizes, and the derivatives there by the complex step.

Every truth is Im f(x + i h e) / h of a forward pass, exact to rounding: no formula for a derivative is used to judge
another. Letters: T queries, S keys, D features of q and k, E of v, B batch, H heads, M features of the layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from attngrad import reference
from attngrad.core.arrays import Array

Function = Callable[[Array], Array]

STEP = 1e-30


@dataclass(frozen=True)
class Sizes:
    """The sizes of a case; ``depth`` is the width of one head where the heads share M."""

    batch: int
    heads: int
    queries: int
    keys: int
    model: int
    width: int
    value_width: int

    @property
    def depth(self) -> int:
        """M / H."""
        return self.model // self.heads


AWKWARD = Sizes(batch=2, heads=3, queries=5, keys=7, model=6, width=3, value_width=4)
"""No two sizes that a formula might confuse are equal."""

SQUARE = Sizes(batch=4, heads=2, queries=4, keys=4, model=4, width=4, value_width=4)
"""Every matrix is square: what evaluates nowhere else may evaluate here."""


# --- the complex step ------------------------------------------------------------------------------------------------


def complex_step(f: Function, x: Array) -> Array:
    """df/dx = Im f(x + i h e_a) / h for every entry a, of shape ``f(x).shape + x.shape``."""
    columns = []
    for a in range(x.size):
        moved = x.reshape(-1).astype(complex)
        moved[a] += 1j * STEP
        columns.append(np.imag(f(moved.reshape(x.shape))) / STEP)
    return np.stack(columns, axis=-1).reshape(*columns[0].shape, *x.shape)


def along(f: Callable[..., Array], *moves: tuple[Array, Array]) -> Array:
    """The derivative of f along (x_dot, ...): Im f(x + i h x_dot, ...) / h for moves (x, x_dot)."""
    return np.imag(f(*(x + 1j * STEP * x_dot for x, x_dot in moves))) / STEP


def softmax(x: Array) -> Array:
    """Softmax over the last axis, analytic in x."""
    e = np.exp(x - np.max(x.real, axis=-1, keepdims=True))
    return e / np.sum(e, axis=-1, keepdims=True)


def attend(q: Array, k: Array, v: Array, scale: float | None = None, bias: Array | None = None) -> Array:
    """``reference.attention``, in complex128 where any input is."""
    given = [q, k, v] if bias is None else [q, k, v, bias]
    dtype = np.result_type(*given)
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    return reference.attention(q, k, v, scale=scale, bias=None if bias is None else bias.astype(dtype))


def t(x: Array) -> Array:
    """x^T over the last two axes."""
    return np.swapaxes(x, -1, -2)


def rowsum(x: Array) -> Array:
    """The sum over the last axis, kept."""
    return np.sum(x, axis=-1, keepdims=True)


# --- one head, or a stack of them ------------------------------------------------------------------------------------


def _gradient(name: str) -> cached_property[Array]:
    """The true gradient of the loss of a head at its q, k or v."""
    return cached_property(lambda head: complex_step(lambda x: head.loss(head.out(**{name: x})), getattr(head, name)))


class Head:
    """q ``(..., T, D)``, k ``(..., S, D)``, v ``(..., S, E)``, dout ``(..., T, E)``: the derivatives of <dout, out>.

    ``keep``, if there is one, is M, the factor that dropout puts on the weights.
    """

    keep: Array | None = None

    def __init__(self, q: Array, k: Array, v: Array, dout: Array, scale: float, rng: np.random.Generator) -> None:
        self.q, self.k, self.v, self.dout, self.scale = q, k, v, dout, scale
        self.q_dot, self.k_dot, self.v_dot = (rng.standard_normal(x.shape) for x in (q, k, v))

    @classmethod
    def random(cls, n: Sizes, rng: np.random.Generator, scale: float | None = None) -> Head:
        """One head, scale 1/sqrt(D)."""
        shapes = ((n.queries, n.width), (n.keys, n.width), (n.keys, n.value_width), (n.queries, n.value_width))
        q, k, v, dout = (rng.standard_normal(shape) for shape in shapes)
        return cls(q, k, v, dout, n.width**-0.5 if scale is None else scale, rng)

    @classmethod
    def unit(cls, n: Sizes, rng: np.random.Generator) -> Head:
        """One head, scale 1."""
        return cls.random(n, rng, scale=1.0)

    @cached_property
    def s(self) -> Array:
        """The scores, scale q k^T."""
        return self.scale * self.q @ t(self.k)

    @cached_property
    def a(self) -> Array:
        """The weights, softmax of the scores."""
        return reference.attention_weights(self.q, self.k, scale=self.scale)

    def out(self, q: Array | None = None, k: Array | None = None, v: Array | None = None) -> Array:
        """The output, with any of q, k, v replaced."""
        q, k, v = (own if x is None else x for own, x in zip((self.q, self.k, self.v), (q, k, v), strict=True))
        return self.attend(q, k, v)

    def attend(self, q: Array, k: Array, v: Array, bias: Array | None = None) -> Array:
        """The reference; with dropout, the softmax times M, for the reference draws its own."""
        if self.keep is None:
            return attend(q, k, v, self.scale, bias)
        return self.mix(softmax(self.scale * q @ t(k) + (0.0 if bias is None else bias)), v)

    def mix(self, a: Array, v: Array) -> Array:
        """The output for given weights, (a o M) v."""
        return (a if self.keep is None else a * self.keep) @ v

    def loss(self, out: Array) -> Array:
        """<dout, out>."""
        return np.sum(self.dout * out)

    dq, dk, dv = _gradient("q"), _gradient("k"), _gradient("v")
    """True dL/dQ, dL/dK and dL/dV."""

    @cached_property
    def da(self) -> Array:
        """True dL/dA, at O = (A o M) V."""
        return complex_step(lambda a: self.loss(self.mix(a, self.v)), self.a)

    @cached_property
    def ds(self) -> Array:
        """True dL/dS: the derivative along an addition to the scaled product."""
        zero = np.zeros_like(self.a)
        return complex_step(lambda b: self.loss(self.attend(self.q, self.k, self.v, b)), zero)

    @cached_property
    def jacobian(self) -> Array:
        """True dA_ij/dS_ik, ``(..., T, S, S)``; the softmax acts row by row."""
        n = self.a.shape[-1]
        rows = [complex_step(softmax, row) for row in self.s.reshape(-1, n)]
        return np.stack(rows).reshape(*self.s.shape, n)


# --- one head of a layer ----------------------------------------------------------------------------------------------


class Projected(Head):
    """One head of self-attention: q, k, v are x w_q, x w_k, x w_v, so that T = S."""

    def __init__(self, n: Sizes, rng: np.random.Generator, scale: float | None = None) -> None:
        self.x = rng.standard_normal((n.queries, n.model))
        self.w_q, self.w_k = n.model**-0.5 * rng.standard_normal((2, n.model, n.width))
        self.w_v = n.model**-0.5 * rng.standard_normal((n.model, n.value_width))
        dout = rng.standard_normal((n.queries, n.value_width))
        scale = n.width**-0.5 if scale is None else scale
        super().__init__(self.x @ self.w_q, self.x @ self.w_k, self.x @ self.w_v, dout, scale, rng)

    def of(self, x: Array, w_q: Array, w_k: Array, w_v: Array) -> Array:
        """The loss as a function of the input and the weights."""
        return self.loss(self.attend(x @ w_q, x @ w_k, x @ w_v))

    @cached_property
    def d_weights(self) -> tuple[Array, Array, Array]:
        """True gradients at w_q, w_k, w_v."""
        x, w_q, w_k, w_v = self.x, self.w_q, self.w_k, self.w_v
        return (
            complex_step(lambda w: self.of(x, w, w_k, w_v), w_q),
            complex_step(lambda w: self.of(x, w_q, w, w_v), w_k),
            complex_step(lambda w: self.of(x, w_q, w_k, w), w_v),
        )

    @cached_property
    def d_x(self) -> Array:
        """True gradient at x."""
        return complex_step(lambda x: self.of(x, self.w_q, self.w_k, self.w_v), self.x)
