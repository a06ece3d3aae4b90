"""The weights of a layer, wherever they are kept: attributes, dicts, objects like ``Linear`` or ``Parameter``.

A slot is the way from a layer to one array. Its form is how the (in, out) matrix of the auditor lies in it: transposed,
by heads, or q, k and v in one. A form is a rearrangement of entries, so that its inverse follows from it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from attngrad.auditor import names
from attngrad.auditor.plans import Dims
from attngrad.core.arrays import NDArray

_INNER = ("weight", "weights", "W", "w", "kernel", "data", "value", "val", "array", "param", "0")
_GRADIENTS = ("grads", "gradients", "grad", "dparams", "d_params", "gradient", "d", "dweights", "grad_params")
_PACKED = ("w_q", "w_k", "w_v")

Form = Callable[[NDArray, int], NDArray]
"""(in, out) and the number of heads to the array as the candidate has it."""

FORMS: dict[str, Form] = {
    "(in, out)": lambda w, h: w,
    "(out, in)": lambda w, h: w.T,
    "(heads, in, width)": lambda w, h: w.reshape(len(w), h, -1).transpose(1, 0, 2),
    "(heads, width, in)": lambda w, h: w.reshape(len(w), h, -1).transpose(1, 2, 0),
    "(in, heads, width)": lambda w, h: w.reshape(len(w), h, -1),
}
OUTPUT_FORMS: dict[str, Form] = {
    "(in, out)": FORMS["(in, out)"],
    "(out, in)": FORMS["(out, in)"],
    "(heads, width, out)": lambda w, h: w.reshape(h, -1, w.shape[1]),
}
PACKED_FORMS: dict[str, Form] = {
    "(in, 3 out)": lambda w, h: w,
    "(3 out, in)": lambda w, h: w.T,
    "(3, in, out)": lambda w, h: w.reshape(len(w), 3, -1).transpose(1, 0, 2),
    "(3, out, in)": lambda w, h: w.reshape(len(w), 3, -1).transpose(1, 2, 0),
    "(in, heads 3 width)": lambda w, h: w.reshape(len(w), 3, h, -1).transpose(0, 2, 1, 3).reshape(len(w), -1),
    "(heads 3 width, in)": lambda w, h: w.reshape(len(w), 3, h, -1).transpose(0, 2, 1, 3).reshape(len(w), -1).T,
}


def forms_of(name: str) -> dict[str, Form]:
    """The forms that a weight may have."""
    return PACKED_FORMS if name == "w_qkv" else OUTPUT_FORMS if name == "w_o" else FORMS


def is_array(x: Any) -> bool:
    """Whether it is an array of numbers with two axes or more, of any library."""
    return hasattr(x, "shape") and hasattr(x, "dtype") and len(x.shape) >= 2


def laid_out(name: str, form: str, weights: Mapping[str, NDArray], n: Dims) -> NDArray:
    """A weight of a case, in this form."""
    w = np.concatenate([weights[x] for x in _PACKED], axis=1) if name == "w_qkv" else weights[name]
    return np.array(forms_of(name)[form](w, _heads(name, n)), order="C")


def _heads(name: str, n: Dims) -> int:
    return n.hk if name in ("w_k", "w_v") else n.hq


def read_back(name: str, form: str, gradient: NDArray, n: Dims) -> dict[str, NDArray]:
    """The gradient of a weight in this form, by the names of the auditor; as it is where its shape is another."""
    inner = {"w_q": n.inner, "w_o": n.model, "w_qkv": n.inner + 2 * n.kv_inner}.get(name, n.kv_inner)
    rows = n.inner if name == "w_o" else n.model or n.inner
    index = forms_of(name)[form](np.arange(rows * (inner or 1)).reshape(rows, -1), _heads(name, n))
    found: NDArray = gradient
    if gradient.shape == index.shape:
        found = np.empty(index.size, gradient.dtype)
        found[index.reshape(-1)] = gradient.reshape(-1)
        found = found.reshape(rows, -1)
    if name != "w_qkv":
        return {f"d{name}": found}
    if found.shape != (rows, inner):
        return {"dw_q": gradient}  # of a wrong shape, which the auditor tells
    parts = np.split(found, [n.inner, n.inner + n.kv_inner], axis=1)
    return {f"d{x}": part for x, part in zip(_PACKED, parts, strict=True)}


def _item(holder: Any, key: str) -> Any:
    if isinstance(holder, (list, tuple)):
        return holder[int(key)] if key.isdigit() and int(key) < len(holder) else None
    return holder.get(key) if isinstance(holder, Mapping) else getattr(holder, key, None)


def _entries(holder: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(holder, Mapping):
        yield from ((k, x) for k, x in holder.items() if isinstance(k, str))
        return
    if isinstance(holder, (list, tuple)):
        yield from ((str(i), x) for i, x in enumerate(holder))
        return
    seen = {**getattr(holder, "__dict__", {})}
    for more in ("_parameters", "_modules"):  # of torch
        seen |= seen.get(more, {}) or {}
    for name in (n for kind in type(holder).__mro__ for n in getattr(kind, "__slots__", ())):
        seen[name] = getattr(holder, name, None)
    yield from ((k, x) for k, x in seen.items() if not k.startswith("__"))


@dataclass(frozen=True)
class Slot:
    """Where a layer keeps a weight: the keys that lead to it."""

    name: str
    path: tuple[str, ...]

    def holders(self, layer: Any) -> list[Any]:
        """The layer, and what lies on the way to the array."""
        found = [layer]
        for key in self.path[:-1]:
            found.append(_item(found[-1], key))
        return found

    def get(self, layer: Any) -> Any:
        """The array."""
        return _item(self.holders(layer)[-1], self.path[-1])

    def set(self, layer: Any, value: NDArray) -> None:
        """Put an array in its place, of the library that it has."""
        holder, old = self.holders(layer)[-1], self.get(layer)
        if hasattr(old, "detach"):  # a tensor
            import torch

            old.data = torch.as_tensor(value).clone()
        elif isinstance(holder, dict):
            holder[self.path[-1]] = value
        else:
            setattr(holder, self.path[-1], value)

    def gradient(self, layer: Any) -> Any:
        """The gradient that a backward has left beside it; None where there is none."""
        holders = self.holders(layer)
        wanted = tuple(np.shape(self.get(layer)))
        for depth in range(len(self.path) - 1, -1, -1):
            holder, key = holders[depth], names.squashed(self.path[depth])
            spelled = {f"d{key}", f"grad{key}", f"g{key}", f"{key}grad", f"dl{key}", f"dld{key}", f"grads{key}"}
            spelled |= {"grad", "gradient", "dw", "gradw", "gradweight", "dweight", "gw"} if depth else set()
            found = [x for k, x in _entries(holder) if names.squashed(k) in spelled and is_array(x)]
            found += [
                x for k, x in _entries(holder) if depth == 0 and names.gradient(k) == f"d{self.name}" and is_array(x)
            ]
            tensor = getattr(_item(holder, self.path[depth]), "grad", None)
            found += [tensor] if is_array(tensor) else []
            for k, x in _entries(holder):
                if k in _GRADIENTS and isinstance(x, Mapping):
                    found += [y for name, y in x.items() if is_array(y) and self._is_mine(str(name), key)]
            if found:
                return next((x for x in found if tuple(x.shape) == wanted), found[0])
        return None

    def _is_mine(self, name: str, key: str) -> bool:
        plain = names.squashed(name)
        return plain in (key, f"d{key}") or f"d{self.name}" in (
            names.gradient(name),
            f"d{names.weight(name, bare=True)}",
        )

    def code(self, layer: Any) -> str:
        """The way as code."""
        pairs = zip(self.holders(layer), self.path, strict=True)
        return "layer" + "".join(f"[{key!r}]" if isinstance(holder, Mapping) else f".{key}" for holder, key in pairs)


def slots(layer: Any) -> dict[str, Slot]:
    """The weights of a layer, by name."""
    found: dict[str, Slot] = {}
    for key, value in _entries(layer):
        inside = isinstance(value, Mapping) and key not in _GRADIENTS
        ways = [(k, (key, k), x) for k, x in value.items() if isinstance(k, str)] if inside else [(key, (key,), value)]
        for name, path, x in ways:
            more = _reach(x)
            bare = inside or (bool(more) if more is not None else False)
            weight = names.weight(name, bare=bare)
            if weight is not None and more is not None and weight not in found:
                found[weight] = Slot(weight, path + more)
    if "w_qkv" in found and {"w_q", "w_k", "w_v"} <= found.keys():
        del found["w_qkv"]
    return found if found.keys() & {*_PACKED, "w_qkv"} else _in_a_row(layer) | found


def _in_a_row(layer: Any) -> dict[str, Slot]:
    """The weights of a layer that keeps them in one list: q, k and v, and perhaps the output's."""
    for key, value in _entries(layer):
        if isinstance(value, (list, tuple)) or (hasattr(value, "_modules") and hasattr(value, "append")):
            ways = [(key, i, *more) for i, x in _entries(value) if i.isdigit() and (more := _reach(x)) is not None]
            if len(ways) in (3, 4):
                return {name: Slot(name, way) for name, way in zip((*_PACKED, "w_o"), ways, strict=False)}
    return {}


