"""What the candidates of PyTorch and JAX share: a differentiable fn(q, k, v), made into a candidate of the auditor."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from attngrad.auditor.report import AuditReport, Finding
from attngrad.auditor.run import audit

_ARRAYS = ("q", "k", "v", "dout", "q_dot", "k_dot", "v_dot", "dout_dot")
OPTION_GRADIENTS = "the gradient of bias or sinks"
_MORE = ("bias", "sinks")
_TANGENTS = tuple(f"{name}_dot" for name in _MORE)
Modes = dict[str, Callable[..., dict[str, Any]]]


def inputs_of(options: dict[str, Any]) -> tuple[str, ...]:
    """The inputs that have a tangent: q, k, v, and what is given of bias and sinks."""
    return ("q", "k", "v", *(name for name in _MORE if name in options))


def function_of(fn: Any, options: dict[str, Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """``fn`` as a function of the inputs ``names`` alone."""
    return lambda *x: fn(*x[:3], **(options | dict(zip(names[3:], x[3:], strict=True))))


def audit_differentiable(
    fn: Any, gradients: Callable[..., dict[str, Any]], modes: Modes, **keywords: Any
) -> AuditReport:
    """Audit ``fn`` by its framework's own differentiation.

    ``gradients(fn, arrays, options)`` gives out, dq, dk, dv; ``modes`` (gradients of options, forward mode, double
    backward) give more results. A mode that the first call shows ``fn`` not to offer is left out, with a note.
    """
    missing: dict[str, str] = {}
    settled: set[str] = set()

    def candidate(*arrays: Any, **options: Any) -> dict[str, Any]:
        given = dict(zip(_ARRAYS, arrays, strict=True))
        given |= {name: options.pop(name) for name in _TANGENTS if name in options}
        results = gradients(fn, given, options)
        for name, mode in modes.items():
            if name in missing:
                continue
            try:
                results |= mode(fn, given, options)
            except Exception as error:
                if name in settled:
                    raise
                missing[name] = f"{type(error).__name__}: {error}".splitlines()[0]
                if name == OPTION_GRADIENTS:  # the tangents are along bias and sinks too
                    missing.update(dict.fromkeys(modes, missing[name]))
            settled.add(name)
        return results

    candidate.__signature__ = _signature(fn)  # type: ignore[attr-defined]
    keywords.setdefault("name", getattr(fn, "__qualname__", type(fn).__name__))
    report = audit(candidate, **keywords)
    notes = tuple(
        Finding("unsupported", f"It does not offer {name}, which was not audited: {why}", False, name)
        for name, why in missing.items()
    )
    return replace(report, findings=report.findings + notes)


def _signature(fn: Any) -> inspect.Signature:
    """The arrays, then the keywords of ``fn`` that may be options."""
    kinds = inspect.Parameter
    parameters = [kinds(name, kinds.POSITIONAL_ONLY) for name in _ARRAYS]
    try:
        own = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        own = []
    keywords = {kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY}
    parameters += [kinds(name, kinds.KEYWORD_ONLY, default=None) for name in _TANGENTS]
    parameters += [
        kinds(p.name, kinds.KEYWORD_ONLY, default=None) for p in own[3:] if p.kind in keywords and p.name not in _ARRAYS
    ]
    parameters += [p for p in own if p.kind is kinds.VAR_KEYWORD]
    return inspect.Signature(parameters)
