"""The one table of steps: attention and its derivatives as small functions, each a formula of docs/notation.md.

A step is named like its function, and its parameters are what it reads: inputs and other steps. ``steps`` and
``tangent_steps`` fill the table. The passes of the reference evaluate it; the auditor computes it with mistakes in some
steps; the explainer takes its values under their mathematical symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any, NamedTuple, TypeVar

STAGES = {"F": "forward", "R": "backward", "T": "tangent", "H": "second"}
"""The pass that a formula belongs to, by the letter of its number."""

_PRIMALS = {"q": "Q", "k": "K", "v": "V", "bias": "bias", "sinks": "sigma"}
_COTANGENTS = {"dout": "dO", "dlse": "dL"}
_UNNAMED = ("mask", "segments", "offset", "origin", "group", "scale", "modifier", "causal", "window", "dropout", "seed")
GIVEN = {
    "forward": {**_PRIMALS, **dict.fromkeys(_UNNAMED, "")},
    "backward": _COTANGENTS,
    "tangent": {f"{name}_dot": f"{symbol}_dot" for name, symbol in _PRIMALS.items()},
    "second": {f"{name}_dot": f"{symbol}_dot" for name, symbol in _COTANGENTS.items()},
}
"""The inputs that each stage adds, with their symbols. Of these, bias, sinks, mask, segments, window, seed, dlse and
their tangents may be None; ``modifier`` is ``modifiers(options)``, ``group`` the query heads per key head."""


class Step(NamedTuple):
    """A function, the names it reads in the order of its parameters, its formula and its symbol, if it has one."""

    function: Callable[..., Any]
    reads: tuple[str, ...]
    number: str = ""
    symbol: str = ""

    @property
    def stage(self) -> str:
        """The pass that it belongs to; empty for those without a number."""
        return STAGES.get(self.number[:1], "")


STEPS: dict[str, Step] = {}
"""Every step by name."""

Function = TypeVar("Function", bound=Callable[..., Any])


def parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the parameters of a function."""
    code = function.__code__
    return code.co_varnames[: code.co_argcount]


def step(number: str, symbol: str = "") -> Callable[[Function], Function]:
    """Enter a function into the table: ``number`` is that of the formula it is, or is a part of."""

    def enter(function: Function) -> Function:
        STEPS[function.__name__] = Step(function, parameters(function), number, symbol)
        return function

    return enter


@cache
def plan(given: tuple[str, ...], wanted: tuple[str, ...]) -> tuple[tuple[str, Step], ...]:
    """The steps that lead from ``given`` to ``wanted``, each after those that it reads."""
    found: dict[str, Step] = {}

    def visit(name: str) -> None:
        if name not in given and name not in found:
            if name not in STEPS:
                raise NameError(f"evaluate: {name!r} is neither given nor a step.")
            for other in STEPS[name].reads:
                visit(other)
            found[name] = STEPS[name]

    for name in wanted:
        visit(name)
    return tuple(found.items())


def evaluate(given: Mapping[str, Any], wanted: tuple[str, ...]) -> dict[str, Any]:
    """``given``, with ``wanted`` and every step in between: no step runs that these do not need."""
    values = dict(given)
    for name, (function, reads, _, _) in plan(tuple(given), wanted):
        values[name] = function(*[values[x] for x in reads])
    return values


def symbols(stages: Collection[str]) -> dict[str, str]:
    """The inputs and steps of these stages that have a symbol: their symbols by name."""
    given = {name: symbol for stage in stages for name, symbol in GIVEN[stage].items()}
    made = {name: step.symbol for name, step in STEPS.items() if step.stage in stages}
    return {name: symbol for name, symbol in (given | made).items() if symbol}
