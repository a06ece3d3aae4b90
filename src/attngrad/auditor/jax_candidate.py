"""A differentiable JAX function, audited: its gradients by jax.vjp, forward mode, second order."""

from __future__ import annotations

from typing import Any

import numpy as np

from attngrad.auditor.frameworks import audit_differentiable
from attngrad.auditor.report import AuditReport


def audit(fn: Any, **keywords: Any) -> AuditReport:
    """Audit ``fn(q, k, v) -> out`` on JAX arrays ``(B, H, T, D)``; keywords as of ``attngrad.audit``.

    dq, dk and dv come from ``jax.vjp``; where ``fn`` offers them, forward mode (``jax.jvp``) and second order are
    audited too. float64 is enabled for the calls. Options are passed as keywords if ``fn`` takes them.
    """
    modes = {"forward mode": _forward_mode, "double backward": _double_backward}
    return audit_differentiable(fn, _gradients, modes, **keywords)


def _x64() -> Any:
    """A context in which float64 stays float64."""
    import jax

    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64  # type: ignore[attr-defined,unused-ignore]

    return enable_x64()


def _given(arrays: dict[str, Any], options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    import jax.numpy as jnp

    o = {n: jnp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    return {n: jnp.asarray(x) for n, x in arrays.items()}, o


def _numbers(results: dict[str, Any]) -> dict[str, Any]:
    return {name: np.asarray(x) for name, x in results.items()}


def _gradients(fn: Any, arrays: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    import jax

    with _x64():
        x, o = _given(arrays, options)
        out, pullback = jax.vjp(lambda q, k, v: fn(q, k, v, **o), x["q"], x["k"], x["v"])
        return _numbers({"out": out, **dict(zip(("dq", "dk", "dv"), pullback(x["dout"]), strict=True))})


def _forward_mode(fn: Any, arrays: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    import jax

    with _x64():
        x, o = _given(arrays, options)
        primals, tangents = tuple(x[n] for n in "qkv"), tuple(x[f"{n}_dot"] for n in "qkv")
        _, out_dot = jax.jvp(lambda q, k, v: fn(q, k, v, **o), primals, tangents)
        return _numbers({"out_dot": out_dot})


def _double_backward(fn: Any, arrays: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The gradients of the gradients, along the tangents: reverse over reverse, which every custom rule can offer."""
    import jax

    with _x64():
        x, o = _given(arrays, options)

        def gradients(q: Any, k: Any, v: Any) -> Any:
            return jax.vjp(lambda *qkv: fn(*qkv, **o), q, k, v)[1](x["dout"])

        primals = tuple(x[n] for n in "qkv")
        _, pullback = jax.vjp(gradients, *primals)
        twice = pullback(tuple(x[f"{n}_dot"] for n in "qkv"))
        more = jax.vjp(lambda *qkv: fn(*qkv, **o), *primals)[1](x["dout_dot"])
        return _numbers({f"d{n}_dot": a + b for n, a, b in zip("qkv", twice, more, strict=True)})
