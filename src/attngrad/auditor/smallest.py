"""The smallest case that still fails, found and told as code to paste."""

from __future__ import annotations

from typing import Any

import numpy as np

from attngrad.auditor.budget import Budget
from attngrad.auditor.cases import Case
from attngrad.auditor.report import symbol
from attngrad.auditor.session import Session
from attngrad.auditor.shrink import shrink
from attngrad.auditor.truth import Truth
from attngrad.core.arrays import NDArray
from attngrad.core.dtypes import BFLOAT16
from attngrad.core.options import OPTION_NAMES


def smallest_case(session: Session, name: str, budget: Budget) -> str:
    """The smallest case that still fails in the result ``name``, as code."""
    target = session.target
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
    fails(case)
    comment = f"{symbol(name)} is wrong here (the case '{case.name}', shrunk)."
    if "truth" in last:
        got, truth = last["actual"].astype(np.float64), last["truth"].astype(np.float64)
        with np.printoptions(precision=6, threshold=24, linewidth=100):
            comment += f"\n{name} should be\n{truth}\nbut it is\n{got}"
    n = case.dims
    text = target.code.replace("{heads}", str(n.hq)).replace("{kv_heads}", str(n.hk)).replace("{model}", str(n.model))
    return as_code(case, target.arguments, text, target.keywords, comment)


def _literal(x: NDArray) -> str:
    if x.dtype.kind in "biu":
        return f"np.array({x.tolist()})"
    listed = np.array2string(
        x.astype(np.float64), separator=", ", threshold=10**6, floatmode="unique", max_line_width=110
    )
    listed = listed.replace("inf", "np.inf").replace("nan", "np.nan")
    module = "ml_dtypes" if x.dtype == BFLOAT16 else "np"
    return f"np.array({listed}, dtype={module}.{x.dtype})"


def as_code(case: Case, wanted: tuple[str, ...], call: str, option_names: tuple[str, ...], comment: str) -> str:
    """A script that makes the case and calls the candidate."""
    lines = ["import numpy as np"]
    if any(x.dtype == BFLOAT16 for x in case.arrays.values()):
        lines.append("import ml_dtypes")
    lines += [f"# {line}" for line in comment.splitlines()]
    lines += [f"{name} = {_literal(case.arrays[name])}" for name in wanted if name in case.arrays]
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
