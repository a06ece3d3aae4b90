"""The examples below the classes, run as they are printed."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np

from attngrad.core.arrays import Array
from attngrad.errata._back_pass.code import forward
from attngrad.errata._back_pass.layer import Layer
from attngrad.errata._claim import Claim


def _printed(code: str, **names: Any) -> tuple[Array, ...]:
    """Run ``code`` with these names defined; give what it prints, without the labels."""
    found: list[Array] = []
    exec(code, {"print": lambda label, *values: found.extend(map(np.array, values)), **names})  # noqa: S102
    return tuple(found)


PRINTS_THE_COTANGENT = 'print("Output shape:", d0.shape)'
PRINTS_THE_OUTPUT = 'print("Output shape:", O.shape)'


def _outputs(c: Layer) -> tuple[Array, Array]:
    """What a forward pass may give the example: the output, and one from which a faulty pass has lost a feature."""
    return forward(c), forward(c)[..., :-1]


def _printed_for_each(c: Layer, line: str) -> tuple[Array, ...]:
    return tuple(shape for output in _outputs(c) for shape in _printed(line, O=output, d0=c.dy))


def _what_the_line_prints(c: Layer) -> str:
    pairs = zip(_outputs(c), _printed_for_each(c, PRINTS_THE_COTANGENT), strict=True)
    return ", ".join(f"an output of shape {o.shape} is printed as {tuple(map(int, shape))}" for o, shape in pairs)


_CLASS = """
class OptimizedSelfAttention:
    def __init__(self, d_model):
        self.W = np.eye(d_model)

    def forward(self, query):
        return np.dot(query, self.W)

"""

_EXAMPLE = """
d_model = query.shape[-1]
attention = OptimizedSelfAttention(d_model)
O = attention.forward(query)
print("Output shape:", O.shape)
"""


def _example_in_the_class(c: Layer) -> tuple[Array, ...]:
    """The example stands inside the class body, by its indentation."""
    return _printed(_CLASS + textwrap.indent(_EXAMPLE, "    "), np=np, query=c.x_q)


def _example_after_the_class(c: Layer) -> tuple[Array, ...]:
    return _printed(_CLASS + _EXAMPLE, np=np, query=c.x_q)


FIGURES = {"printed-shapes": _what_the_line_prints}

CHECKS = {
    "back-pass-21": Claim(
        Layer,
        lambda c: _printed_for_each(c, PRINTS_THE_COTANGENT),
        lambda c: tuple(np.array(output.shape) for output in _outputs(c)),
        lambda c: _printed_for_each(c, PRINTS_THE_OUTPUT),
    ),
    "back-pass-39": Claim(Layer, _example_in_the_class, lambda c: (np.array(c.x_q.shape),), _example_after_the_class),
}
