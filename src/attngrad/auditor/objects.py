"""Layers written as objects: ``forward(query, key, value)``, ``backward(dO, query, key, value, learning_rate)``.

The style of many tutorials: weights ``WQ WK WV`` (and perhaps ``WO``) as attributes, their gradients ``dWQ`` and so on
beside them, set by ``backward``, which also updates the weights and returns the three input gradients. A class is
constructed as ``Class(d_model, num_heads)`` for every case; an object is copied for every case, at its own sizes.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from attngrad.auditor.cases import Caller, Case
from attngrad.auditor.plans import Dims
from attngrad.core.arrays import NDArray

LEARNING_RATE = 0.25
"""Large, so that an update that comes too early shows."""

_WEIGHTS = {f"w_{x}": (f"W{x.upper()}", f"W_{x}", f"W_{x.upper()}", f"w_{x}", f"W{x}", f"w{x}") for x in "qkvo"}
_STAGES = {"weights": "A", "scores": "S", "q": "Q", "k": "K", "v": "V"}


def is_layer_object(candidate: Any) -> bool:
    """Whether it is a class or an object with forward and backward."""
    return callable(getattr(candidate, "forward", None)) and callable(getattr(candidate, "backward", None))


def _attribute(layer: Any, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if isinstance(getattr(layer, name, None), np.ndarray)), None)


def _made(candidate: Any, d_model: int | None, num_heads: int) -> Any:
    """An object to run: a new one of a class, a copy of an object."""
    construct: Any = candidate
    return construct(d_model, num_heads) if inspect.isclass(candidate) else copy.deepcopy(candidate)


def has_output_projection(candidate: Any) -> bool:
    """Whether it has a w_o. A class that cannot be constructed has none that could be found."""
    try:
        layer = _made(candidate, 4, 2)
    except (Exception, SystemExit):
        return False
    return _attribute(layer, _WEIGHTS["w_o"]) is not None


def sizes(candidate: Any) -> Callable[[Dims], Dims | None]:
    """How cases must be sized: a class takes any square one, an object its own."""

    def adapt(n: Dims) -> Dims | None:
        if n.features & {"rectangular", "gqa"}:
            return None
        if inspect.isclass(candidate):
            return n
        name = _attribute(candidate, _WEIGHTS["w_q"])
        fallback = getattr(candidate, name).shape[0] if name else n.model or 1
        model, heads = int(getattr(candidate, "d_model", fallback)), int(getattr(candidate, "num_heads", 1))
        return replace(n, hq=heads, hk=heads, d=model // heads, e=model // heads, model=model)

    return adapt


def call_as_code(candidate: Any) -> str:
    """How such a class or object is called, as code, with ``{model}`` and ``{heads}`` to be filled in."""
    made = f"{candidate.__name__}({{model}}, {{heads}})" if inspect.isclass(candidate) else "candidate"
    lines = [f"layer = {made}"]
    with contextlib.suppress(Exception, SystemExit):  # what cannot be constructed has failed before anything needs this
        layer = _made(candidate, 4, 2)
        for name, spellings in _WEIGHTS.items():
            if (found := _attribute(layer, spellings)) is not None:
                lines.append(f"layer.{found} = {name}")
        rate = f", {LEARNING_RATE}" if _takes_rate(layer) else ""
        lines += ["y = layer.forward(query, key, value)", f"back = layer.backward(dy, query, key, value{rate})"]
    return "\n".join(lines)


def _takes_rate(layer: Any) -> bool:
    return len(inspect.signature(layer.backward).parameters) > 4


def object_caller(candidate: Any) -> Caller:
    """How to run one case through such a class or object."""

    def prepare(case: Case) -> tuple[Callable[[], Any], dict[str, NDArray]]:
        fresh = {name: np.array(case.arrays[name], order="K") for name in ("query", "key", "value", "dy")}

        def action() -> dict[str, Any]:
            results: dict[str, Any] = {}
            try:
                _step(candidate, case, fresh, results)
            except Exception as error:
                error.attngrad_partial = results  # type: ignore[attr-defined]
                raise
            return results

        return action, fresh

    return prepare


def _step(candidate: Any, case: Case, x: dict[str, NDArray], results: dict[str, Any]) -> None:
    n = case.dims
    layer = _made(candidate, n.model, n.hq)
    for name, spellings in _WEIGHTS.items():
        found = _attribute(layer, spellings)
        if found is not None:
            setattr(layer, found, np.array(case.arrays[name]))
        elif name != "w_o":
            raise AttributeError(f"{type(layer).__name__} has no weight {spellings[0]}")
    results["y"] = layer.forward(x["query"], x["key"], x["value"])
    for name, attribute in _STAGES.items():
        stage = getattr(layer, attribute, None)
        if isinstance(stage, np.ndarray) and stage.ndim == 4:
            results[name] = np.array(stage)
    rate = (LEARNING_RATE,) if _takes_rate(layer) else ()
    back = layer.backward(x["dy"], x["query"], x["key"], x["value"], *rate)
    for name, spellings in _WEIGHTS.items():
        found = _attribute(layer, tuple(f"d{s}" for s in spellings))
        if found is not None:
            results[f"d{name}"] = getattr(layer, found)
    if isinstance(back, (tuple, list)) and len(back) == 3:
        results |= dict(zip(("dquery", "dkey", "dvalue"), back, strict=True))
    elif isinstance(back, np.ndarray):
        results["dx"] = back
