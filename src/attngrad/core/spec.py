"""Spec: the shape and dtype of an array, apart from its numbers. What is checked is checked on these."""

from __future__ import annotations

from typing import Any, NamedTuple


class Spec(NamedTuple):
    """What the checks read of an array; ``dtype`` is NumPy's.

    A bridge whose arrays NumPy does not know, or whose numbers are not there yet, passes Specs in their place.

    >>> import numpy as np
    >>> Spec.of(np.zeros((2, 3))) == Spec((2, 3), np.dtype(np.float64))
    True
    """

    shape: tuple[int, ...]
    dtype: Any

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @classmethod
    def of(cls, x: Any) -> Spec:
        """The Spec of an array whose dtype is NumPy's."""
        return cls(tuple(x.shape), x.dtype)
