"""The smallest case that still fails, found and told as code to paste."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from attngrad.auditor.budget import Budget
from attngrad.auditor.cases import Case
from attngrad.auditor.plans import AXES, Dims
from attngrad.auditor.report import symbol
from attngrad.auditor.session import Session
from attngrad.auditor.torch_code import as_torch
from attngrad.auditor.truth import Truth
from attngrad.core.arrays import NDArray
from attngrad.core.dtypes import BFLOAT16
from attngrad.core.options import OPTION_NAMES


def _cut(x: NDArray, axes: tuple[str, ...], n: Dims) -> NDArray:
    """The leading part of an array, as long along each named axis as ``n`` says; broadcast axes stay."""
    own = axes[len(axes) - x.ndim :]
    part = tuple(slice(0, getattr(n, a)) if size != 1 else slice(None) for a, size in zip(own, x.shape, strict=True))
    return x[part]


def cut(case: Case, n: Dims) -> Case:
    """The case at smaller sizes: every array cut to them."""

    def own(name: str, x: Any) -> Any:
        axes = AXES.get(name.removesuffix("_dot"))
        return _cut(x, axes, n) if axes is not None and isinstance(x, np.ndarray) and x.ndim else x

    arrays = {name: own(name, x) for name, x in case.arrays.items()}
    options = {name: own(name, x) for name, x in case.options.items()}
    if isinstance(options.get("segments"), tuple):
        ids, key_ids = options["segments"]
        options["segments"] = (_cut(ids, ("b", "t"), n), _cut(key_ids, ("b", "s"), n))
    return replace(case, dims=n, arrays=arrays, options=options)


def _fewer(size: int, *tried: int) -> list[int]:
    return sorted(set(tried) & set(range(1, size)))


def _smaller(n: Dims) -> Iterator[Dims]:
    """Sizes to try, the boldest first."""
    for t in _fewer(n.t, 1, 2, 3, n.t // 2, n.t - 1):
        if n.t == n.s:
            yield replace(n, t=t, s=t)
        yield replace(n, t=t)
    for s in _fewer(n.s, 1, 2, 3, n.s // 2, n.s - 1):
        yield replace(n, s=s)
    for b in range(1, n.b):
        yield replace(n, b=b)
    group = n.hq // n.hk
    for hk in range(1, n.hk):
        yield _modelled(replace(n, hk=hk, hq=hk * group), n)
    if n.hk == 1:
        for hq in range(1, n.hq):
            yield _modelled(replace(n, hq=hq), n)
    for d in _fewer(n.d, 2, max(n.d // 2, 2)):  # not 1, where a missing scale cannot show
        yield _modelled(replace(n, d=d, e=d) if n.d == n.e else replace(n, d=d), n)
    for e in _fewer(n.e, 2, max(n.e // 2, 2)) if n.d != n.e else ():
        yield replace(n, e=e)
    if n.model is not None and n.model != n.inner:
        for model in _fewer(n.model, 1, 2, n.model // 2):
            yield replace(n, model=model)


def _modelled(small: Dims, n: Dims) -> Dims:
    """A layer whose d_model is heads times width stays one."""
    return small if n.model is None or n.model != n.inner else replace(small, model=small.inner)


def shrink(case: Case, fails: Callable[[Case], bool], budget: Budget) -> Case:
    """The smallest case found within the budget, with few digits where that still fails."""
    progress = True
    while progress and not budget.over:
        progress = False
        for n in _smaller(case.dims):
            if budget.over:
                break
            budget.spend()
            small = cut(case, n)
            if fails(small):
                case, progress = small, True
                break
    for digits in (0, 1, 2):
        if budget.over and budget.cut == "time":
            break
        rounded = {name: np.round(x.astype(np.float64), digits).astype(x.dtype) for name, x in case.arrays.items()}
        candidate = replace(case, arrays=rounded)
        if fails(candidate):
            return candidate
    return case


def smallest_case(session: Session, name: str, budget: Budget) -> str:
    """The smallest case that still fails in the result ``name``, as code."""
    target = session.target
    if session.recorded is not None:
        return session.recorded.told
    bad = [o for o in session.observations if name in o.judgements and not o.judgements[name].right]
    start = min(bad, key=lambda o: o.size)
    kind = start.judgements[name].kind
    last: dict[str, Any] = {}

    def fails(case: Case) -> bool:
        if target.adapt is not None and target.adapt(case.dims) != case.dims:
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
    drawn = _drawn(case)
    drawn = drawn if drawn is not None and fails(drawn) else None
    case = drawn or case
    fails(case)
    comment = f"{symbol(name)} is wrong here (the case '{case.name}', shrunk)."
    if "truth" in last:
        got, truth = last["actual"].astype(np.float64), last["truth"].astype(np.float64)
        for digits in range(6, 18):  # until they can be told apart
            with np.printoptions(precision=digits, threshold=24, linewidth=100):
                shown = str(truth), str(got)
            if shown[0] != shown[1]:
                break
        comment += f"\n{name} should be\n{shown[0]}\nbut it is\n{shown[1]}"
    plain = target.code.endswith("dout_dot{options})") and "stack_axis" not in target.arguments
    plain = plain and not {"bias", "sinks", "segments"} & case.options.keys()
    if (spelled := session.spelled) is not None and plain:
        draw = _code_of_draw if drawn is not None else None
        return as_torch(target.view(case.spelt), name, spelled, target.keywords, comment, draw)
    n = case.dims
    text = target.code
    for mark, size in (("heads", n.hq), ("kv_heads", n.hk), ("model", n.model), ("width", n.d)):
        text = text.replace(f"{{{mark}}}", str(size))
    return as_code(target.view(case.spelt), target.arguments, text, target.keywords, comment, drawn is not None)


_MANY = 200
"""Numbers from which on a case is told by how it is drawn."""


def _drawn(case: Case) -> Case | None:
    """A large case with values that one line of code draws; None for a small one."""
    if sum(x.size for x in case.arrays.values()) < _MANY or any(
        isinstance(x, np.ndarray) for x in case.options.values()
    ):
        return None
    return replace(case, arrays={name: _draw(name, x.shape).astype(x.dtype) for name, x in case.arrays.items()})


def _draw(name: str, shape: tuple[int, ...]) -> NDArray:
    return np.random.default_rng(len(name) + ord(name[0])).standard_normal(shape)


def _code_of_draw(name: str, x: NDArray) -> str:
    module = "ml_dtypes" if x.dtype == BFLOAT16 else "np"
    seed = len(name) + ord(name[0])
    return f"np.random.default_rng({seed}).standard_normal({x.shape}).astype({module}.{x.dtype})"


def _literal(x: NDArray) -> str:
    if x.dtype.kind in "biu":
        return f"np.array({x.tolist()})"
    listed = np.array2string(
        x.astype(np.float64), separator=", ", threshold=10**6, floatmode="unique", max_line_width=110
    )
    listed = listed.replace("inf", "np.inf").replace("nan", "np.nan")
    module = "ml_dtypes" if x.dtype == BFLOAT16 else "np"
    return f"np.array({listed}, dtype={module}.{x.dtype})"


def as_code(
    case: Case, wanted: tuple[str, ...], call: str, option_names: tuple[str, ...], comment: str, drawn: bool = False
) -> str:
    """A script that makes the case and calls the candidate; ``drawn``: its values are those of ``_draw``."""
    lines = ["import numpy as np"]
    if any(x.dtype == BFLOAT16 for x in case.arrays.values()):
        lines.append("import ml_dtypes")
    lines += [f"# {line}" for line in comment.splitlines()]
    for name in wanted:
        if name in case.arrays:
            x = case.arrays[name]
            lines.append(f"{name} = {_code_of_draw(name, x) if drawn else _literal(x)}")
    passed = ""
    for name, value in case.options.items():
        if name not in OPTION_NAMES or name not in option_names:
            continue
        if isinstance(value, np.ndarray):
            lines.append(f"{name} = {_literal(value)}")
            passed += f", {name}={name}"
        elif isinstance(value, tuple) and any(isinstance(x, np.ndarray) for x in value):
            passed += f", {name}=({', '.join(map(_literal, value))})"
        else:
            passed += f", {name}={value!r}"
    lines.append(call.format(options=passed))
    return "\n".join(lines) + "\n"
