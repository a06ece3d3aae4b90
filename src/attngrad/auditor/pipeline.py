"""One pipeline of named steps: the forward pass, the backward pass and their tangents, of attention and of the layer.

Every step is a small function of the ones before it, computed when it is asked for, in any dtype. A mistake of the
catalogue overrides steps, and two mistakes compose because they override steps of the same pipeline. Without mistakes,
in longdouble, it is the truth; in the dtype of the candidate, it is the straightforward computation.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import numpy as np

from attngrad.core.options import OPTION_NAMES

Step = Callable[["Pipeline"], Any]
Override = Callable[["Pipeline", Callable[[], Any]], Any]

ATTENTION_STEPS: dict[str, Step] = {}
"""The steps of attention, by name; ``steps`` fills it."""
LAYER_STEPS: dict[str, Step] = {}
"""Those that the layer adds; ``layer_steps`` fills it."""


INPUTS = frozenset(
    ("q", "k", "v", "dout", "q_dot", "k_dot", "v_dot", "dout_dot", "query", "key", "value", "w_q", "w_k", "w_v", "w_o",
     "dy", "num_heads", "num_kv_heads")
)  # fmt: skip
"""What a case gives, of attention or of the layer."""
OPTIONAL = frozenset(OPTION_NAMES) - {"return_lse"} | {"bias_dot", "sinks_dot", "fitted", "candidate_dtype"}
"""What is None where it was not given: options, their tangents, and what ``diagnose`` knows of the candidate."""


class Undefined(Exception):  # noqa: N818
    """The mistake has no meaning for these shapes or options; the case has no such step.

    The one reason for which a mistake may have no effect. Any other exception is an error of the auditor.
    """


def attention_step(function: Step) -> Step:
    """Register a step of attention under its own name."""
    ATTENTION_STEPS[function.__name__] = function
    return function


def layer_step(function: Step) -> Step:
    """Register a step of the layer under its own name."""
    LAYER_STEPS[function.__name__] = function
    return function


@cache
def _steps() -> Mapping[str, Step]:
    from attngrad.auditor import layer_steps, steps  # noqa: F401 - they register themselves

    return {**ATTENTION_STEPS, **LAYER_STEPS}


def check_name(name: str) -> None:
    """An AttributeError with the nearest name, where no pipeline has this one."""
    known = (*_steps(), *INPUTS, *OPTIONAL)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        raise AttributeError(f"Pipeline: there is no step, input or option {name!r}. Did you mean {near[0]!r}?")


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


@cache
def reads() -> Mapping[str, frozenset[str]]:
    """Which names each step may read: all that its code mentions, and that of the auditor's functions that it calls.

    By its code, not by what a run of it read: no branch is missed, and no audit depends on those before it.
    """
    found = {}
    for name, step in _steps().items():
        pending, seen, names = [step], {step}, set[str]()
        while pending:
            function = pending.pop()
            assert isinstance(function, FunctionType)  # noqa: S101
            mentioned = {x for code in _codes(function.__code__) for x in code.co_names}
            names |= mentioned
            called = {x for x in map(function.__globals__.get, mentioned) if isinstance(x, FunctionType)}
            called = {x for x in called - seen if x.__module__.startswith("attngrad.auditor")}
            pending += called
            seen |= called
        found[name] = frozenset(names)
    return found


@cache
def affected(steps: frozenset[str]) -> frozenset[str]:
    """The steps, and those that read them, and so on: what must be computed anew when ``steps`` change."""
    for name in steps:
        check_name(name)
    found = set(steps)
    while more := {name for name, names in reads().items() if name not in found and names & found}:
        found |= more
    return frozenset(found)


class Pipeline:
    """The steps of one case, each computed once, when it is first asked for: ``p.dscores``, ``p.dq``, ...

    ``given`` are the inputs and options by name, ``overrides`` what mistakes compute instead: functions of the pipeline
    and of ``base()``, which gives what this step would be without them. ``parent`` is the pipeline without mistakes, of
    the same case and dtype: steps that no mistake can reach are taken from it.
    """

    def __init__(
        self,
        given: Mapping[str, Any],
        dtype: Any,
        overrides: Sequence[Mapping[str, Override]] = (),
        parent: Pipeline | None = None,
    ) -> None:
        self._dtype = np.dtype(dtype)
        inputs: dict[str, Any] = {} if parent is None else parent._inputs
        self._inputs: dict[str, Any] = inputs | {
            name: self._round(x) for name, x in given.items() if name not in inputs
        }
        changed = frozenset(name for steps in overrides for name in steps)
        fresh = affected(changed)
        self._values: dict[str, Any] = {name: x for name, x in self._inputs.items() if name not in changed}
        self._overrides = overrides
        self._steps = _steps() if "query" in given else ATTENTION_STEPS
        self._parent = parent
        self._fresh = None if parent is None else fresh

    def _round(self, x: Any) -> Any:
        floating = isinstance(x, np.ndarray) and x.dtype.kind not in "biu"
        return x.astype(self._dtype) if floating else x

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        values = self._values
        if name not in values:
            if name not in self._steps and name not in self._inputs:
                check_name(name)
                if name not in OPTIONAL:
                    raise Undefined(name)  # of the layer, or a tangent: this case has none
                values[name] = None
            elif self._fresh is not None and name not in self._fresh:
                values[name] = getattr(self._parent, name)
            else:
                values[name] = self._compute(name)
        return values[name]

    def _compute(self, name: str) -> Any:
        def base() -> Any:
            return self._inputs[name] if name in self._inputs else self._steps[name](self)

        for overrides in self._overrides:
            if name in overrides:
                base = _wrap(overrides[name], self, base)
        return base()

    def reshaped(self, name: str) -> bool:
        """Whether mistakes give a step another shape than it should have."""
        parent = self._parent
        return parent is not None and np.shape(getattr(self, name)) != np.shape(getattr(parent, name))

    def has(self, name: str) -> bool:
        """Whether the input or option was given."""
        return self._inputs.get(name) is not None

    def c(self, value: Any) -> Any:
        """A constant in the dtype of the pipeline."""
        return np.asarray(value).astype(self._dtype)


def _wrap(override: Override, p: Pipeline, base: Callable[[], Any]) -> Callable[[], Any]:
    """The override, or the step as it was where the mistake has no meaning."""

    def step() -> Any:
        try:
            return override(p, base)
        except Undefined:
            return base()

    return step


FORWARD = ("q", "k", "v", "z", "scores", "lse", "weights", "out", "y")
REVERSE = ("dout", "dweights", "delta", "dscores", "dbias", "dsinks", "dz", "dq", "dk", "dv")
LAYER = ("dw_o", "dw_q", "dw_k", "dw_v", "dquery", "dkey", "dvalue", "dx")
TANGENT = ("scores_dot", "lse_dot", "weights_dot", "out_dot")
SECOND = ("dweights_dot", "delta_dot", "dscores_dot", "dbias_dot", "dsinks_dot", "dq_dot", "dk_dot", "dv_dot")
RESULTS = (*FORWARD, *TANGENT, *REVERSE, *LAYER, *SECOND)
"""Every result that can be checked, in the order of the data flow."""
