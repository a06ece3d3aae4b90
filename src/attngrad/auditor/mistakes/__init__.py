"""The catalogue of mistakes: what each computes, why it is wrong, how to fix it."""

from __future__ import annotations

from functools import cache

from attngrad.auditor.mistakes._entry import Mistake, Variant, Wild

__all__ = ["Mistake", "Variant", "Wild", "catalogue", "find"]


@cache
def catalogue() -> tuple[Mistake, ...]:
    """Every mistake, by theme, in the order of the data flow.

    >>> [m.id for m in catalogue()][:2]
    ['scale-missing', 'scale-twice']
    """
    from attngrad.auditor.mistakes import (
        dropout,
        heads,
        layer,
        masks,
        modifiers,
        products,
        scale,
        softmax,
        tangents,
        tiles,
    )

    themes = (scale, softmax, masks, dropout, modifiers, products, heads, tiles, tangents, layer)
    return tuple(mistake for theme in themes for mistake in theme.MISTAKES)


def find(name: str) -> Mistake:
    """The mistake of an id.

    >>> find("scale-missing").title
    'the scale 1/sqrt(D) is missing'
    """
    for mistake in catalogue():
        if mistake.id == name:
            return mistake
    raise KeyError(f"find: {name!r} is not the id of a mistake.")