def _reach(x: Any, depth: int = 3) -> tuple[str, ...] | None:
    """The keys from an object to the array in it; None where there is none."""
    if is_array(x):
        return ()
    for key in _INNER if depth and not isinstance(x, (str, int, float, list, tuple)) else ():
        inner = _item(x, key)
        if inner is not None and not inspect.isroutine(inner) and (more := _reach(inner, depth - 1)) is not None:
            return (key, *more)
    return None


def without_biases(layer: Any, depth: int = 3) -> bool:
    """Set to zero the vectors that a layer or one of its parts adds: the auditor's layer has none. Whether it has."""
    found = False
    kept = [x for key, x in _entries(layer) if key != "_buffers"]
    parts = [x for x in kept if hasattr(x, "__dict__") or isinstance(x, (dict, list, tuple))]
    for holder in [layer, *parts]:
        for key, x in _entries(holder):
            shape = getattr(x, "shape", (0,) * 3)
            vector = len(shape) <= 2 and int(np.prod(shape)) == max(shape, default=0)  # and no mask of that name
            if isinstance(x, np.ndarray) and x.dtype.kind == "f" and key.lower().startswith("b") and vector:
                x[...], found = 0, True
            elif hasattr(x, "detach") and key.startswith("bias") and vector:
                x.data.zero_()
                found = True
    for part in parts if depth else ():
        if hasattr(part, "_modules") or isinstance(part, (list, tuple)):
            found |= without_biases(part, depth - 1)
    return found
