"""The audit: call the candidate on every case, judge what comes back, diagnose, shrink, report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from attngrad.auditor import adapters, recorded
from attngrad.auditor.calls import BadCandidate, parameters_of
from attngrad.auditor.cases import EFFORTS, Case, cases, check_options
from attngrad.auditor.companions import add_companions
from attngrad.auditor.conventions import settle_conventions
from attngrad.auditor.detect import settle
from attngrad.auditor.findings import Again, report
from attngrad.auditor.layouts import Layout, layout_of
from attngrad.auditor.objects import is_layer_object
from attngrad.auditor.pace import too_slow
from attngrad.auditor.pairs import as_function, is_pair
from attngrad.auditor.pipeline import LATER, RESULTS
from attngrad.auditor.plans import COMPILED, FEATURES, Dims
from attngrad.auditor.repeat import repeat, uninitialised
from attngrad.auditor.report import AuditReport, Finding
from attngrad.auditor.session import Session
from attngrad.auditor.sizes import Adapt, both, sizes_of
from attngrad.auditor.targets import Target, level_of, own_options, target_of
from attngrad.auditor.trials import off_by_default, on_by_default, try_options
from attngrad.core.arrays import kind_of
from attngrad.core.checks import check_real, fail
from attngrad.core.dtypes import BFLOAT16, KERNEL_DTYPES, SENTENCE

Progress = Callable[[int, int, str], None]
LEVELS = ("attention", "layer")
PATIENCE = {"quick": 1.0, "default": 4.0, "full": 120.0}
"""Seconds that all calls at the sizes of blocks may take; those beyond are left out."""

_ALIASES = {"d!=e": "widths", "dv": "widths", "t!=s": "cross", "mqa": "gqa"}


def audit(
    candidate: Any,
    *,
    level: str | None = None,
    options: Mapping[str, Any] | None = None,
    supports: Sequence[str] = (),
    layout: str | None = None,
    sizes: Mapping[str, Any] | None = None,
    dtype: Any = None,
    framework: str | None = None,
    device: Any = None,
    inputs: Mapping[str, Any] | None = None,
    effort: str = "default",
    seed: int = 0,
    time_limit: float = 10.0,
    progress: Progress | None = None,
    name: str | None = None,
    compiled: bool = False,
) -> AuditReport:
    """Say whether an attention implementation and its gradients are right, and if not, what the mistake is.

    Args:
        candidate: ``candidate(q, k, v, dout)`` on arrays ``(B, H, T, D)``, which returns ``(out, dq, dk, dv)``,
            ``(dq, dk, dv)``, or a mapping with any of the names of docs/audit.md; ``candidate(q, k, v)`` for a forward
            alone; with ``q_dot, k_dot, v_dot`` (and ``dout_dot``) among its arguments for JVP and HVP; a pair
            ``(forward, backward)``. For a layer: ``candidate(query, key, value, w_q, w_k, w_v, w_o, dy, num_heads)``,
            what it needs of these by name, or a class or object with ``forward`` and ``backward``.
        level: ``"attention"`` or ``"layer"``; None: by whether it has weights.
        options: what every case has: ``{"causal": True}``. Passed as keywords if the candidate takes them; one that
            takes no ``causal`` must be causal by itself, and is not audited where it is not. ``True`` for mask, bias,
            sinks or segments makes one for each case. None: those that it takes by name are tried one by one; ``{}``:
            none is passed.
        supports: ``"gqa"``, ``"cross"`` (T != S), ``"widths"`` (D != E), ``"rectangular"``: raising on these is then a
            fault, not a note.
        layout: ``"BHTD"``, ``"BTHD"``, ``"BTD"``, ``"HTD"``, ``"TD"`` or ``"packed"`` (with cu_seqlens); None: found
            out by a call.
        sizes: those that it takes: ``{"tokens": "multiple of 16", "features": (32, 64, 128)}``.
        dtype: float64, float32, float16 or bfloat16; None: float64, or the widest that it takes.
        framework: ``"numpy"``, ``"torch"`` or ``"jax"``: the arrays that it takes; None: by what it uses.
        device: where the tensors of a PyTorch candidate live. The truth is computed on the CPU.
        inputs: recorded ``{"q": ..., "k": ..., "v": ..., "dout": ...}`` to audit it with, in place of made cases.
        effort: ``"quick"``, ``"default"`` or ``"full"``.
        seed: of the values.
        time_limit: seconds for one call.
        progress: called with (done, total, text).
        compiled: whether every shape is compiled before it runs, so that few shapes are tried but by ``"full"``.

    >>> import attngrad
    >>> def candidate(q, k, v, dout):
    ...     out, pullback = attngrad.vjp(q, k, v)
    ...     dq, dk, dv, _, _ = pullback(dout)
    ...     return out, dq * np.sqrt(q.shape[-1]), dk, dv
    >>> report = audit(candidate, effort="quick")
    >>> report.ok, report.mistakes
    (False, ('scale-missing-in-dq',))
    """
    options, sizes = own_options(candidate, options, sizes)
    chosen, wanted, kind = _check(candidate, level, options, supports, dtype, effort, seed, time_limit)
    held = recorded.checked(inputs)
    if held is not None:
        kind = np.dtype(dtype := dtype or held["q"].dtype)
    asked = _Asked(
        candidate, level, chosen, wanted, layout_of(layout), sizes_of(sizes), kind, held, effort, seed, time_limit,
        compiled,
    )  # fmt: skip
    keywords: dict[str, Any] = {
        "level": level, "options": options, "supports": supports, "layout": layout, "sizes": sizes, "dtype": dtype,
        "inputs": inputs, "effort": effort, "seed": seed, "time_limit": time_limit, "progress": progress, "name": name,
    }  # fmt: skip
    handled = adapters.differentiable(candidate, framework, device, **keywords)
    if handled is not None:
        return handled
    title: str = name or _name(candidate)
    settings: dict[str, Any] = {"level": level, "dtype": kind, "effort": effort, "seed": int(seed), "options": ""}
    try:
        settings["level"] = level = level or level_of(candidate)
        taken = _settled(asked, level, adapters.converter(candidate, framework, device))
    except BadCandidate as error:
        settings["dtype"] = (kind or np.dtype(np.float64)).name
        return AuditReport(title, "not audited", findings=(Finding("crash", str(error)),), settings=settings)
    settings |= {"dtype": taken.dtype.name, "options": _told(taken.options)}
    session = _session(asked, taken)
    tell, made = progress or (lambda done, total, text: None), _cases(asked, taken, session)
    for number, case in enumerate(made):
        tell(number, len(made) + 2, case.name)
        if not compiled and too_slow(session, case):
            continue
        if session.try_case(case):
            break
    if framework is None and not session.observations and session.crashes:
        session.tensors = adapters.imported_beside(candidate) == "torch"
        with_tensors = _with_tensors(candidate, session, keywords | {"compiled": compiled})
        if with_tensors is not None:
            return with_tensors
    session.settle_crashes()
    if (fault := _computes_without(candidate, session, taken.lacking)) is not None:
        return AuditReport(title, "not audited", findings=(fault,), settings=settings)
    settle_conventions(session)
    if not compiled or effort == "full":  # what is compiled for each shape has few of them
        add_companions(session)
    again = Again()
    if held is None:
        again = _again(session, effort)
        again = _with_options(session, again, off_by_default(taken.function), options, effort, compiled)
    settings["cases"] = len(session.observations)
    settings |= {"unasked": again.unasked} if again.unasked else {}
    tell(len(made), len(made) + 2, "diagnosis" if session.wrong else "report")
    found = report(session, title, settings, again, lambda: tell(len(made) + 1, len(made) + 2, "the smallest case"))
    tell(len(made) + 2, len(made) + 2, "done")
    return found


class _Asked(NamedTuple):
    """What was asked of an audit, checked; None where that is to be found out."""

    candidate: Any
    level: str | None
    options: Mapping[str, Any]
    supports: frozenset[str]
    layout: Layout | None
    adapt: Adapt | None
    """To the sizes that it takes."""
    dtype: np.dtype[Any] | None
    inputs: Any
    effort: str
    seed: int
    time_limit: float
    compiled: bool


class _Taken(NamedTuple):
    """What the candidate takes, as its first calls showed."""

    target: Target
    function: Any
    dtype: np.dtype[Any]
    options: dict[str, Any]
    """What it is judged by: what was asked for, and what it does without being asked."""
    lacking: tuple[str, ...]
    """Of these, what it has no parameter for."""
    notes: list[tuple[str, str, str | None]]
    """What is said of that: kind, text, name."""


def _name(candidate: Any) -> str:
    function = candidate[0] if is_pair(candidate) else candidate
    return getattr(function, "__qualname__", None) or type(function).__name__


def _settled(asked: _Asked, level: str, convert: Any) -> _Taken:
    """Find out, by a few calls, what was not asked for: layout, dtype, what is on by default."""
    candidate, held = asked.candidate, asked.inputs
    function = as_function(candidate) if level == "attention" else candidate
    standing = {name: x for name, x in on_by_default(function).items() if name not in asked.options}
    options = {**asked.options, **standing}
    probe = getattr(candidate, "probe", candidate)
    place, dtype, more, said, spelling, groups = settle(
        lambda layout, kind: target_of(probe, level, asked.supports, layout, kind, convert),
        level, asked.layout, asked.dtype, options,
        (lambda x: asked.adapt) if held is None else partial(recorded.sizes_in, held),
        asked.time_limit, asked.compiled,
    )  # fmt: skip
    target = target_of(candidate, level, asked.supports, place, dtype, convert)
    target = replace(target, adapt=both(target.adapt, asked.adapt))
    if not groups and "gqa" not in asked.supports:
        target = replace(target, adapt=both(target.adapt, lambda n: replace(n, hk=n.hq)))
    if spelling is not None:
        recast = target.recast
        target = replace(target, recast=lambda case: replace(recast(case), spelling=spelling))
    lacking = tuple(x for x in options if x not in target.keywords and x not in more and x != "seed")
    notes: list[tuple[str, str, str | None]] = [(about, text, None) for about, text in said]
    notes += [("option", _standing(name, x), None) for name, x in standing.items()]
    judged = "It has no parameter {0}: it was called without it, and judged as attention with {0}."
    notes += [("option", judged.format(option), option) for option in lacking]
    return _Taken(target, function, dtype, options | more, lacking, notes)


def _session(asked: _Asked, taken: _Taken) -> Session:
    """The session, with what is known of the candidate so far."""
    session = Session(taken.target, taken.dtype, asked.supports, asked.time_limit)
    session.options, session.patience = taken.options, PATIENCE[asked.effort]
    session.skipped += taken.target.untried
    session.spelled = getattr(asked.candidate, "spelled", None)
    session.transposes = adapters.names_attribute(asked.candidate, "T")
    for kind, text, name in taken.notes:
        session.say(kind, text, fault=False, name=name)
    return session


def _cases(asked: _Asked, taken: _Taken, session: Session) -> list[Case]:
    """What it is called with, by size; of recorded inputs the one case."""
    target = taken.target
    if asked.inputs is not None:
        whole = recorded.case_of(asked.inputs, target.layout, taken.options, asked.seed)
        session.recorded = recorded.Recorded(whole, target.layout, asked.effort)
        return [whole]
    made = cases(
        target.level, options=taken.options, dtype=taken.dtype, effort=asked.effort, seed=asked.seed,
        only=_shapes(target, asked.effort, asked.compiled), plain_output=target.plain_output,
    )  # fmt: skip
    # The larger show how long the largest take.
    return sorted(map(target.recast, made), key=lambda case: case.dims.work if case.dims.large else 0)


def _computes_without(candidate: Any, session: Session, lacking: tuple[str, ...]) -> Finding | None:
    """That it computes attention without the options that it does not take, where fewer results are wrong then."""
    if not lacking or not (wrong := session.count_wrong()):
        return None
    without = session.count_wrong(without=(*lacking, "seed") if "dropout" in lacking else lacking)
    return Finding("option", _not_taken(candidate, lacking, without > 0)) if without < wrong else None


def _with_tensors(candidate: Any, session: Session, keywords: dict[str, Any]) -> AuditReport | None:
    """The audit by the framework that its module imports, where NumPy arrays raise and that says more; else None."""
    if (framework := adapters.imported_beside(candidate)) is None:
        return None
    found = audit(candidate, **keywords, framework=framework)
    if found.status == "not audited" and not any("numpy.ndarray" in (call.error or "") for _, call in session.crashes):
        return None
    what = {"torch": "tensors of PyTorch", "jax": "arrays of JAX"}[framework]
    told = f"NumPy arrays raise {session.crashes[0][1].error}: audited with {what}."
    return replace(found, findings=(*found.findings, Finding("framework", told, fault=False, name="framework")))


def _shapes(target: Target, effort: str, compiled: bool) -> Callable[[Dims], Dims | None] | None:
    """The sizes that a case has for this candidate: those of the plan, or the nearest of a few that are compiled."""
    if not compiled or effort == "full":
        return target.adapt

    def nearest(n: Dims) -> Dims | None:
        few = COMPILED[1 if n.features else 2 if n.t > 256 else 3 if n.d >= 128 else 0]
        return target.adapt(few) if target.adapt is not None else few

    return nearest


def _again(session: Session, effort: str) -> Again:
    """The same case many times, and cases with poisoned memory."""
    repeated, stale = repeat(session, effort), uninitialised(session, effort)
    if repeated is not None and stale and set(repeated.names) <= set(stale):
        repeated = None  # whatever stood in memory: that is why they differ
    tried = (repeated.told,) if repeated is not None and not repeated.differing else ()
    return Again(repeated, stale, tried)


def _with_options(
    session: Session, again: Again, names: tuple[str, ...], options: Any, effort: str, compiled: bool
) -> Again:
    """What was tried and what was not: sizes, and the options that nobody asked for."""
    seen = [o.truth.case.dims for o in session.observations]
    if not seen:
        return again
    tokens, features = max(max(n.t, n.s) for n in seen), max(max(n.d, n.e) for n in seen)
    tried, untried = [f"up to {tokens} tokens and {features} features"], list(session.skipped)
    rest = [n for n in names if n not in (options or {}) and n not in ("seed", "offset", "return_lse")]
    if options is None and not session.wrong_at_once:
        if session.wrong:  # a fault of second order must not hide one of first order
            session.judged = tuple(n for n in RESULTS if n not in LATER)
        found = try_options(session, names, effort, compiled)
        if found.tried and session.judged != RESULTS:
            untried.append("tangents and second order with options (wrong without)")
        tried, untried = tried + found.tried, untried + found.untried
        again = replace(again, repeated=found.flaky or again.repeated, unasked=tuple(found.unasked))
    elif rest:
        untried.append(f"{', '.join(rest)} ({'options were given' if options is not None else 'it is wrong without'})")
    return replace(again, tried=(*tried, *again.tried), untried=(*untried, *again.untried))


def _check(
    candidate: Any, level: Any, options: Any, supports: Any, dtype: Any, effort: Any, seed: Any, time_limit: Any
) -> tuple[dict[str, Any], frozenset[str], np.dtype[Any] | None]:
    if not callable(candidate) and not is_layer_object(candidate) and not is_pair(candidate):
        fail(TypeError, "audit", "candidate", "be callable", kind_of(candidate))
    if level not in (None, *LEVELS):
        fail(ValueError, "audit", "level", "be 'attention' or 'layer'", repr(level))
    if effort not in EFFORTS:
        fail(ValueError, "audit", "effort", f"be one of {', '.join(EFFORTS)}", repr(effort))
    if isinstance(supports, str):
        supports = (supports,)
    if not isinstance(supports, Iterable):
        fail(TypeError, "audit", "supports", f"be among {', '.join(FEATURES)}", kind_of(supports))
    claimed = frozenset(_ALIASES.get(str(s).lower(), str(s)) for s in supports)
    for unknown in claimed - set(FEATURES):
        fail(ValueError, "audit", "supports", f"have only {', '.join(FEATURES)}", repr(unknown))
    try:
        kind = None if dtype is None else np.dtype(BFLOAT16 if dtype == BFLOAT16.name else dtype)
    except TypeError:
        fail(TypeError, "audit", "dtype", "be a dtype", repr(dtype))
    if kind is not None and kind not in KERNEL_DTYPES:
        fail(ValueError, "audit", "dtype", f"be {SENTENCE}", kind)
    if not isinstance(seed, (int, np.integer)) or isinstance(seed, bool) or seed < 0:
        fail(ValueError, "audit", "seed", "be an integer >= 0", repr(seed))
    if check_real("audit", "time_limit", time_limit) <= 0.0:
        fail(ValueError, "audit", "time_limit", "be positive", time_limit, "It is in seconds.")
    return check_options(options), claimed, kind


def _standing(name: str, x: Any) -> str:
    """What is said of an option that nobody asked for and that is on all the same."""
    if name == "causal":
        return "It is causal by default: audited as causal attention."
    if x is True:
        return f"It wants {name}: audited with {name} made for each case."
    return f"It has {name} by default: audited with {name}={x:g}."


def _not_taken(candidate: Any, lacking: Sequence[str], wrong: bool) -> str:
    """What is said of a candidate that was asked for options that it neither takes nor computes."""
    names, own = " and ".join(lacking), parameters_of(getattr(as_function(candidate), "__wrapped__", candidate)).names
    close = "closer to" if wrong else "right for"
    return (
        f"audit: candidate must take {names}; it takes ({', '.join(own)}), and its results are {close} attention "
        f"without {names}. Give it the parameter, or leave the option out."
    )


def _told(options: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name}={'array' if isinstance(x, (np.ndarray, tuple)) and name not in ('window',) else x}"
        for name, x in options.items()
    )
