"""What a layer takes and gives back, in the spelling and the shapes of the candidate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from attngrad.auditor import names
from attngrad.auditor.cases import Case, make
from attngrad.auditor.pipeline import RESULTS, Pipeline
from attngrad.auditor.plans import Dims, Plan
from attngrad.auditor.weights import forms_of, laid_out, read_back
from attngrad.core.arrays import NDArray

WEIGHTS = ("w_q", "w_k", "w_v", "w_o")
INPUTS = ("query", "key", "value")
_TOKENS = {*INPUTS, "x", "memory", "dy", "y", "dx", "dmemory", "dquery", "dkey", "dvalue"}


_MEANT = {"x": "query", "memory": "value"}


@dataclass(frozen=True)
class Convention:
    """How a layer has its weights and inputs."""

    forms: Mapping[str, str] = field(default_factory=dict)
    """The form of each weight that it has, by name (w_q, or w_qkv for three in one), in the order that it has them."""
    axes: str = "btd"
    """Those of its inputs: ``tbd`` where tokens come first, as ``torch.nn.MultiheadAttention`` has them, or ``td``."""
    inputs: tuple[str, ...] = INPUTS
    """What it takes: three inputs, one that attends to itself (x), or one and what it attends to (x, memory)."""
    single: bool = False
    """Whether it has one head."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """The names of the weights, by its own."""

    @property
    def self_only(self) -> bool:
        """Whether it attends to itself alone."""
        return self.inputs == ("x",)

    @property
    def plain_output(self) -> bool:
        """Whether it has no w_o."""
        return "w_o" not in self.forms

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arrays that it is given."""
        return (*self.inputs, *self.forms, "dy")

    def adapt(self, n: Dims) -> Dims | None:
        """The sizes that it can have."""
        if self.single:
            square = n.model == n.inner
            n = replace(n, hq=1, hk=1)
            n = replace(n, model=n.d) if square else n
        if "b" not in self.axes:
            n = replace(n, b=1)
        return replace(n, s=n.t) if self.self_only else n

    def recast(self, case: Case) -> Case:
        """The case with one input for all three, or one for keys and values, where it takes no more."""
        if self.inputs == INPUTS:
            return case
        one = case.arrays["value"]  # whose values may have a mean
        same = ("query", "key", "value") if self.self_only else ("key", "value")
        return replace(case, arrays={**case.arrays, **{name: one.copy() for name in same}})

    def environment(self, case: Case) -> dict[str, NDArray]:
        """The arrays of a case as the candidate has them."""
        arrays = {name: case.arrays[_MEANT.get(name, name)] for name in (*self.inputs, "dy")}
        arrays = {n: np.array(self._turned(x) if "b" in self.axes else x[0], order="K") for n, x in arrays.items()}
        return arrays | {name: laid_out(name, form, case.arrays, case.dims) for name, form in self.forms.items()}

    def _turned(self, x: NDArray) -> NDArray:
        """Batch and tokens in the order that it has them; in ours again by a second turn."""
        return x.swapaxes(0, 1) if self.axes == "tbd" else x

    def view(self, case: Case) -> Case:
        """The case as it is handed over, for a report."""
        return replace(case, arrays=self.environment(case))

    def read(self, named: Mapping[str, Any], case: Case) -> dict[str, Any]:
        """Results in the shapes of the auditor; what is no array as it is."""
        found: dict[str, Any] = {}
        for name, x in named.items():
            array = as_array(x)
            name = "dquery" if name == "dx" and "memory" in self.inputs else name
            if array is None:
                found[name] = x
            elif name[1:] in self.forms:
                found |= read_back(name[1:], self.forms[name[1:]], array, case.dims)
            elif name in _TOKENS and self.axes != "btd" and array.ndim == len(self.axes):
                found[name] = self._turned(array) if "b" in self.axes else array[None]
            else:
                found[name] = array
        return found

    def named(self, value: Any, case: Case, alone: str = "dx") -> dict[str, Any]:
        """What came back, by name: a mapping, an array (``alone``), or arrays and mappings in a tuple."""
        if value is None:
            return {}
        if isinstance(value, Mapping):
            inner = [x for x in value.values() if isinstance(x, Mapping)]
            found = {self._name(str(name), x): x for name, x in value.items() if not isinstance(x, Mapping)}
            return found | {name: y for x in inner for name, y in self.named(x, case).items()}
        if not isinstance(value, (tuple, list)):
            return {alone: value}
        flat = [y for x in value if x is not None for y in (x if isinstance(x, (tuple, list)) else [x])]
        told = {name: y for x in flat if isinstance(x, Mapping) for name, y in self.named(x, case).items()}
        arrays = [x for x in flat if not isinstance(x, Mapping)]
        if len(arrays) == 1 and {"dx", "dquery"} & told.keys():
            return {"y": arrays[0]} | told
        return self._in_order(arrays, case) | told

    def _name(self, name: str, x: Any) -> str:
        return f"d{self.keys[name]}" if name in self.keys else result_name(name, x)

    def _in_order(self, arrays: list[Any], case: Case) -> dict[str, Any]:
        """Arrays without names: the output, gradients of the inputs, then of the weights; of these, what fits."""
        given = self.environment(case)
        shapes = {f"d{name}": x.shape for name, x in given.items()} | {"y": given["dy"].shape}
        weights = tuple(f"d{name}" for name in self.forms)
        inputs = tuple(f"d{name}" for name in self.inputs)
        parts = (inputs, (*inputs, *weights), ("dx",), ("dx", *weights), weights, (*inputs, *weights[:-1]))
        orders = [(*y, *part) for part in parts for y in ((), ("y",)) if len(y) + len(part) == len(arrays)]
        if not orders:
            raise ValueError(f"returned {len(arrays)} arrays without names; return a mapping from names to arrays")
        fits = [o for o in orders if all(np.shape(x) == shapes.get(n) for n, x in zip(o, arrays, strict=True))]
        return dict(zip((fits or orders)[0], arrays, strict=True))


