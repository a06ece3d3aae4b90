"""The catalogue of mistakes: what each computes, why it is wrong, how to fix it.

``catalogue.toml`` tells each in words; the module of its theme has, under the same id, the ways to make it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from attngrad.auditor.pipeline import Override, Pipeline, Undefined
from attngrad.core.files import read_toml, require_same_ids
from attngrad.reference.dense import rowsum, zero_hidden

Base = Callable[[], Any]
"""What a step would be without the mistake."""

Wild = np.nan
"""What a mistake puts where it leaves a result open (memory that was never written): any value reproduces it."""


@dataclass(frozen=True)
class Variant:
    """One way to make a mistake: the steps of the pipeline that it changes."""

    steps: Mapping[str, Override]
    note: str = ""
    """Where or how, for the report; empty where the title says it all."""
    wild: bool = False
    """Whether it leaves entries open."""
    beyond: int = 0
    """It changes nothing where there are no more tokens than this."""
    rare: bool = False
    """Whether it is tried only where what is wrong is longer than ``beyond``, and what is right is not."""
    fit: Callable[[Pipeline, Mapping[str, Any]], Any] | None = None
    """Finds the parameter of the mistake (a learning rate, say) in what the candidate returned."""


@dataclass(frozen=True)
class Mistake:
    """A mistake: what it is, why it is wrong, how to fix it (``catalogue.toml``), and what it computes.

    ``needs`` names options (or "layer", "tangents", "gqa") without which it cannot be made.
    """

    id: str
    theme: str
    title: str
    formula: str
    correct: str
    why: str
    fix: str
    variants: tuple[Variant, ...] = field(repr=False)
    needs: tuple[str, ...] = ()

    @property
    def level(self) -> str:
        """The level it is made at, "attention" or "layer"; empty for both."""
        return "layer" if "layer" in self.needs else "attention" if "tangents" in self.needs else ""


def only(**steps: Override) -> tuple[Variant, ...]:
    """The one variant of a mistake that is made in one way."""
    return (Variant(steps),)


def way(note: str, **steps: Override) -> Variant:
    """A variant with a note on where or how."""
    return Variant(steps, note)


def reading(step: str, **changed: Callable[[Pipeline], Any]) -> dict[str, Override]:
    """The override that leaves the formula of ``step`` as it is, and lets it read something else."""
    return {step: lambda p, base: p.redo(step, **{name: other(p) for name, other in changed.items()})}


def without(step: str, name: str) -> dict[str, Override]:
    """The override that lets ``step`` read zeros for ``name``: the terms that it is a factor of are missing."""
    return reading(step, **{name: lambda p: np.zeros_like(getattr(p, name))})


def need(condition: Any) -> None:
    """The mistake has a meaning only where this holds."""
    if not condition:
        raise Undefined


def where(holds: Callable[[Pipeline], Any], step: Override) -> Override:
    """``step``, which has a meaning only where this holds."""

    def held(p: Pipeline, base: Base) -> Any:
        need(holds(p))
        return step(p, base)

    return held


def weights_from_lse(p: Pipeline, visible: Any, factor: float = 1.0, exp: Callable[[Any], Any] | None = None) -> Any:
    """exp(S - factor lse) over what is ``visible``, as a backward pass computes the weights again."""
    lse = np.where(p.lse == -np.inf, p.c(0.0), p.lse)[..., None]
    return zero_hidden((exp or np.exp)(p.scores_unmasked - lse * p.c(factor)), visible)


def delta_from_weights(p: Pipeline, base: Base) -> Any:
    """delta as rowsum(A o dA), which other weights change, in place of rowsum(dO o O)."""
    return rowsum(p.weights_back * p.dweights)


@cache
def catalogue() -> tuple[Mistake, ...]:
    """Every mistake, by theme, in the order of the data flow.

    >>> [m.id for m in catalogue()][:2]
    ['scale-missing', 'scale-twice']
    """
    found = []
    for theme, told in read_toml(__name__, "catalogue.toml").items():
        title = told.pop("theme")
        variants = import_module(f"{__name__}.{theme}").VARIANTS
        require_same_ids(f"catalogue: {theme} and catalogue.toml", told, variants)
        for name, words in told.items():
            needs = tuple(words.pop("needs", ()))
            found.append(Mistake(name, title, **words, variants=variants[name], needs=needs))
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
