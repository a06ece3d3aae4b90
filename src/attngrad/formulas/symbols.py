"""The words of the language, ``symbols.toml``: every name with its shape, other spellings of it, and the functions.

A formula can say nothing else.
"""

from __future__ import annotations

import difflib

from attngrad.core.files import read_toml

Dims = tuple[str, ...]

ONE = "1"
SCALAR: Dims = (ONE, ONE)

_WORDS: dict[str, dict[str, str]] = read_toml("attngrad.formulas", "symbols.toml")
SHAPES, LAYER, SIZED = (
    {name: tuple(dims.split()) for name, dims in _WORDS[part].items()} for part in ("shapes", "layer", "sized")
)
ALIASES, FUNCTION_ALIASES = (
    {other: name for name, others in _WORDS[part].items() for other in others.split()}
    for part in ("spellings", "function_spellings")
)
FUNCTIONS, SIGNS, BELOW = _WORDS["functions"], _WORDS["signs"], _WORDS["below"]

LOSSES = {"L", "l", "ell", "loss", "Loss", "sL", "phi", "varphi", "J"}
"""What stands above the line in dL/dQ."""

KNOWN = SHAPES | LAYER | SIZED

_GRADIENTS = ("grad_", "dL_d", "dL_", "d_", "dloss_d")


def canonical(name: str) -> str | None:
    """The one spelling of a name, or None for a name that is not of the list.

    >>> canonical("attn_weights"), canonical("grad_scores"), canonical("dL_dQ")
    ('A', 'dS', 'dQ')
    """
    plain = ALIASES.get(name, name)
    if plain in KNOWN and "/" not in plain:
        return plain
    prefix = next((x for x in _GRADIENTS if name.startswith(x) and len(name) > len(x)), None)
    of = None if prefix is None else ALIASES.get(name[len(prefix) :], name[len(prefix) :])
    return f"d{of}" if f"d{of}" in KNOWN and (prefix != "d_" or len(name) > 3) else None


def is_long_name(word: str) -> bool:
    """Whether a word with underscores is one name: attn_weights, grad_scores, dL_dQ; not A_ij, d_k or W_Q."""
    return "_" in word and word not in KNOWN and (canonical(word) is not None or word in FUNCTION_ALIASES)


def function(name: str) -> str | None:
    """The one spelling of a function, or None."""
    name = FUNCTION_ALIASES.get(name, name)
    return name if name in FUNCTIONS else None


def split(run: str) -> list[str] | None:
    """A run of capital names, as QK or dSK, in its parts; None where it does not divide."""
    parts: list[str] = []
    while run:
        width = next((w for w in (2, 1) if run[:w] in KNOWN and run[:w][-1].isupper()), 0)
        width = width or (1 if run[0] in "WPG" else 0)
        if not width:
            return None
        parts.append(run[:width])
        run = run[width:]
    return parts


def suggestion(name: str) -> str:
    """What an unknown name may have meant, as a sentence."""
    words = [w for w in (*KNOWN, *ALIASES, *FUNCTIONS) if "/" not in w]
    # 0 for O and case are the commonest slips.
    folded = {w.lower().replace("o", "0"): w for w in reversed(words)}
    near = folded.get(name.lower().replace("o", "0")) or next(iter(difflib.get_close_matches(name, words, 1)), None)
    if near:
        return f"Did you mean {near}?"
    shown = " ".join(n for n in SHAPES if "/" not in n)
    return f"Names: {shown}; functions: {' '.join(FUNCTIONS)}."
