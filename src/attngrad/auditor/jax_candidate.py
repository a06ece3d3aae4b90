"""A differentiable JAX function, audited: its gradients by jax.vjp, forward mode, second order."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from attngrad.auditor.frameworks import audit_differentiable
from attngrad.auditor.report import AuditReport


def audit(fn: Any, **keywords: Any) -> AuditReport:
    """Audit ``fn(q, k, v) -> out`` on JAX arrays ``(B, H, T, D)``; keywords as of ``attngrad.audit``.

    dq, dk and dv come from ``jax.vjp``; where ``fn`` offers them, forward mode (``jax.jvp``) and second order are
    audited too, all under ``jax.jit``. float64 is enabled for the calls. Options are passed as keywords if ``fn`` takes
    them. One call may take a minute (``time_limit``), since every shape is compiled.

    >>> import jax
    >>> def fn(q, k, v):
    ...     return jax.nn.softmax(q @ k.mT, -1) @ v
    >>> audit(fn, effort="quick").mistakes
    ('scale-missing',)
    """
    keywords.setdefault("time_limit", 60.0)
    modes = {"forward mode": _caller(_forward_mode), "double backward": _caller(_double_backward)}
    return audit_differentiable(fn, _caller(_gradients), modes, **keywords)


def _x64() -> Any:
    """A context in which float64 stays float64."""
    import jax

    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64  # type: ignore[attr-defined,unused-ignore]

    return enable_x64()


@cache
def _compiled(mode: Callable[..., dict[str, Any]], fn: Any, static: tuple[tuple[str, Any], ...]) -> Any:
    """``mode`` of ``fn`` under jit; compiled once a shape, for as long as ``fn`` lives here."""
    import jax

    def run(x: dict[str, Any], arrays: dict[str, Any]) -> dict[str, Any]:
        return mode(lambda q, k, v: fn(q, k, v, **dict(static), **arrays), x)

    return jax.jit(run)


def _caller(mode: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    def call(fn: Any, given: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
        import jax.numpy as jnp

        with _x64():
            x = {name: jnp.asarray(value) for name, value in given.items()}
            arrays = {n: jnp.asarray(o) for n, o in options.items() if isinstance(o, np.ndarray)}
            static = tuple((n, o) for n, o in options.items() if n not in arrays)
            results = _compiled(mode, fn, static)(x, arrays)
            return {name: np.asarray(value) for name, value in results.items()}

    return call


def _gradients(f: Any, x: dict[str, Any]) -> dict[str, Any]:
    import jax

    out, pullback = jax.vjp(f, x["q"], x["k"], x["v"])
    return {"out": out, **dict(zip(("dq", "dk", "dv"), pullback(x["dout"]), strict=True))}


def _forward_mode(f: Any, x: dict[str, Any]) -> dict[str, Any]:
    import jax

    primals, tangents = tuple(x[n] for n in "qkv"), tuple(x[f"{n}_dot"] for n in "qkv")
    return {"out_dot": jax.jvp(f, primals, tangents)[1]}


def _double_backward(f: Any, x: dict[str, Any]) -> dict[str, Any]:
    """The gradients of the gradients, along the tangents: reverse over reverse, which every custom rule can offer."""
    import jax

    primals = tuple(x[n] for n in "qkv")
    _, pullback = jax.vjp(lambda *qkv: jax.vjp(f, *qkv)[1](x["dout"]), *primals)
    twice = pullback(tuple(x[f"{n}_dot"] for n in "qkv"))
    more = jax.vjp(f, *primals)[1](x["dout_dot"])
    return {f"d{n}_dot": a + b for n, a, b in zip("qkv", twice, more, strict=True)}
