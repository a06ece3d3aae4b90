"""A trace as JSON and back, bit for bit. Numbers that JSON has not, inf and nan, are strings."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from attngrad.core.arrays import NDArray
from attngrad.core.binding import bind
from attngrad.core.operands import Operands
from attngrad.core.options import Options
from attngrad.explain.invariants import Invariant
from attngrad.explain.rules import RULES, STAGES, Rule

if TYPE_CHECKING:
    from attngrad.explain.trace import Trace

FORMAT, VERSION = "attngrad trace", 1


def jsonable(x: Any, names: Mapping[str, str] = {}) -> Any:
    """Nested lists of an array, or a number: floats that JSON cannot write as strings, by ``names`` where these are."""
    if isinstance(x, np.ndarray):
        return x.tolist() if x.dtype.kind != "f" or np.isfinite(x).all() else jsonable(x.tolist(), names)
    if isinstance(x, list):
        return [jsonable(a, names) for a in x]
    return x if not isinstance(x, float) or math.isfinite(x) else names.get(str(x), str(x))


def _array(values: Any, shape: list[int]) -> NDArray:
    """The inverse of ``jsonable``; the shape distinguishes empty arrays."""
    flat = np.array(values, dtype=object).reshape(-1)
    return np.array([float(a) for a in flat], np.float64).reshape(shape)


def dump(trace: Trace) -> str:
    """``trace`` as JSON."""
    x, o = trace.operands, trace.options
    steps = {}
    for name, rule in trace.rules.items():
        step = trace[name]
        steps[name] = {
            "stage": rule.stage,
            "number": rule.number,
            "formula": rule.formula,
            "inputs": step.inputs,
            "letters": rule.letters,
            "entry": rule.entry,
            "shape": step.shape,
            "value": jsonable(step.value),
        }
    document = {
        "format": FORMAT,
        "version": VERSION,
        "options": {name: getattr(o, name) for name in Options.__dataclass_fields__},
        "mask": None if x.mask is None else x.mask.tolist(),
        "segments": None if x.segments is None else [ids.tolist() for ids in x.segments],
        "offset": x.offset if isinstance(x.offset, int) else x.offset.tolist(),
        "tokens": trace.tokens,
        "steps": steps,
        "invariants": [
            {"claim": i.claim, "steps": i.steps, "error": jsonable(i.error), "holds": i.holds} for i in trace.invariants
        ],
    }
    return json.dumps(document, allow_nan=False)


def _check_steps(x: Operands, rules: Mapping[str, Rule], values: Mapping[str, NDArray]) -> None:
    """Steps are named by texts; those of attention have the letters of their rule, and the shapes that these say."""
    letters = {rule.name: rule.letters for rule in RULES}
    (t, s), d, e = x.scores_shape[-2:], x.q.shape[-1], x.v.shape[-1]
    sizes = {"i": t, "j": s, "d": d, "e": e}
    for name, rule in rules.items():
        if not all(isinstance(text, str) for text in rule) or rule.stage not in STAGES:
            raise TypeError(f"step {name!r} without its texts")
        if rule.letters != letters.get(name, rule.letters):
            raise ValueError(f"step {name!r} with letters {rule.letters!r}")
        expected = [sizes[c] for c in letters.get(name, "") if c in sizes]
        shape = values[name].shape
        if "bias" not in name and len(expected) and list(shape[len(shape) - len(expected) :]) != expected:
            raise ValueError(f"step {name!r} of shape {shape}")


def load(text: str) -> Trace:
    """The trace that ``dump`` wrote."""
    from attngrad.explain.places import check_tokens
    from attngrad.explain.trace import Trace

    function = "Trace.from_json"
    try:
        document = json.loads(text)
        if document["format"] != FORMAT or document["version"] != VERSION:
            raise ValueError(f"format {document['format']!r}, version {document['version']!r}")
        steps = document["steps"]
        values = {name: _array(step["value"], step["shape"]) for name, step in steps.items()}
        rules = {
            name: Rule(name, s["number"], s["stage"], s["letters"], s["formula"], s["entry"])
            for name, s in steps.items()
        }
        given = {**document["options"], "bias": values.get("bias"), "sinks": values.get("sigma")}
        given["window"] = None if given["window"] is None else tuple(given["window"])
        mask, segments, offset = document["mask"], document["segments"], document["offset"]
        given["mask"] = None if mask is None else np.array(mask, bool)
        given["segments"] = None if segments is None else (np.array(segments[0]), np.array(segments[1]))
        given["offset"] = offset if isinstance(offset, int) else np.array(offset)
        operands, options, _ = bind(function, values["Q"], values["K"], values["V"], given)
        _check_steps(operands, rules, values)
        if not all(isinstance(text, str) for i in document["invariants"] for text in (i["claim"], *i["steps"])):
            raise TypeError("an invariant without its texts")
        labels = check_tokens(function, document["tokens"], *operands.scores_shape[-2:])
        checked = [Invariant(i["claim"], tuple(i["steps"]), float(i["error"])) for i in document["invariants"]]
        return Trace(operands, options, values, rules, labels, checked)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, MemoryError, RecursionError) as error:
        remedy = "Write one with trace.to_json()."
        raise ValueError(f"{function}: text must be a trace, version {VERSION}; got {error!r}. {remedy}") from error
