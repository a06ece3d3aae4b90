"""The catalogue of mistakes: what each computes, why it is wrong, how to fix it."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from attngrad.auditor.mistakes._entry import Mistake, Variant, Wild

__all__ = ["Mistake", "Variant", "Wild", "catalogue", "find", "themes"]

_THEMES = {
    "scale": "The scale",
    "softmax": "Softmax and its derivative",
    "masks": "Causality, masks, windows",
    "dropout": "Dropout",
    "modifiers": "Softcap, bias, sinks",
    "products": "Matrix products",
    "heads": "Heads",
    "tiles": "Tiles, chunks, precision",
    "tangents": "Forward mode and second order",
    "layer": "The layer",
}


@cache
def themes() -> dict[str, tuple[Mistake, ...]]:
    """Every mistake, by theme, in the order of the data flow."""
    return {title: import_module(f"{__name__}.{name}").MISTAKES for name, title in _THEMES.items()}


def catalogue() -> tuple[Mistake, ...]:
    """Every mistake, in the order of the data flow.

    >>> [m.id for m in catalogue()][:2]
    ['scale-missing', 'scale-twice']
    """
    return tuple(mistake for mistakes in themes().values() for mistake in mistakes)


def find(name: str) -> Mistake:
    """The mistake of an id.

    >>> find("scale-missing").title
    'the scale 1/sqrt(D) is missing'
    """
    for mistake in catalogue():
        if mistake.id == name:
            return mistake
    raise KeyError(f"find: {name!r} is not the id of a mistake.")
