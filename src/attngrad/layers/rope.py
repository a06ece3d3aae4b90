"""Rotary position embedding (Su et al., 2021): positions enter attention as rotations of q and k.

A token at position n turns each pair of features (x_i, x_{i + d/2}) by the angle n base^(-2i/d), the rotate-half
convention of GPT-NeoX and Llama::

    y_i         = x_i cos - x_{i + d/2} sin
    y_{i + d/2} = x_i sin + x_{i + d/2} cos        i < d/2

so that the score of a query at position m and a key at position n depends on m - n alone. The map is linear and
orthogonal: its tangent is itself, and its transpose, which the backward pass needs, is the turn by minus the angle.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from attngrad.core.arrays import NDArray


class Rotation(NamedTuple):
    """cos and sin of every angle, ``(..., 1, T, d/2)``: the same for all heads, by leading axis where offsets are."""

    cos: NDArray
    sin: NDArray

    def apply(self, x: NDArray) -> NDArray:
        """``x`` (..., H, T, d) turned by the angles of its positions."""
        return _turn(x, self.cos, self.sin)

    def invert(self, y: NDArray) -> NDArray:
        """``apply`` undone; also its transpose."""
        return _turn(y, self.cos, -self.sin)


def _turn(x: NDArray, cos: NDArray, sin: NDArray) -> NDArray:
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def rotation(base: float, features: int, tokens: int, offset: NDArray | int, dtype: npt.DTypeLike) -> Rotation:
    """The rotation of tokens at positions offset, offset + 1, ...; angles in float64, cos and sin in ``dtype``.

    ``offset`` is an integer, or integers that broadcast to the leading axes.

    >>> quarter = rotation(1.0, 2, 2, 0, np.float64)
    >>> quarter.apply(np.array([[1.0, 0.0], [1.0, 0.0]])).round(4)
    array([[[1.    , 0.    ],
            [0.5403, 0.8415]]])
    """
    frequencies = base ** (-np.arange(features // 2) / (features // 2))
    positions = np.asarray(offset, np.float64)[..., None] + np.arange(tokens)
    angles = positions[..., None, :, None] * frequencies
    return Rotation(np.cos(angles).astype(dtype), np.sin(angles).astype(dtype))
