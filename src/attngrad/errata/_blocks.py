"""What the derivation by traces is judged on: a layer whose heads are the blocks of wide matrices.

Letters: T queries, S keys, D features of q and k, H heads, M features of the layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np

from attngrad.core.arrays import Array
from attngrad.formulas.case import Sizes, along, attend, complex_step, softmax
from attngrad.reference.forms import block_diagonal, reciprocal, selector

DIRECTIONS = 4


class Blocks:
    """Heads side by side: query, g ``(T, M)``, key, value ``(S, M)``, w_q, w_k ``(H, M, D)``, w_v ``(H, M, M/H)``."""

    def __init__(self, n: Sizes, rng: np.random.Generator) -> None:
        self.n = n
        self.query, self.g = rng.standard_normal((2, n.queries, n.model))
        self.key, self.value = rng.standard_normal((2, n.keys, n.model))
        self.w_q, self.w_k = n.model**-0.5 * rng.standard_normal((2, n.heads, n.model, n.width))
        self.w_q_dot, self.w_k_dot = rng.standard_normal((2, DIRECTIONS, n.heads, n.model, n.width))
        self.w_v = n.model**-0.5 * rng.standard_normal((n.heads, n.model, n.depth))
        self.weights = {"w_q": self.w_q, "w_k": self.w_k, "w_v": self.w_v}
        self.w_o = rng.standard_normal((n.heads * n.depth, n.model))
        self.a_dot = rng.standard_normal((n.queries, n.heads * n.keys))
        self.w_v_dot, self.w_o_dot = rng.standard_normal(self.w_v.shape), rng.standard_normal(self.w_o.shape)
        self.gamma = n.width**-0.5
        self.ones = block_diagonal(np.ones((n.heads, n.keys, n.keys)))
        self.value_blocks = block_diagonal(self.value @ self.w_v)
        self.picks = [selector(h, n.heads, n.keys) for h in range(n.heads)]

    def heads(self, **moved: Array) -> Array:
        """Concat(head_1, ..., head_H), with any of the weights replaced."""
        w = self.weights | moved
        q, k, v = self.query @ w["w_q"], self.key @ w["w_k"], self.value @ w["w_v"]
        return np.concatenate(list(attend(q, k, v)), axis=-1)

    def f(self, x: Array) -> Array:
        """A loss whose gradient at the layer's output X is g."""
        return np.sum(self.g * x)

    def products(self, w_q: Array, w_k: Array) -> list[Array]:
        """Q W_h^Q (W_h^K)^T K^T, head by head."""
        return [self.query @ q @ k.T @ self.key.T for q, k in zip(w_q, w_k, strict=True)]

    @cached_property
    def a(self) -> Array:
        """The scores (A_1, ..., A_H), ``(T, H S)``."""
        return self.gamma * np.concatenate(self.products(self.w_q, self.w_k), axis=1)

    def soft(self, a: Array) -> Array:
        """(softmax(A_1), ..., softmax(A_H)), analytic in A."""
        return np.concatenate([softmax(x) for x in np.split(a, self.n.heads, axis=1)], axis=1)

    @cached_property
    def s(self) -> Array:
        """The weights (S_1, ..., S_H)."""
        return self.soft(self.a)

    @cached_property
    def inverse(self) -> Array:
        """Upsilon(exp(A) 1): one over the row sums of each block."""
        return reciprocal(np.exp(self.a) @ self.ones)

    @cached_property
    def mixed(self) -> Array:
        """(S_1 V, ..., S_H V), ``(T, H M)``."""
        return self.s @ block_diagonal(np.stack([self.value] * self.n.heads))

    def f_of_scores(self, a: Array) -> Array:
        """The loss as a function of the scores."""
        return self.f(self.soft(a) @ self.value_blocks @ self.w_o)

    def f_of_weights(self, **moved: Array) -> Array:
        """The loss as a function of w_q, w_k, w_v."""
        return self.f(self.heads(**moved) @ self.w_o)

    @cached_property
    def da(self) -> Array:
        """True df/dA."""
        return complex_step(self.f_of_scores, self.a)

    @cached_property
    def d_weights(self) -> dict[str, Array]:
        """True df/dW for w_q, w_k and w_v, heads stacked."""
        moved = {name: lambda w, name=name: self.f_of_weights(**{name: w}) for name in self.weights}
        return {name: complex_step(moved[name], w) for name, w in self.weights.items()}

    def along_weights(self, f: Callable[[Array, Array], Array], only: Array | float = 1.0) -> Array:
        """The derivatives of f(w_q, w_k) along each (w_q_dot, w_k_dot), times ``only``."""
        directions = zip(only * self.w_q_dot, only * self.w_k_dot, strict=True)
        return np.stack([along(f, (self.w_q, q_dot), (self.w_k, k_dot)) for q_dot, k_dot in directions])

    @cached_property
    def df(self) -> Array:
        """True df along each (w_q_dot, w_k_dot)."""
        return self.along_weights(lambda q, k: self.f_of_weights(w_q=q, w_k=k))
