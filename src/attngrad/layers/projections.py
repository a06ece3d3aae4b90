"""The projections of one call, to heads and back, with their derivatives; the gradients that they gather."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from attngrad.core.arrays import NDArray
from attngrad.core.dtypes import ACCUMULATE
from attngrad.core.operands import Gradients
from attngrad.layers.checks import Call, Config
from attngrad.layers.linear import affine, affine_jvp, merge, split
from attngrad.layers.rope import rotation

LETTERS = ("q", "k", "v")
Arrays = Mapping[str, NDArray]


class LayerGradients(NamedTuple):
    """Gradients of a layer: one an input given, the parameters by name, and those of the options bias and sinks.

    >>> import numpy as np
    >>> from attngrad import MultiHeadAttention
    >>> layer = MultiHeadAttention(4, 2)
    >>> x = np.ones((3, 4), np.float32)
    >>> grads, grads_dot = layer.hvp((x,), (x,), x)
    >>> len(grads.inputs), sorted(grads_dot.params)
    (1, ['w_k', 'w_o', 'w_q', 'w_v'])
    """

    inputs: tuple[NDArray, ...]
    params: dict[str, NDArray]
    bias: NDArray | None
    sinks: NDArray | None


class Projections:
    """Inputs ``x`` and parameters ``w`` of one call by name, in the dtype that products are computed in (``wide``).

    ``source`` names the input of q, k and v; ``turns`` are the rotations of q and k, where there is rope. With
    ``copy`` the arrays may be written to by others afterwards; ``dtype`` is another one to compute in.
    """

    def __init__(self, params: Arrays, config: Config, call: Call, copy: bool = False, dtype: Any = None) -> None:
        self.dtype = np.dtype(dtype or params["w_q"].dtype)
        self.wide = ACCUMULATE.get(self.dtype, self.dtype)
        self.d_head = params["w_q"].shape[1] // config.num_heads
        self.source = call.source
        self.x = {name: a.astype(self.wide, order="C" if copy else "K", copy=copy) for name, a in call.inputs.items()}
        self.w = {name: p.astype(self.wide, copy=copy) for name, p in params.items()}
        starts = {} if config.rope is None else {"q": call.offset, "k": 0}
        self.turns = {
            c: rotation(config.rope or 0.0, self.d_head, self.x[self.source[c]].shape[-2], start, self.wide)
            for c, start in starts.items()
        }

    def widen(self, arrays: Arrays) -> dict[str, NDArray]:
        """The arrays in the wide dtype."""
        return {name: a.astype(self.wide, copy=False) for name, a in arrays.items()}

    def round(self, x: NDArray) -> NDArray:
        """``x`` in the dtype of the layer."""
        return x.astype(self.dtype, copy=False)

    def merged(self, heads: NDArray) -> NDArray:
        """Heads side by side, in the wide dtype."""
        return merge(heads).astype(self.wide, copy=False)

    def to_heads(self, letter: str, x: NDArray) -> NDArray:
        """``rope(split(x))``, rounded."""
        heads = split(x, self.d_head)
        return self.round(self.turns[letter].apply(heads) if letter in self.turns else heads)

    def from_heads(self, letter: str, dheads: NDArray) -> NDArray:
        """The transpose of ``to_heads``: ``merge(rope^T(dheads))``, in the wide dtype."""
        wide = dheads.astype(self.wide, copy=False)
        return merge(self.turns[letter].invert(wide) if letter in self.turns else wide)

    def heads(self) -> tuple[NDArray, NDArray, NDArray]:
        """The heads of q, k and v."""

        def one(c: str) -> NDArray:
            return self.to_heads(c, affine(self.x[self.source[c]], self.w[f"w_{c}"], self.w.get(f"b_{c}")))

        return one("q"), one("k"), one("v")

    def heads_dot(self, x_dot: Arrays, w_dot: Arrays) -> tuple[NDArray | None, NDArray | None, NDArray | None]:
        """How they move; None for those that do not."""

        def one(c: str) -> NDArray | None:
            name, weight = self.source[c], f"w_{c}"
            tangents = x_dot.get(name), w_dot.get(weight), w_dot.get(f"b_{c}")
            moved = affine_jvp(self.x[name], self.w[weight], *tangents)
            return None if moved is None else self.to_heads(c, moved)

        return one("q"), one("k"), one("v")


class Saved(NamedTuple):
    """What backward needs of the last forward."""

    projections: Projections
    out: NDArray
    pullback: Callable[[NDArray], Gradients]


class Gathered:
    """Gradients of inputs and parameters; an input that serves more than once gets the sum."""

    def __init__(self) -> None:
        self.inputs: dict[str, NDArray] = {}
        self.params: dict[str, NDArray] = {}

    def add(self, letter: str, found: tuple[NDArray, NDArray, NDArray], source: str = "out") -> NDArray:
        """Take dx, dw, db of one projection; dx."""
        dx, self.params[f"w_{letter}"], self.params[f"b_{letter}"] = found
        self.inputs[source] = self.inputs[source] + dx if source in self.inputs else dx
        return dx

    def result(self, p: Projections, params: Iterable[str], attention: Gradients) -> LayerGradients:
        """What was found, inputs rounded, for the inputs and parameters that there are."""
        inputs = tuple(p.round(self.inputs[name]) for name in p.x)
        return LayerGradients(inputs, {n: self.params[n] for n in params}, attention.bias, attention.sinks)
