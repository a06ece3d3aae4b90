"""Diagnosis by reproduction: which mistake of the catalogue, or which few together, computes the candidate's numbers.

A mistake is named only where it reproduces every result of every case, within the rounding of the dtype. The search
follows the data flow: the first result that is wrong must be explained first, by one mistake or by two, and what
explains it is extended for the results after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import numpy as np

from attngrad.auditor.budget import Budget
from attngrad.auditor.mistakes import Mistake, Variant, catalogue
from attngrad.auditor.pipeline import RESULTS, SECOND, TANGENT, Pipeline, Undefined, affected
from attngrad.auditor.rounding import ENTRYWISE, EntryErrors
from attngrad.auditor.truth import LONG, Judgement, Truth, epsilon
from attngrad.core.arrays import NDArray
from attngrad.testing import rms_error, rounding_bound

Named = tuple[Mistake, Variant]
State = tuple[Named, ...]
_WIDTH = 24
"""How many explanations are followed side by side."""
_SMALL = 400
"""The number of scores up to which pipelines are kept."""
_LARGE = 2000.0
"""The number of scores that take about as long again as what a prediction takes at any size."""


@dataclass
class Observation:
    """What a candidate returned in one case, and how it was judged."""

    truth: Truth
    results: dict[str, NDArray]
    judgements: dict[str, Judgement] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, actual in self.results.items():
            self.judgements[name] = self.truth.judge(name, actual)

    @property
    def size(self) -> int:
        """The number of scores: small cases are tried first."""
        return int(np.prod(self.truth.case.dims.scores))


@dataclass(frozen=True)
class Diagnosis:
    """The explanations that reproduce everything (each a combination of mistakes), and what none explains."""

    explanations: tuple[State, ...]
    unexplained: tuple[str, ...]
    cut: str = ""
    """What ended the search before everything was tried: "work", "time", or nothing."""

    @property
    def ids(self) -> tuple[str, ...]:
        """The mistakes of all explanations, each once, in the order of the data flow."""
        found = {mistake.id for state in self.explanations for mistake, _ in state}
        return tuple(m.id for m in catalogue() if m.id in found)


class Search:
    """The search over one candidate's observations."""

    def __init__(self, observations: Sequence[Observation], level: str, budget: Budget) -> None:
        self.observations = sorted(observations, key=lambda o: o.size)
        self.budget = budget
        self.names = [n for n in RESULTS if any(n in o.results for o in observations)]
        self.named = [(m, v) for m in catalogue() if self._applies(m, level) for v in m.variants]
        self.pairs = True
        self._pipelines: dict[tuple[int, ...], Pipeline] = {}
        self._verdicts: dict[tuple[Any, ...], bool] = {}

    def _applies(self, mistake: Mistake, level: str) -> bool:
        there = {name for o in self.observations for name, x in o.truth.case.options.items() if x is not None}
        there |= {name for o in self.observations for name in o.truth.case.dims.features} | {level}
        if any(n in (*TANGENT, *SECOND) for n in self.names):
            there.add("tangents")
        needs = all(any(n in there for n in need.split("|")) for need in mistake.needs)
        return needs and mistake.level in ("", level)

    # --- one state ---------------------------------------------------------------------------------------------------

    def _pipeline(self, state: State, o: Observation, dtype: Any) -> Pipeline:
        key = (id(o), np.dtype(dtype).num, *(id(v) for _, v in state))
        if key in self._pipelines:
            return self._pipelines[key]
        given = {**o.truth.case.given, "candidate_dtype": o.truth.dtype}
        for place, (_, variant) in enumerate(state):
            if variant.fit is not None:
                others = self._pipeline(state[:place] + state[place + 1 :], o, LONG)
                given["fitted"] = variant.fit(others, o.results)
        parent = o.truth.exact if np.dtype(dtype) == LONG else o.truth.naive[0]
        made = Pipeline(given, dtype, [v.steps for _, v in state], parent)
        if o.size <= _SMALL:  # large ones are seldom reached, and would fill the memory
            if len(self._pipelines) > 8000:
                self._pipelines.clear()
            self._pipelines[key] = made
        return made

    def _predict(self, state: State, o: Observation, name: str, dtype: Any = LONG) -> NDArray | None:
        self.budget.spend(1.0 + o.size / _LARGE)
        with _explained_by(state, o):
            try:
                value: NDArray | None = getattr(self._pipeline(state, o, dtype), name)
            except Undefined:
                return o.truth.value(name)
            return value

    def reproduces(self, state: State, o: Observation, name: str) -> bool:
        """Whether the mistakes of ``state`` compute what the candidate returned, within rounding."""
        key = (id(o), name, *(id(v) for _, v in state))
        if key not in self._verdicts:
            self._verdicts[key] = self._compare(state, o, name)
        return self._verdicts[key]

    def _compare(self, state: State, o: Observation, name: str) -> bool:
        actual, predicted = o.results[name], self._predict(state, o, name)
        if predicted is None or predicted.shape != actual.shape:
            return False
        truth = o.truth.value(name)
        if truth is not None and predicted.shape == truth.shape and np.array_equal(predicted, truth):
            return o.judgements[name].right or self._within(state, o, name, predicted)
        if name == "scores":
            shown = np.isfinite(predicted) & np.isfinite(actual)
        else:
            wild = any(v.wild or v.fit for _, v in state)
            shown = ~np.isnan(predicted) if wild else np.ones(predicted.shape, bool)
            shown = shown & ~(np.isneginf(predicted) & np.isneginf(actual.astype(LONG)))
        if name.startswith("dweights") and predicted.shape == o.truth.exact.visible.shape:
            shown = shown & o.truth.exact.visible
        if not np.isfinite(actual.astype(LONG)[shown]).all():  # inf and NaN are reproduced where the dtype overflows
            naive = self._predict(state, o, name, o.truth.dtype)
            if naive is None or naive.shape != predicted.shape:
                return False
            shown = shown & (np.isfinite(actual.astype(LONG)) | np.isfinite(naive.astype(LONG)))
        if not shown.any():
            return True
        a, b = actual[shown], predicted[shown]
        with np.errstate(all="ignore"):
            off = rms_error(a, b)
            coarse = 2000.0 * rounding_bound(b, b, o.truth.eps)
        if truth is not None:
            coarse += 100.0 * o.truth.bound(name)
        if not off <= coarse:  # but for terms that cancel to nothing, whose rounding is left
            return off <= 1e4 * o.truth.eps and off <= 2.0 * self._scale(state, o, name)
        naive = self._predict(state, o, name, o.truth.dtype)
        if naive is None or naive.shape != predicted.shape:
            return False
        with np.errstate(all="ignore"):
            fine = rounding_bound(naive[shown], b, o.truth.eps)
        floor = o.truth.bound(name) if truth is not None else 0.0
        if off <= 2.0 * max(fine if np.isfinite(fine) else 0.0, floor):
            return True
        return off <= 2.0 * self._scale(state, o, name)

    def _scales(self, state: State, o: Observation, name: str) -> NDArray:
        """The entries' error scales in the mistaken pipeline, where these have a meaning."""
        with _explained_by(state, o):
            try:
                errors = EntryErrors(self._pipeline(state, o, LONG), o.truth.eps, o.truth.tiny)
                scales: NDArray = getattr(errors, name) if name in ENTRYWISE else np.zeros(1)
            except Undefined:
                return np.zeros(1)
            return scales

    def _scale(self, state: State, o: Observation, name: str) -> float:
        scales = self._scales(state, o, name)
        scales = scales[np.isfinite(scales)]
        with np.errstate(over="ignore"):
            return float(np.sqrt(np.mean(scales**2))) if scales.size else 0.0

    def _within(self, state: State, o: Observation, name: str, predicted: NDArray) -> bool:
        """Whether every entry is off by rounding only, where the mistake changes the terms but not their sum."""
        judged = o.judgements[name]
        if not state or judged.kind != "wrong" or judged.rms > 1e4 * max(o.truth.eps, judged.bound):
            return False
        scales = self._scales(state, o, name)
        if scales.shape != predicted.shape:
            return False
        off = np.abs(o.results[name].astype(LONG) - predicted)
        return bool(np.all(off <= o.truth.outlier * scales))

    def consistent(self, state: State, names: Sequence[str]) -> bool:
        """Whether every case is reproduced, in all of ``names``."""
        backwards = list(reversed(names))  # the last is the one in question
        return all(
            self.reproduces(state, o, name) for o in self._wrong_first(names) for name in backwards if name in o.results
        )

    def _wrong_first(self, names: Sequence[str]) -> list[Observation]:
        key = ("order", *names)
        if key not in self._verdicts:
            last = names[-1] if names else ""
            wrong = [o for o in self.observations if last in o.judgements and not o.judgements[last].right]
            self._verdicts[key] = wrong + [o for o in self.observations if o not in wrong]  # type: ignore[assignment]
        return self._verdicts[key]  # type: ignore[return-value]

    # --- the search --------------------------------------------------------------------------------------------------

    def run(self, *, pairs: bool) -> Diagnosis:
        """Follow the data flow, and extend what explains the results so far: by one mistake, or (``pairs``) by two."""
        self.pairs = pairs
        states: list[State] = [()]
        explained: list[str] = []
        unexplained: list[str] = []
        for name in self.names:
            kept = self._explain(states, [*explained, name])
            if kept:
                states, explained = kept, [*explained, name]
            elif self._wrong(name):
                unexplained.append(name)
            else:  # a right result that no explanation so far leaves right: they were none
                states, explained = [()], [n for n in explained if not self._wrong(n)] + [name]
                unexplained = [n for n in self.names if self._wrong(n)]
                break
        # What the results after it have shown may explain a result that was not explained before.
        for name in list(unexplained):
            kept = self._explain(states, [*explained, name])
            if kept:
                states, explained = kept, [*explained, name]
                unexplained.remove(name)
        fewest = min(len(s) for s in states)
        found = tuple(s for s in states if s and len(s) == fewest)
        return Diagnosis(found, tuple(unexplained), self.budget.cut)

    def _wrong(self, name: str) -> bool:
        return any(name in o.judgements and not o.judgements[name].right for o in self.observations)

    def _explain(self, states: list[State], names: Sequence[str]) -> list[State]:
        """The states that reproduce ``names``: as they are, or with one mistake more, or two."""
        kept = [s for s in states if self.consistent(s, names)]
        for by, wild in ((1, False), (1, True), (2, False)) if self.pairs else ((1, False), (1, True)):
            kept = kept or self._extended(states, names, by, wild)
        return kept

    def _extended(self, states: list[State], names: Sequence[str], by: int, wild: bool) -> list[State]:
        """The states that reproduce ``names`` with ``by`` more mistakes."""
        found: dict[frozenset[int], State] = {}
        for state in states:
            for added in self._additions(state, names, by, wild):
                taken = state + added
                key = frozenset(id(v) for _, v in taken)
                if self.budget.over or key in found or len({m.id for m, _ in taken}) < len(taken):
                    continue
                order = next((s for s in self._orders(state, added) if self.consistent(s, names)), None)
                if order is not None and self._tells(order, names[-1]):
                    found[key] = order
        return sorted(found.values(), key=len)[:_WIDTH]

    def _tells(self, state: State, name: str) -> bool:
        """Whether a state that leaves values open still fixes most of them where the candidate is wrong."""
        if not any(v.wild or v.fit for _, v in state):
            return True
        closed = []
        for o in self.observations:
            if name in o.results and not o.judgements[name].right:
                predicted = self._predict(state, o, name)
                closed.append(0.0 if predicted is None else float(np.mean(~np.isnan(predicted))))
        return sum(c > 0.3 for c in closed) >= 2 or (bool(closed) and "overflow" in state[-1][0].id)

    def _additions(self, state: State, names: Sequence[str], by: int, wild: bool) -> list[State]:
        useful = [n for n in self.named if n[1].wild == wild and self._changes(state, n, names[-1])]
        if by == 1:
            return [(n,) for n in useful]
        # Of two, each must by itself leave the results before as they are: they are explained already.
        before = list(names[:-1])
        useful = [n for n in useful if self.consistent((*state, n), before)]
        return [(a, b) for i, a in enumerate(useful) for b in useful[i + 1 :] if a[0].id != b[0].id]

    def _changes(self, state: State, n: Named, name: str) -> bool:
        """Whether ``n`` has an effect on a result, in a few small cases where that is wrong, or a long one."""
        rewired = any(
            name in affected(frozenset(v.steps)) for _, v in state
        )  # an exchange reads what it returns instead
        if name not in affected(frozenset(n[1].steps)) and not rewired:
            return False
        key = ("changes", id(n[1]), name, *(id(v) for _, v in state))
        if key not in self._verdicts:
            wrong = [o for o in self.observations if name in o.results and not o.judgements[name].right]
            kinds = {o.truth.case.dims.features: o for o in reversed(wrong)}  # a small one of each
            long = [o for o in wrong if o.truth.case.dims.t > 32][:1]
            self._verdicts[key] = not self.budget.over and any(
                not _same(self._predict((*state, n), o, name), self._predict(state, o, name))
                for o in [*wrong[:5], *kinds.values(), *long]
            )
        return self._verdicts[key]

    @staticmethod
    def _orders(state: State, added: State) -> list[State]:
        """The orders that may differ: those of mistakes that change the same step."""
        taken = state + added
        steps = [step for _, v in taken for step in v.steps]
        if len(steps) == len(set(steps)):
            return [taken]
        return list(permutations(taken))


