"""The labels of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from attngrad.core.arrays import kind_of
from attngrad.core.checks import fail

Tokens = tuple[tuple[str, ...], tuple[str, ...]]


def check_tokens(function: str, tokens: Any, t: int, s: int) -> Tokens | None:
    """The labels of t queries and s keys, from one list for both or a pair of lists."""
    if tokens is None:
        return None
    if isinstance(tokens, str) or not isinstance(tokens, Sequence):
        _bad_tokens(function, t, s, kind_of(tokens))
    pair = tokens if len(tokens) == 2 and not any(isinstance(a, str) for a in tokens) else (tokens, tokens)
    for labels, n in zip(pair, (t, s), strict=True):
        if not isinstance(labels, Sequence) or not all(isinstance(label, str) for label in labels):
            _bad_tokens(function, t, s, "labels that are no strings")
        if len(labels) != n:
            fail(
                ValueError, function, "tokens", f"have {t} labels of queries and {s} of keys", f"{len(labels)} for {n}"
            )
    return tuple(pair[0]), tuple(pair[1])


def _bad_tokens(function: str, t: int, s: int, got: str) -> NoReturn:
    rule = f"be a list of {t} strings" if t == s else f"be a pair of lists, {t} and {s} strings"
    fail(TypeError, function, "tokens", rule, got, "A text is split into tokens with text.split().")
