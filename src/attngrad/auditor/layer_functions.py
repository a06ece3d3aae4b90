"""Layers written as functions: the weights are arguments; one function, or a forward and a backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from attngrad.auditor import calls, names
from attngrad.auditor.calls import BadCandidate, parameters_of
from attngrad.auditor.candidate import guarded
from attngrad.auditor.cases import Case
from attngrad.auditor.layers import INPUTS, WEIGHTS, Convention, settle
from attngrad.core.arrays import NDArray
from attngrad.core.options import OPTIONS

_ALL = (*INPUTS, *WEIGHTS, "dy", "num_heads")


class Weights(dict[str, Any]):
    """The weights by any spelling: ``params["Wq"]``, ``params["W_q"]``."""

    def __missing__(self, key: str) -> Any:
        name = names.weight(str(key), bare=True)
        if name is None or not dict.__contains__(self, name):
            raise KeyError(key)
        return self[name]

    def __contains__(self, key: object) -> bool:
        return dict.__contains__(self, key) or dict.__contains__(self, names.weight(str(key), bare=True))

    def get(self, key: str, default: Any = None) -> Any:
        """As of a dict."""
        return self[key] if key in self else default  # noqa: SIM401


class LayerFunction:
    """A function of the inputs and the weights, or a pair of a forward and a backward."""

    def __init__(self, candidate: Any, dtype: Any, convert: Callable[[Any], Any] = lambda x: x) -> None:
        self.convert = convert
        self.forward, self.backward = candidate if isinstance(candidate, (tuple, list)) else (candidate, None)
        self.dtype = dtype
        found = calls.parameters(self.forward, "layer")
        everything = parameters_of(self.forward).everything
        required = [p for p in found if p.required]
        meant = [p.means for p in required]
        self.by_place = len(found) == 0 or (
            len(required) == len(_ALL) and len({m for m in meant if m in _ALL}) < len(_ALL)
        )
        self.keywords = tuple(p.name for p in found) + tuple(p.means for p in found if p.means)
        self.takes = {p.means for p in found} | (set(_ALL) if self.by_place else set())
        self.more = frozenset(OPTIONS) - self.takes if everything else frozenset()
        self.keywords += tuple(self.more)

        weights = [p.means for p in found if p.means in (*WEIGHTS, "w_qkv")]
        if self.by_place or "parameters" in self.takes:
            weights = list(WEIGHTS)
        strange = [p.name for p in required if p.means is None and not self.by_place]
        if not weights or strange or (self.backward is None and "dy" not in self.takes):
            raise BadCandidate(
                f"audit: a layer candidate must take ({', '.join(_ALL)}), or by name what it needs of these; "
                f"it takes ({', '.join(p.name for p in found)})."
            )
        single = "num_heads" not in self.takes
        self.convention = Convention(dict.fromkeys(weights, "(in, out)"), inputs=self._inputs(), single=single)
        if not self.by_place and {"x", "parameters", "w_qkv"} & self.takes:
            first = {name: "(in, 3 out)" if name == "w_qkv" else "(in, out)" for name in weights}
            self.convention = settle(self.convention, None, self._y, lambda n: n, first, dtype)
        elif "w_qkv" in weights:
            self.convention = replace(self.convention, forms={**self.convention.forms, "w_qkv": "(in, 3 out)"})

    def _inputs(self) -> tuple[str, ...]:
        if "query" in self.takes or "x" not in self.takes:
            return INPUTS
        return ("x", "memory") if "memory" in self.takes else ("x",)

    def _given(self, convention: Convention, case: Case, arrays: Mapping[str, Any]) -> dict[str, Any]:
        options: dict[str, Any] = {n: x.default for n, x in OPTIONS.items() if n in self.takes} | dict(case.options)
        extra = {"num_heads": case.dims.hq, "num_kv_heads": case.dims.hk, "training": True}
        packed = {"parameters": Weights({name: arrays[name] for name in convention.forms})}
        given: dict[str, Any] = {**arrays, **packed, **extra, **{n: x for n, x in options.items() if n in self.takes}}
        return given | ({"scale": 1.0 / np.sqrt(case.dims.d)} if given.get("scale", 0) is None else {})

    def _run(self, convention: Convention, case: Case, arrays: dict[str, NDArray]) -> dict[str, Any]:
        given = self._given(convention, case, {name: self.convert(x) for name, x in arrays.items()})
        results: dict[str, Any] = {}
        more = {name: x for name, x in case.options.items() if name in self.more}
        if self.by_place:
            found = calls.parameters(self.forward, "layer")
            more |= {p.name: given[p.means] for p in found if not p.required and p.means in given}
            returned = self.forward(*[given[name] for name in _ALL], **more)
        elif self.backward is None:
            returned = calls.call(self.forward, given, "layer", (), more=more)
        else:
            try:
                returned = calls.both(self.forward, self.backward, given, "layer", results)
            except Exception as error:
                error.attngrad_partial = convention.read(results, case)  # type: ignore[attr-defined]
                raise
        if returned is None and not results:
            return {}
        return convention.read(results | convention.named(returned, case, "y" if self.backward is None else "dx"), case)

    def _y(self, convention: Convention, case: Case) -> Any:
        """The output for one token; None where it raises."""

        def forward() -> Any:
            return self._run(convention, case, convention.environment(case)).get("y")

        result, error, _ = guarded(forward, 5.0)
        return result if error is None else getattr(error, "attngrad_partial", {}).get("y")

    def prepare(self, case: Case) -> tuple[Callable[[], Any], dict[str, NDArray]]:
        """How to run one case through it."""
        arrays = self.convention.environment(case)
        options = {n: np.array(x) for n, x in case.options.items() if isinstance(x, np.ndarray)}
        own = replace(case, options={**case.options, **options})
        return lambda: self._run(self.convention, own, arrays) or None, arrays | options

    def code(self) -> str:
        """The call as code."""
        if self.by_place:
            many = ", num_kv_heads={kv_heads}" if "num_kv_heads" in self.takes else ""
            return f"results = candidate({', '.join(_ALL[:-1])}, num_heads={{heads}}{many}{{options}})"
        shown = {"num_heads": "{heads}", "num_kv_heads": "{kv_heads}", "parameters": "params"}
        found = [p for p in calls.parameters(self.forward, "layer") if p.required]
        text = ", ".join(shown.get(str(p.means), str(p.means)) for p in found)
        lines = (
            ["params = {" + ", ".join(f'"{x}": {x}' for x in self.convention.forms) + "}"]
            if "parameters" in self.takes
            else []
        )
        lines = [line.replace("{", "{{").replace("}", "}}") for line in lines]
        if self.backward is None:
            return "\n".join([*lines, f"results = candidate({text}{{options}})"])
        return "\n".join([*lines, f"y, cache = forward({text}{{options}})", "results = backward(dy, cache)"])
