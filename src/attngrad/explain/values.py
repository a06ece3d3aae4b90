"""The arrays of a trace: the table of steps, evaluated in float64, each under its mathematical symbol."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from attngrad.core.arrays import NDArray
from attngrad.core.operands import Operands, Tangents
from attngrad.core.options import Options
from attngrad.explain.rules import Rule
from attngrad.reference.modifiers import IDENTITY
from attngrad.reference.passes import directions, inputs
from attngrad.reference.table import evaluate, symbols


class Step(np.ndarray):
    """An array of a trace, which knows where it comes from; what is computed from it is a base array.

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
        """The numbers, as a base array."""
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


def to_float64(x: Any) -> Any:
    """A copy in float64; None stays None."""
    if isinstance(x, Mapping):
        return {name: to_float64(y) for name, y in x.items()}
    return None if x is None else np.array(x, np.float64)


def widen(x: Operands) -> Operands:
    """The operands in float64, copied, so that the trace stays what it was."""
    copies = {name: y if isinstance(y, int) else copy.deepcopy(y) for name, y in x._asdict().items()}
    return Operands(**copies | {name: to_float64(getattr(x, name)) for name in Tangents._fields})


def compute(
    x: Operands,
    o: Options,
    dout: Any = None,
    dlse: Any = None,
    dout_dot: Any = None,
    dlse_dot: Any = None,
    t: Tangents | None = None,
) -> tuple[dict[str, NDArray], set[str]]:
    """Every intermediate by its mathematical name, and the flags that choose among the rules."""
    given, stages = inputs(x, o), ["forward"]
    if dout is not None or dlse is not None:
        given |= {"dout": np.zeros(x.out_shape) if dout is None else dout, "dlse": dlse}
        stages.append("backward")
    if t is not None:
        given |= directions(x, t)
        stages.append("tangent")
    if len(stages) == 3:
        given |= {"dout_dot": np.zeros(x.out_shape) if dout_dot is None else dout_dot, "dlse_dot": dlse_dot}
        stages.append("second")
    names = symbols(stages)
    with np.errstate(all="ignore"):
        values = evaluate(given, tuple(names))
    flags = {"bias", "sinks", "keep", "dlse", "dlse_dot", "bias_dot", "sinks_dot"}
    flags = {name for name in flags if values.get(name) is not None}
    on = {"cap": values["modifier"] is not IDENTITY, "group": x.group > 1, "hidden": not np.all(values["visible"])}
    flags |= {name for name, is_on in on.items() if is_on}
    return {symbol: values[name] for name, symbol in names.items() if values[name] is not None}, flags