@contextmanager
def _explained_by(state: State, o: Observation) -> Iterator[None]:
    """What mistakes compute may overflow; what they raise is an error of the auditor, and says so."""
    try:
        with np.errstate(all="ignore"):
            yield
    except Exception as error:
        told = ", ".join(f"{m.id} ({v.note})" if v.note else m.id for m, v in state)
        error.add_note(f"audit: an error of the auditor, not of the candidate: in {told}, case '{o.truth.case.name}'.")
        raise


def _same(a: NDArray | None, b: NDArray | None) -> bool:
    return (a is None and b is None) or (a is not None and b is not None and np.array_equal(a, b, equal_nan=True))


def low_precision(observations: Sequence[Observation]) -> str | None:
    """The coarser dtype whose rounding the errors look like; None where they do not look like rounding."""
    wrong = [(o, n) for o in observations for n, j in o.judgements.items() if not j.right]
    if not wrong or any(o.judgements[n].kind != "wrong" for o, n in wrong):
        return None
    import ml_dtypes

    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        eps = epsilon(dtype)[0]
        if all(_like_rounding(o, n, dtype, eps) for o, n in wrong) and _spread(wrong):
            return np.dtype(dtype).name
    return None


def _like_rounding(o: Observation, name: str, dtype: Any, eps: float) -> bool:
    """An error about as large as rounding to ``dtype`` everywhere leaves, or a part of it."""
    if eps < 2.0 * o.truth.eps:
        return False
    truth = o.truth.value(name)
    assert truth is not None  # noqa: S101
    with np.errstate(all="ignore"):
        coarse = getattr(Pipeline(o.truth.case.given, dtype), name)
    usual = rms_error(coarse, truth)
    return bool(usual / 1000.0 <= o.judgements[name].rms <= 6.0 * usual)


