"""The catalogue of mistakes: what each computes, why it is wrong, how to fix it.

``catalogue.toml`` tells each in words; the module of its theme has, under the same id, the ways to make it.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import import_module, resources

from attngrad.auditor.mistakes._entry import Mistake, Variant, Wild

__all__ = ["Mistake", "Variant", "Wild", "catalogue", "find"]


@cache
def catalogue() -> tuple[Mistake, ...]:
    """Every mistake, by theme, in the order of the data flow.

    >>> [m.id for m in catalogue()][:2]
    ['scale-missing', 'scale-twice']
    """
    text = (resources.files(__name__) / "catalogue.toml").read_text(encoding="utf-8")
    found = []
    for theme, told in tomllib.loads(text).items():
        variants = import_module(f"{__name__}.{theme}").VARIANTS
        if variants.keys() != told.keys():
            raise KeyError(f"catalogue: {theme} and catalogue.toml differ in {sorted(variants.keys() ^ told.keys())}.")
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
