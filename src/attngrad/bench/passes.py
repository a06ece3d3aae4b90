"""The passes: what each returns, what it counts for, and the reference that verifies it. One entry a pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from attngrad import reference
from attngrad.bench.cases import Inputs, NDArray

Arrays = dict[str, NDArray]


@dataclass(frozen=True)
class Pass:
    """A pass of the benchmark.

    ``outputs`` are the names that every peer returns, as docs/notation.md has them: ``out``, ``dq``, ``out_dot``; dbias
    comes where a bias is differentiated. ``cost`` is in FLOPs of the forward pass. ``reference`` takes float64 inputs.
    """

    name: str
    short: str
    cost: float
    outputs: tuple[str, ...]
    reference: Callable[[Inputs], Arrays]


def _options(x: Inputs) -> dict[str, Any]:
    return {"mask": x.mask, "bias": x.bias}


def _forward(x: Inputs) -> Arrays:
    return {"out": reference.attention(x.q, x.k, x.v, **_options(x))}


def _backward(x: Inputs) -> Arrays:
    out, pullback = reference.vjp(x.q, x.k, x.v, **_options(x))
    grads = pullback(x.dout)
    found = {"out": out, "dq": grads.q, "dk": grads.k, "dv": grads.v}
    return found if grads.bias is None else found | {"dbias": grads.bias}


PASSES: dict[str, Pass] = {
    # two products forward; backward five: the scores again, dv, dp, dq, dk
    "forward": Pass("forward", "fwd", 1.0, ("out",), _forward),
    "forward + backward": Pass("forward + backward", "fwd+bwd", 3.5, ("out", "dq", "dk", "dv"), _backward),
}
