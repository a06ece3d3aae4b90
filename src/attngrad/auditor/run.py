"""The audit: call the candidate on every case, judge what comes back, diagnose, shrink, report."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from attngrad.auditor import objects
from attngrad.auditor.budget import LIMITS, Budget, Limits
from attngrad.auditor.candidate import LAYER_ARGUMENTS, BadCandidate, Call, Caller, attention_caller, layer_caller
from attngrad.auditor.candidate import run as call_candidate
from attngrad.auditor.cases import EFFORTS, FEATURES, Case, Dims, cases, check_options
from attngrad.auditor.diagnose import Diagnosis, Observation, explain
from attngrad.auditor.mistakes import find
from attngrad.auditor.patterns import describe
from attngrad.auditor.pipeline import RESULTS
from attngrad.auditor.report import AuditReport, Explained, Finding, Heat, Stage, symbol
from attngrad.auditor.shrink import as_code, shrink
from attngrad.auditor.truth import LONG, Truth
from attngrad.core.arrays import kind_of
from attngrad.core.checks import check_real, fail
from attngrad.core.dtypes import KERNEL_DTYPES
from attngrad.core.options import OPTION_NAMES

Progress = Callable[[int, int, str], None]
LEVELS = ("attention", "layer")

_ALIASES = {"d!=e": "widths", "dv": "widths", "t!=s": "cross", "mqa": "gqa"}


def audit(
    candidate: Any,
    *,
    level: str = "attention",
    options: Mapping[str, Any] | None = None,
    supports: Sequence[str] = (),
    dtype: Any = np.float64,
    effort: str = "default",
    seed: int = 0,
    time_limit: float = 10.0,
    progress: Progress | None = None,
    name: str | None = None,
) -> AuditReport:
    """Say whether an attention implementation and its gradients are right, and if not, what the mistake is.

    Args:
        candidate: ``candidate(q, k, v, dout)`` on arrays ``(B, H, T, D)``, which returns ``(out, dq, dk, dv)``,
            ``(dq, dk, dv)``, or a mapping with any of the names of docs/audit.md; ``candidate(q, k, v)`` for a forward
            alone; with ``q_dot, k_dot, v_dot`` (and ``dout_dot``) among its arguments for JVP and HVP. For
            ``level="layer"``: ``candidate(query, key, value, w_q, w_k, w_v, w_o, dy, num_heads)``, or a class or object
            with ``forward`` and ``backward``.
        options: what every case has: ``{"causal": True}``. Passed as keywords if the candidate takes them. ``True`` for
            mask, bias, sinks or segments makes one for each case. None: no option is ever passed.
        supports: ``"gqa"``, ``"cross"`` (T != S), ``"widths"`` (D != E), ``"rectangular"``: raising on these is then a
            fault, not a note.
        dtype: float64, float32, float16 or bfloat16.
        effort: ``"quick"``, ``"default"`` or ``"full"``.
        seed: of the values.
        time_limit: seconds for one call.
        progress: called with (done, total, text).

    >>> import attngrad
    >>> def candidate(q, k, v, dout):
    ...     out, pullback = attngrad.vjp(q, k, v)
    ...     dq, dk, dv, _, _ = pullback(dout)
    ...     return out, dq * np.sqrt(q.shape[-1]), dk, dv
    >>> report = audit(candidate, effort="quick")
    >>> report.ok, report.mistakes
    (False, ('scale-missing-in-dq',))
    """
    chosen, wanted, kind = _check(candidate, level, options, supports, dtype, effort, seed, time_limit)
    title: str = name or getattr(candidate, "__qualname__", None) or type(candidate).__name__
    settings = {"level": level, "dtype": kind.name, "effort": effort, "seed": int(seed), "options": _told(chosen)}
    try:
        caller, adapt, plain_output, tangents, call_text = _caller(candidate, level, wanted)
    except BadCandidate as error:
        return AuditReport(title, "not audited", findings=(Finding("crash", str(error)),), settings=settings)
    made = list(
        cases(level, options=chosen, dtype=kind, effort=effort, seed=seed, only=adapt, plain_output=plain_output)
    )
    session = _Session(caller, level, tangents, kind, wanted, time_limit, adapt)
    for option in chosen if level == "attention" else ():
        if option not in _keywords(candidate):
            text = f"It takes no keyword {option}, so it is not told; the truth that it is held against has {option}."
            session.say("option", text, fault=False, name=option)
    for number, case in enumerate(made):
        if progress is not None:
            progress(number, len(made) + 2, case.name)
        if session.try_case(case):
            break
    session.settle_crashes()
    settings["cases"] = len(session.observations)
    if progress is not None:
        progress(len(made), len(made) + 2, "diagnosis" if session.wrong else "report")
    report = _report(session, title, settings, effort, progress, len(made), call_text)
    if progress is not None:
        progress(len(made) + 2, len(made) + 2, "done")
    return report


def _check(
    candidate: Any, level: Any, options: Any, supports: Any, dtype: Any, effort: Any, seed: Any, time_limit: Any
) -> tuple[dict[str, Any], frozenset[str], np.dtype[Any]]:
    if not callable(candidate) and not objects.is_layer_object(candidate):
        fail(TypeError, "audit", "candidate", "be callable", kind_of(candidate))
    if level not in LEVELS:
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
        kind = np.dtype(_bfloat16() if dtype == "bfloat16" else dtype)
    except TypeError:
        fail(TypeError, "audit", "dtype", "be a dtype", repr(dtype))
    if kind not in KERNEL_DTYPES:
        fail(ValueError, "audit", "dtype", "be float64, float32, float16 or bfloat16", kind)
    if not isinstance(seed, (int, np.integer)) or isinstance(seed, bool) or seed < 0:
        fail(ValueError, "audit", "seed", "be an integer >= 0", repr(seed))
    if check_real("audit", "time_limit", time_limit) <= 0.0:
        fail(ValueError, "audit", "time_limit", "be positive", time_limit, "It is in seconds.")
    chosen = check_options(options)
    return chosen, claimed, kind


def _bfloat16() -> Any:
    import ml_dtypes

    return ml_dtypes.bfloat16


def _told(options: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name}={'array' if isinstance(x, (np.ndarray, tuple)) and name not in ('window',) else x}"
        for name, x in options.items()
    )


def _caller(
    candidate: Any, level: str, supports: frozenset[str]
) -> tuple[Caller, Any, bool, bool, tuple[tuple[str, ...], str, tuple[str, ...]]]:
    """How to call it; how cases are sized; whether it has no w_o; whether it takes tangents; and the call as code."""
    if level == "layer":
        wanted = LAYER_ARGUMENTS[:-1]
        if objects.is_layer_object(candidate):
            plain = not objects.has_output_projection(candidate)
            given = tuple(name for name in wanted if name != "w_o" or not plain)
            code = objects.call_as_code(candidate)
            return objects.object_caller(candidate), objects.sizes(candidate), plain, False, (given, code, ())
        keywords = _keywords(candidate)
        groups = "gqa" in supports or "num_kv_heads" in keywords
        adapt = None if groups else _one_key_head_each
        many = ", num_kv_heads={kv_heads}" if "num_kv_heads" in keywords else ""
        code = f"results = candidate({', '.join(wanted)}, num_heads={{heads}}{many}{{options}})"
        return layer_caller(candidate), adapt, False, False, (wanted, code, keywords)
    caller, names = attention_caller(candidate)
    tangents = any(name.endswith("_dot") or name == "tangents" for name in names)
    flat = tuple(
        y for x in names for y in {"primals": ("q", "k", "v"), "tangents": ("q_dot", "k_dot", "v_dot")}.get(x, (x,))
    )
    shown = {"primals": "(q, k, v)", "tangents": "(q_dot, k_dot, v_dot)"}
    code = f"results = candidate({', '.join(shown.get(x, x) for x in names)}{{options}})"
    return caller, None, False, tangents, (flat, code, _keywords(candidate))


def _one_key_head_each(n: Dims) -> Dims | None:
    """No groups: a layer is told the number of key heads only where it asks for it, or claims to find it in w_k."""
    return None if "gqa" in n.features else n


def _keywords(candidate: Any) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(candidate).parameters.values()
    except (TypeError, ValueError):
        return ()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return tuple(OPTION_NAMES)
    return tuple(p.name for p in parameters)


class _Session:
    """The calls of one audit, and what they showed."""

    def __init__(
        self,
        caller: Caller,
        level: str,
        tangents: bool,
        dtype: np.dtype[Any],
        supports: frozenset[str],
        limit: float,
        adapt: Callable[[Dims], Dims | None] | None,
    ) -> None:
        self.caller, self.level, self.tangents, self.dtype = caller, level, tangents, dtype
        self.supports, self.limit, self.adapt = supports, limit, adapt
        self.observations: list[Observation] = []
        self.crashes: list[tuple[Case, Call]] = []
        self.findings: list[Finding] = []
        self.traceback = ""
        self.stopped = False
        self._said: set[str] = set()

    @property
    def wrong(self) -> bool:
        """Whether any number is wrong."""
        return any(not j.right for o in self.observations for j in o.judgements.values())

    def say(
        self, kind: str, text: str, *, fault: bool = True, name: str | None = None, case: str | None = None
    ) -> None:
        """A finding, once."""
        if (key := f"{kind} {name or text}") not in self._said:
            self._said.add(key)
            self.findings.append(Finding(kind, text, fault, name, case))

    def call(self, case: Case) -> Call:
        """One call of the candidate."""
        return call_candidate(self.caller, case, self.level, self.tangents, self.limit)

    def try_case(self, case: Case) -> bool:
        """Call and judge; True where it makes no sense to go on."""
        call = self.call(case)
        if call.timeout:
            text = f"it did not return within {self.limit:g} s in the case '{case.name}'."
            self.say("timeout", text, case=case.name)
            self.stopped = True
            return True
        if call.printed:
            first = call.printed.strip().splitlines()
            shown = f": {first[0][:60]!r}" if first else ""
            self.say("printed", f"It prints while it runs{shown}.", fault=False, name="printed")
        for name in call.mutated:
            self.say(
                "mutates", f"it changes its input {name} in place (case '{case.name}').", name=name, case=case.name
            )
        for name in call.unknown:
            self.say(
                "unknown", f"It returns {name!r}, which is no result that the auditor knows.", fault=False, name=name
            )
        for text in call.strange:
            self.say("strange", f"{text} (case '{case.name}').", name=text, case=case.name)
        if call.exited:
            self.say(
                "exit", f"it called sys.exit ({call.error}) in the case '{case.name}'.", name="exit", case=case.name
            )
            self.traceback = self.traceback or call.crash or ""
        elif call.crash is not None:
            self.crashes.append((case, call))
        results = {}
        truth = Truth(case, self.dtype)
        for name in RESULTS:
            if name in call.results and (name in case.options or truth.value(name) is not None):
                results[name] = call.results[name]
        if results:
            self.observations.append(Observation(truth, results))
        return len(self.crashes) >= 4 and not self.observations

    def settle_crashes(self) -> None:
        """Which crashes are faults, and which say what the candidate does not support."""
        passed = {o.truth.case.name for o in self.observations}
        lacking: list[frozenset[str]] = []
        for case, call in sorted(self.crashes, key=lambda c: len(c[0].dims.features)):
            features = case.dims.features
            claimed = features & self.supports
            if features and passed and not claimed:
                if any(features >= known for known in lacking):
                    continue
                lacking.append(features)
                what = " with ".join(_LACKS[f] for f in sorted(features))
                text = f"It does not support {what}: {call.error}"
                self.say("unsupported", text, fault=False, name="+".join(sorted(features)))
                continue
            told = f"it raised {call.error} in the case '{case.name}'" + (
                f", though it claims to support {', '.join(sorted(claimed))}." if claimed else "."
            )
            self.say("crash", told, name="crash", case=case.name)
            if not passed and self.level == "attention":
                text = "Arrays are (batch, heads, tokens, features): transpose with k.swapaxes(-1, -2), not with k.T."
                self.say("axes", text, fault=False)
            self.traceback = self.traceback or call.crash or ""
        self._forget(lacking)

    def _forget(self, lacking: list[frozenset[str]]) -> None:
        """Results of the wrong shape that broadcasting let through, where the candidate is known not to support it."""
        for o in self.observations:
            if any(o.truth.case.dims.features >= known for known in lacking):
                for name in [n for n, j in o.judgements.items() if j.kind == "shape"]:
                    del o.judgements[name], o.results[name]
        self.observations = [o for o in self.observations if o.results]


_LACKS = {
    "gqa": "groups of query heads (gqa)",
    "cross": "T != S (cross)",
    "widths": "D != E (widths)",
    "rectangular": "d_model other than heads times width (rectangular)",
}


# --- the report ------------------------------------------------------------------------------------------------------


def _stages(observations: Sequence[Observation], unexplained: Sequence[str], level: str) -> tuple[Stage, ...]:
    found = []
    for name in RESULTS:
        held = [o for o in observations if name in o.judgements]
        if not held:
            continue
        bad = [o for o in held if not o.judgements[name].right]
        worst = max(bad or held, key=lambda o: (o.judgements[name].error, -o.size))
        j = worst.judgements[name]
        kinds = [o.judgements[name].kind for o in bad]
        status = next((k for k in ("wrong", "nan", "shape") if k in kinds), "right")
        if bad and j.kind != status:
            worst = next(o for o in bad if o.judgements[name].kind == status)
            j = worst.judgements[name]
        pattern = _pattern(bad, name, level) if name in unexplained else ""
        unit = worst.truth.unit(name)
        found.append(
            Stage(
                name, status, j.rms / unit, worst.truth.bound(name) / unit, len(bad), len(held),
                worst.truth.case.name, j.where, j.got, j.expected, j.detail, pattern,
            )
        )  # fmt: skip
    return tuple(found)


def _pattern(bad: Sequence[Observation], name: str, level: str) -> str:
    """Where a result is wrong, in a case that is large enough to show it and small enough to read."""
    told = [o for o in bad if o.judgements[name].kind != "shape"]
    if not told:
        return f"In the case '{bad[0].truth.case.name}' it has {bad[0].judgements[name].detail}."
    o = max(told, key=lambda o: (o.size <= 2500, o.size))
    return f"In the case '{o.truth.case.name}' {describe(o, name, level == 'layer')}"


def _explained(state: Any) -> tuple[Explained, ...]:
    return tuple(Explained(m.id, m.title, v.note, m.formula, m.correct, m.why, m.fix) for m, v in state)


def _heat(observations: Sequence[Observation], name: str) -> Heat | None:
    """The error over (row, column) in the worst head of the largest case that fits on a page."""
    bad = [o for o in observations if name in o.judgements and o.judgements[name].kind in ("wrong", "nan")]
    held = [o for o in bad if o.results[name].ndim >= 2 and max(o.results[name].shape[-2:]) <= 48]
    if not held:
        return None
    o = max(held, key=lambda o: o.size)
    truth = o.truth.value(name)
    assert truth is not None  # noqa: S101
    with np.errstate(invalid="ignore"):
        error = np.abs(o.results[name].astype(LONG) - truth).astype(np.float64)
    error = np.where(np.isfinite(error), error, np.inf)
    error = np.where(np.isneginf(truth.astype(np.float64)), 0.0, error)
    unit = o.truth.unit(name)
    flat = error.reshape(-1, *error.shape[-2:])
    head = int(np.argmax(np.max(flat, axis=(1, 2))))
    where = tuple(int(i) for i in np.unravel_index(head, error.shape[:-2])) if error.ndim > 2 else ()
    rows = tuple(tuple(float(x) for x in row) for row in flat[head] / unit)
    return Heat(name, o.truth.case.name, where, rows, o.truth.bound(name) / unit)


def _report(
    session: _Session,
    title: str,
    settings: dict[str, Any],
    effort: str,
    progress: Progress | None,
    made: int,
    call_text: tuple[tuple[str, ...], str, tuple[str, ...]],
) -> AuditReport:
    limits = LIMITS[effort]
    findings = session.findings
    diagnosis, coarse = Diagnosis((), ()), None
    if session.wrong:
        budget = Budget(limits.predictions, limits.seconds)
        diagnosis, coarse = explain(session.observations, session.level, budget)
    explanations = _merged([_explained(state) for state in diagnosis.explanations])
    ids = diagnosis.ids
    if coarse is not None:
        m = find("low-precision")
        explanations = [(Explained(m.id, m.title, f"errors as of {coarse}", m.formula, m.correct, m.why, m.fix),)]
        ids = (m.id,)
    unexplained = diagnosis.unexplained
    stages = _stages(session.observations, unexplained, session.level)
    findings += [
        Finding("wrong", f"{symbol(s.name)} is wrong in {s.wrong} of {s.cases} cases.", name=s.name, case=s.case)
        for s in stages
        if not s.ok
    ]
    findings += [Finding("mistake", f"{i}: {find(i).title}.", name=i) for i in ids]
    if "weights-updated-first" in ids:
        findings = [f for f in findings if not (f.kind == "mutates" and (f.name or "").startswith("w_"))]
    for s in stages:
        if s.name in unexplained:
            text = f"{symbol(s.name)} is wrong and no known mistake explains it. {s.pattern}"
            findings.append(Finding("unexplained", text, name=s.name, case=s.case))
    smallest = ""
    if session.wrong:
        if progress is not None:
            progress(made + 1, made + 2, "the smallest case")
        budget = Budget(limits.calls, limits.calling)
        smallest = _smallest(session, stages, budget, call_text)
        findings += _cut_off(diagnosis.cut, budget.cut, effort, limits)
    first = next((s.name for s in stages if not s.ok), None)
    kinds = {f.kind for f in findings if f.fault}
    if kinds & {"wrong", "mutates", "strange"} and session.observations:
        status = "wrong"
    elif kinds or not session.observations:
        status = "not audited"
    else:
        status = "right"
    return AuditReport(
        title,
        status,
        ids,
        tuple(findings),
        stages,
        tuple(explanations),
        smallest,
        session.traceback,
        None if first is None else _heat(session.observations, first),
        settings,
    )


def _cut_off(search: str, shrinking: str, effort: str, limits: Limits) -> list[Finding]:
    """What ended before it was done. Only the clock can make another run find something else."""
    clock = "was cut off by the clock, after {:g} s: another run may find more."
    told = {
        ("search", "work"): f"Not every combination of mistakes was tried: effort {effort!r} ends before that.",
        ("search", "time"): f"The search for mistakes {clock.format(limits.seconds)}",
        ("smallest", "time"): f"The search for the smallest case {clock.format(limits.calling)}",
    }
    cut = {("search", search), ("smallest", shrinking)}
    return [Finding("limit", text, fault=False, name=key[0]) for key, text in told.items() if key in cut]


def _merged(states: list[tuple[Explained, ...]]) -> list[tuple[Explained, ...]]:
    """One explanation a set of ids; the first note of each stands."""
    kept: dict[frozenset[str], tuple[Explained, ...]] = {}
    for state in states:
        kept.setdefault(frozenset(m.id for m in state), state)
    return list(kept.values())


def _smallest(
    session: _Session,
    stages: Sequence[Stage],
    budget: Budget,
    call_text: tuple[tuple[str, ...], str, tuple[str, ...]],
) -> str:
    """The smallest case that still fails in the first wrong result, as code."""
    name = next(s.name for s in stages if not s.ok)
    bad = [o for o in session.observations if name in o.judgements and not o.judgements[name].right]
    start = min(bad, key=lambda o: o.size)
    kind = start.judgements[name].kind
    last: dict[str, Any] = {}

    def fails(case: Case) -> bool:
        if session.adapt is not None and session.adapt(case.dims) != case.dims:
            return False  # an object has sizes of its own
        call = session.call(case)
        truth = Truth(case, session.dtype)
        if name not in call.results or truth.value(name) is None:
            return False
        judged = truth.judge(name, call.results[name])
        if judged.kind != kind or (kind == "wrong" and judged.error < 1e-3 * start.judgements[name].error):
            return False
        last["judged"], last["actual"], last["truth"] = judged, call.results[name], truth.value(name)
        return True

    case = shrink(start.truth.case, fails, budget)
    fails(case)
    wanted, code, keywords = call_text
    comment = f"{symbol(name)} is wrong here (the case '{case.name}', shrunk)."
    if "truth" in last:
        got, truth = last["actual"].astype(np.float64), last["truth"].astype(np.float64)
        with np.printoptions(precision=6, threshold=24, linewidth=100):
            comment += f"\n{name} should be\n{truth}\nbut it is\n{got}"
    n = case.dims
    text = code.replace("{heads}", str(n.hq)).replace("{kv_heads}", str(n.hk)).replace("{model}", str(n.model))
    return as_code(case, wanted, text, keywords, comment)
