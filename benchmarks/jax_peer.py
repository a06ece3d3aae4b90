"""jax.nn.dot_product_attention, jitted, on the CPU.

Inputs are in its own layout, (B, T, H, D), before the clock starts. What it does not do is plain jax.numpy: D != E,
float16 (which it refuses on the CPU), and float64 (where its softmax would be in float32). Causal with T != S is a
boolean mask, as its is_causal is top-left. JVP is jax.jvp of it, HVP jax.jvp of jax.vjp, each jitted as one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from attngrad.core.arrays import NDArray
from benchmarks.cases import Case, Inputs
from benchmarks.peers import Peer, Prepared, gradients, second_order


def dense(q: Any, k: Any, v: Any, bias: Any = None, mask: Any = None) -> Any:
    """Attention in plain jax.numpy, layout (B, T, H, D)."""
    jax: Any = importlib.import_module("jax")
    jnp = jax.numpy
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    s = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    s = s if bias is None else s + bias
    s = s if mask is None else jnp.where(mask, s, -jnp.inf)
    return jnp.einsum("bhts,bshe->bthe", jax.nn.softmax(s, axis=-1), v)


def to_array(x: Any) -> NDArray:
    """(B, T, H, D) of jax as (B, H, T, D) of NumPy."""
    return np.asarray(x).swapaxes(1, 2)


class Jax(Peer):
    """jax.nn.dot_product_attention, compiled by XLA. Its number of threads is fixed when jax starts: NPROC."""

    name = "jax"
    most_pairs = 50_000_000

    def __init__(self, threads: int) -> None:
        self.jax: Any = importlib.import_module("jax")
        self.jax.config.update("jax_platforms", "cpu")
        self.jax.config.update("jax_enable_x64", True)
        passes = {
            "forward": self._forward,
            "forward + backward": self._backward,
            "jvp": self._jvp,
            "hvp": self._hvp,
        }
        super().__init__(str(self.jax.__version__), passes)
        self._compiled: tuple[Any, Any] = (None, None)

    def _attention(self, case: Case) -> Any:
        """f(q, k, v, bias, mask) for this case."""
        options: dict[str, Any] = {}
        plane = case.visible(np.arange(case.n.t))
        plain = case.n.d != case.n.e or case.dtype in ("float64", "float16")
        if case.options.causal and case.n.t == case.n.s and not plain:
            options["is_causal"] = True
            plane = None
        function = dense if plain else self.jax.nn.dot_product_attention
        constant = None if plane is None else self.jax.numpy.asarray(plane)[None, None]

        def attend(q: Any, k: Any, v: Any, bias: Any, mask: Any) -> Any:
            if constant is not None:
                mask = constant if mask is None else mask & constant
            return function(q, k, v, bias=bias, mask=mask, **options)

        return attend

    def _jitted(self, key: tuple[Any, ...], function: Any) -> Any:
        """``function`` compiled; the last one is kept, as a case is prepared to be verified, then to be timed."""
        if self._compiled[0] != key:
            self._compiled = key, self.jax.jit(function)
        return self._compiled[1]

    def _swapped(self, x: NDArray) -> Any:
        return self.jax.numpy.asarray(np.ascontiguousarray(x.swapaxes(1, 2)))

    def _inputs(self, x: Inputs) -> tuple[Any, ...]:
        asarray = self.jax.numpy.asarray
        swapped = (self._swapped(a) for a in x[:4])
        return (*swapped, *(None if a is None else asarray(a) for a in (x.bias, x.mask)))

    def _forward(self, case: Case, x: Inputs) -> Prepared:
        q, k, v, _, bias, mask = self._inputs(x)
        function = self._jitted((case, "forward"), self._attention(case))
        wait = self.jax.block_until_ready
        return Prepared(lambda: wait(function(q, k, v, bias, mask)), lambda out: {"out": to_array(out)})

    def _backward(self, case: Case, x: Inputs) -> Prepared:
        q, k, v, dout, bias, mask = self._inputs(x)
        attend, dbias, vjp = self._attention(case), case.options.dbias, self.jax.vjp

        def both(q: Any, k: Any, v: Any, dout: Any, bias: Any, mask: Any) -> Any:
            inputs = (q, k, v, bias) if dbias else (q, k, v)
            out, pullback = vjp(lambda *a: attend(*a[:3], a[3] if dbias else bias, mask), *inputs)
            return out, pullback(dout)

        function = self._jitted((case, "forward + backward"), both)
        wait = self.jax.block_until_ready

        def arrays(found: Any) -> dict[str, NDArray]:
            out, (dq, dk, dv, *rest) = found
            named = gradients((out, (dq, dk, dv)), to_array)
            return named | ({"dbias": np.asarray(rest[0])} if rest else {})

        return Prepared(lambda: wait(function(q, k, v, dout, bias, mask)), arrays)

    def _pushed(self, key: tuple[Any, ...], function: Any, x: Inputs, names: Sequence[str]) -> Callable[[], Any]:
        """The jitted call of jax.jvp of ``function(inputs names, bias, mask)`` along the tangents."""
        *primals, bias, mask = self._inputs(x)
        inputs = dict(zip(("q", "k", "v", "dout"), primals, strict=True))
        tangents = {name: self._swapped(x_dot) for name, x_dot in x.given([f"{name}_dot" for name in names]).items()}
        jvp, wait = self.jax.jvp, self.jax.block_until_ready

        def push(inputs: Any, tangents: Any, bias: Any, mask: Any) -> Any:
            def along(moved: Any) -> Any:
                whole = inputs | moved
                return function(*(whole[name] for name in names), bias, mask)

            return jvp(along, ({name: inputs[name] for name in tangents},), (tangents,))

        compiled = self._jitted((*key, *tangents), push)
        return lambda: wait(compiled(inputs, tangents, bias, mask))

    def _jvp(self, case: Case, x: Inputs) -> Prepared:
        call = self._pushed((case, "jvp"), self._attention(case), x, ("q", "k", "v"))
        return Prepared(call, lambda found: dict(zip(("out", "out_dot"), map(to_array, found), strict=True)))

    def _hvp(self, case: Case, x: Inputs) -> Prepared:
        attend, vjp = self._attention(case), self.jax.vjp

        def pulled(q: Any, k: Any, v: Any, dout: Any, bias: Any, mask: Any) -> Any:
            _, pullback = vjp(lambda q, k, v: attend(q, k, v, bias, mask), q, k, v)
            return pullback(dout)

        call = self._pushed((case, "hvp"), pulled, x, ("q", "k", "v", "dout"))
        return Prepared(call, lambda found: second_order(found, to_array))


PEER = Jax
