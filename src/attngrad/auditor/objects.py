"""Layers written as objects: ``forward`` and ``backward``, weights and their gradients as attributes.

The style of tutorials and homework: ``forward(query, key, value)`` or ``forward(x)``; ``backward(dy)``, with the
inputs, a cache or a learning rate too where it takes them; weights ``WQ WK WV`` (and perhaps ``WO``),
``q_proj.weight``, ``params["Wq"]`` or three in one; their gradients beside them, or returned. A class is constructed
for every case, by the names of its parameters; an object is copied for every case, at its own sizes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from attngrad.auditor import calls, names
from attngrad.auditor.candidate import guarded
from attngrad.auditor.cases import Caller, Case
from attngrad.auditor.construction import asked_of, construct, positional
from attngrad.auditor.layers import INPUTS, ONE_TOKEN, Convention, settle
from attngrad.auditor.plans import Dims
from attngrad.auditor.weights import Slot, slots, without_biases
from attngrad.core.arrays import NDArray

LEARNING_RATE = 0.25
"""Large, so that an update that comes too early shows."""

_STAGES = {"A": "weights", "attn_weights": "weights", "attention_weights": "weights", "S": "scores"}
_STAGES |= {"Q": "q", "K": "k", "V": "v"}


def is_layer_object(candidate: Any) -> bool:
    """Whether it is a class or an object with forward and backward, or a module of PyTorch, which needs no backward."""
    there = [callable(getattr(candidate, name, None)) for name in ("forward", "backward")]
    return all(there) or (there[0] and is_module(candidate))


def is_module(candidate: Any) -> bool:
    """Whether it is a ``torch.nn.Module``, or a class of them."""
    kind = candidate if inspect.isclass(candidate) else type(candidate)
    return any(k.__module__ == "torch.nn.modules.module" for k in kind.__mro__)


class LayerObject:
    """A class or object with forward and backward: how it is made, what it holds, and how it has it."""

    def __init__(self, candidate: Any, dtype: Any, convert: Callable[[Any], Any] = lambda x: x) -> None:
        self.candidate, self.dtype, self.convert = candidate, dtype, convert
        self.is_class = inspect.isclass(candidate)
        self._sizes = asked_of(candidate, ONE_TOKEN.dims) if self.is_class else set()
        single = self.is_class and "heads" not in self._sizes
        n = Convention(single=single).adapt(ONE_TOKEN.dims)
        n = self._own_sizes(n or ONE_TOKEN.dims) or ONE_TOKEN.dims
        layer, error, _ = guarded(lambda: construct(candidate, n, dtype), 5.0)
        self.made = error is None and layer is not None
        self.slots: dict[str, Slot] = slots(layer) if self.made else {}
        self.biased = self.made and self.is_class and without_biases(layer)
        """Whether it has biases, which are set to zero."""
        forward = getattr(layer if self.made else candidate, "forward", None)
        inputs = (("x",), ("x",), ("x", "memory"), INPUTS)[min(3, _inputs(forward))]
        order = [w for w in ("w_qkv", "w_q", "w_k", "w_v", "w_o") if w in self.slots]
        keys = {slot.path[-1]: name for name, slot in self.slots.items() if slot.path[-1] not in ("weight", "data")}
        self.convention = Convention(dict.fromkeys(order, ""), inputs=inputs, single=single, keys=keys)
        shapes = {name: tuple(slot.get(layer).shape) for name, slot in self.slots.items()}
        begin = {name: self._first(slot) for name, slot in self.slots.items()}
        if self.slots:
            self.convention = settle(self.convention, shapes, self._y, self.adapt_sizes, begin, dtype)

    @property
    def has_weights(self) -> bool:
        """Whether weights were found in it; one that could not be made may have some."""
        return bool(self.slots) or not self.made

    @staticmethod
    def _first(slot: Slot) -> str:
        transposed = slot.path[-1] == "weight" or (len(slot.path) > 1 and slot.path[-2] == "weight")
        if slot.name == "w_qkv":
            return "(3 out, in)" if transposed else "(in, 3 out)"
        return "(out, in)" if transposed else "(in, out)"

    def _own_sizes(self, n: Dims) -> Dims | None:
        """The sizes of an object, which has its own."""
        if self.is_class:
            return n
        own = {names.known(k, "sizes"): x for k, x in vars(self.candidate).items() if isinstance(x, int)}
        found = slots(self.candidate)
        model = width = int(own.get("model", n.model or 1))
        if (slot := found.get("w_qkv") or found.get("w_q")) is not None:
            shape = sorted(slot.get(self.candidate).shape) if slot.name == "w_qkv" else slot.get(self.candidate).shape
            if len(shape) == 3:  # by heads
                shape = (shape[1], shape[0] * shape[2])
            model, width = shape[:: -1 if self._first(slot) == "(out, in)" else 1]
            width = width // 3 if slot.name == "w_qkv" else width
        heads = int(own.get("heads", 1))
        return replace(n, hq=heads, hk=int(own.get("kv_heads", heads)), d=width // heads, e=width // heads, model=model)

    def adapt_sizes(self, n: Dims) -> Dims | None:
        """The sizes that it can be made at."""
        n = n if "gqa" not in n.features or "kv_heads" in self._sizes else replace(n, hk=n.hq)
        if not self.is_class:
            return self._own_sizes(n)
        free = bool(self._sizes & {"width", "inner"}) and ("inner" not in self._sizes or "w_o" not in self.slots)
        return n if free or "rectangular" not in n.features else None

    def adapt(self, n: Dims) -> Dims | None:
        """The sizes of a case that it can be given; groups and widths of their own are left out where it has none."""
        if "gqa" in n.features and "kv_heads" not in self._sizes:
            return None
        if "rectangular" in n.features and self.is_class and self.adapt_sizes(n) is None:
            return None
        if not self.is_class and "rectangular" in n.features:
            return None
        found = self.convention.adapt(n)
        return None if found is None else self.adapt_sizes(found)

    def _given(self, arrays: dict[str, NDArray], case: Case) -> dict[str, Any]:
        more = {"mask": None, "training": True, "rate": LEARNING_RATE, "num_heads": case.dims.hq}
        return {name: self.convert(x) for name, x in arrays.items()} | more | dict(case.options)

    def _filled(self, convention: Convention, case: Case, given: dict[str, Any]) -> Any:
        layer = construct(self.candidate, case.dims, self.dtype)
        if is_module(layer):
            one = next(x for x in given.values() if hasattr(x, "detach"))
            layer = layer.to(device=one.device, dtype=one.dtype)
        without_biases(layer)
        found = slots(layer)
        for name in convention.forms:
            found[name].set(layer, given[name])
        missing = [w for w in ("w_q", "w_k", "w_v") if w not in found and "w_qkv" not in found]
        if missing:
            raise AttributeError(f"{type(layer).__name__} has no weight W{missing[0][-1].upper()}")
        return layer

    def _y(self, convention: Convention, case: Case) -> Any:
        """The forward alone; None where it raises."""

        def forward() -> Any:
            given: dict[str, Any] = self._given(convention.environment(case), case)
            layer = self._filled(convention, case, given)
            returned = calls.call(layer.forward, given, "layer", calls.first_names(layer.forward, given, "layer"))
            return convention.read(calls.split(returned, "y")[0], case).get("y")

        return guarded(forward, 5.0)[0]

    def caller(self) -> Caller:
        """How to run one case through it."""

        def prepare(case: Case) -> tuple[Callable[[], Any], dict[str, NDArray]]:
            given = self.convention.environment(case)
            watched = {name: given[name] for name in given if name not in self.convention.forms}

            def action() -> dict[str, Any]:
                results: dict[str, Any] = {}
                try:
                    self._step(case, given, results)
                except Exception as error:
                    error.attngrad_partial = self.convention.read(results, case)  # type: ignore[attr-defined]
                    raise
                return self.convention.read(results, case)

            return action, watched

        return prepare

    def _step(self, case: Case, arrays: dict[str, NDArray], results: dict[str, Any]) -> None:
        given = self._given(arrays, case)
        layer = self._filled(self.convention, case, given)

        def forward(*positional: Any, **keywords: Any) -> Any:
            returned = layer.forward(*positional, **keywords)
            results.update(calls.split(returned, "y")[0])
            for attribute, name in _STAGES.items():
                stage = getattr(layer, attribute, None)
                if isinstance(stage, np.ndarray) and stage.ndim == 4:
                    results[name] = np.array(stage)
            return returned

        forward.__signature__ = inspect.signature(layer.forward)  # type: ignore[attr-defined]
        if not hasattr(layer, "backward"):
            back = _by_autograd(forward, given, results)
        else:
            back = calls.both(forward, layer.backward, given, "layer", results)
        found = slots(layer)
        for name in self.convention.forms:
            if (gradient := found[name].gradient(layer)) is not None:
                results[f"d{name}"] = gradient
        results |= self.convention.named(back, case)

    def code(self) -> str:
        """How it is called, as code, with ``{model}`` and ``{heads}`` to be filled in."""
        marks = {"model": "{model}", "heads": "{heads}", "kv_heads": "{kv_heads}", "width": "{width}"}
        given = [marks.get(m, m) for m in positional(self.candidate)] if self.is_class else []
        made = f"{self.candidate.__name__}({', '.join(given)})" if self.is_class else "candidate"
        lines = [f"layer = {made}"]
        if self.made:
            layer = construct(self.candidate, ONE_TOKEN.dims, self.dtype)
            lines += [f"{self.slots[name].code(layer)} = {name}" for name in self.convention.forms]
            names_given = {*self.convention.arguments, "rate", "mask", "training"} - {*self.convention.forms}
            forward = calls.first_names(layer.forward, names_given - {"dy"}, "layer")
            shown = {"rate": str(LEARNING_RATE), "mask": "None", "training": "True"}
            backward = getattr(layer, "backward", None)
            for name, function, unknown in (("y", layer.forward, forward), ("back", backward, ("dy", "cache"))):
                if function is None:
                    lines.append("y.backward(dy)")
                    continue
                try:
                    by_place, by_name = calls.sources(function, {*names_given, "y", "cache"}, "layer", unknown)
                except TypeError:
                    by_place, by_name = ["..."], {}
                text = [shown.get(str(x), str(x)) for x in by_place]
                text += [f"{k}={shown.get(str(x), x)}" for k, x in by_name.items()]
                lines.append(f"{name} = layer.{function.__name__}({', '.join(text)})")
        return "\n".join(lines)


def _by_autograd(forward: Any, given: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    """The backward of a module of PyTorch: gradients of its inputs, and of its weights beside them."""
    moved = {name: x.detach().clone().requires_grad_() for name, x in given.items() if name in ("x", "memory", *INPUTS)}
    calls.call(forward, {**given, **moved}, "layer", calls.first_names(forward, given, "layer"))
    results["y"].backward(given["dy"])
    return {f"d{name}": x.grad for name, x in moved.items() if x.grad is not None}


def _inputs(forward: Any) -> int:
    """How many inputs a forward takes."""
    try:
        found = calls.parameters(forward, "layer")
    except (TypeError, ValueError):
        return 3
    return sum(p.required and p.means not in ("mask", "training") for p in found if p.name != "self")
