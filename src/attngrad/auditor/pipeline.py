"""One pipeline of named steps: the forward pass, the backward pass and their tangents, of attention and of the layer.

The steps are those of the book (``steps``) and of the layer around it (``layer_steps``), each computed once, when it is
asked for, in any dtype. A mistake of the catalogue overrides steps, and two mistakes compose because they override
steps of the same pipeline. Without mistakes, in longdouble, it is the truth; in the dtype of the candidate, it is the
straightforward computation.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from attngrad.auditor.plans import INPUTS as CASE_INPUTS
from attngrad.auditor.steps import ATTENTION_STEPS, LAYER_STEPS, Undefined
from attngrad.core.options import OPTION_NAMES
from attngrad.reference.passes import refuse_unread

__all__ = ["ATTENTION_STEPS", "LAYER_STEPS", "Override", "Pipeline", "Undefined", "affected", "reads"]

Override = Callable[["Pipeline", Callable[[], Any]], Any]

_STEPS = {**ATTENTION_STEPS, **LAYER_STEPS}
INPUTS = {*CASE_INPUTS["attention"], *CASE_INPUTS["layer"], "num_heads", "num_kv_heads"}
INPUTS |= {f"{name}_dot" for name in CASE_INPUTS["attention"]}
"""What a case gives, of attention or of the layer."""
OPTIONAL = frozenset(OPTION_NAMES) - {"return_lse"} | {
    *("dlse", "bias_dot", "sinks_dot", "dlse_dot"),
    *("by_sequence", "fitted", "candidate_dtype"),
}
"""What is None where it was not given: options, cotangents, tangents, whether causal and window count within each
sequence of those end to end, and what ``diagnose`` knows of the candidate."""


NAMES = frozenset((*_STEPS, *INPUTS, *OPTIONAL))
"""Whatever a pipeline can be asked for."""


def check_name(name: str) -> None:
    """An AttributeError with the nearest name, where no pipeline has this one."""
    if name not in NAMES:
        near = difflib.get_close_matches(name, sorted(NAMES), n=1, cutoff=0.0)
        raise AttributeError(f"Pipeline: there is no step, input or option {name!r}. Did you mean {near[0]!r}?")


@cache
def reads() -> Mapping[str, frozenset[str]]:
    """Which names each step reads: its parameters. No audit depends on those before it."""
    return {name: frozenset(step.reads) for name, step in _STEPS.items()}


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

    What has been computed is kept as an attribute, so that Python finds it without ``__getattr__``: an audit looks up
    some hundred thousand.
    """

    def __init__(
        self,
        given: Mapping[str, Any],
        dtype: Any,
        overrides: Sequence[Mapping[str, Override]] = (),
        parent: Pipeline | None = None,
    ) -> None:
        refuse_unread(given)
        self._dtype = np.dtype(dtype)
        inputs: dict[str, Any] = {} if parent is None else parent._inputs
        self._inputs: dict[str, Any] = inputs | {
            name: self._round(x) for name, x in given.items() if name not in inputs
        }
        changed = frozenset(name for steps in overrides for name in steps)
        fresh = affected(changed)
        self.__dict__ |= {name: x for name, x in self._inputs.items() if name not in changed}
        self._overrides = overrides
        self._steps = _STEPS if "query" in given else ATTENTION_STEPS
        self._parent = parent
        self._fresh = None if parent is None else fresh

    def _round(self, x: Any) -> Any:
        floating = isinstance(x, np.ndarray) and x.dtype.kind not in "biu"
        return x.astype(self._dtype) if floating else x

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        value = None
        if name not in self._steps and name not in self._inputs:
            check_name(name)
            if name not in OPTIONAL:
                raise Undefined(name)  # of the layer, or a tangent: this case has none
        elif self._fresh is not None and name not in self._fresh:
            value = getattr(self._parent, name)
        else:
            value = self._compute(name)
        self.__dict__[name] = value
        return value

    def _compute(self, name: str) -> Any:
        def base() -> Any:
            return self._inputs[name] if name in self._inputs else self.redo(name)

        for overrides in self._overrides:
            if name in overrides:
                base = _wrap(overrides[name], self, base)
        return base()

    def redo(self, name: str, **changed: Any) -> Any:
        """What a step makes of ``changed``, where it would read other steps by these names."""
        step = self._steps[name]
        if not changed:
            return step.function(*[getattr(self, x) for x in step.reads])
        for other in changed.keys() - set(step.reads):
            raise AttributeError(f"Pipeline: the step {name!r} does not read {other!r}. It reads {step.reads}.")
        return step.function(*[changed[x] if x in changed else getattr(self, x) for x in step.reads])

    def reshaped(self, name: str) -> bool:
        """Whether mistakes give a step another shape than it should have."""
        parent = self._parent
        return parent is not None and np.shape(getattr(self, name)) != np.shape(getattr(parent, name))

    def knows(self, name: str) -> bool:
        """Whether a step has been computed."""
        return name in self.__dict__

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
LAYER = ("dw_o", "dw_q", "dw_k", "dw_v", "dquery", "dkey", "dvalue", "dx", "dmemory")
TANGENT = ("scores_dot", "lse_dot", "weights_dot", "out_dot")
MIXED = ("dq_mixed", "dk_mixed", "dv_mixed")
SECOND = ("dweights_dot", "delta_dot", "dscores_dot", "dbias_dot", "dsinks_dot", "dq_dot", "dk_dot", "dv_dot", *MIXED)
LATER = (*TANGENT, *SECOND)
"""Results along tangents."""
RESULTS = (*FORWARD, *TANGENT, *REVERSE, *LAYER, *SECOND)
"""Every result that can be checked, in the order of the data flow."""
