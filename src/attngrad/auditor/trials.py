"""Options that a candidate takes by name, where none was asked for: each tried alone, under every convention known.

A candidate that is right under one convention (True = masked, an additive mask, top-left causal) is right, and the
report names the convention. One whose output is right under one, and whose gradients are not, is wrong. One that is
right under none is wrong where a known mistake explains it, or where all conventions mean the same (causal, T = S).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from attngrad.auditor import names as spellings
from attngrad.auditor.budget import LIMITS, Budget
from attngrad.auditor.cases import Case, Spelling, make
from attngrad.auditor.detect import WINDOWS
from attngrad.auditor.diagnose import Search
from attngrad.auditor.objects import is_layer_object
from attngrad.auditor.plans import COMPILED, Dims, Plan
from attngrad.auditor.repeat import Repeated, repeated
from attngrad.auditor.report import NO_CONVENTION
from attngrad.auditor.session import Session
from attngrad.auditor.truth import Observation, Truth

_COMPANIONS = ("seed", "offset", "return_lse")
_DIMS = {
    "attention": (Dims(2, 2, 2, 5, 5, 4, 4), Dims(1, 2, 2, 3, 7, 4, 4)),
    "layer": (Dims(2, 2, 2, 5, 5, 3, 3, 6),),
}
"""Square, and with more keys than queries, where the corner of a causal mask tells."""
_OUTPUTS = {"out", "y"}
_EMPTY = inspect.Parameter.empty
_PREDICTIONS = 15_000
"""What is spent on the search for a mistake with one option: every entry of the catalogue once, in all results."""


class Convention(NamedTuple):
    """One meaning of an option: its name, the options in attngrad's terms, and how these are passed."""

    told: str
    meant: Callable[[Case], dict[str, Any]]
    spell: Spelling | None = None


def _mask(case: Case) -> Any:
    """A mask in which every query sees a key, and some see not all; its opposite is one too."""
    n = case.dims
    mask = np.random.default_rng(7).random(n.scores) > 0.4
    i = np.arange(n.t)
    mask[..., i, i % n.s], mask[..., i, (i + 1) % n.s] = True, n.s < 2
    return mask


def _hiding(row: int) -> Callable[[Case], Any]:
    """The same, with one query that sees nothing."""

    def mask(case: Case) -> Any:
        found = _mask(case)
        found[..., row, :] = False
        return found

    return mask


def _masks(mask: Callable[[Case], Any], dtype: Any) -> tuple[Convention, ...]:
    def meant(case: Case) -> dict[str, Any]:
        return {"mask": mask(case)}

    def additive(options: Mapping[str, Any]) -> dict[str, Any]:
        return {"mask": np.where(options["mask"], 0.0, -np.inf).astype(dtype)}

    return (
        Convention("True = may attend", meant),
        Convention("True = masked", meant, lambda options: {"mask": ~options["mask"]}),
        Convention("additive, 0 or -inf", meant, additive),
    )


_CONVENTIONS: dict[str, tuple[Convention, ...]] = {
    "mask": (),  # by the dtype: _masks
    "causal": (
        Convention("bottom-right", lambda case: {"causal": True}),
        Convention(
            "top-left, as PyTorch's is_causal",
            lambda case: {"causal": True, "offset": 0},
            lambda options: {"causal": True},
        ),
    ),
    "window": (
        Convention("(left, right)", lambda case: {"window": (2, 1)}),
        *(
            Convention(told, lambda case, w=w: {"window": w}, lambda options, count=count: {"window": count(options)})  # type: ignore[misc]
            for told, w, count in WINDOWS
        ),
    ),
    "scale": (Convention("", lambda case: {"scale": 0.3}),),
    "softcap": (Convention("", lambda case: {"softcap": 1.5}),),
    "dropout": (Convention("by attngrad.dropout_mask", lambda case: {"dropout": 0.3, "seed": 5}),),
}


@dataclass
class Tried:
    """What was tried of the options, and what was not, in words."""

    tried: list[str] = field(default_factory=list)
    untried: list[str] = field(default_factory=list)
    unasked: list[str] = field(default_factory=list)
    """The names of options that are tried only where they are asked for."""
    flaky: Repeated | None = None
    """Calls with the same seed that differ."""


def off_by_default(candidate: Any) -> tuple[str, ...]:
    """The options that a candidate takes by name and that are off where they are not given."""
    try:
        found = inspect.signature(candidate).parameters.values()
    except (TypeError, ValueError):
        return ()
    meant = [(spellings.known(p.name, "options"), p.default) for p in found]
    off = [
        (name, x)
        for name, x in meant
        if x is None or (_is_number(x) and (not x or name == "dropout")) or (x is _EMPTY and name == "mask")
    ]
    return tuple(name for name, _ in off if name is not None)


def on_by_default(function: Any) -> dict[str, Any]:
    """The options that a function has without being asked, and what they are then.

    A cap is what it is, and so is causal; dropout, which draws a mask, is turned off; bias and sinks that it must be
    given are made.
    """
    if is_layer_object(function):
        return {}
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {}
    meant = [(spellings.known(p.name, "options"), p.default) for p in found]
    on = {name: x for name, x in meant if name in ("softcap", "dropout", "causal") and _is_number(x) and x}
    made = {name: True for name, x in meant if name in ("bias", "sinks") and x is _EMPTY}
    return {name: 0.0 if name == "dropout" else x for name, x in on.items()} | made


def _is_number(x: Any) -> bool:
    return isinstance(x, (bool, int, float))


