"""Numbers on a signed heat, in the terminal and in notebooks: blue below zero, orange above."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from attngrad.explain.windows import Matrix, number

BLUE, ORANGE = (33, 102, 172), (230, 97, 1)  # told apart in all common kinds of colour blindness


class Cell(NamedTuple):
    """A number in about six characters, the colour behind it, and whether that is dark."""

    value: float
    text: str
    colour: str
    dark: bool


def heat(m: Matrix) -> list[list[Cell | None]]:
    """The cells of a matrix, row by row; None where hidden."""
    largest = float(np.abs(m.values[np.isfinite(m.values)]).max(initial=0.0)) or 1.0

    def cell(value: float) -> Cell:
        strength = min(1.0, abs(value) / largest) if np.isfinite(value) else 0.0
        paint = ",".join(str(round(255 + (c - 255) * strength)) for c in (ORANGE if value > 0 else BLUE))
        return Cell(value, number(value), f"rgb({paint})", strength > 0.7)

    rows = zip(m.values, m.hidden, strict=True)
    return [[None if h else cell(float(x)) for x, h in zip(row, hidden, strict=True)] for row, hidden in rows]
