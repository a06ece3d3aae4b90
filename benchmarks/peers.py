"""Who computes: attngrad here, NumPy, torch and jax in modules of their own.

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
from attngrad.core.arrays import NDArray
from benchmarks.cases import Case, Inputs
from benchmarks.passes import PASSES, Arrays, Pass, by_name

NAMES = ("torch", "jax", "numpy")
OURS = "attngrad"
OWN_FLOAT32 = "f32"
OWN_BASE = "own"
HOUSE = (OURS, OWN_FLOAT32, OWN_BASE)
"""The contenders that are attngrad: no peers, nothing to win or lose against; a wrong result of theirs is our fault."""


class Prepared(NamedTuple):
    """``call()`` is what is timed; ``arrays`` turns its result into NumPy arrays (B, H, T, D), by output."""

    call: Callable[[], Any]
    arrays: Callable[[Any], Arrays]


Prepare = Callable[[Case, Inputs], Prepared]


class Peer:
    """One contender: ``passes`` holds, by the name of a pass, what prepares its call.

    ``most_pairs`` is the largest B H T S that it is asked for; ``approximate``, the passes in which it approximates.
    """

    name = ""
    most_pairs = math.inf
    approximate: frozenset[str] = frozenset()

    def __init__(self, version: str, passes: Mapping[str, Prepare]) -> None:
        self.version = version
        self.passes = passes
        self.deadly: dict[str, str] = {}  # dtypes that it does not survive on this machine, and why

    def runs(self, name: str) -> Pass:
        """The pass that it runs in the rows of the pass ``name``."""
        return PASSES[name]

    def refuses(self, case: Case, name: str) -> str | None:
        """Why this case is not run here, or None."""
        if self.runs(name).method not in self.passes:
            return f"has no {name}"
        if case.dtype in self.deadly:
            return self.deadly[case.dtype]
        if case.n.batch * case.n.heads * case.n.t * case.n.s > self.most_pairs:
            return "too large"
        return None

    def prepare(self, case: Case, name: str, x: Inputs) -> Prepared:
        """The call of a pass on these inputs."""
        run = self.runs(name)
        return self.passes[run.method](case, x.along(run.tangents))


def gradients(found: Any, convert: Callable[[Any], NDArray] = np.asarray) -> Arrays:
    """(out, (dq, dk, dv, perhaps dbias, ...)) by name, as NumPy arrays."""
    out, grads = found
    names = ("out", "dq", "dk", "dv", "dbias")
    return {name: convert(x) for name, x in zip(names, (out, *grads), strict=False) if x is not None}


def second_order(found: Any, convert: Callable[[Any], NDArray] = np.asarray) -> Arrays:
    """((dq, dk, dv), (dq_dot, dk_dot, dv_dot)) by name, as NumPy arrays."""
    return {
        f"d{name}{end}": convert(x)
        for end, by in zip(("", "_dot"), found, strict=True)
        for name, x in zip("qkv", by, strict=True)
    }


class Ours(Peer):
    """attngrad, through its public functions."""

    name = OURS

    def __init__(self) -> None:
        passes = {
            "forward": self._forward,
            "forward + backward": self._backward,
            "jvp": self._jvp,
            "hvp": self._hvp,
        }
        super().__init__(attngrad.__version__, passes)

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
        vjp, wrt = attngrad.vjp, None if case.options.dbias or x.bias is None else ("q", "k", "v")

        def call() -> Any:
            out, pullback = vjp(q, k, v, **options)
            return out, pullback(dout, wrt=wrt)

        return Prepared(call, gradients)

    def _jvp(self, case: Case, x: Inputs) -> Prepared:
        options, primals, tangents = self._options(case, x), x[:3], (x.q_dot, x.k_dot, x.v_dot)
        jvp = attngrad.jvp
        return Prepared(lambda: jvp(primals, tangents, **options), lambda f: {"out": f[0], "out_dot": f[1]})

    def _hvp(self, case: Case, x: Inputs) -> Prepared:
        options, primals, tangents = self._options(case, x), x[:3], (x.q_dot, x.k_dot, x.v_dot)
        hvp, dout, dout_dot = attngrad.hvp, x.dout, x.dout_dot
        return Prepared(
            lambda: hvp(primals, tangents, dout, dout_dot, **options),
            lambda found: by_name(found[0]) | by_name(found[1], "_dot"),
        )


class OursInFloat32(Ours):
    """attngrad on the same numbers in float32: what 16-bit rows are held against."""

    name = OWN_FLOAT32

    def prepare(self, case: Case, name: str, x: Inputs) -> Prepared:  # noqa: D102 as above
        wide = {field: a.astype(np.float32) for field, a in x._asdict().items() if a is not None and field != "mask"}
        return super().prepare(replace(case, dtype="float32"), name, x._replace(**wide))


class OursInAnotherPass(Ours):
    """attngrad's own forward, or forward + backward: what JVP and HVP are held against."""

    name = OWN_BASE

    def runs(self, name: str) -> Pass:  # noqa: D102 as above
        own = PASSES[name].own
        if own is None:
            raise ValueError(f"bench: the pass must be held against one of our own; got {name}.")
        return PASSES[own]


def load(name: str, threads: int) -> Peer:
    """The peer of that name, set to ``threads`` threads; an ImportError names the extra to install."""
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"bench: {name} is not installed: make .venv/.group-bench.") from error
    module = importlib.import_module(f"benchmarks.{name}_peer")
    peer: Peer = module.PEER(threads)
    return peer
