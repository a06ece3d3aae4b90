"""The names of the language at a case: its value by the reference and the complex step, computed on first use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any

import numpy as np

from attngrad import reference
from attngrad.core.arrays import Array
from attngrad.formulas.case import Head, Projected, Sizes, along, complex_step, rowsum, softmax, t
from attngrad.formulas.symbols import LAYER

LARGE_MEAN = 4.0
"""Of V in some of the cases: the term that the softmax subtracts from every row of dA is large there."""

CASES = (
    (Sizes(batch=1, heads=1, queries=5, keys=7, model=6, width=3, value_width=4), 0.0),
    (Sizes(batch=1, heads=1, queries=4, keys=3, model=7, width=6, value_width=2), 0.0),
    (Sizes(batch=1, heads=1, queries=3, keys=6, model=8, width=5, value_width=7), LARGE_MEAN),
)
"""Sizes and the mean of V: more queries than keys and fewer, no two sizes of a case equal."""


def _moved(f: Callable[..., Array]) -> Callable[[Head], Array]:
    """The derivative of f(h, q, k, v) along the tangents of q, k and v."""
    return lambda h: along(lambda q, k, v: f(h, q, k, v), (h.q, h.q_dot), (h.k, h.k_dot), (h.v, h.v_dot))


def _scores(h: Head, q: Array, k: Array, v: Array) -> Array:
    return h.scale * q @ t(k)


def _number(value: float) -> Array:
    return np.full((1, 1), float(value))


def _own(names: str) -> dict[str, Callable[[Any], Array]]:
    """The names that a case has under the same name in small letters."""
    return {name: attrgetter(name.lower()) for name in names.split()}


_SIMPLE: dict[str, Callable[[Head], Array]] = {
    **_own("Q K V S A dA dS dQ dK dV Q_dot K_dot V_dot"),
    "Z": lambda h: h.s,
    "M": lambda h: np.ones_like(h.a) if h.keep is None else h.keep,
    "O": lambda h: h.out(),
    "L": lambda h: reference.attention(h.q, h.k, h.v, scale=h.scale, return_lse=True)[1][:, None],
    "delta": lambda h: rowsum(h.dout * h.out()),
    "dO": lambda h: h.dout,
    "dZ": lambda h: h.ds,
    "S_dot": _moved(_scores),
    "A_dot": _moved(lambda h, q, k, v: softmax(_scores(h, q, k, v))),
    "O_dot": _moved(Head.attend),
    "L_dot": _moved(lambda h, q, k, v: np.log(rowsum(np.exp(_scores(h, q, k, v))))),
    "J": lambda h: h.jacobian,
    "p": lambda h: h.s[..., None],
    "scale": lambda h: _number(h.scale),
    "n": lambda h: _number(h.q.shape[0]),
    "m": lambda h: _number(h.k.shape[0]),
    "d_k": lambda h: _number(h.q.shape[1]),
    "d_v": lambda h: _number(h.v.shape[1]),
    **dict.fromkeys(("dZ/dQ", "dS/dQ"), lambda h: complex_step(lambda q: _scores(h, q, h.k, h.v), h.q)),
    **dict.fromkeys(("dZ/dK", "dS/dK"), lambda h: complex_step(lambda k: _scores(h, h.q, k, h.v), h.k)),
    "dA/dS": lambda h: complex_step(softmax, h.s),
    "dO/dA": lambda h: complex_step(lambda a: h.mix(a, h.v), h.a),
    "dO/dV": lambda h: complex_step(lambda v: h.mix(h.a, v), h.v),
}

_OF_LAYER: dict[str, Callable[[Projected], Array]] = {
    **_own("X W_Q W_K W_V"),
    "dX": lambda h: h.d_x,
    "dW_Q": lambda h: h.d_weights[0],
    "dW_K": lambda h: h.d_weights[1],
    "dW_V": lambda h: h.d_weights[2],
    "d_model": lambda h: _number(h.x.shape[1]),
}


class HeadValues(Mapping[str, Array]):
    """The names at one head, those of ``also`` first: a document may use a letter in its own way."""

    def __init__(self, head: Head, also: Mapping[str, Callable[[Head], Array]] | None = None) -> None:
        self.head = head
        layer = _OF_LAYER if isinstance(head, Projected) else {}
        self._ways: dict[str, Callable[[Any], Array]] = {**_SIMPLE, **layer, **(also or {})}
        self._found: dict[str, Array] = {}

    def __getitem__(self, name: str) -> Array:
        if name not in self._found:
            self._found[name] = self._ways[name](self.head)
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._ways)

    def __len__(self) -> int:
        return len(self._ways)


def case(sizes: Sizes, used: set[str], scale: float | None, seed: list[int], mean: float = 0.0) -> HeadValues:
    """A random case for a formula that uses these names: a layer where it speaks of one, dropout where it has M."""
    rng = np.random.default_rng(seed)
    if used & set(LAYER):
        head: Head = Projected(sizes, rng, scale)
    else:
        head = Head.random(sizes, rng, scale)
        head.v = head.v + mean
    if "M" in used:
        head.keep = rng.integers(0, 2, head.a.shape) / 0.5
    return HeadValues(head)


def cases(used: set[str], scale: float | None, seed: int) -> list[HeadValues]:
    """The cases that a formula must hold in."""
    return [case(sizes, used, scale, [seed, i], mean) for i, (sizes, mean) in enumerate(CASES)]
