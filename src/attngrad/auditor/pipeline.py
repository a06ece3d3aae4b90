"""One pipeline of named steps: the forward pass, the backward pass and their tangents, of attention and of the layer.

Every step is a small function of the ones before it, computed when it is asked for, in any dtype. A mistake of the
catalogue overrides steps, and two mistakes compose because they override steps of the same pipeline. Without mistakes,
in longdouble, it is the truth; in the dtype of the candidate, it is the straightforward computation.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

Step = Callable[["Pipeline"], Any]
Override = Callable[["Pipeline", Callable[[], Any]], Any]

ATTENTION_STEPS: dict[str, Step] = {}
"""The steps of attention, by name; ``steps`` fills it."""
LAYER_STEPS: dict[str, Step] = {}
"""Those that the layer adds; ``layer_steps`` fills it."""


class Undefined(Exception):  # noqa: N818
    """The mistake has no meaning for these shapes or options."""


def attention_step(function: Step) -> Step:
    """Register a step of attention under its own name."""
    ATTENTION_STEPS[function.__name__] = function
    return function


def layer_step(function: Step) -> Step:
    """Register a step of the layer under its own name."""
    LAYER_STEPS[function.__name__] = function
    return function


_READS: defaultdict[str, set[str]] = defaultdict(set)
"""Which steps each step reads, as seen in pipelines without mistakes."""


@cache
def affected(steps: frozenset[str]) -> frozenset[str]:
    """The steps, and those that read them, and so on: what must be computed anew when ``steps`` change."""
    found = set(steps)
    while more := {name for name, reads in _READS.items() if name not in found and reads & found}:
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
        self._values: dict[str, Any] = dict(self._inputs)
        self._overrides = overrides
        from attngrad.auditor import layer_steps, steps  # noqa: F401 - they register themselves

        self._steps = {**ATTENTION_STEPS, **LAYER_STEPS} if "query" in given else ATTENTION_STEPS
        self._parent = parent
        self._fresh = None if parent is None else affected(frozenset(x for y in overrides for x in y))
        self._stack: list[str] = []

    def _round(self, x: Any) -> Any:
        floating = isinstance(x, np.ndarray) and x.dtype.kind not in "biu"
        return x.astype(self._dtype) if floating else x

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self._stack and not self._overrides:
            _READS[self._stack[-1]].add(name)
        values = self._values
        if name not in values:
            if name not in self._steps:
                values[name] = None  # an option that was not given
            elif self._fresh is not None and name not in self._fresh:
                values[name] = getattr(self._parent, name)
            else:
                values[name] = self._compute(name)
        return values[name]

    def _compute(self, name: str) -> Any:
        def base() -> Any:
            return self._steps[name](self)

        for overrides in self._overrides:
            if name in overrides:
                base = _wrap(overrides[name], self, base)
        self._stack.append(name)
        try:
            return base()
        finally:
            self._stack.pop()

    def learn(self) -> None:
        """Compute every step, so that it is known which step reads which."""
        for name in self._steps:
            with contextlib.suppress(Exception):  # tangents of a layer, dx of three inputs: not there
                getattr(self, name)
        affected.cache_clear()

    def has(self, name: str) -> bool:
        """Whether the input or option was given."""
        return self._values.get(name) is not None

    def c(self, value: Any) -> Any:
        """A constant in the dtype of the pipeline."""
        return np.asarray(value).astype(self._dtype)


def _wrap(override: Override, p: Pipeline, base: Callable[[], Any]) -> Callable[[], Any]:
    """The override, or the step as it was where the mistake has no meaning or its shapes do not fit."""

    def step() -> Any:
        try:
            return override(p, base)
        except (Undefined, ValueError):
            return base()

    return step


FORWARD = ("q", "k", "v", "z", "scores", "lse", "weights", "out", "y")
REVERSE = ("dout", "dweights", "delta", "dscores", "dbias", "dsinks", "dz", "dq", "dk", "dv")
LAYER = ("dw_o", "dw_q", "dw_k", "dw_v", "dquery", "dkey", "dvalue", "dx")
TANGENT = ("scores_dot", "lse_dot", "weights_dot", "out_dot")
SECOND = ("dweights_dot", "delta_dot", "dscores_dot", "dbias_dot", "dsinks_dot", "dq_dot", "dk_dot", "dv_dot")
RESULTS = (*FORWARD, *TANGENT, *REVERSE, *LAYER, *SECOND)
"""Every result that can be checked, in the order of the data flow."""
