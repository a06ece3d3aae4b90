"""A trace as JSON and back, bit for bit. Numbers that JSON has not, inf and nan, are strings."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from attngrad._options import Operands, Options
from attngrad.explain.invariants import Invariant
from attngrad.explain.rules import Rule

if TYPE_CHECKING:
    from attngrad.explain.trace import Trace

NDArray = npt.NDArray[Any]
FORMAT, VERSION = "attngrad trace", 1


def plain(x: Any) -> Any:
    """Nested lists of an array, or a number: floats that JSON cannot write as strings."""
    if isinstance(x, np.ndarray):
        return plain(x.tolist())
    if isinstance(x, list):
        return [plain(a) for a in x]
    return x if not isinstance(x, float) or math.isfinite(x) else str(x)


def _array(values: Any, shape: list[int]) -> NDArray:
    """``plain`` undone; the shape tells apart what is empty."""
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
            "value": plain(step.value),
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
            {"claim": i.claim, "steps": i.steps, "error": plain(i.error), "holds": i.holds} for i in trace.invariants
        ],
    }
    return json.dumps(document, allow_nan=False)


def load(text: str) -> Trace:
    """The trace that ``dump`` wrote."""
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
        given = dict(document["options"])
        given["window"] = None if given["window"] is None else tuple(given["window"])
        options = Options(**given)
        segments = document["segments"]
        offset = document["offset"]
        operands = Operands(
            values["Q"],
            values["K"],
            values["V"],
            values.get("bias"),
            values.get("sigma"),
            None if document["mask"] is None else np.array(document["mask"], bool),
            None if segments is None else (np.array(segments[0]), np.array(segments[1])),
            offset if isinstance(offset, int) else np.array(offset),
        )
        tokens = document["tokens"]
        checked = [Invariant(i["claim"], tuple(i["steps"]), float(i["error"])) for i in document["invariants"]]
        labels = None if tokens is None else (tuple(tokens[0]), tuple(tokens[1]))
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        remedy = "Write one with trace.to_json()."
        raise ValueError(f"{function}: text must be a trace, version {VERSION}; got {error!r}. {remedy}") from error
    return Trace(operands, options, values, rules, labels, checked)
