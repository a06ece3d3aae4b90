"""The smallest failing case of a PyTorch function, as code to paste: tensors, and the derivative that is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np

from attngrad.auditor.cases import Case
from attngrad.auditor.pipeline import MIXED, SECOND, TANGENT
from attngrad.core.arrays import NDArray
from attngrad.core.options import OPTION_NAMES

_CALL = "candidate(q, k, v{options})"
_AROUND = """one = torch.ones((), dtype=q.dtype, requires_grad=True)  # a graph around it, as layers have

def mapped(q, k, v):
    return one * candidate(one * q, one * k, one * v{options})

"""
_ALONG = """along = torch.autograd.grad(candidate(q, k, v{options}), (q, k, v), dout_dot)
NAMES = (a + b for a, b in zip(twice, along, strict=True))"""
_SECOND = "twice = torch.autograd.grad(first, (q, k, v), ALONG, materialize_grads=True)\n"
_FORWARD = "torch.func.jvp(FUNCTION, (q, k, v), (q_dot, k_dot, v_dot))"
_INPUTS = ("q", "k", "v")
_DOTS = ("q_dot", "k_dot", "v_dot")


def _call(name: str) -> tuple[tuple[str, ...], str]:
    """The arrays that a result needs, and the code that computes it."""
    if name in TANGENT:
        function = f"lambda q, k, v: {_CALL}"
        return (*_INPUTS, *_DOTS), f"out, out_dot = {_FORWARD.replace('FUNCTION', function)}"
    if name in MIXED:
        first = f"first = {_FORWARD.replace('FUNCTION', 'mapped')}[1]\n"
        names = "dq_mixed, dk_mixed, dv_mixed"
        code = _AROUND + first + _SECOND.replace("ALONG", "dout") + _ALONG.replace("NAMES", names)
        return (*_INPUTS, "dout", *_DOTS, "dout_dot"), code
    if name in SECOND:
        first = "first = torch.autograd.grad(mapped(q, k, v), (q, k, v), dout, create_graph=True)\n"
        second = _SECOND.replace("ALONG", "(q_dot, k_dot, v_dot)") + _ALONG.replace("NAMES", "dq_dot, dk_dot, dv_dot")
        return (*_INPUTS, "dout", *_DOTS, "dout_dot"), _AROUND + first + second
    if name == "out":
        return _INPUTS, f"out = {_CALL}"
    return (*_INPUTS, "dout"), f"out = {_CALL}\ndq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)"


def _tensor(name: str, x: NDArray, drawn: str) -> str:
    if x.dtype.kind in "biu":
        return f"torch.tensor({x.tolist()})"
    listed = np.array2string(
        x.astype(np.float64), separator=", ", threshold=10**6, floatmode="unique", max_line_width=110
    )
    listed = drawn.partition(".astype")[0] or listed.replace("inf", "torch.inf").replace("nan", "torch.nan")
    return f"torch.tensor({listed}, dtype=torch.{x.dtype}{', requires_grad=True' if name in _INPUTS else ''})"


def as_torch(case: Case, name: str, spelled: dict[str, str], taken: tuple[str, ...], comment: str, drawn: Any) -> str:
    """A script that makes the case of tensors and computes the result ``name``; ``drawn(name, x)`` draws large ones."""
    wanted, call = _call(name)
    lines = [*(["import numpy as np"] if drawn else []), "import torch", *(f"# {x}" for x in comment.splitlines())]
    for array in wanted:
        x = case.arrays[array]
        lines.append(f"{array} = {_tensor(array, x, drawn(array, x) if drawn else '')}")
    passed = ""
    for option, value in case.options.items():
        if option not in OPTION_NAMES or option not in taken:
            continue
        shown = repr(value)
        if isinstance(value, np.ndarray):
            lines.append(f"{option} = {_tensor(option, value, '')}")
            shown = option
        passed += f", {spelled.get(option, option)}={shown}"
    return "\n".join([*lines, call.replace("{options}", passed)]) + "\n"
