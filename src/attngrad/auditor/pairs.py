"""Attention in two halves: a pair ``(forward, backward)``, or a class or object without weights, as one function."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import numpy as np

from attngrad.auditor import calls, names
from attngrad.auditor.calls import parameters_of
from attngrad.auditor.construction import construct
from attngrad.auditor.objects import is_layer_object
from attngrad.auditor.plans import Dims


def is_pair(candidate: Any) -> bool:
    """Whether it is ``(forward, backward)``."""
    return isinstance(candidate, (tuple, list)) and len(candidate) == 2 and all(map(callable, candidate))


def as_function(candidate: Any) -> Any:
    """The function ``(q, k, v, dout, **options)`` that runs forward and then backward; a function as it is."""
    if takes_one_array(candidate):
        return separated(_of_one_array(*candidate) if is_pair(candidate) else candidate)
    if is_pair(candidate):
        forward, backward = candidate
        return _joined(forward, lambda q, k, v: (forward, backward))
    if not is_layer_object(candidate):
        return candidate
    if _is_static(candidate):
        return _joined(candidate.forward, lambda q, k, v: (candidate.forward, candidate.backward))

    def halves(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        shape = (1, 1, *np.shape(q))[-4:]
        layer = construct(candidate, Dims(shape[0], shape[1], shape[1], shape[2], np.shape(k)[-2], shape[3]), q.dtype)
        return layer.forward, layer.backward

    return _joined(candidate.forward, halves, bound=not inspect.isclass(candidate))


def takes_one_array(candidate: Any) -> bool:
    """Whether q, k and v come to it in one array."""
    if is_layer_object(candidate):
        return False
    required = parameters_of(candidate[0] if is_pair(candidate) else candidate).required
    if any(names.known(x, "given") in ("parameters", "memory") for x in required):
        return False
    arrays = [x for x in required if names.known(x, "given") is None]
    first, *others = [names.known(x, "arrays") for x in arrays] or [None]
    if first not in ("qkv", "x") or len(arrays) > 2 or "x" in others:
        return False
    return first == "qkv" or not any(map(names.weight, required))  # without weights, x can be nothing else


def _of_one_array(forward: Any, backward: Any) -> Any:
    """A pair of a forward of ``qkv`` and its backward as one function of ``qkv`` and ``dout``."""
    own = list(inspect.signature(forward).parameters.values())

    def candidate(qkv: Any, *more: Any, **options: Any) -> Any:
        *others, dout = more
        given = {str(calls.meaning(p.name, "attention")): x for p, x in zip(own[1:], others, strict=False)}
        given |= {str(calls.meaning(name, "attention")): x for name, x in options.items()}
        results: dict[str, Any] = {}
        back = calls.both(forward, backward, {"q": qkv, "qkv": qkv, "dout": dout, **given}, "attention", results)
        return results["out"], back

    kinds = inspect.Parameter
    last = sum(p.default is kinds.empty for p in own)
    named = [*own[:last], kinds("dout", kinds.POSITIONAL_OR_KEYWORD), *own[last:]]
    candidate.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    candidate.__qualname__ = getattr(forward, "__qualname__", type(forward).__name__)
    return candidate


def separated(fn: Any) -> Any:
    """A function of ``qkv`` (and ``dout``) as one of q, k and v, which are stacked along ``stack_axis``.

    Where this is -1, they are side by side within the features.
    """
    own = list(inspect.signature(fn).parameters.values())
    alone = all(calls.meaning(p.name, "attention") != "dout" for p in own)

    def candidate(q: Any, k: Any, v: Any, *more: Any, stack_axis: int = 0, **options: Any) -> Any:
        module = import_module(next(m for m in ("torch", "jax.numpy", "numpy") if type(q).__module__.startswith(m[:3])))
        join = module.concatenate if stack_axis < 0 else module.stack
        value = fn(join((q, k, v), stack_axis), *more, **options)
        if alone:
            return value
        last = value[-1] if isinstance(value, (tuple, list)) else value
        named = {"out": value[0]} if isinstance(value, (tuple, list)) and len(value) == 2 else {}
        last = last.reshape((*last.shape[:-1], 3, -1)) if stack_axis < 0 else last
        axis = last.ndim - 2 if stack_axis < 0 else stack_axis
        return named | {n: last.take(i, axis) for i, n in enumerate(("dq", "dk", "dv"))}

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
