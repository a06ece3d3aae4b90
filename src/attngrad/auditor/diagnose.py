"""Diagnosis by reproduction: which mistake of the catalogue, or which few together, computes the candidate's numbers.

A mistake is named only where it reproduces every result of every case, within the rounding of the dtype. The search
follows the data flow: the first result that is wrong must be explained first, by one mistake or by two, and what
explains it is extended for the results after it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations
from typing import Any

import numpy as np

from attngrad.auditor.budget import Budget
from attngrad.auditor.mistakes import Mistake, catalogue, delta_from_weights
from attngrad.auditor.patterns import low_precision, sizes
from attngrad.auditor.pipeline import LATER, MIXED, RESULTS, TANGENT, Override, affected
from attngrad.auditor.reproduce import Named, Predictions, State
from attngrad.auditor.truth import Observation
from attngrad.core.arrays import NDArray

_STYLES: tuple[Mapping[str, Override], ...] = ({}, {"delta": delta_from_weights})
"""Right ways to compute, which a mistake may set apart: delta from out, or from the weights."""
_WIDTH = 24
"""How many explanations are followed side by side."""
_TELLING = 6
"""How many cases say whether values are left open: the longest, with whole tiles; the shortest of what is fitted."""
_WAYS = (0, 8, 1 << 16)
"""How far pairs of mistakes are followed at first, and then: the sum of the places of their ways in the catalogue."""


@dataclass(frozen=True)
class Diagnosis:
    """The explanations that reproduce everything (each a combination of mistakes), and what none explains."""

    explanations: tuple[State, ...]
    unexplained: tuple[str, ...]
    cut: str = ""
    """What ended the search before everything was tried: "work", "time", or nothing."""
    only: str = ""
    """The sizes that it is limited to, in words."""
    derived: tuple[str, ...] = ()
    """Tangents and second order, wrong where the first order is: the derivative of something else."""

    @property
    def mistakes(self) -> int:
        """How many are made together."""
        return min(map(len, self.explanations), default=0)

    @property
    def ids(self) -> tuple[str, ...]:
        """The mistakes of all explanations, each once, in the order of the data flow."""
        found = {mistake.id for state in self.explanations for mistake, _ in state}
        return tuple(m.id for m in catalogue() if m.id in found)


class Search:
    """The search over one candidate's observations."""

    def __init__(
        self,
        observations: Sequence[Observation],
        level: str,
        budget: Budget,
        style: Mapping[str, Override] = _STYLES[0],
        telling: dict[tuple[Any, ...], bool] | None = None,
    ) -> None:
        self.observations = sorted(observations, key=lambda o: o.size)
        self.budget = budget
        self._wrong_cases: dict[str, list[Observation]] = {}
        self._shown_cases: dict[str, list[Observation]] = {}
        found = [n for n in RESULTS if any(n in o.results for o in observations)]
        later = [n for n in found if n in LATER]
        first = [n for n in found if n not in later]
        spoilt = [o for n in first for o in self._wrong(n) if any(x in o.results for x in later)]
        self.names = first if spoilt else found
        if any(map(self._wrong, TANGENT)):  # reverse over forward differentiates what is wrong
            self.names = [n for n in self.names if n not in MIXED]
        self.derived = [n for n in later if n not in self.names and self._wrong(n)]
        longest = max((max(o.truth.case.dims.t, o.truth.case.dims.s) for o in observations), default=0)
        known = [m for m in catalogue() if self._applies(m, level)]
        least, most = self._room()
        self.named = [
            (m, v) for m in known for v in m.variants if v.beyond < longest and (not v.rare or least <= v.beyond < most)
        ]
        self.ways = 0
        self._telling = {} if telling is None else telling
        """Whether states that leave values open tell anything: the same in every style."""
        self.unexplained: list[str] = []
        """What no state has explained so far."""
        self.predictions = Predictions(budget, style)
        self._verdicts: dict[tuple[Any, ...], bool] = {}

    def _applies(self, mistake: Mistake, level: str) -> bool:
        there = {name for o in self.observations for name, x in o.truth.case.options.items() if x is not None}
        there |= {name for o in self.observations for name in o.truth.case.dims.features} | {level}
        if any(n in LATER for n in self.names):
            there.add("tangents")
        needs = all(any(n in there for n in need.split("|")) for need in mistake.needs)
        return needs and mistake.level in ("", level)

    def _room(self) -> tuple[int, int]:
        """The length up to which cases are right, and the shortest that is wrong: a rare tile must lie between."""
        wrong = [o for o in self.observations if not all(j.right for j in o.judgements.values())]
        right = [o.truth.case.dims for o in self.observations if all(o is not x for x in wrong)]
        shortest = min((max(o.truth.case.dims.t, o.truth.case.dims.s) for o in wrong), default=0)
        return max((min(n.t, n.s) for n in right), default=0), shortest

    def consistent(self, state: State, names: Sequence[str]) -> bool:
        """Whether every case is reproduced, in all of ``names``."""
        backwards = list(reversed(names))  # the last is the one in question
        reproduces = self.predictions.reproduces
        return all(reproduces(state, o, n) for o in self._wrong_first(names) for n in backwards if n in o.results)

    def _wrong_first(self, names: Sequence[str]) -> list[Observation]:
        key = ("order", *names)
        if key not in self._verdicts:
            wrong = self._wrong(names[-1]) if names else []
            order = wrong + [o for o in self.observations if o not in wrong]
            self._verdicts[key] = sorted(order, key=lambda o: o.truth.case.dims.large)  # type: ignore[assignment]
        return self._verdicts[key]  # type: ignore[return-value]

    def run(self, *, ways: int = 0) -> Diagnosis:
        """Follow the data flow, and extend what explains the results so far by a mistake, or by two in so many ways."""
        self.ways = ways
        states: list[State] = [()]
        explained: list[str] = []
        unexplained: list[str] = []
        self.unexplained = unexplained
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
        derived = [n for n in self.derived if not any(self.consistent(s, [n]) for s in found)]
        return Diagnosis(found, tuple(unexplained), self.budget.cut, derived=tuple(derived))

    def _wrong(self, name: str) -> list[Observation]:
        if name not in self._wrong_cases:
            found = [o for o in self.observations if name in o.judgements and not o.judgements[name].right]
            self._wrong_cases[name] = found
        return self._wrong_cases[name]

    def _shown(self, name: str) -> list[Observation]:
        """A few small cases where a result is wrong, one of each kind among them, and a long one."""
        if name not in self._shown_cases:
            wrong = self._wrong(name)
            wrong = [o for o in wrong if not o.truth.case.dims.large] or wrong[:1]  # a large one costs a thousand small
            kinds = {o.truth.case.dims.features: o for o in reversed(wrong)}  # a small one of each
            long = [o for o in wrong if o.truth.case.dims.t > 32][:1]
            chosen = {id(o): o for o in [*wrong[:5], *kinds.values(), *long]}
            self._shown_cases[name] = list(chosen.values())
        return self._shown_cases[name]

    def _explain(self, states: list[State], names: Sequence[str]) -> list[State]:
        """The states that reproduce ``names``: as they are, or with one mistake more, or two."""
        kept = [s for s in states if self.consistent(s, names)]
        for by, wild in ((1, False), (1, True), (2, False)):
            kept = kept or self._extended(states, names, by, wild)
        return kept

    def _extended(self, states: list[State], names: Sequence[str], by: int, wild: bool) -> list[State]:
        """The states that reproduce ``names`` with ``by`` more mistakes."""
        found: dict[frozenset[int], State] = {}
        ids: set[str] = set()
        for state in states:
            for added in self._additions(state, names, by, wild, ids):
                taken = state + added
                key = frozenset(id(v) for _, v in taken)
                if self.budget.over:
                    break
                if key in found or len({m.id for m, _ in taken}) < len(taken):
                    continue
                if by == 2 and not all(self._useful(state, n, names) for n in added):
                    continue
                orders = [s for s in self._orders(state, added) if self._tells(s, names[-1])]
                order = next((s for s in orders if self.consistent(s, names)), None)
                # What changes nothing explains nothing. Of one mistake asked last: the first case tells most apart.
                if order is not None and all(self._changes(state, n, names[-1]) for n in added):
                    found[key] = order
                    ids |= {m.id for m, _ in added}
        return sorted(found.values(), key=len)[:_WIDTH]

    def _tells(self, state: State, name: str) -> bool:
        """Whether a state that leaves values open still fixes most of them where the candidate is wrong."""
        if not any(v.wild or v.fit for _, v in state):
            return True
        key = (name, *(id(v) for _, v in state))
        if key not in self._telling:
            self._telling[key] = self._fixes_most(state, name)
        return self._telling[key]

    def _fixes_most(self, state: State, name: str) -> bool:
        wrong = self._wrong(name)
        small = [o for o in wrong if not o.truth.case.dims.large]
        longest_first = (small if len(small) > 1 else wrong)[::-1]
        stale = (_stale(o, self.predictions.predict(state, o, name), name) for o in longest_first)
        if any(v.wild for _, v in state) and not any(stale):
            return False
        most_closed = longest_first[-_TELLING:] if any(v.fit for _, v in state) else longest_first[:_TELLING]
        shown = [self.predictions.predict(state, o, name) for o in most_closed]
        closed = [0.0 if predicted is None else float(np.mean(~np.isnan(predicted))) for predicted in shown]
        return sum(c > 0.3 for c in closed) >= 2 or (bool(closed) and "overflow" in state[-1][0].id)

    def _useful(self, state: State, n: Named, names: Sequence[str]) -> bool:
        """Whether ``n`` changes a result, and by itself leaves those before as they are: they are explained already."""
        return self._changes(state, n, names[-1]) and self.consistent((*state, n), names[:-1])

    def _additions(self, state: State, names: Sequence[str], by: int, wild: bool, found: set[str]) -> Iterator[State]:
        """The mistakes that reach a result, one by one or in pairs: first each in its first way, then in others.

        Once pairs are ``found`` to explain it, only these mistakes are made in further ways.
        """
        # What is fitted to a result fits anything: only where all before it is explained.
        named = [n for n in self.named if n[1].wild == wild and not (n[1].fit and self.unexplained)]
        reaching = [n for n in named if self._reaches(state, n, names[-1])]
        if by == 1:
            yield from ((n,) for n in reaching)
            return
        ways: dict[str, list[Named]] = {}
        for n in reaching:
            ways.setdefault(n[0].id, []).append(n)
        for rank in range(min(self.ways, 2 * max(map(len, ways.values()), default=0) - 1)):
            ways = {name: x for name, x in ways.items() if not found or name in found}
            for first, second in combinations(ways.values(), 2):
                fewest, most = max(0, rank + 1 - len(second)), min(rank + 1, len(first))
                yield from ((first[a], second[rank - a]) for a in range(fewest, most))

    def _reaches(self, state: State, n: Named, name: str) -> bool:
        """Whether ``n`` overrides a step that a result is computed from."""
        # an exchange reads what it returns instead
        rewired = any(name in affected(frozenset(v.steps)) for _, v in state)
        return rewired or name in affected(frozenset(n[1].steps))

    def _changes(self, state: State, n: Named, name: str) -> bool:
        """Whether ``n`` has an effect on a result, in a few small cases where that is wrong, or a long one."""
        if not self._reaches(state, n, name):
            return False
        key = ("changes", id(n[1]), name, *(id(v) for _, v in state))
        if key not in self._verdicts:
            self._verdicts[key] = any(
                not _same(self.predictions.predict((*state, n), o, name), self.predictions.predict(state, o, name))
                for o in self._shown(name)
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


def _stale(o: Observation, predicted: NDArray | None, name: str) -> bool:
    """Whether what a mistake leaves open may be anything: memory that was never written is not nearly right."""
    actual, truth = o.results[name].astype(float), o.truth.expected(name).astype(float)
    if predicted is None or not predicted.shape == actual.shape == truth.shape:
        return True
    left = np.isnan(predicted)
    return bool(left.any()) and not float(np.max(np.abs(actual - truth)[left])) < 1e-2 * o.truth.unit(name)


def _same(a: NDArray | None, b: NDArray | None) -> bool:
    return (a is None and b is None) or (a is not None and b is not None and np.array_equal(a, b, equal_nan=True))


def explain(observations: Sequence[Observation], level: str, budget: Budget) -> tuple[Diagnosis, str | None]:
    """The diagnosis of what was observed, and the coarser dtype where it is rounding.

    The search looks at small cases, a thousand of which cost as much as one at the sizes of blocks. What it finds must
    hold in those too.
    """
    telling: dict[tuple[Any, ...], bool] = {}
    searches = [Search(_small(observations), level, budget, style, telling) for style in _STYLES]
    found: list[Diagnosis] = []
    for ways in _WAYS:
        for search in searches:
            if not budget.over or not found:
                found.append(_holding(search.run(ways=ways), search, observations))
            if not found[-1].unexplained and found[-1].mistakes <= 1:
                return found[-1], None
        if whole := [d for d in found if not d.unexplained]:
            return min(whole, key=lambda d: d.mistakes), None
        if not ways and (coarse := low_precision(observations)) is not None:
            return Diagnosis((), (), budget.cut), coarse
        if not ways and (limited := _at_some_sizes(observations, level, budget)) is not None:
            return limited, None
    return min(reversed(found), key=lambda d: len(d.unexplained)), None


def _small(observations: Sequence[Observation]) -> Sequence[Observation]:
    """Those that the search looks at: the small ones, if any of them is wrong."""
    small = [o for o in observations if not o.truth.case.dims.large]
    return small if any(not j.right for o in small for j in o.judgements.values()) else observations


def _at_some_sizes(observations: Sequence[Observation], level: str, budget: Budget) -> Diagnosis | None:
    """What explains a result that is wrong at some sizes only: where one rule tells these from the others."""
    wrong = [o for o in observations if not all(j.right for j in o.judgements.values())]
    rule = sizes(observations, wrong)
    if len(wrong) < 2 or not rule:
        return None
    for style in _STYLES:
        search = Search(_small(wrong), level, budget, style)
        found = _holding(search.run(), search, wrong)
        if found.explanations and not found.unexplained:
            return replace(found, only=rule)
    return None


def _holding(diagnosis: Diagnosis, search: Search, observations: Sequence[Observation]) -> Diagnosis:
    """The diagnosis of small cases, as far as it holds in the large ones: what it does not is not explained."""
    looked_at = {id(o) for o in search.observations}
    large = [o for o in observations if id(o) not in looked_at]
    open_names = {*diagnosis.unexplained, *diagnosis.derived, *search.derived}
    failing: dict[str, set[int]] = {}
    predictions = Predictions(Budget(math.inf, math.inf), search.predictions.style)  # a few, whatever was spent
    states: Sequence[State] = diagnosis.explanations or ((),)
    for o in large:
        for place, state in enumerate(states):
            for name in (n for n in search.names if n in o.results and n not in open_names):
                if not predictions.reproduces(state, o, name):
                    failing.setdefault(name, set()).add(place)
    whole = [state for place, state in enumerate(states) if not any(place in x for x in failing.values())]
    if whole:
        return replace(diagnosis, explanations=tuple(state for state in whole if state))
    wrong = {n for o in observations for n, j in o.judgements.items() if not j.right}
    if failing.keys() <= wrong:
        left = {*diagnosis.unexplained, *failing}
    else:  # a right result that no explanation leaves right: they were none
        diagnosis, left = replace(diagnosis, explanations=()), wrong - {*search.derived}
    return replace(diagnosis, unexplained=tuple(n for n in RESULTS if n in left))
