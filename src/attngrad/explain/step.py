"""One array of a trace."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from attngrad.core.arrays import NDArray
from attngrad.explain.rules import Rule


class Step(np.ndarray):
    """An array of a trace, which knows where it comes from; what is computed from it is a plain array.

    ``name`` is its name, ``formula`` what makes it, ``inputs`` the names in that, ``number`` the number of the formula
    in docs/notation.md (empty for what is given), ``stage`` the pass it belongs to: forward, backward, tangent, second.
    """

    name: str = ""
    formula: str = ""
    number: str = ""
    stage: str = ""
    inputs: tuple[str, ...] = ()

    @property
    def value(self) -> NDArray:
        """The numbers, as a plain array."""
        return self.view(np.ndarray)

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        return array[()] if return_scalar else np.asarray(array)

    def __getitem__(self, index: Any) -> Any:
        return self.view(np.ndarray)[index]

    def __repr__(self) -> str:
        return f"{self.name} = {self.formula}\n{self.value!r}" if self.name else repr(self.value)


def make_step(rule: Rule, value: NDArray, names: Mapping[str, Any]) -> Step:
    """``value`` as the read-only step of ``rule``."""
    step = np.array(value, order="C").view(Step)
    step.name, step.formula, step.number, step.stage = rule.name, rule.formula, rule.number, rule.stage
    words = re.findall(r"[A-Za-z]\w*", rule.formula if rule.entry else "")
    step.inputs = tuple(dict.fromkeys(w for w in words if w in names and w != rule.name))
    step.flags.writeable = False
    return step
