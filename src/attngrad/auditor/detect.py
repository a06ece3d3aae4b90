"""What a candidate takes, found out by a call or two: its layout and its dtype.

The layout is settled by the output alone, on small sizes that all differ: gradients do not choose it. Where no layout
makes the output right, equal keys are tried, which leave out = mean(v) whatever is wrong with the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from attngrad.auditor.candidate import Call, run
from attngrad.auditor.cases import Case, Spelling, make
from attngrad.auditor.layouts import LAYOUTS, STACKED, TURNED, Layout
from attngrad.auditor.pipeline import Pipeline
from attngrad.auditor.plans import COMPILED, Dims, Plan
from attngrad.auditor.sizes import Adapt, both
from attngrad.auditor.targets import Target
from attngrad.core.dtypes import BFLOAT16

_PROBE = {"attention": COMPILED[0], "layer": Dims(2, 2, 2, 4, 4, 3, 3, 6)}
_GROUPED = Dims(1, 4, 2, 4, 4, 4, 4)  # k and v may be taken for half as many tokens
_DTYPES = tuple(map(np.dtype, (np.float64, np.float32, np.float16, BFLOAT16)))
_RANDOM, _EQUAL, _RAN = 3, 2, 1

WINDOWS: tuple[tuple[str, tuple[int, int], Callable[[Mapping[str, Any]], int]], ...] = (
    ("a number: of keys before, and none after", (2, 0), lambda options: options["window"][0]),
    ("a number: of keys up to its own", (2, 0), lambda options: options["window"][0] + 1),
    ("a number: of keys on each side", (2, 2), lambda options: options["window"][0]),
)
"""What a window may mean that is one number: in words, such a window, and the number."""
Make = Callable[[Layout | None, Any], Target]
"""The target of a layout and a dtype."""
Sizes = Callable[[Layout], Adapt | None]
"""The sizes that it is tried with, in a layout."""


class Settled(NamedTuple):
    """What a candidate takes."""

    layout: Layout
    dtype: np.dtype[Any]
    options: dict[str, Any]
    """What it does without being asked: causal attention."""
    said: list[tuple[str, str]]
    """What is to be said of it: kind and text."""
    spelling: Spelling | None = None
    """How it is given its options."""
    groups: bool = True
    """Whether fewer key heads mean anything to it."""


class _Try(NamedTuple):
    rank: int
    target: Target
    options: Mapping[str, Any]
    call: Call
    window: str = ""
    """What a window means to it that is one number, in words."""


def settle(
    of: Make,
    level: str,
    layout: Layout | None,
    dtype: Any,
    options: Mapping[str, Any],
    sizes: Sizes,
    limit: float,
    compiled: bool = False,
) -> Settled:
    """The layout and the dtype that it takes, and whether it is causal by itself."""
    said: list[tuple[str, str]] = []
    refused = ""
    chosen: tuple[_Try, np.dtype[Any]] | None = None
    for kind in _DTYPES if dtype is None else (np.dtype(dtype),):
        best = _best(of, level, layout, kind, options, sizes, limit)
        chosen = chosen or (best, kind)
        if _hopeless(best.call):
            break
        if best.rank >= _RAN:
            chosen = best, kind
            if dtype is None and (narrower := _returned(best.call, kind)) is not None:
                said.append(("dtype", f"It returns {narrower.name} for {kind.name}: audited in {narrower.name}."))
                chosen = best, narrower
            elif refused:
                said.append(("dtype", f"It does not take {refused}: audited in {kind.name}."))
            break
        refused = refused or f"float64 ({best.call.error})"
    assert chosen is not None  # noqa: S101
    best, kind = chosen
    found = best.target.layout
    if level == "attention" and layout is None and not found.plain:
        said.append(("layout", f"Its arrays are ({found.words}): audited with layout {found.name!r}."))
    more = dict(best.options) if not options else {}
    grouped = Plan("groups", COMPILED[1] if compiled else _GROUPED)
    ways = (found, replace(found, tiled=True)) if level == "attention" and best.rank >= _EQUAL else ()
    fits = (x for x in ways if _fits(of, x, grouped, kind, best.options, sizes, limit))
    read = next(fits, None)
    groups = read is not None or not (ways and found.merged) or "num_kv_heads" in best.target.arguments
    if not groups:
        text = "It does not support groups of query heads (gqa): it splits the features of k and v by the heads of q."
        said.append(("unsupported", text))
    if (found := read or found).tiled:
        text = "Query head h reads key head h % Hk: audited by that convention (PyTorch's is h // (Hq // Hk))."
        said.append(("convention", text))
    if best.window:
        said.append(("convention", f"Its window is {best.window}."))
    elif more:
        said.append(("convention", "It is causal without being asked: audited as causal attention."))
    return Settled(found, kind, more, said, _SPELLINGS.get(best.window), groups)


def _best(
    of: Make,
    level: str,
    layout: Layout | None,
    kind: np.dtype[Any],
    options: Mapping[str, Any],
    sizes: Sizes,
    limit: float,
) -> _Try:
    """The first layout in which the output is right; else that in which it is nearest to it."""
    best: _Try | None = None
    given_it = level == "layer" or (layout is not None and layout.name != "packed")
    for each in [layout] if given_it else list(_in_turn(of, kind)):
        target = of(each, kind)
        for given, window in _ways(target, options):
            rank, call = _rank(target, level, kind, given, sizes, limit, _SPELLINGS.get(window))
            if best is None or (rank > best.rank and (rank == _RANDOM or not given or options)):
                best = _Try(rank, target, given, call, window)
            if rank == _RANDOM or _hopeless(call):
                return best
    assert best is not None  # noqa: S101
    return best if best.rank == _RANDOM or options else best._replace(options={})


def _ways(target: Target, options: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], str]]:
    """The options to try it with, and what its window means, where it is a number and asked for, or always on."""
    if not target.counts or not ("window" in options or target.windowed):
        return [({}, ""), (options or {"causal": True}, "")]
    if "window" in options:
        return [*((options, told) for told, _, _ in WINDOWS[:2]), (options, "")]
    ways = [(window, told) for told, window, _ in WINDOWS]
    return [({**options, "window": window}, told) for window, told in (*ways, (WINDOWS[0][1], ""))]


def _spelling(count: Callable[[Mapping[str, Any]], int]) -> Spelling:
    return lambda options: {**options, "window": count(options)} if "window" in options else dict(options)


_SPELLINGS = {told: _spelling(count) for told, _, count in WINDOWS}


def _hopeless(call: Call) -> bool:
    """Whether no other layout or dtype could mend what happened."""
    beyond = ("MemoryError", "RecursionError", "NameError", "KeyboardInterrupt", "ImportError", "ModuleNotFoundError")
    return call.timeout or call.exited or (call.error or "").split(":")[0] in beyond


def _in_turn(of: Make, kind: np.dtype[Any]) -> Iterator[Layout | None]:
    """The layouts to try; one that is told where sequences begin has them end to end."""
    arguments = of(LAYOUTS["BHTD"], kind).arguments
    if "stack_axis" in arguments:
        one = any("cu_seqlens" in name for name in arguments)  # sequences end to end have no batch
        yield from (x for x in STACKED if not (one and "b" in x.axes))
    elif any("cu_seqlens" in name for name in arguments):
        yield LAYOUTS["packed"]
    else:
        yield from (*(x for name, x in LAYOUTS.items() if name != "packed"), TURNED)


def _rank(
    target: Target,
    level: str,
    kind: np.dtype[Any],
    options: Mapping[str, Any],
    sizes: Sizes,
    limit: float,
    spelling: Spelling | None = None,
) -> tuple[int, Call]:
    adapt = both(target.adapt, sizes(target.layout))
    dims = _PROBE[level] if adapt is None else adapt(_PROBE[level])
    if dims is None:
        return 0, Call(error="it takes no such sizes")
    plan = Plan("small", dims)
    case = target.recast(make(level, plan, kind, np.random.default_rng(7), options, target.plain_output))
    case = replace(case, spelling=spelling)
    if target.layout.adapt(case.dims) != case.dims:  # options with heads, and none in the layout
        return 0, Call(error="it takes no such sizes")
    call = run(target.prepare, case.spelt, level, target.tangents, limit)
    if not call.results:
        return 0, call
    if _is_right(call, case):
        return _RANDOM, call
    if level == "layer":
        return _RAN, call
    case = replace(case, arrays={**case.arrays, "k": np.zeros_like(case.arrays["k"])})
    equal = run(target.prepare, case.spelt, level, target.tangents, limit)
    return (_EQUAL if _is_right(equal, case) else _RAN), call


def _fits(
    of: Make, layout: Layout, plan: Plan, kind: Any, options: Mapping[str, Any], sizes: Sizes, limit: float
) -> bool:
    """Whether query heads read the key heads that the layout says: equal keys leave the mean of their values."""
    target = of(layout, kind)
    adapt = both(target.adapt, sizes(target.layout))
    n = plan.dims if adapt is None else adapt(plan.dims)
    if n is None or not 1 < n.hk < n.hq:
        return not layout.tiled
    rng = np.random.default_rng(7)
    case = target.recast(make("attention", plan._replace(dims=n), kind, rng, options, target.plain_output))
    call = run(target.prepare, case, "attention", target.tangents, limit)
    if "out" in call.results:
        case = replace(case, arrays={**case.arrays, "k": np.zeros_like(case.arrays["k"])})
        call = run(target.prepare, case, "attention", target.tangents, limit)
    return _is_right(call, case) if call.results else not layout.tiled


def _is_right(call: Call, case: Case) -> bool:
    """Whether the output is near what it should be; without one, the first gradient that came."""
    name = next((x for x in ("y", "out") if x in call.results), next(iter(call.results), ""))
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
