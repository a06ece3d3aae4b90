"""Who computes: attngrad and NumPy here, torch and jax in modules of their own.

A peer maps the names of passes to methods that prepare a call: everything outside of the timed region (layout, dtype,
leaves, compilation) happens there. What a peer cannot do, it refuses with a reason, and the table shows a dash.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

import attngrad
from attngrad.bench.cases import Case, Inputs, NDArray
from attngrad.bench.passes import Arrays

NAMES = ("torch", "jax", "numpy")
OURS = "attngrad"
OWN_FLOAT32 = "f32"


class Prepared(NamedTuple):
    """``call()`` is what is timed; ``arrays`` turns its result into NumPy arrays (B, H, T, D), by output."""

    call: Callable[[], Any]
    arrays: Callable[[Any], Arrays]


Prepare = Callable[[Case, Inputs], Prepared]


class Peer:
    """One contender: ``passes`` holds, by the name of a pass, what prepares its call.

    ``most_pairs`` is the largest B H T S that it is asked for.
    """

    name = ""
    most_pairs = math.inf

    def __init__(self, version: str, passes: Mapping[str, Prepare]) -> None:
        self.version = version
        self.passes = passes
        self.deadly: dict[str, str] = {}  # dtypes that it does not survive on this machine, and why

    def refuses(self, case: Case, name: str) -> str | None:
        """Why this case is not run here, or None."""
        if name not in self.passes:
            return f"has no {name}"
        if case.dtype in self.deadly:
            return self.deadly[case.dtype]
        if case.n.batch * case.n.heads * case.n.t * case.n.s > self.most_pairs:
            return "too large"
        return None

    def prepare(self, case: Case, name: str, x: Inputs) -> Prepared:
        """The call of a pass on these inputs."""
        return self.passes[name](case, x)


def gradients(found: Any, convert: Callable[[Any], NDArray] = np.asarray) -> Arrays:
    """(out, (dq, dk, dv, perhaps dbias, ...)) by name, as NumPy arrays."""
    out, grads = found
    names = ("out", "dq", "dk", "dv", "dbias")
    return {name: convert(x) for name, x in zip(names, (out, *grads), strict=False) if x is not None}


class Ours(Peer):
    """attngrad, through its public functions."""

    name = OURS

    def __init__(self) -> None:
        super().__init__(attngrad.__version__, {"forward": self._forward, "forward + backward": self._backward})

    def _options(self, case: Case, x: Inputs) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if case.options.causal:
            options["causal"] = True
        if case.options.window is not None:
            options["window"] = (case.options.window, 0)
        if x.mask is not None:
            options["mask"] = x.mask
        if x.bias is not None:
            options["bias"] = x.bias
        return options

    def _forward(self, case: Case, x: Inputs) -> Prepared:
        options, (q, k, v) = self._options(case, x), x[:3]
        attention = attngrad.attention
        return Prepared(lambda: attention(q, k, v, **options), lambda out: {"out": out})

    def _backward(self, case: Case, x: Inputs) -> Prepared:
        options, (q, k, v, dout) = self._options(case, x), x[:4]
        vjp = attngrad.vjp

        def call() -> Any:
            out, pullback = vjp(q, k, v, **options)
            return out, pullback(dout)

        return Prepared(call, gradients)


class OursInFloat32(Ours):
    """attngrad on the same numbers in float32: what 16-bit rows are held against."""

    name = OWN_FLOAT32

    def prepare(self, case: Case, name: str, x: Inputs) -> Prepared:  # noqa: D102 as above
        wide = {field: a.astype(np.float32) for field, a in x._asdict().items() if a is not None and field != "mask"}
        return super().prepare(replace(case, dtype="float32"), name, x._replace(**wide))


class NumPy(Peer):
    """Dense attention and its gradients in plain NumPy: the code of the errata's document 001, corrected, no layer."""

    name = "numpy"
    most_pairs = 10_000_000

    def __init__(self) -> None:
        super().__init__(np.__version__, {"forward": self._forward, "forward + backward": self._backward})

    def refuses(self, case: Case, name: str) -> str | None:  # noqa: D102 as above
        if case.dtype not in ("float32", "float64"):
            return f"computes {case.dtype} in software"
        return "has no grouped heads" if case.n.group > 1 else super().refuses(case, name)

    def _forward(self, case: Case, x: Inputs) -> Prepared:
        hidden = _hidden(case, x)
        return Prepared(lambda: dense_attention(x, hidden)[0], lambda out: {"out": out})

    def _backward(self, case: Case, x: Inputs) -> Prepared:
        hidden = _hidden(case, x)

        def call() -> Any:
            out, a = dense_attention(x, hidden)
            return out, dense_gradients(x, a)

        return Prepared(call, gradients)


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


def load(name: str, threads: int) -> Peer:
    """The peer of that name, set to ``threads`` threads; an ImportError names the extra to install."""
    if name == "numpy":
        return NumPy()
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"bench: {name} is not installed: pip install 'attngrad[bench]'.") from error
    module = importlib.import_module(f"attngrad.bench.{name}_peer")
    peer: Peer = module.PEER(threads)
    return peer