def try_options(session: Session, names: Iterable[str], effort: str, compiled: bool) -> Tried:
    """Try each option that has conventions; what a known mistake explains becomes an observation of the session."""
    found, names = Tried(), tuple(names)
    for name in names:
        if name == "dropout" and "seed" not in names:
            found.untried.append("dropout (it draws a mask of its own)")
        elif name in _CONVENTIONS:
            _try_one(session, name, found, effort, compiled)
        elif name not in _COMPANIONS:
            found.unasked.append(name)
            found.untried.append(f"{name} (only where it is asked for)")
    return found


def _try_one(session: Session, name: str, found: Tried, effort: str, compiled: bool) -> None:
    made = _cases(session, name, compiled)
    first: list[Observation] = []
    refused = meant = ""
    conventions = _CONVENTIONS[name] or _masks(_mask, session.dtype)
    for convention in conventions:
        seen, error = _observed(session, made, convention)
        refused = refused or error
        if seen and all(j.right for o in seen for j in o.judgements.values()):
            _keep(session, name, convention, seen, found)
            return
        first = first or seen
        if not meant and seen and all(any(o.judgements[n].right for n in _OUTPUTS & o.results.keys()) for o in seen):
            meant, first = f"{name} ({convention.told})" if convention.told else name, seen
    if name == "dropout" and any(not o.judgements[n].right for o in first for n in _OUTPUTS & o.results.keys()):
        again = repeated(session, first[0], effort)
        found.flaky = again if again.differing else None
        if found.flaky is None:
            found.untried.append("dropout (it draws a mask of its own)")
    elif not first:
        found.untried.append(f"{name} ({refused or 'nothing came back'})")
    else:
        budget = Budget(_PREDICTIONS, LIMITS[effort].seconds / 4)
        diagnosis = Search([*session.observations[:4], *first], session.target.level, budget).run()
        square = [o for o in first if o.truth.case.dims.t == o.truth.case.dims.s]
        if meant or (diagnosis.explanations and not diagnosis.unexplained):
            session.observations += first
            found.tried.append(meant or name)
        elif name == "causal" and any(not j.right for o in square for j in o.judgements.values()):
            session.observations += square
            found.tried.append("causal (T = S, where every convention means the same)")
        else:
            told = ", ".join(c.told for c in conventions if c.told)
            found.untried.append(f"{name} ({NO_CONVENTION}{f': {told}' if told else ''})")


def _keep(session: Session, name: str, convention: Convention, seen: list[Observation], found: Tried) -> None:
    """What is right under a convention; for a mask, then also with a query that sees nothing."""
    told, square = convention.told, all(o.truth.case.dims.t == o.truth.case.dims.s for o in seen)
    if name == "causal" and square:
        told = "T = S"
    elif name == "mask" and told.startswith("additive"):
        found.untried.append("a query that sees nothing, by an additive mask")
    elif name == "mask":
        case = replace(
            seen[0].truth.case,
            options=_made_anyway(seen[0]),
            spelling=None,
            name=f"{seen[0].truth.case.name}, one sees nothing",
        )
        for row in (0, case.dims.t // 2):
            hiding = next(c for c in _masks(_hiding(row), session.dtype) if c.told == convention.told)
            blind, error = _observed(session, [case], hiding)
            seen = [*seen, *blind]
        if error:
            found.untried.append(f"a query that sees nothing ({error})")
        else:
            told += ", with a query that sees nothing"
    session.observations += seen
    found.tried.append(f"{name} ({told})" if told else name)


def _made_anyway(o: Observation) -> dict[str, Any]:
    """What a case has whatever is tried: the segments of sequences end to end."""
    return {name: x for name, x in o.truth.case.options.items() if name == "segments"}


def _cases(session: Session, name: str, compiled: bool) -> list[Case]:
    """Those that the candidate takes, by what it has taken."""
    target = session.target
    lacking = [case.dims.features for case, _ in session.crashes]
    corner = any(f.kind == "convention" and f.name == "corner" for f in session.findings)
    made = []
    for number, dims in enumerate(COMPILED[:1] if compiled or corner else _DIMS[target.level]):
        n = dims if target.adapt is None else target.adapt(dims)
        if n is not None and not any(known and known <= n.features for known in lacking):
            rng = np.random.default_rng((11, number))
            what = "dropout and a seed" if name == "dropout" else name
            plan = Plan(f"with {what}, {n.t} queries, {n.s} keys", n)
            case = make(target.level, plan, session.dtype, rng, session.options, target.plain_output)
            made.append(target.recast(case))
    return made


def _also(spell: Spelling | None, plain: Case) -> Spelling | None:
    """The spelling, beside the options that the case has anyway."""
    return plain.spelling if spell is None else lambda options: {**plain.spelt.options, **spell(options)}


def _observed(session: Session, made: list[Case], convention: Convention) -> tuple[list[Observation], str]:
    """What came back under a convention; and why nothing did, where it raised."""
    found: list[Observation] = []
    for plain in made:
        case = replace(
            plain, options={**plain.options, **convention.meant(plain)}, spelling=_also(convention.spell, plain)
        )
        call = session.call(case)
        if call.timeout or call.error is not None or call.strange:
            if found and "causal" in convention.meant(plain) and case.dims.t != case.dims.s:
                continue  # as many masks are made
            return [], f"it raised {call.error}" if call.error else "it did not return what can be read"
        truth = Truth(case, session.dtype)
        results = {n: call.results[n] for n in session.judged if n in call.results and truth.value(n) is not None}
        found += [Observation(truth, results)] if results else []
    return found, ""