def result_name(name: str, x: Any = None) -> str:
    """The auditor's name for a result of a layer; ``out`` with heads is that of the attention within it."""
    if name in RESULTS and not (name == "out" and np.ndim(x) < 4):
        return name
    found = names.known(name, "layer_results") or names.gradient(name)
    weight = "x" if names.known(name, "arrays") == "x" else names.weight(name)  # a gradient by the name of its argument
    return found or (f"d{weight}" if weight is not None else name)


def as_array(x: Any) -> NDArray | None:
    """``x`` as an array of NumPy; None where it is none that can be had."""
    from attngrad.auditor.candidate import array_of

    found = array_of(x)
    return None if isinstance(found, str) else found


ONE_TOKEN = Plan("one token", Dims(2, 2, 2, 1, 1, 3, 3, 6))
"""Whatever is wrong with the scores, one token attends to itself alone: y = x W_v W_o. So the forms show."""


def settle(
    convention: Convention,
    shapes: Mapping[str, tuple[int, ...]] | None,
    y_of: Callable[[Convention, Case], Any],
    adapt: Callable[[Dims], Dims | None],
    first: Mapping[str, str],
    dtype: Any,
) -> Convention:
    """The forms of the weights and the axes of the inputs, by what the layer makes of one token.

    ``shapes`` are those of its weights at the sizes of that case, where it has its own; ``first`` are the forms to
    begin with; ``y_of`` runs the forward, and gives None where it raises.
    """
    for axes in ("btd", "tbd", "td"):
        tried = replace(convention, axes=axes)
        n = adapt(tried.adapt(ONE_TOKEN.dims) or ONE_TOKEN.dims)
        if n is None:
            continue
        case = make("layer", ONE_TOKEN._replace(dims=n), dtype, np.random.default_rng(0), {}, tried.plain_output)
        case = tried.recast(case)
        truth = Pipeline(case.given, np.float64).y
        for forms in _choices(tried, first, shapes, case):
            now = replace(tried, forms=forms)
            y = as_array(y_of(now, case))
            if y is not None and y.shape == truth.shape and np.allclose(y, truth, 0.05, 0.02):
                return now
    return replace(convention, forms={**convention.forms, **{k: x for k, x in first.items() if k in convention.forms}})


def _choices(
    convention: Convention, first: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]] | None, case: Case
) -> list[dict[str, str]]:
    """Forms to try: of the values and of the output, those of queries and keys like that of the values."""
    have = tuple(convention.forms)
    lead = "w_qkv" if "w_qkv" in have else "w_v"

    def possible(name: str) -> list[str]:
        found = [
            f
            for f in forms_of(name)
            if shapes is None or laid_out(name, f, case.arrays, case.dims).shape == shapes[name]
        ]
        return sorted(found, key=lambda f: f != first.get(name))

    choices = []
    for form in possible(lead) if lead in have else [""]:
        for output in possible("w_o") if "w_o" in have else [""]:
            alike = {name: form if form in forms_of(name) and name != "w_o" else output for name in have}
            choices.append(alike)
    return choices
