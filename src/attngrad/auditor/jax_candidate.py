"""A differentiable JAX function, audited: its gradients by jax.vjp, forward mode, second order."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np

from attngrad.auditor.frameworks import Call, Mode, audit_differentiable, function_of, inputs_of
from attngrad.auditor.report import AuditReport


def audit(fn: Any, **keywords: Any) -> AuditReport:
    """Audit ``fn(q, k, v) -> out`` on JAX arrays; keywords as of ``attngrad.audit``.

    dq, dk, dv, dbias and dsinks come from ``jax.vjp``; where ``fn`` offers them, forward mode (``jax.jvp``) and second
    order are audited too, all under ``jax.jit``. float64 is enabled for calls in it, and for no others.
    Options are passed as keywords if ``fn`` takes them. One call may take a minute, since every shape is compiled.

    >>> import jax
    >>> def fn(q, k, v):
    ...     return jax.nn.softmax(q @ k.mT, -1) @ v
    >>> audit(fn, effort="quick").mistakes
    ('scale-missing',)
    """
    from attngrad.auditor.run import audit as audit_any

    return audit_any(fn, framework="jax", **keywords)


def differentiate(fn: Any, **keywords: Any) -> AuditReport:
    """Audit a function of q, k and v by its gradients."""
    import jax

    keywords["time_limit"] = max(keywords["time_limit"], 60.0)
    keywords.setdefault("compiled", True)
    seconds: dict[Any, float] = {}
    report = audit_differentiable(fn, partial(_caller, seconds), _probe, _vjp, jax.jvp, _second, **keywords)
    told = f"{len(seconds)} programs of JAX, compiled in {sum(seconds.values()):.1f} s"
    return replace(report, tried=(*report.tried, told)) if seconds else report


def _x64(given: dict[str, Any]) -> Any:
    """A context in which float64 stays float64, where there is any."""
    import jax

    if not any(x.dtype == np.float64 for x in given.values()):
        return contextlib.nullcontext()

    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64  # type: ignore[attr-defined,unused-ignore]

    return enable_x64()


@cache
def _made(modes: tuple[Mode, ...], fn: Any, static: tuple[tuple[str, Any], ...]) -> Any:
    """``modes`` of ``fn`` as one function of arrays, under jit: compiled once per shape, for as long as it lives."""
    import jax

    def run(x: dict[str, Any], arrays: dict[str, Any]) -> dict[str, Any]:
        names = inputs_of(arrays)
        results: dict[str, Any] = {}
        for mode in modes:
            results |= mode(function_of(fn, dict(static) | arrays, names), x | arrays, names)
        return results

    return jax.jit(run)


def _with(modes: tuple[Mode, ...], run: Callable[..., Any]) -> Call:
    """``run(function, x, arrays)`` of the function of these modes, in a context in which float64 stays float64."""

    def call(fn: Any, given: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
        import jax
        import jax.numpy as jnp

        with _x64(given):
            x = {name: jnp.asarray(value) for name, value in given.items()}
            arrays = {n: jax.tree.map(jnp.asarray, o) for n, o in options.items() if _has_arrays(o)}
            static = tuple((n, o) for n, o in options.items() if n not in arrays)
            found: dict[str, Any] = run(_made(modes, fn, static), x, arrays)
            return found

    return call


def _caller(seconds: dict[Any, float], modes: tuple[Mode, ...]) -> Call:
    """Calls; ``seconds`` has how long the first of each program and shape took, which compiles it."""

    def run(f: Any, *x: Any) -> dict[str, Any]:
        import jax

        key = (f, *((y.shape, y.dtype) for y in jax.tree.leaves(x)))
        start = time.perf_counter()
        found = {name: np.asarray(value) for name, value in f(*x).items()}
        seconds.setdefault(key, time.perf_counter() - start)
        return found

    return _with(modes, run)


def _probe(modes: tuple[Mode, ...]) -> Call:
    """Traced and lowered, which shows what is not offered, and not compiled."""
    return _with(modes, lambda f, *x: f.lower(*x))


def _has_arrays(option: Any) -> bool:
    return isinstance(option, np.ndarray) or (isinstance(option, tuple) and any(map(_has_arrays, option)))


def _vjp(f: Any, inputs: tuple[Any, ...], dout: Any, part: slice, unused: bool = False) -> tuple[Any, Any]:
    import jax

    def of_part(*moved: Any) -> Any:
        given = list(inputs)
        given[part] = moved
        return f(*given)

    out, pullback = jax.vjp(of_part, *inputs[part])
    return out, pullback(dout)


def _second(f: Any, inputs: tuple[Any, ...], dout: Any, along: tuple[Any, ...], over: str) -> Any:
    """Reverse over reverse, which every custom rule can offer, or over forward."""
    import jax

    if over == "forward":
        _, pullback = jax.vjp(lambda *x: jax.jvp(f, x, along)[1], *inputs)
        return pullback(dout)
    _, pullback = jax.vjp(lambda *x: jax.vjp(f, *x)[1](dout), *inputs)
    return pullback(along)
