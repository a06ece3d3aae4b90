"""What the candidates of PyTorch and JAX share: a differentiable fn(q, k, v), made into a candidate of the auditor."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from attngrad.auditor.adapters import prepared
from attngrad.auditor.report import AuditReport, Finding
from attngrad.auditor.run import audit

_ARRAYS = ("q", "k", "v", "dout", "q_dot", "k_dot", "v_dot", "dout_dot")
BACKWARD = "a backward"
OPTION_GRADIENTS = "the gradient of bias or sinks"
_MORE = ("bias", "sinks")
_TANGENTS = tuple(f"{name}_dot" for name in _MORE)
Mode = Callable[[Any, dict[str, Any], tuple[str, ...]], dict[str, Any]]
"""Results of ``f``, a function of the inputs of these names, at arrays by name."""
Call = Callable[[Any, dict[str, Any], dict[str, Any]], dict[str, Any]]
"""The same of the candidate, at NumPy arrays and options."""


def inputs_of(options: dict[str, Any]) -> tuple[str, ...]:
    """The inputs that have a tangent: q, k, v, and what is given of bias and sinks."""
    return ("q", "k", "v", *(name for name in _MORE if name in options))


def function_of(fn: Any, options: dict[str, Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """``fn`` as a function of the inputs ``names`` alone."""

    def f(*x: Any) -> Any:
        found = fn(*x[:3], **(options | dict(zip(names[3:], x[3:], strict=True))))
        return found[0] if isinstance(found, (tuple, list)) else found  # out before lse, or before weights

    return f


def _forward(f: Any, x: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The output alone."""
    return {"out": f(*(x[n] for n in names))}


@cache
def _modes(vjp: Callable[..., Any], jvp: Callable[..., Any], second: Callable[..., Any]) -> dict[str, Mode]:
    """Every way to differentiate, by name; that to the gradients of q, k and v first, under the empty one.

    The same functions for each audit: JAX compiles a function once.
    """

    def inputs(x: dict[str, Any], names: tuple[str, ...], suffix: str = "") -> tuple[Any, ...]:
        return tuple(x[f"{n}{suffix}"] for n in names)

    def gradients(f: Any, x: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
        out, grads = vjp(f, inputs(x, names), x["dout"], slice(3), unused=True)
        return {"out": out, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}

    def option_gradients(f: Any, x: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
        if not names[3:]:
            return {}
        _, grads = vjp(f, inputs(x, names), x["dout"], slice(3, None))
        return {f"d{n}": g for n, g in zip(names[3:], grads, strict=True)}

    def forward_mode(f: Any, x: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
        return {"out_dot": jvp(f, inputs(x, names), inputs(x, names, "_dot"))[1]}

    def twice(over: str, suffix: str, count: int | None) -> Mode:
        """The Hessian of <dout, out> applied to the tangents, plus the gradients along dout_dot."""

        def mode(f: Any, x: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
            hessian = second(f, inputs(x, names), x["dout"], inputs(x, names, "_dot"), over)
            _, more = vjp(f, inputs(x, names), x["dout_dot"], slice(None))
            return {f"d{n}_{suffix}": a + b for n, a, b in zip(names[:count], hessian, more, strict=False)}

        return mode

    return {
        "": gradients,
        OPTION_GRADIENTS: option_gradients,
        "forward mode": forward_mode,
        "double backward": twice("reverse", "dot", None),
        "reverse over forward": twice("forward", "mixed", 3),
    }


def audit_differentiable(
    fn: Any,
    caller: Callable[[tuple[Mode, ...]], Call],
    probe: Callable[[tuple[Mode, ...]], Call],
    vjp: Callable[..., Any],
    jvp: Callable[..., Any],
    second: Callable[..., Any],
    tensors: bool = False,
    **keywords: Any,
) -> AuditReport:
    """Audit ``fn`` by its framework's own differentiation.

    ``vjp(f, inputs, dout, part)`` gives out and the gradients of that part of the inputs, ``jvp(f, inputs, tangents)``
    out and its tangent, ``second(f, inputs, dout, tangents, over)`` the Hessian of <dout, out> along the tangents,
    reverse over reverse or over forward mode; ``caller`` lets modes take NumPy arrays, ``probe`` raises where ``fn``
    does not offer them; ``tensors``: it is of PyTorch. What the first call shows ``fn`` not to offer is left out, with
    a note.
    """
    fn = prepared(fn, keywords)
    modes = _modes(vjp, jvp, second)
    missing: dict[str, str] = {}
    offered: dict[tuple[str, ...], tuple[Mode, ...]] = {}

    def found(given: dict[str, Any], options: dict[str, Any]) -> tuple[Mode, ...]:
        """The modes that ``fn`` offers with these options; the first must be there."""
        kept, lacking = [], set()
        for name, mode in modes.items():
            if OPTION_GRADIENTS in lacking or (name == "reverse over forward" and "forward mode" in lacking):
                continue  # the tangents are along bias and sinks too
            try:
                probe((mode,))(fn, given, options)
            except Exception as error:
                if not name and isinstance(error, NotImplementedError):  # as FlexAttention's on the CPU
                    missing.setdefault(BACKWARD, _not_offered(BACKWARD, error))
                    return (_forward,)
                if not name:
                    raise
                lacking.add(name)
                missing.setdefault(name, _not_offered(name, error))
                continue
            kept.append(mode)
        return tuple(kept)

    def candidate(*arrays: Any, **options: Any) -> dict[str, Any]:
        given = dict(zip(_ARRAYS, arrays, strict=True))
        given |= {name: options.pop(name) for name in _TANGENTS if name in options}
        names = inputs_of(options)
        if names not in offered:
            offered[names] = found(given, options)
        return caller(offered[names])(fn, given, options)

    def output(*arrays: Any, **options: Any) -> dict[str, Any]:
        given = dict(zip(_ARRAYS, arrays, strict=True))
        return caller((_forward,))(fn, given, {name: x for name, x in options.items() if name not in _TANGENTS})

    candidate.probe = output  # type: ignore[attr-defined]
    output.__signature__ = _signature(fn)  # type: ignore[attr-defined]
    candidate.__signature__ = _signature(fn)  # type: ignore[attr-defined]
    candidate.__wrapped__ = fn  # type: ignore[attr-defined]
    if tensors:
        candidate.spelled = getattr(fn, "spelled", {})  # type: ignore[attr-defined]
    keywords.setdefault("name", getattr(fn, "__qualname__", type(fn).__name__))
    report = audit(candidate, level="attention", framework="numpy", **keywords)
    notes = tuple(Finding("unsupported", told, False, name) for name, told in missing.items())
    return replace(report, findings=report.findings + notes)


def _not_offered(name: str, error: Exception) -> str:
    """What is said of a mode that raised; a note on the error says where it would not have."""
    notes = getattr(error, "__notes__", ())  # JAX adds some of its own
    where = "".join(f" {note}" for note in notes if note.startswith("with "))
    silent = "" if name == OPTION_GRADIENTS else f"; it raises, so nothing is silently wrong{where}"
    why = f"{type(error).__name__}: {error}".splitlines()[0]
    return f"It does not offer {name}, which was not audited{silent}: {why}"


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
        kinds(p.name, kinds.KEYWORD_ONLY, default=p.default)
        for p in own[3:]
        if p.kind in keywords and p.name not in _ARRAYS
    ]
    parameters += [p for p in own if p.kind is kinds.VAR_KEYWORD]
    return inspect.Signature(parameters)
