"""What an entry of the catalogue is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attngrad.auditor.pipeline import Override, Pipeline, Undefined
from attngrad.reference.dense import rowsum

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


def need(condition: Any) -> None:
    """The mistake has a meaning only where this holds."""
    if not condition:
        raise Undefined


def delta_of_weights(p: Pipeline, base: Base) -> Any:
    """delta as rowsum(A o dA), which other weights change, in place of rowsum(dO o O)."""
    return rowsum(p.weights_back * p.dweights)
