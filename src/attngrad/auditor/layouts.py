"""Layouts: how a candidate wants (batch, heads, tokens, features), and how its results are read back.

A layout is the order of its axes: ``BTHD`` has tokens before heads, ``BTD`` no heads (or, for a candidate that is told
their number, heads within the features), ``HTD`` no batch, ``TD`` neither. ``packed`` holds sequences of several
lengths end to end, (total tokens, heads, features), with ``cu_seqlens``: to the auditor one batch with segments. It is
also the layout of one array ``qkv``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attngrad.auditor.cases import Case
from attngrad.auditor.plans import Dims
from attngrad.core.arrays import NDArray
from attngrad.core.checks import fail

_TOKENS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
_PLANES = ("z", "scores", "weights", "dweights", "dscores", "dz", "mask", "bias")
_ROWS = ("lse", "delta")
_KEYS = ("k", "v", "dk", "dv")


@dataclass(frozen=True)
class Layout:
    """The axes of q in their order; ``merged``: heads are within the features."""

    name: str
    axes: str
    merged: bool = False
    stack: int | None = None
    """The axis along which q, k and v are stacked, where they come in one array."""
    tiled: bool = False
    """Whether query head h reads key head h % Hk, as ``np.tile`` has it, in place of h // (Hq // Hk)."""
    turned: str = ""
    """The axes of the output, where these are others, as Hugging Face's attention functions have them."""

    @property
    def words(self) -> str:
        """Its axes in words."""
        letters = {"b": "batch", "h": "heads", "t": "tokens", "d": "features"}
        found = [letters[a] for a in self.axes]
        if self.stack is not None:
            found = [*found[: self.stack], "3", *found[self.stack :]]
        if self.stack == -1:
            found[-2:] = ["3 heads features" if self.merged else "3 features"]
        own = f"), its output ({', '.join(letters[a] for a in self.turned)}" if self.turned else ""
        return ", ".join(found) + own

    @property
    def plain(self) -> bool:
        """Whether it is the auditor's own."""
        return self.name == "BHTD" and not self.turned

    def _axes(self, name: str) -> str:
        return self.turned if self.turned and name in ("out", "dout") else self.axes

    def adapt(self, n: Dims) -> Dims:
        """The sizes that have this layout: one batch or one head where it has no axis for them."""
        if self.stack is not None:
            n = replace(n, hk=n.hq, s=n.t, e=n.d)
        n = n if "b" in self.axes else replace(n, b=1)
        if "h" in self.axes or self.merged:
            return n
        return replace(n, hq=1, hk=1, model=None if n.model is None else n.d if n.model == n.inner else n.model)

    def _kept(self, axes: str) -> str:
        return "".join(a for a in axes if a in "s" or a in self.axes or (a == "h" and self.merged))

    def give(self, name: str, x: Any) -> Any:
        """An array of a case, or an option, as the candidate wants it."""
        name = name.removesuffix("_dot").removesuffix("_mixed")
        if isinstance(x, tuple) and name == "segments":
            return x if "b" in self.axes else tuple(y[0] if y.ndim > 1 else y for y in x)
        if not isinstance(x, np.ndarray) or self.plain:
            return x
        if name in _TOKENS:
            return self._tokens(name, x)
        if name in _PLANES:
            own = "bhts"[4 - x.ndim :]
            return x.reshape([n for a, n in zip(own, x.shape, strict=True) if a in self._kept(own)])
        return x

    def by_group(self, name: str, x: Any, n: Dims, back: bool = False) -> Any:
        """An array with query heads in the order in which a tiled candidate finds their key head; ``back`` in ours."""
        name = name.removesuffix("_dot").removesuffix("_mixed")
        axis = -3 if name in (*_TOKENS, *_PLANES, "dbias") else -2 if name in _ROWS else -1
        if not self.tiled or n.hq == n.hk or name in _KEYS or not isinstance(x, np.ndarray):
            return x
        if x.ndim < -axis or x.shape[axis] != n.hq or (axis == -1 and name not in ("sinks", "dsinks")):
            return x
        order = np.arange(n.hq).reshape(n.hk, -1).T.reshape(-1)
        return np.take(x, np.argsort(order) if back else order, axis)

    def _tokens(self, name: str, x: NDArray) -> NDArray:
        order = ["bhtd".index(a) for a in ("bthd" if self.merged else self._axes(name))]
        order = [i for i in range(4) if i not in order] + order
        strided = not x.flags.c_contiguous and 0 not in x.strides
        moved = np.ascontiguousarray(x).transpose(order) if strided else x.transpose(order)
        if x.flags.c_contiguous:
            moved = np.ascontiguousarray(moved)
        if self.merged:
            return moved.reshape(*moved.shape[:2], -1)
        found: NDArray = moved[(0,) * (4 - len(self.axes))]
        return found

    def read(self, name: str, x: NDArray, case: Case) -> NDArray:
        """A result of the candidate in the shape that the auditor has it in; as it is where it has another shape."""
        base, n = name.removesuffix("_dot").removesuffix("_mixed"), case.dims
        if base in ("dbias", "dsinks"):
            given = case.options.get(base[1:])
            if isinstance(given, np.ndarray) and self.give(base[1:], given).shape == x.shape:
                return x.reshape(given.shape)
            return x
        if base in _ROWS and x.ndim and x.shape[-1] == 1 and x.ndim == len(self._kept("bht")) + 1:
            x = x[..., 0]
        if self.plain:
            return x
        if base in _TOKENS and self.merged and x.ndim == 3:
            x = x.reshape(*x.shape[:2], n.hk if base in _KEYS else n.hq, -1)
            return x.transpose(0, 2, 1, 3)
        for own, full in self._shapes(base):
            sizes = {"b": n.b, "h": n.hk if base in _KEYS else n.hq, "t": n.t, "s": n.s}
            if x.ndim == len(own) and all(x.shape[i] == sizes[a] for i, a in enumerate(own) if a in sizes and a != "t"):
                x = x.transpose([own.index(a) for a in full if a in own])
                return x.reshape([x.shape[[b for b in full if b in own].index(a)] if a in own else 1 for a in full])
        return x

    def _shapes(self, name: str) -> Iterator[tuple[str, str]]:
        """The axes that a result may come with, and those that the auditor has."""
        if name in _TOKENS:
            yield self._axes(name), "bhtd"
        elif name in _PLANES:
            yield self._kept("bhts"), "bhts"
        elif name in _ROWS:
            yield self._kept("bht"), "bht"
            yield self._kept("bth"), "bht"


