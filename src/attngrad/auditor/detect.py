"""What a candidate takes, found out by a call or two: its layout and its dtype.

The layout is settled by the output alone, on small sizes that all differ: gradients do not choose it. Where no layout
makes the output right, equal keys are tried, which leave out = mean(v) whatever is wrong with the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from attngrad.auditor.candidate import Call, run
from attngrad.auditor.cases import Case, make
from attngrad.auditor.layouts import LAYOUTS, Layout
from attngrad.auditor.pipeline import Pipeline
from attngrad.auditor.plans import Dims, Plan
from attngrad.auditor.sizes import Adapt, both
from attngrad.auditor.targets import BadCandidate, Target
from attngrad.core.dtypes import BFLOAT16

_PROBE = {"attention": Dims(2, 3, 3, 5, 5, 4, 4), "layer": Dims(2, 2, 2, 4, 4, 3, 3, 6)}
_DTYPES = tuple(map(np.dtype, (np.float64, np.float32, np.float16, BFLOAT16)))
_RANDOM, _EQUAL, _RAN = 3, 2, 1
Make = Callable[[Layout | None, Any], Target]
"""The target of a layout and a dtype."""


def settle(
    of: Make,
    level: str,
    layout: Layout | None,
    dtype: Any,
    options: Mapping[str, Any],
    sizes: Adapt | None,
    limit: float,
) -> tuple[Layout, np.dtype[Any], list[tuple[str, str]]]:
    """The layout and the dtype that it takes, and what is to be said of these: kind and text."""
    said: list[tuple[str, str]] = []
    refused = ""
    chosen: tuple[Target, np.dtype[Any]] | None = None
    for kind in _DTYPES if dtype is None else (np.dtype(dtype),):
        rank, target, call = _best(of, level, layout, kind, options, sizes, limit)
        chosen = chosen or (target, kind)
        if _hopeless(call):
            break
        if rank >= _RAN:
            chosen = target, kind
            if dtype is None and (narrower := _returned(call, kind)) is not None:
                said.append(("dtype", f"It returns {narrower.name} for {kind.name}: audited in {narrower.name}."))
                chosen = target, narrower
            elif refused:
                said.append(("dtype", f"It does not take {refused}: audited in {kind.name}."))
            break
        refused = refused or f"float64 ({call.error})"
    if chosen is None:
        raise BadCandidate("audit: there is no dtype to try.")
    found = chosen[0].layout.name
    if level == "attention" and layout is None and found != "BHTD":
        letters = {"b": "batch", "h": "heads", "t": "tokens", "d": "features"}
        axes = ", ".join(letters[a] for a in chosen[0].layout.axes)
        said.append(("layout", f"Its arrays are ({axes}): audited with layout {found!r}."))
    return chosen[0].layout, chosen[1], said


def _best(
    of: Make,
    level: str,
    layout: Layout | None,
    kind: np.dtype[Any],
    options: Mapping[str, Any],
    sizes: Adapt | None,
    limit: float,
) -> tuple[int, Target, Call]:
    """The first layout in which the output is right; else that in which it is nearest to it."""
    best: tuple[int, Target, Call] | None = None
    tried = [layout] if layout is not None or level == "layer" else list(_in_turn(of, kind))
    for each in tried:
        target = of(each, kind)
        for given in ({}, options) if options and level == "attention" else (options,):
            rank, call = _rank(target, level, kind, given, sizes, limit)
            if best is None or rank > best[0]:
                best = rank, target, call
            if rank == _RANDOM or _hopeless(call):
                return rank, target, call
    assert best is not None  # noqa: S101
    return best


def _hopeless(call: Call) -> bool:
    """Whether no other layout or dtype could mend what happened."""
    beyond = ("MemoryError", "RecursionError", "NameError", "KeyboardInterrupt", "ImportError", "ModuleNotFoundError")
    return call.timeout or call.exited or (call.error or "").split(":")[0] in beyond


def _in_turn(of: Make, kind: np.dtype[Any]) -> Iterator[Layout | None]:
    """The layouts to try; one that is told where sequences begin has them end to end."""
    if any("cu_seqlens" in name for name in of(LAYOUTS["BHTD"], kind).arguments):
        yield LAYOUTS["packed"]
    else:
        yield from (x for name, x in LAYOUTS.items() if name != "packed")


def _rank(
    target: Target, level: str, kind: np.dtype[Any], options: Mapping[str, Any], sizes: Adapt | None, limit: float
) -> tuple[int, Call]:
    adapt = both(target.adapt, sizes)
    dims = _PROBE[level] if adapt is None else adapt(_PROBE[level])
    if dims is None:
        return 0, Call(error="it takes no such sizes")
    plan = Plan("small", dims)
    case = target.recast(make(level, plan, kind, np.random.default_rng(7), options, target.plain_output))
    call = run(target.prepare, case, level, target.tangents, limit)
    if not call.results:
        return 0, call
    if level == "layer" or _is_right(call, case):
        return _RANDOM, call
    case = Case(case.name, case.dims, {**case.arrays, "k": np.zeros_like(case.arrays["k"])}, case.options)
    equal = run(target.prepare, case, level, target.tangents, limit)
    return (_EQUAL if _is_right(equal, case) else _RAN), call


def _is_right(call: Call, case: Case) -> bool:
    """Whether the output is near what it should be; without one, the first gradient that came."""
    name = "out" if "out" in call.results else next(iter(call.results), "")
    if not name:
        return False
    truth, found = np.asarray(getattr(Pipeline(case.given, np.float64), name)), call.results[name]
    if found.shape != truth.shape:
        return False
    near = 0.02 * float(np.max(np.abs(truth), initial=0.0)) + 1e-6
    return bool(np.max(np.abs(found.astype(np.float64) - truth), initial=0.0) <= near)


def _returned(call: Call, kind: np.dtype[Any]) -> np.dtype[Any] | None:
    """The dtype of all results, where it is narrower than that of the inputs."""
    kinds = {x.dtype for x in call.results.values() if x.dtype.kind == "f" or x.dtype == BFLOAT16}
    found = max(kinds, key=lambda x: x.itemsize, default=kind)
    return found if found.itemsize < kind.itemsize and found in _DTYPES else None