def _spread(wrong: Sequence[tuple[Observation, str]]) -> bool:
    """Whether errors are many, of both signs, and no constant multiple of the truth: noise, not a formula."""
    votes = []
    for o, name in wrong:
        truth = o.truth.value(name)
        assert truth is not None  # noqa: S101
        error = (o.results[name].astype(LONG) - truth).astype(np.float64).ravel()
        size = truth.astype(np.float64).ravel()
        if error.size < 12:
            continue
        many = np.mean(np.abs(error) > 0.05 * np.sqrt(np.mean(error**2))) > 0.5
        signs = 0.15 < np.mean(error > 0) < 0.85
        norms = float(np.linalg.norm(error) * np.linalg.norm(size))
        free = norms == 0 or abs(float(error @ size)) < 0.7 * norms
        votes.append(float(many and signs and free))
    return bool(votes) and float(np.mean(votes)) > 0.7


def explain(observations: Sequence[Observation], level: str, budget: Budget) -> tuple[Diagnosis, str | None]:
    """The diagnosis of what was observed, and the coarser dtype where it is rounding."""
    search = Search(observations, level, budget)
    diagnosis = search.run(pairs=False)
    if not diagnosis.unexplained:
        return diagnosis, None
    coarse = low_precision(observations)
    if coarse is not None:
        return Diagnosis((), (), diagnosis.cut), coarse
    return search.run(pairs=True), None
