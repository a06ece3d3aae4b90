"""What crosses every layer beside Options: Operands, Gradients, Tangents; and the flat list that frameworks see."""

from __future__ import annotations

import re
from collections import namedtuple
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from attngrad.core.arrays import Array
from attngrad.core.options import ARRAYS, OPTIONS, Kind, Options

QKV = ("q", "k", "v")
DIFFERENTIABLE = (*QKV, *(row.name for row in ARRAYS if row.differentiable))
"""The inputs that have gradients and tangents."""


def record(name: str, fields: Sequence[str], required: int = 0, **defaults: Any) -> Any:
    """The base of a named tuple whose fields come from the table: after the ``required`` ones each has a default."""
    values = [defaults.get(field) for field in fields[required:]]
    return namedtuple(name, fields, defaults=values)


_Operands: Any = record("Operands", [*QKV, *(row.name for row in ARRAYS), "origin"], 3, offset=0, origin=(0, 0, 0, 0))
_Gradients: Any = record("Gradients", DIFFERENTIABLE, 3)
_Tangents: Any = record("Tangents", DIFFERENTIABLE)


class Operands(_Operands):  # type: ignore[misc]
    """The arrays of one call, as they were given, or their Specs. ``offset`` is resolved, never None.

    ``origin`` is where the first score stands in a whole of which this is a part, (batch, head, query, key): a shard
    sees its part of the global dropout mask.

    >>> import numpy as np
    >>> from attngrad import trace
    >>> x = trace(np.zeros((4, 2, 3)), *np.zeros((2, 2, 5, 3))).operands
    >>> x.heads, x.group, x.scores_shape, x.offset
    (4, 2, (4, 2, 5), 3)
    """

    __slots__ = ()

    @property
    def heads(self) -> int:
        """Hq, the number of query heads; 1 for 2-D input."""
        return int(self.q.shape[-3]) if len(self.q.shape) > 2 else 1

    @property
    def group(self) -> int:
        """Hq / Hk, the number of query heads that read one key head."""
        key_heads = int(self.k.shape[-3]) if len(self.k.shape) > 2 else 1
        return self.heads // key_heads if key_heads else 1

    @property
    def scores_shape(self) -> tuple[int, ...]:
        """``(..., Hq, T, S)``."""
        return (*self.q.shape[:-1], int(self.k.shape[-2]))

    @property
    def out_shape(self) -> tuple[int, ...]:
        """``(..., Hq, T, E)``."""
        return (*self.q.shape[:-1], int(self.v.shape[-1]))


def _name_the_field(self: Any, name: str) -> Any:
    """``__getattr__`` of records by input: dq, grad_q or q_dot is asked for, where the field is q."""
    field = re.sub(r"^(grad_|d)|(_grad|_dot)+$", "", name.lower())
    hint = f" Use .{field}." if field in self._fields else ""
    raise AttributeError(f"{type(self).__name__} has no field {name!r}.{hint} Fields are {', '.join(self._fields)}.")


class Gradients(_Gradients):  # type: ignore[misc]
    """One array per differentiable input, of its shape and dtype: None for one that was not given or is not wanted.

    >>> import numpy as np
    >>> from attngrad import vjp
    >>> x = np.eye(2)
    >>> grads = vjp(x, x, x)[1](x)
    >>> grads.q.shape, grads.bias, grads._fields
    ((2, 2), None, ('q', 'k', 'v', 'bias', 'sinks'))
    """

    __slots__ = ()
    __getattr__ = _name_the_field
    q: Array
    k: Array
    v: Array
    bias: Array | None
    sinks: Array | None


class Tangents(_Tangents):  # type: ignore[misc]
    """A direction in the space of the differentiable inputs. None stands for a zero tangent."""

    __slots__ = ()
    __getattr__ = _name_the_field


# --- one flat list: what a framework sees -----------------------------------------------------------------------------


class Input(NamedTuple):
    """One entry of the flat list, and the option that it is, or is a part of; ``kind`` is None for q, k, v."""

    name: str
    option: str
    kind: Kind | None


def _inputs() -> tuple[Input, ...]:
    found = [Input(name, name, None) for name in QKV]
    for row in ARRAYS:
        sides = ("q_", "k_") if row.kind is Kind.IDS else ("",)
        found += [Input(side + row.name, row.name, row.kind) for side in sides]
    return (*found, *(Input(row.name, row.name, row.kind) for row in OPTIONS.values() if row.kind is Kind.SEED))


INPUTS = _inputs()
"""What may be an array, in one list: the differentiable inputs first; ids as two; then offset and seed, which may be
numbers instead."""
INPUT_NAMES = tuple(i.name for i in INPUTS)
NUMBERS = frozenset(i.name for i in INPUTS if i.kind in (Kind.OFFSET, Kind.SEED))
"""The inputs that may be numbers."""
SEEDS = tuple(i.name for i in INPUTS if i.kind is Kind.SEED)


def flatten(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that may be arrays, as entries of the flat list; what is None is left out.

    >>> flatten({"causal": True, "segments": ([0], [1]), "offset": 2})
    {'q_segments': [0], 'k_segments': [1], 'offset': 2}
    """
    found: dict[str, Any] = {}
    for name, value in options.items():
        row = OPTIONS.get(name)
        if value is None or row is None or not (row.is_array or row.kind is Kind.SEED):
            continue
        if row.kind is Kind.IDS:
            found |= {f"q_{name}": value[0], f"k_{name}": value[1]}
        else:
            found[name] = value
    return found


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """``flatten`` undone.

    >>> unflatten({"q_segments": [0], "k_segments": [1], "offset": 2, "seed": None})
    {'segments': ([0], [1]), 'offset': 2}
    """
    found: dict[str, Any] = {}
    for i in INPUTS:
        value = flat.get(i.name)
        if value is None or i.kind is None:
            continue
        if i.kind is not Kind.IDS:
            found[i.option] = value
        elif i.name == f"q_{i.option}":
            found[i.option] = (value, flat[f"k_{i.option}"])
    return found


def assemble(o: Options, flat: Mapping[str, Any]) -> tuple[Operands, Options]:
    """Operands and options from entries of the flat list, arrays of NumPy among them."""
    given = unflatten(flat)
    seeds = {name: _seed(given.pop(name)) for name in SEEDS if name in given}
    q, k, v = (flat[name] for name in QKV)
    for row in ARRAYS:
        if row.kind is Kind.OFFSET:
            given.setdefault(row.name, default_offset(q, k))
    return Operands(q, k, v, **given), replace(o, **seeds) if seeds else o


def _seed(x: Any) -> int:
    """A number, or an array of one: a negative one of 64 bits, with a sign, stands for what it is without."""
    return (x if isinstance(x, int) else int(x.item())) % 2**64


def default_offset(q: Array, k: Array) -> int:
    """The last query meets the last key."""
    return int(k.shape[-2]) - int(q.shape[-2])
