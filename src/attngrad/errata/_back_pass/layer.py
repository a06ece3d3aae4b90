"""What the code is judged on: a layer of several heads, without an output projection.

Letters: T queries, S keys, B batch, H heads, M features of the layer.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from attngrad.core.arrays import Array
from attngrad.formulas.case import Head, Sizes, attend, complex_step


class Layer:
    """x_q ``(B, T, M)``, x_k, x_v ``(B, S, M)``, weights ``(M, M)``, H heads of width M / H; dy is the cotangent."""

    def __init__(self, n: Sizes, rng: np.random.Generator) -> None:
        self.n = n
        self.x_q = rng.standard_normal((n.batch, n.queries, n.model))
        self.x_k, self.x_v = rng.standard_normal((2, n.batch, n.keys, n.model))
        self.w_q, self.w_k, self.w_v, self.w_o = n.model**-0.5 * rng.standard_normal((4, n.model, n.model))
        self.inputs = (self.x_q, self.x_k, self.x_v)
        self.weights = (self.w_q, self.w_k, self.w_v)
        self.dy = rng.standard_normal((n.batch, n.queries, n.model))
        q, k, v = (self.split(x @ w) for x, w in zip(self.inputs, self.weights, strict=True))
        self.head = Head(q, k, v, self.split(self.dy), n.depth**-0.5, rng)

    def split(self, x: Array) -> Array:
        """``(B, n, M)`` to ``(B, H, n, M / H)``: head h is the h-th slice of the features."""
        return np.stack(np.split(x, self.n.heads, axis=-1), axis=1)

    def merge(self, x: Array) -> Array:
        """The inverse of ``split``."""
        return np.concatenate(list(np.moveaxis(x, 1, 0)), axis=-1)

    def merged(self, inputs: tuple[Array, ...], weights: tuple[Array, ...]) -> Array:
        """The heads' outputs side by side, before any output projection."""
        q, k, v = (self.split(x @ w) for x, w in zip(inputs, weights, strict=True))
        return self.merge(attend(q, k, v))

    def _derivatives(self, of: str) -> tuple[Array, ...]:
        given: dict[str, tuple[Array, ...]] = {"inputs": self.inputs, "weights": self.weights}

        def loss(x: Array, i: int) -> Array:
            moved = {**given, of: (*given[of][:i], x, *given[of][i + 1 :])}
            return np.sum(self.dy * self.merged(**moved))

        return tuple(complex_step(lambda x, i=i: loss(x, i), x) for i, x in enumerate(given[of]))  # type: ignore[misc]

    @cached_property
    def d_inputs(self) -> tuple[Array, ...]:
        """True gradients at x_q, x_k, x_v, the merged heads being the output."""
        return self._derivatives("inputs")

    @cached_property
    def d_weights(self) -> tuple[Array, ...]:
        """True gradients at w_q, w_k, w_v, the merged heads being the output."""
        return self._derivatives("weights")
