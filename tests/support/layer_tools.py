"""What the tests of the layer share."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from attngrad import MultiHeadAttention

EXACT = 1e-10
DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]


def randomise(layer: MultiHeadAttention, seed: int = 1) -> MultiHeadAttention:
    """Fill every parameter, biases too, with numbers that are neither zero nor small."""
    rng = np.random.default_rng(seed)
    for p in layer.params.values():
        p[...] = rng.standard_normal(p.shape) / np.sqrt(p.shape[0])
    return layer


def directions(layer: MultiHeadAttention, x: tuple[Any, ...], options: dict[str, Any], seed: int = 5) -> dict[str, Any]:
    """A random tangent for every input, parameter, bias and sinks."""
    rng = np.random.default_rng(seed)
    return {
        "inputs_dot": tuple(rng.standard_normal(a.shape) for a in x),
        "params_dot": {name: rng.standard_normal(p.shape) for name, p in layer.params.items()},
        **{f"{n}_dot": rng.standard_normal(options[n].shape) for n in ("bias", "sinks") if n in options},
    }


def as_tuple(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


def worst(actual: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest error of all arrays, each relative to its largest entry; both must have the same names and shapes.

    An array that should be zero (the gradient of b_k is, without rope: it moves a row of scores as one) is held against
    a thousandth of the largest entry of all. A NaN on either side is an infinite error.
    """
    assert {name: a.shape for name, a in actual.items()} == {name: b.shape for name, b in expected.items()}
    largest = {name: float(np.max(np.abs(b), initial=0.0)) for name, b in expected.items()}
    least = 1e-3 * (max(largest.values()) or 1.0)
    errors = [np.max(np.abs(actual[n] - b), initial=0.0) / max(largest[n], least) for n, b in expected.items()]
    greatest = float(np.max(errors))  # unlike Python's max, it does not lose a NaN
    return math.inf if math.isnan(greatest) else greatest
