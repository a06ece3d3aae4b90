"""Attention in two halves: a pair ``(forward, backward)``, or a class or object without weights, as one function."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import numpy as np

from attngrad.auditor import calls
from attngrad.auditor.calls import parameters_of
from attngrad.auditor.construction import construct
from attngrad.auditor.objects import is_layer_object
from attngrad.auditor.plans import Dims


def is_pair(candidate: Any) -> bool:
    """Whether it is ``(forward, backward)``."""
    return isinstance(candidate, (tuple, list)) and len(candidate) == 2 and all(map(callable, candidate))


def as_function(candidate: Any) -> Any:
    """The function ``(q, k, v, dout, **options)`` that runs forward and then backward; a function as it is."""
    if is_pair(candidate):
        forward, backward = candidate
        return _joined(forward, lambda q, k, v: (forward, backward))
    if not is_layer_object(candidate):
        return separated(candidate) if takes_one_array(candidate) else candidate
    if _is_static(candidate):
        return _joined(candidate.forward, lambda q, k, v: (candidate.forward, candidate.backward))

    def halves(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        shape = (1, 1, *np.shape(q))[-4:]
        layer = construct(candidate, Dims(shape[0], shape[1], shape[1], shape[2], np.shape(k)[-2], shape[3]), q.dtype)
        return layer.forward, layer.backward

    return _joined(candidate.forward, halves, bound=not inspect.isclass(candidate))


def takes_one_array(candidate: Any) -> bool:
    """Whether q, k and v come to it in one array."""
    if is_layer_object(candidate) or is_pair(candidate):
        return False
    required = parameters_of(candidate).required
    return bool(required) and calls.meaning(required[0], "attention") == "qkv" and len(required) < 3


def separated(fn: Any) -> Any:
    """A function of ``qkv`` (and ``dout``) as one of q, k and v, which are stacked along ``stack_axis``."""
    own = list(inspect.signature(fn).parameters.values())

    def candidate(q: Any, k: Any, v: Any, *more: Any, stack_axis: int = 0, **options: Any) -> Any:
        module = import_module(next(m for m in ("torch", "jax.numpy", "numpy") if type(q).__module__.startswith(m[:3])))
        value = fn(module.stack((q, k, v), stack_axis), *more, **options)
        if not more:
            return value
        last = value[-1] if isinstance(value, (tuple, list)) else value
        named = {"out": value[0]} if isinstance(value, (tuple, list)) and len(value) == 2 else {}
        return named | {n: last.take(i, stack_axis) for i, n in enumerate(("dq", "dk", "dv"))}

    kinds = inspect.Parameter
    arrays = [kinds(name, kinds.POSITIONAL_OR_KEYWORD) for name in ("q", "k", "v")]
    rest = [p.replace(kind=kinds.KEYWORD_ONLY) if p.default is not kinds.empty else p for p in own[1:]]
    stack = kinds("stack_axis", kinds.KEYWORD_ONLY, default=0)
    candidate.__signature__ = inspect.Signature([*arrays, *rest, stack])  # type: ignore[attr-defined]
    candidate.__qualname__ = getattr(fn, "__qualname__", type(fn).__name__)
    return candidate


def _is_static(candidate: Any) -> bool:
    """Whether its methods take a context in place of an object."""
    first = next(iter(inspect.signature(candidate.forward).parameters), "")
    return inspect.isclass(candidate) and first == "ctx"


def _joined(forward: Any, halves: Any, bound: bool = True) -> Any:
    options = [
        p
        for p in inspect.signature(forward).parameters.values()
        if calls.meaning(p.name, "attention") not in ("q", "k", "v", "cache", None) and (bound or p.name != "self")
    ]

    def candidate(q: Any, k: Any, v: Any, dout: Any, **given: Any) -> dict[str, Any]:
        results: dict[str, Any] = {}
        there, back = halves(q, k, v)
        meant = {str(calls.meaning(name, "attention")): x for name, x in given.items()}
        try:
            returned = calls.both(there, back, {"q": q, "k": k, "v": v, "dout": dout, **meant}, "attention", results)
        except Exception as error:
            error.attngrad_partial = results  # type: ignore[attr-defined]
            raise
        if isinstance(returned, dict):
            return results | returned
        flat = returned if isinstance(returned, (tuple, list)) else (returned,)
        return results | dict(zip(("dq", "dk", "dv", "dbias"), flat, strict=False))

    kinds = inspect.Parameter
    arrays = [kinds(name, kinds.POSITIONAL_OR_KEYWORD) for name in ("q", "k", "v", "dout")]
    more = [kinds(p.name, kinds.KEYWORD_ONLY, default=p.default) for p in options]
    candidate.__signature__ = inspect.Signature([*arrays, *more])  # type: ignore[attr-defined]
    candidate.__wrapped__ = forward  # type: ignore[attr-defined]
    candidate.__qualname__ = getattr(forward, "__qualname__", type(forward).__name__)
    return candidate
