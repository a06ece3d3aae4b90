"""The steps of attention as the auditor has them: those of the book, with more names where a mistake may differ.

No formula stands here. ``_READS`` says which steps of the book read another name, and ``_ALIASES`` what that name is
where no mistake says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from attngrad.core.operands import Operands
from attngrad.reference.modifiers import MODIFIERS, compose
from attngrad.reference.table import STEPS, Step, parameters


class Undefined(Exception):  # noqa: N818
    """The mistake has no meaning for these shapes or options; the case has no such step.

    The one reason for which a mistake may have no effect. Any other exception is an error of the auditor.
    """


_BACK = {name: f"{name}_back" for name in ("visible", "weights", "keep", "slope")}
"""The backward may see other weights than the forward had, so these have names of their own."""

_READS: Mapping[str, Mapping[str, str]] = {
    "z": {"scale": "scale_z"},
    "visible": {"window": "band", "offset": "position"},
    "scores_unmasked": {"bias": "bias_finite"},
    "dq": {"scale": "scale_dq"},
    "dk_heads": {"scale": "scale_dk"},
}
"""What a step reads, by its name in the book; ``scale`` is read as ``scale_value`` by all others."""

_MADE = {"dq": "dq_made", "dk": "dk_made", "dv": "dv_made"}
"""Gradients as they are made; the name without ``_made`` is what is returned in its place."""

_ALIASES = {
    **{alias: name for name, alias in _BACK.items()},
    **_MADE,
    **dict.fromkeys(("scale_z", "scale_dq", "scale_dk"), "scale_value"),
    "band": "window",
    # The book keeps what is not finite out of rows that see nothing and of hidden scores. Inputs of an audit are
    # finite, and a mistake that gives such a row weight must show in the gradients.
    **{f"{name}_seen": name for name in ("q", "z", "dout", "q_dot", "z_dot", "dout_dot")},
}


_OWN: dict[str, Callable[..., Any]] = {
    # the scale, in longdouble where it is 1/sqrt(D); the offset, and the bias without -inf, which masks
    "scale_value": lambda scale, q: 1 / np.sqrt(np.longdouble(q.shape[-1])) if scale is None else scale,
    "position": lambda offset, q, k: k.shape[-2] - q.shape[-2] if offset is None else offset,
    "bias_finite": lambda bias: None if bias is None else np.where(bias == -np.inf, np.zeros_like(bias), bias),
    "group": lambda q, k: Operands(q, k, k).group,
    "origin": lambda: (0, 0, 0, 0),
}


def _attention_steps() -> dict[str, Step]:
    found = {name: Step(function, parameters(function)) for name, function in _OWN.items()}
    found["modifier"] = Step(compose, tuple(MODIFIERS))
    for name, step in STEPS.items():
        names = {"scale": "scale_value", **(_BACK if step.stage == "backward" else {}), **_READS.get(name, {})}
        found[_MADE.get(name, name)] = step._replace(reads=tuple(names.get(x, x) for x in step.reads))
    return found | {alias: Step(lambda x: x, (name,)) for alias, name in _ALIASES.items()}


ATTENTION_STEPS = _attention_steps()
"""The steps of attention, by name."""
