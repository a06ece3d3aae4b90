"""Oracles for derivatives of attention: how to know that a gradient is right without trusting another gradient.

The complex step: for an analytic f, Im f(x + i h t) / h is the derivative along t to machine precision, for h as small
as 1e-30, because nothing is subtracted. ``attngrad.reference`` runs in complex128, so every formula of the reverse and
forward modes can be held against the forward pass alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from attngrad import reference
from attngrad.core.arrays import NDArray
from attngrad.core.checks import fail
from attngrad.core.operands import Gradients, Tangents
from attngrad.core.options import OptionArguments

if TYPE_CHECKING:
    from attngrad.auditor.cases import Case
    from attngrad.auditor.report import AuditReport

__all__ = [
    "assert_attention_gradients",
    "assert_right",
    "cases",
    "complex_step_hvp",
    "complex_step_jvp",
    "complex_step_vjp",
    "relative_error",
    "rms_error",
    "rounding_bound",
]

_STEP = 1e-30
_INPUTS = Gradients._fields


def _same_shape(function: str, a: NDArray, b: NDArray) -> None:
    if np.shape(a) != np.shape(b):
        raise ValueError(f"{function}: shapes differ: {np.shape(a)} and {np.shape(b)}.")


def _difference(a: NDArray, b: NDArray) -> NDArray:
    """``a - b``, and zero where both are the same infinity, as lse is in a row that sees no key."""
    with np.errstate(invalid="ignore"):
        return np.where(a == b, a.dtype.type(0), a - b)


def _largest(x: NDArray) -> float:
    """The largest finite number, or 0."""
    return float(np.max(np.abs(x), where=np.isfinite(x), initial=0))


def relative_error(actual: NDArray, expected: NDArray) -> float:
    """``max |actual - expected| / max |expected|``, or the absolute difference where everything expected is zero.

    Infinite where either has NaN, or an infinity that the other has not.

    >>> relative_error(np.array([1.0, 2.2]), np.array([1.0, 2.0]))
    0.10000000000000009
    """
    _same_shape("relative_error", actual, expected)
    if actual.size == 0:
        return 0.0
    wide = np.result_type(actual.dtype if actual.dtype.kind in "fc" else np.float64, np.float64)
    a, b = actual.astype(wide), expected.astype(wide)
    error = float(np.max(np.abs(_difference(a, b))) / (_largest(b) or 1.0))
    return float("inf") if np.isnan(error) else error


def rms_error(actual: NDArray, expected: NDArray) -> float:
    """sqrt(mean((actual - expected)^2)), in longdouble.

    Infinite where either has NaN, or an infinity that the other has not.

    >>> rms_error(np.array([1.0, 2.0]), np.array([1.0, 4.0])) == 2.0**0.5
    True
    """
    _same_shape("rms_error", actual, expected)
    if actual.size == 0:
        return 0.0
    difference = _difference(actual.astype(np.longdouble), expected.astype(np.longdouble))
    error = float(np.sqrt(np.mean(difference * difference)))
    return float("inf") if np.isnan(error) else error


def rounding_bound(naive: NDArray, truth: NDArray, eps: float) -> float:
    """What a computation in a dtype may be off by: twice the naive RMS error, plus 8 eps times the largest result.

    ``naive`` is the straightforward computation in that dtype, every intermediate rounded to it; ``truth`` the
    longdouble reference. Compare with ``rms_error(actual, truth)``.

    >>> truth = np.array([1.0, 3.0], np.longdouble)
    >>> actual = truth.astype(np.float16) + np.float16(0.002)
    >>> bool(rms_error(actual, truth) <= rounding_bound(truth.astype(np.float16), truth, eps=2.0**-10))
    True
    """
    return 2.0 * rms_error(naive, truth) + 8.0 * eps * _largest(truth.astype(np.float64))


def _perturbed(inputs: Mapping[str, NDArray], t: Mapping[str, NDArray | None]) -> dict[str, NDArray]:
    """Every input as complex128, moved by i h t."""
    moved = {}
    for name, x in inputs.items():
        direction = t.get(name)
        moved[name] = x.astype(np.complex128) + (0.0 if direction is None else 1j * _STEP * direction)
    return moved


def _split(
    inputs: Mapping[str, NDArray], options: Mapping[str, Any]
) -> tuple[tuple[NDArray, NDArray, NDArray], OptionArguments]:
    """(q, k, v), and the options with bias and sinks among them."""
    arrays = {name: x for name, x in inputs.items() if name in ("bias", "sinks")}
    return (inputs["q"], inputs["k"], inputs["v"]), cast(OptionArguments, {**options, **arrays})


def _gather(
    q: NDArray, k: NDArray, v: NDArray, options: Mapping[str, Any]
) -> tuple[dict[str, NDArray], dict[str, Any]]:
    """The differentiable inputs by name, and the other options."""
    rest = dict(options)
    inputs = {"q": q, "k": k, "v": v}
    inputs |= {name: x for name in ("bias", "sinks") if (x := rest.pop(name, None)) is not None}
    return inputs, rest


def complex_step_jvp(
    q: NDArray, k: NDArray, v: NDArray, t: Tangents | tuple[Any, ...], **options: Any
) -> tuple[NDArray, NDArray]:
    """``out_dot, lse_dot`` along ``t``, from the forward pass alone.

    >>> import attngrad
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 3, 2))
    >>> out_dot, lse_dot = complex_step_jvp(q, k, v, (dout, None, None))
    >>> relative_error(attngrad.jvp((q, k, v), (dout, None, None))[1], out_dot) < 1e-14
    True
    """
    inputs, rest = _gather(q, k, v, options)
    qkv, moved = _split(_perturbed(inputs, Tangents(*t)._asdict()), rest | {"return_lse": True})
    out, lse = reference.attention(*qkv, **moved)
    return out.imag / _STEP, lse.imag / _STEP


def complex_step_vjp(
    q: NDArray, k: NDArray, v: NDArray, dout: NDArray | None, dlse: NDArray | None = None, **options: Any
) -> Gradients:
    """The gradient of <dout, out> + <dlse, lse>, coordinate by coordinate, from the forward pass alone.

    >>> import attngrad
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 3, 2))
    >>> expected = complex_step_vjp(q, k, v, dout, causal=True)
    >>> relative_error(attngrad.vjp(q, k, v, causal=True)[1](dout).k, expected.k) < 1e-14
    True
    """
    inputs, rest = _gather(q, k, v, options)
    found: dict[str, NDArray] = {}
    for name, x in inputs.items():
        gradient = np.zeros(x.shape)
        for index in np.ndindex(x.shape):
            one = np.zeros(x.shape)
            one[index] = 1.0
            qkv, moved = _split(_perturbed(inputs, {name: one}), rest | {"return_lse": True})
            out, lse = reference.attention(*qkv, **moved)
            value = 0.0 if dout is None else np.sum(dout * out.imag)
            if dlse is not None:
                value += np.sum(dlse * lse.imag)
            gradient[index] = value / _STEP
        found[name] = gradient
    return Gradients(*(found.get(name) for name in _INPUTS))


def complex_step_hvp(
    q: NDArray,
    k: NDArray,
    v: NDArray,
    t: Tangents | tuple[Any, ...],
    dout: NDArray,
    dout_dot: NDArray | None = None,
    dlse: NDArray | None = None,
    dlse_dot: NDArray | None = None,
    **options: Any,
) -> Gradients:
    """``grads_dot`` along ``t``, dout_dot and dlse_dot, from the backward pass of the reference.

    >>> import attngrad
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 3, 2))
    >>> expected = complex_step_hvp(q, k, v, (dout, None, None), dout)
    >>> _, grads_dot = attngrad.hvp((q, k, v), (dout, None, None), dout)
    >>> relative_error(grads_dot.k, expected.k) < 1e-14
    True
    """
    inputs, rest = _gather(q, k, v, options)
    qkv, moved = _split(_perturbed(inputs, Tangents(*t)._asdict()), rest)
    cotangents = _perturbed({"dout": dout}, {"dout": dout_dot})
    if dlse is not None:
        cotangents |= _perturbed({"dlse": dlse}, {"dlse": dlse_dot})
    _, pullback = reference.vjp(*qkv, **moved)
    grads = pullback(**cotangents)
    return Gradients(*(None if g is None else g.imag / _STEP for g in grads))


# --- for the tests of others ------------------------------------------------------------------------------------------


def assert_right(candidate: Any, *, framework: str = "numpy", **keywords: Any) -> AuditReport:
    """Fail, with the auditor's report as the message, unless ``candidate`` is right.

    Keywords as of ``attngrad.audit``; ``framework="torch"`` or ``"jax"``: a differentiable ``fn(q, k, v)``, as of
    ``attngrad.torch.audit`` and ``attngrad.jax.audit``. In pytest the fixture ``attngrad_audit`` does the same.

    >>> import attngrad
    >>> def candidate(q, k, v, dout):
    ...     out, pullback = attngrad.vjp(q, k, v)
    ...     return out, *pullback(dout)[:3]
    >>> assert_right(candidate, effort="quick").ok
    True
    """
    __tracebackhide__ = True
    report = audit_by(framework)(candidate, **keywords)
    if not report.ok:
        raise AssertionError(f"\n{report}")
    return report


assert_attention_gradients = assert_right
"""The same, under the name that it had first."""


def audit_by(framework: str) -> Callable[..., AuditReport]:
    """The audit of a framework's candidates."""
    modules = {"numpy": "run", "torch": "torch_candidate", "jax": "jax_candidate"}
    if framework not in modules:
        fail(ValueError, "assert_right", "framework", f"be one of {', '.join(modules)}", repr(framework))
    audit: Callable[..., AuditReport] = import_module(f"attngrad.auditor.{modules[framework]}").audit
    return audit


def cases(level: str = "attention", **keywords: Any) -> list[Case]:
    """The auditor's cases, for ``pytest.mark.parametrize``: each has a ``name``, ``arrays`` and ``options``.

    Keywords: options, dtype, effort, seed, as of ``attngrad.audit``.

    >>> case = cases(effort="quick")[0]
    >>> case.name, case.arrays["q"].shape, str(case)
    ('plain', (2, 2, 5, 4), 'plain')
    """
    from attngrad.auditor.cases import cases as provoking

    return list(provoking(level, **keywords))
