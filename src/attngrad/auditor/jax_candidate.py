"""A differentiable JAX function, audited: its gradients by jax.vjp, forward mode, second order."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from attngrad.auditor.frameworks import OPTION_GRADIENTS, audit_differentiable, function_of, inputs_of
from attngrad.auditor.report import AuditReport


def audit(fn: Any, **keywords: Any) -> AuditReport:
    """Audit ``fn(q, k, v) -> out`` on JAX arrays ``(B, H, T, D)``; keywords as of ``attngrad.audit``.

    dq, dk, dv, dbias and dsinks come from ``jax.vjp``; where ``fn`` offers them, forward mode (``jax.jvp``) and second
    order are audited too, all under ``jax.jit``. float64 is enabled for the calls. Options are passed as keywords if
    ``fn`` takes them. One call may take a minute (``time_limit``), since every shape is compiled.

    >>> import jax
    >>> def fn(q, k, v):
    ...     return jax.nn.softmax(q @ k.mT, -1) @ v
    >>> audit(fn, effort="quick").mistakes
    ('scale-missing',)
    """
    keywords.setdefault("time_limit", 60.0)
    modes = {
        OPTION_GRADIENTS: _caller(_option_gradients),
        "forward mode": _caller(_forward_mode),
        "double backward": _caller(_double_backward),
    }
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
    """``mode`` of ``fn`` under jit; compiled once per shape, for as long as ``fn`` lives here."""
    import jax

    def run(x: dict[str, Any], arrays: dict[str, Any]) -> dict[str, Any]:
        names = inputs_of(arrays)
        return mode(function_of(fn, dict(static) | arrays, names), x | arrays, names)

    return jax.jit(run)


def _caller(mode: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    def call(fn: Any, given: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
        import jax
        import jax.numpy as jnp

        with _x64():
            x = {name: jnp.asarray(value) for name, value in given.items()}
            arrays = {n: jax.tree.map(jnp.asarray, o) for n, o in options.items() if _has_arrays(o)}
            static = tuple((n, o) for n, o in options.items() if n not in arrays)
            results = _compiled(mode, fn, static)(x, arrays)
            return {name: np.asarray(value) for name, value in results.items()}

    return call


def _has_arrays(option: Any) -> bool:
    return isinstance(option, np.ndarray) or (isinstance(option, tuple) and any(map(_has_arrays, option)))


def _gradients(f: Any, x: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    import jax

    fixed = [x[n] for n in names[3:]]
    out, pullback = jax.vjp(lambda *qkv: f(*qkv, *fixed), x["q"], x["k"], x["v"])
    return {"out": out, **dict(zip(("dq", "dk", "dv"), pullback(x["dout"]), strict=True))}


def _option_gradients(f: Any, x: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    import jax

    if not names[3:]:
        return {}
    _, pullback = jax.vjp(lambda *more: f(x["q"], x["k"], x["v"], *more), *(x[n] for n in names[3:]))
    return {f"d{n}": g for n, g in zip(names[3:], pullback(x["dout"]), strict=True)}


def _forward_mode(f: Any, x: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    import jax

    primals, tangents = tuple(x[n] for n in names), tuple(x[f"{n}_dot"] for n in names)
    return {"out_dot": jax.jvp(f, primals, tangents)[1]}


def _double_backward(f: Any, x: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The gradients of the gradients, along the tangents: reverse over reverse, which every custom rule can offer."""
    import jax

    primals = tuple(x[n] for n in names)
    _, pullback = jax.vjp(lambda *inputs: jax.vjp(f, *inputs)[1](x["dout"]), *primals)
    twice = pullback(tuple(x[f"{n}_dot"] for n in names))
    more = jax.vjp(f, *primals)[1](x["dout_dot"])
    return {f"d{n}_dot": a + b for n, a, b in zip(names, twice, more, strict=True)}