LAYOUTS = {name: Layout(name, name.lower()) for name in ("BHTD", "BTHD", "BTD", "HTD", "TD")}
LAYOUTS["packed"] = Layout("packed", "thd")
STACKED = tuple(
    Layout("packed", axes, stack=axis)
    for axes, axis in (
        ("thd", 1),
        ("bthd", 2),
        ("bhtd", 0),
        ("bthd", 0),
        ("htd", 0),
        ("thd", 0),
        ("bhtd", 1),
        ("bhtd", 2),
    )
)
STACKED += tuple(Layout("packed", "btd", merged=merged, stack=-1) for merged in (True, False))
"""The layouts of q, k and v in one array: stacked along an axis, or side by side within the features."""
TURNED = replace(LAYOUTS["BHTD"], turned="bthd")
MERGED = Layout("BTD", "btd", merged=True)


def layout_of(name: object) -> Layout | None:
    """The layout of that name; None for one that is to be found out."""
    if name is None:
        return None
    if not isinstance(name, str) or name not in LAYOUTS:
        fail(ValueError, "audit", "layout", f"be one of {', '.join(LAYOUTS)}", repr(name))
    return LAYOUTS[name]


def partition(length: int, parts: int) -> NDArray:
    """Segment ids of so many sequences of different lengths.

    >>> partition(9, 3)
    array([0, 1, 1, 1, 2, 2, 2, 2, 2])
    """
    rest = length - parts
    lengths = [1 + rest // 8, 1 + rest // 3][: parts - 1]
    return np.repeat(np.arange(parts), [*lengths, length - sum(lengths)])


def packed(case: Case) -> Case:
    """The case as sequences end to end: its tokens, in segments."""
    n = case.dims
    parts = min(3, n.t, n.s)
    ids = tuple(partition(size, parts)[None] for size in (n.t, n.s))
    return replace(case, options={**case.options, "segments": ids}, by_sequence=True)


def seqlens(ids: NDArray, parts: int) -> tuple[NDArray, int]:
    """``cu_seqlens`` and ``max_seqlen`` of segment ids.

    >>> seqlens(np.array([0, 1, 1, 1, 2, 2]), 3)
    (array([0, 1, 4, 6], dtype=int32), 3)
    """
    lengths = np.bincount(ids.reshape(-1), minlength=parts)
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), int(lengths.max(initial=0))
