"""The table of options. Each is named here, once, with its type, its kind and its check.

What lists options elsewhere derives from the table: Options and Operands, the arguments of torch's operators, the
inputs and the static part of JAX's primitives, what the ranks of a ring agree on, how vmap folds an axis in, the flags
of ``attngrad explain``. An option that a layer does not know is an error there.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass, replace
from enum import Enum
from typing import Annotated, Any, TypedDict, get_type_hints

from attngrad.core import option_checks as check
from attngrad.core.arrays import Array


class Kind(Enum):
    """What an option is: the first five are part of Options, the others of Operands.

    No row is a FUNCTION or PARAMETERS so far; tests/core/test_new_option.py adds one, and calls every layer.
    """

    NUMBER = "a number"
    FLAG = "True or False"
    PAIR = "two integers, either of which may be None"
    SEED = "an integer, or an array that holds one"
    FUNCTION = "a function"
    PLANE = "an array that broadcasts to (..., Hq, T, S)"
    PER_HEAD = "an array (Hq,)"
    IDS = "a pair of integer arrays, (..., T) and (..., S)"
    OFFSET = "an integer, or an integer array over the leading axes"
    PARAMETERS = "a mapping from names to arrays"

    @property
    def is_array(self) -> bool:
        """Whether it is part of Operands."""
        return self in (Kind.PLANE, Kind.PER_HEAD, Kind.IDS, Kind.OFFSET, Kind.PARAMETERS)


@dataclass(frozen=True)
class Option:
    """One row. ``check(function, value, x)`` gives the value, checked beside the operands ``x``, or raises.

    ``resolved``: bind finds a value where none is given, so that Options and Operands always have one. ``summary`` and
    ``metavar`` are the help of its flag in ``attngrad explain``, and how a value is written there.
    """

    kind: Kind
    check: Callable[[str, Any, Any], Any]
    default: Any = None
    resolved: bool = False
    differentiable: bool = False
    name: str = ""
    is_array: bool = field(init=False)
    """Whether it is part of Operands."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_array", self.kind.is_array)


class ScoreArguments(TypedDict, total=False):
    """The options that change what is computed: the table."""

    scale: Annotated[float | None, Option(Kind.NUMBER, check.scale, resolved=True)]
    causal: Annotated[bool, Option(Kind.FLAG, check.causal, False)]
    window: Annotated[tuple[int | None, int | None] | None, Option(Kind.PAIR, check.window)]
    offset: Annotated[Array | int | None, Option(Kind.OFFSET, check.offset, resolved=True)]
    mask: Annotated[Array | None, Option(Kind.PLANE, check.mask)]
    bias: Annotated[Array | None, Option(Kind.PLANE, check.bias, differentiable=True)]
    softcap: Annotated[float | None, Option(Kind.NUMBER, check.softcap)]
    sinks: Annotated[Array | None, Option(Kind.PER_HEAD, check.sinks, differentiable=True)]
    dropout: Annotated[float, Option(Kind.NUMBER, check.dropout, 0.0)]
    seed: Annotated[int | None, Option(Kind.SEED, check.seed)]
    segments: Annotated[tuple[Array, Array] | None, Option(Kind.IDS, check.segments)]


class OptionArguments(ScoreArguments, total=False):
    """The keyword options of ``attention``, ``vjp``, ``jvp``, ``hvp``, ``jacobian`` and ``attention_weights``."""

    return_lse: bool


OPTIONS: Mapping[str, Option] = {
    name: replace(hint.__metadata__[0], name=name)
    for name, hint in get_type_hints(ScoreArguments, include_extras=True).items()
}
OPTION_NAMES = (*OPTIONS, "return_lse")
STATIC = tuple(row for row in OPTIONS.values() if not row.is_array)
"""The options of Options."""
ARRAYS = tuple(
    sorted(
        (row for row in OPTIONS.values() if row.is_array),
        key=lambda row: (not row.differentiable, row.kind is Kind.OFFSET),
    )
)
"""The options of Operands: the differentiable ones first, the offset last."""

_Static: Any = make_dataclass(
    "Options",
    [(row.name, Any, field() if row.resolved else field(default=row.default)) for row in STATIC],
    frozen=True,
    slots=True,
)


class Options(_Static):  # type: ignore[misc]
    """The options that are not arrays: frozen and hashable. ``scale`` is resolved, never None.

    >>> import numpy as np
    >>> from attngrad import trace
    >>> options = trace(*np.zeros((3, 2, 4)), causal=True).options
    >>> options.scale, options.causal, options == Options(0.5, causal=True)
    (0.5, True, True)
    """

    __slots__ = ()


NOT_FLAT = frozenset(row.name for row in OPTIONS.values() if row.kind in (Kind.FUNCTION, Kind.PARAMETERS))
"""The options that have no place in a flat list of arrays and numbers, which is what a framework's graph holds."""


def reject_not_flat(function: str, options: Mapping[str, Any]) -> None:
    """An error where such an option is given to a function that makes a flat list of its options."""
    for name in NOT_FLAT:
        if options.get(name) is not None:
            remedy = "attngrad.attention takes it, where a backend computes it."
            raise NotImplementedError(f"{function}: {name} is {OPTIONS[name].kind.value}, not taken here. {remedy}")


_MASK = "Use mask= where it is boolean, True = may attend; bias= where it is added."
_PADDING = "Use mask=attention_mask.astype(bool)[:, None, None] where it is (batch, keys), 1 = may attend."
ELSEWHERE = {
    "softmax_scale": ("scale", "Use scale=."),
    "sm_scale": ("scale", "Use scale=."),
    "is_causal": ("causal", "Use causal=; with offset=0 it is aligned as PyTorch's."),
    "dropout_p": ("dropout", "Use dropout= and seed=."),
    "dropout_rate": ("dropout", "Use dropout= and seed=."),
    "window_size": ("window", "Use window=(left, right); None on a side leaves it unbounded."),
    "sliding_window": ("window", "Use window=(n - 1, 0) for the last n keys."),
    "logits_soft_cap": ("softcap", "Use softcap=."),
    "attn_bias": ("bias", "Use bias=."),
    "attn_mask": ("mask", _MASK),
    "attention_mask": ("mask", _PADDING),
    "key_padding_mask": ("mask", "Use mask=~key_padding_mask[:, None, None]: here True = may attend."),
    "cu_seqlens": ("segments", "Use segments=(ids, ids) with ids = attngrad.segments_from_lengths(lengths)."),
    "segment_ids": ("segments", "Use segments=(q_ids, k_ids)."),
    "enable_gqa": (None, "Leave it out: key heads may divide query heads."),
}
"""What other libraries call an option: the option here, and what to write."""


def reject_unknown(function: str, options: Iterable[str], known: Sequence[str] = OPTION_NAMES) -> None:
    """Every option is ``known``; else a TypeError that suggests the nearest name."""
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"Did you mean {near[0]!r}?" if near else f"Options are: {', '.join(known)}."
            ours, told = ELSEWHERE.get(name, (None, hint))
            if ours is None or ours in known:
                hint = told
            raise TypeError(f"{function}: unknown option {name!r}. {hint}")
