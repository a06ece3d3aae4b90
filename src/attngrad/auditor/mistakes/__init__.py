"""The catalogue of mistakes: what each computes, why it is wrong, how to fix it.

``catalogue.toml`` tells each in words; the module of its theme has, under the same id, the ways to make it.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from attngrad.auditor.mistakes._entry import Mistake, Variant, Wild
from attngrad.core.files import read_toml, require_same_ids

__all__ = ["Mistake", "Variant", "Wild", "catalogue", "find"]


@cache
def catalogue() -> tuple[Mistake, ...]:
    """Every mistake, by theme, in the order of the data flow.

    >>> [m.id for m in catalogue()][:2]
    ['scale-missing', 'scale-twice']
    """
    found = []
    for theme, told in read_toml(__name__, "catalogue.toml").items():
        variants = import_module(f"{__name__}.{theme}").VARIANTS
        require_same_ids(f"catalogue: {theme} and catalogue.toml", told, variants)
        for name, words in told.items():
            needs = tuple(words.pop("needs", ()))
            found.append(Mistake(name, theme, **words, variants=variants[name], needs=needs))
    return tuple(found)


def find(name: str) -> Mistake:
    """The mistake of an id.

    >>> find("scale-missing").title
    'the scale 1/sqrt(D) is missing'
    """
    for mistake in catalogue():
        if mistake.id == name:
            return mistake
    raise KeyError(f"find: {name!r} is not the id of a mistake.")
