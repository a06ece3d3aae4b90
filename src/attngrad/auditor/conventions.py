"""Conventions: what is right in another sense than attngrad's, in all results alike, is told and is no fault.

Which corner a causal mask starts from, where T != S, and which query heads share a key head are a matter of agreement.
A candidate that has its own, and is right by it in every case, is right; one that mixes two is not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from attngrad.auditor.cases import Case
from attngrad.auditor.plans import AXES
from attngrad.auditor.session import Session
from attngrad.auditor.truth import Observation, Truth
from attngrad.core.arrays import NDArray

Results = dict[str, NDArray]


class Convention(NamedTuple):
    """Another meaning of a case: whether it has one, and the case and the results in attngrad's terms."""

    name: str
    told: str
    differs: Callable[[Case], bool]
    case: Callable[[Case], Case]
    results: Callable[[Case, Results], Results] = lambda case, results: results


def _top_left(case: Case) -> Case:
    return replace(case, options={**case.options, "offset": 0})


def _is_grouped(case: Case) -> bool:
    n = case.dims
    return 1 < n.hk < n.hq and not case.options.get("dropout")


def _order(case: Case) -> NDArray:
    """The query heads that read the first key head, then those that read the second, where h reads h % Hk."""
    heads = np.arange(case.dims.hq)
    return np.concatenate([heads[heads % case.dims.hk == g] for g in range(case.dims.hk)])


def _sorted(case: Case, x: Any, axes: tuple[str, ...]) -> Any:
    """An array with its query heads in that order, along the axis that has them by itself or beside their features."""
    own = axes[len(axes) - x.ndim :]
    for axis, name in enumerate(own):
        if name == "hq" and x.shape[axis] == case.dims.hq:
            return np.take(x, _order(case), axis)
        if name == "inner":
            split = (*x.shape[:axis], case.dims.hq, -1, *x.shape[axis + 1 :])
            return np.take(x.reshape(split), _order(case), axis).reshape(x.shape)
    return x


_SHAPES = {**AXES, **{f"d{name}": axes for name, axes in AXES.items() if name not in ("mask", "offset")}}
_SHAPES |= dict.fromkeys(("z", "scores", "weights", "dz", "dscores", "dweights"), AXES["mask"])
_SHAPES |= dict.fromkeys(("lse", "delta"), ("b", "hq", "t")) | {"out": AXES["dout"]}
"""The axes of inputs, options and results."""


def _axes(name: str) -> tuple[str, ...]:
    return _SHAPES.get(name.removesuffix("_dot").removesuffix("_mixed"), ())


def _grouped_in_order(case: Case) -> Case:
    arrays = {name: _sorted(case, x, _axes(name)) for name, x in case.arrays.items()}
    options = {n: _sorted(case, x, _axes(n)) if isinstance(x, np.ndarray) else x for n, x in case.options.items()}
    return replace(case, arrays=arrays, options=options)


CONVENTIONS = (
    Convention(
        "corner",
        "the causal mask starts at the top left corner, as PyTorch's is_causal has it",
        lambda case: bool(case.options.get("causal")) and "offset" not in case.options and case.dims.t != case.dims.s,
        _top_left,
    ),
    Convention(
        "groups",
        "query head h reads key head h % Hk, as np.tile lays them out",
        _is_grouped,
        _grouped_in_order,
        lambda case, results: {name: _sorted(case, x, _axes(name)) for name, x in results.items()},
    ),
)


def settle_conventions(session: Session) -> None:
    """Judge what is wrong by another convention, or by two; what is right by it in every case counts as right."""
    if session.recorded is not None or not session.wrong:
        return
    for chosen in ((CONVENTIONS[0],), (CONVENTIONS[1],), CONVENTIONS):
        judged = [(o, _judged(o, chosen)) for o in session.observations]
        if all(j.right for _, now in judged for j in now.values()):
            for o, now in judged:
                o.judgements.update(now)
            for convention in chosen:
                text = f"Right by a convention of its own: {convention.told}."
                session.say("convention", text, fault=False, name=convention.name)
            return


def _judged(o: Observation, chosen: Collection[Convention]) -> dict[str, Any]:
    case, results = o.truth.case, o.results
    for convention in chosen:
        if convention.differs(case):
            results = convention.results(case, results)
            case = convention.case(case)
    return o.judgements if case is o.truth.case else Observation(Truth(case, o.truth.dtype), results).judgements
