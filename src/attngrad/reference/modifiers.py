# ruff: noqa: D102 - value, first and second are m(z), m'(z) and m''(z)
"""The score modifiers: functions of one score, each with its first and second derivative beside it.

A modifier stands between z and the scores, s = m(z) + bias. To add one, write its class and enter it in ``MODIFIERS``
under the name of its option; everything else asks ``modifiers(o)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attngrad.core.arrays import Array
from attngrad.reference.dense import namespace, real_part, scalar


class Modifier:
    """A function of z, entry by entry, and its derivatives; this one is the identity."""

    def value(self, z: Array) -> Array:
        return z

    def first(self, z: Array) -> Array:
        return namespace(z).ones_like(z)

    def second(self, z: Array) -> Array:
        return namespace(z).zeros_like(z)


class SoftCap(Modifier):
    """cap(z) = c tanh(z/c), and its derivatives 1 - tanh^2 and -2/c tanh (1 - tanh^2)."""

    def __init__(self, cap: float) -> None:
        self.cap = cap

    def value(self, z: Array) -> Array:
        return scalar(self.cap, z) * self._tanh(z)

    def first(self, z: Array) -> Array:
        # 1 - tanh(x)^2 = 4 e / (1 + e)^2 with e = exp(-2 |x|): no difference that cancels where tanh saturates
        xp = namespace(z)
        x = z / scalar(self.cap, z)
        e = xp.exp(scalar(-2.0, z) * xp.where(real_part(x) < 0, -x, x))
        u = scalar(1.0, z) / (scalar(1.0, z) + e)
        return scalar(4.0, z) * (e * u) * u

    def second(self, z: Array) -> Array:
        return scalar(-2.0 / self.cap, z) * self._tanh(z) * self.first(z)

    def _tanh(self, z: Array) -> Array:
        return namespace(z).tanh(z / scalar(self.cap, z))


MODIFIERS: dict[str, Callable[[Any], Modifier]] = {"softcap": SoftCap}
"""Every modifier by the name of its option, in the order in which they are applied."""


class Chain(Modifier):
    """outer(inner(z)), by the chain rule.

    >>> import numpy as np
    >>> m = Chain(SoftCap(2.0), SoftCap(3.0))
    >>> z, h = np.linspace(-4, 4, 9), 1e-6
    >>> bool(np.allclose(m.first(z), (m.value(z + h) - m.value(z - h)) / (2 * h)))
    True
    >>> bool(np.allclose(m.second(z), (m.first(z + h) - m.first(z - h)) / (2 * h)))
    True
    """

    def __init__(self, inner: Modifier, outer: Modifier) -> None:
        self.inner, self.outer = inner, outer

    def value(self, z: Array) -> Array:
        return self.outer.value(self.inner.value(z))

    def first(self, z: Array) -> Array:
        return self.outer.first(self.inner.value(z)) * self.inner.first(z)

    def second(self, z: Array) -> Array:
        u, slope = self.inner.value(z), self.inner.first(z)
        return self.outer.second(u) * slope * slope + self.outer.first(u) * self.inner.second(z)


IDENTITY = Modifier()
"""What stands where no modifier is given."""


def compose(*settings: Any) -> Modifier:
    """The modifiers of these settings, one for each entry of ``MODIFIERS``, as one; None leaves a modifier out."""
    found = IDENTITY
    for make, setting in zip(MODIFIERS.values(), settings, strict=True):
        if setting is not None:
            found = make(setting) if found is IDENTITY else Chain(found, make(setting))
    return found


def modifiers(options: Any) -> Modifier:
    """The modifiers that ``options`` ask for, as one: ``IDENTITY`` where they ask for none.

    >>> import numpy as np
    >>> from attngrad.core.options import Options
    >>> m = modifiers(Options(1.0, softcap=2.0))
    >>> m.value(np.zeros(1)), m.first(np.zeros(1)), abs(m.second(np.zeros(1)))
    (array([0.]), array([1.]), array([0.]))
    """
    return compose(*(getattr(options, name) for name in MODIFIERS))
