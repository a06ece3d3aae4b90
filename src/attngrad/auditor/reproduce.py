"""Reproduction: what mistakes compute in a case, and whether that is what the candidate returned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import numpy as np

from attngrad.auditor.budget import Budget
from attngrad.auditor.mistakes import Mistake, Variant
from attngrad.auditor.pipeline import Override, Pipeline, Undefined
from attngrad.auditor.rounding import ENTRYWISE, EntryErrors
from attngrad.auditor.truth import LONG, Observation
from attngrad.core.arrays import NDArray
from attngrad.testing import rms_error, rounding_bound

Named = tuple[Mistake, Variant]
State = tuple[Named, ...]
"""A combination of mistakes."""
_SMALL = 400
"""The number of scores up to which pipelines are kept."""
_LOOKUP = 0.2
"""What it counts to look up a result that was computed before, for a comparison."""
_LARGE = 12_000.0
"""The multiplications that take about as long again as what a prediction takes at any size."""


class Predictions:
    """What combinations of mistakes compute, within a budget; ``style``: a right way to compute that they change."""

    def __init__(self, budget: Budget, style: Mapping[str, Override] = MappingProxyType({})) -> None:
        self.budget, self.style = budget, style
        self._pipelines: dict[tuple[int, ...], Pipeline] = {}
        self._last: dict[tuple[int, ...], Pipeline] = {}
        """The last two of large cases: one result is asked for after the other, exact and in the dtype."""
        self._verdicts: dict[tuple[Any, ...], bool] = {}

    @staticmethod
    def _key(state: State, o: Observation, dtype: Any) -> tuple[int, ...]:
        return (id(o), (o.truth.wide if dtype is LONG else np.dtype(dtype)).num, *[id(v) for _, v in state])

    def _pipeline(self, state: State, o: Observation, dtype: Any) -> Pipeline:
        key = self._key(state, o, dtype)
        dtype = o.truth.wide if dtype is LONG else dtype
        if (known := self._pipelines.get(key) or self._last.get(key)) is not None:
            return known
        given = {**o.truth.case.given, "candidate_dtype": o.truth.dtype}
        for place, (_, variant) in enumerate(state):
            if variant.fit is not None:
                others = self._pipeline(state[:place] + state[place + 1 :], o, LONG)
                given["fitted"] = variant.fit(others, o.results)
        parent = o.truth.exact if np.dtype(dtype) == o.truth.wide else o.truth.naive[0]
        made = Pipeline(given, dtype, [self.style, *(v.steps for _, v in state)], parent)
        if o.size <= _SMALL:  # large ones are seldom reached, and would fill the memory
            if len(self._pipelines) > 8000:
                self._pipelines.clear()
            self._pipelines[key] = made
        else:
            self._last = {**dict(list(self._last.items())[-1:]), key: made}
        return made

    def predict(self, state: State, o: Observation, name: str, dtype: Any = LONG) -> NDArray | None:
        """The result ``name`` as the mistakes compute it; as it should be where they have no meaning."""
        known = self._pipelines.get(self._key(state, o, dtype))
        if known is not None and known.knows(name):
            self.budget.spend(_LOOKUP)
            found: NDArray | None = getattr(known, name)
            return found
        with _explained_by(state, o):
            try:
                pipeline = self._pipeline(state, o, dtype)
                self.budget.spend(_LOOKUP if pipeline.knows(name) else 1.0 + o.truth.case.dims.work / _LARGE)
                value: NDArray | None = getattr(pipeline, name)
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
        if not state:
            return o.judgements[name].right
        actual, predicted = o.results[name], self.predict(state, o, name)
        if predicted is None or predicted.shape != actual.shape:
            return False
        truth = o.truth.value(name)
        if truth is not None and predicted.shape == truth.shape and np.array_equal(predicted, truth):
            open_ended = any(v.wild for _, v in state)  # which changes nothing here, and so explains nothing
            return o.judgements[name].right or (not open_ended and self._within(state, o, name, predicted))
        if name == "scores":
            shown = np.isfinite(predicted) & np.isfinite(actual)
        else:
            wild = any(v.wild or v.fit for _, v in state)
            shown = ~np.isnan(predicted) if wild else np.ones(predicted.shape, bool)
            shown = shown & ~(np.isneginf(predicted) & np.isneginf(actual.astype(LONG)))
        if name.startswith("dweights") and predicted.shape == o.truth.exact.visible.shape:
            shown = shown & o.truth.exact.visible
        if not np.isfinite(actual.astype(LONG)[shown]).all():  # inf and NaN are reproduced where the dtype overflows
            naive = self.predict(state, o, name, o.truth.dtype)
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
            left = 1e4 * o.truth.eps * self._largest_weight(state, o)
            return off <= left and off <= 2.0 * self._scale(state, o, name)
        naive = self.predict(state, o, name, o.truth.dtype)
        if naive is None or naive.shape != predicted.shape:
            return False
        with np.errstate(all="ignore"):
            fine = rounding_bound(naive[shown], b, o.truth.eps)
        floor = o.truth.bound(name) if truth is not None else 0.0
        if off <= 2.0 * max(fine if np.isfinite(fine) else 0.0, floor):
            return True
        return off <= 2.0 * self._scale(state, o, name)

    def _largest_weight(self, state: State, o: Observation) -> float:
        """That of the backward, which a mistake may make larger than one: terms and their rounding grow with it."""
        weights = self.predict(state, o, "weights_back")
        return max(1.0, float(np.max(np.nan_to_num(weights, posinf=1.0), initial=1.0))) if weights is not None else 1.0

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
