"""Gradients that are clipped, and losses that are scaled."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from attngrad.core import checks
from attngrad.core.arrays import NDArray, kind_of
from attngrad.core.checks import fail
from attngrad.core.dtypes import ACCUMULATE
from attngrad.optim._trees import Tree, flat, number, require_writable
from attngrad.optim._updates import Optimizer

_SMALLEST, _LARGEST = 2.0**-100, 2.0**100
"""The scale stays within float32, so that neither endless overflow nor endless growth leads to 0 or inf."""


def clip_by_global_norm(grads: Tree, max_norm: float) -> float:
    """Scale ``grads`` in place so that their norm, all of them one vector, is at most ``max_norm``; give the old norm.

    A norm that is not finite is given back and the gradients are left as they are. ``max_norm=math.inf`` only measures.

    >>> g = {"w": np.array([3.0, 4.0])}
    >>> clip_by_global_norm(g, 1.0), g["w"]
    (5.0, array([0.6, 0.8]))
    """
    function = "clip_by_global_norm"
    arrays = flat(function, "grads", grads)
    if max_norm != math.inf:
        if checks.check_real(function, "max_norm", max_norm) <= 0.0:
            fail(ValueError, function, "max_norm", "be positive", max_norm)
        require_writable(function, "grads", arrays)
    norm = _norm(arrays)
    if math.isfinite(norm) and norm > max_norm:
        for g in arrays.values():
            g[...] = (g.astype(ACCUMULATE.get(g.dtype, g.dtype), copy=False) * (max_norm / norm)).astype(g.dtype)
    return norm


def _norm(arrays: Mapping[str, NDArray]) -> float:
    """The float64 norm; squares of entries over the largest, which neither overflow nor all vanish."""
    wide = [g.astype(np.float64, copy=False) for g in arrays.values() if g.size]
    largest = max((float(np.max(np.abs(g))) for g in wide), default=0.0)
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    return largest * math.sqrt(sum(float(np.sum(np.square(g / largest))) for g in wide))


class LossScaler:
    """Dynamic loss scaling for 16-bit training: multiply dy by ``scale``, and let ``step`` divide the gradients by it.

    A step whose gradients hold inf or nan is skipped and the scale backs off; after ``interval`` good steps in a row
    it grows. Small gradients thus stay above the underflow of float16, and large ones below its overflow.

    >>> from attngrad.optim import SGD
    >>> p, scaler = {"w": np.ones(1, np.float32)}, LossScaler(scale=8.0)
    >>> scaler.step(SGD(p, lr=1.0), {"w": np.array([np.inf], np.float32)}), scaler.scale
    (False, 4.0)
    >>> scaler.step(SGD(p, lr=1.0), {"w": np.array([2.0], np.float32)}), p["w"]
    (True, array([0.5], dtype=float32))
    """

    scale: float

    def __init__(self, scale: float = 2.0**16, growth: float = 2.0, backoff: float = 0.5, interval: int = 2000) -> None:
        name = "LossScaler"
        self.scale = checks.check_real(name, "scale", scale)
        if not _SMALLEST <= self.scale <= _LARGEST:
            fail(ValueError, name, "scale", "be in [2**-100, 2**100]", scale)
        self.growth = number(name, "growth", growth, 1.0)
        self.backoff = checks.check_real(name, "backoff", backoff)
        if not 0.0 < self.backoff < 1.0:
            fail(ValueError, name, "backoff", "be in (0, 1)", backoff)
        self.interval = checks.check_integer(name, "interval", interval)
        if self.interval < 1:
            fail(ValueError, name, "interval", "be positive", interval)
        self._good = 0

    def step(self, optimizer: Optimizer, grads: Tree, max_norm: float | None = None) -> bool:
        """Step on ``grads / scale``, clipped to ``max_norm`` where that is given; False where the step was skipped.

        The grads themselves are left as they are.
        """
        if not callable(getattr(optimizer, "step", None)):
            rule = "be an optimiser, with a method step(grads)"
            fail(TypeError, "LossScaler.step", "optimizer", rule, kind_of(optimizer), "Pass SGD(...) or Adam(...).")
        with np.errstate(all="ignore"):
            unscaled = {
                name: g.astype(ACCUMULATE.get(g.dtype, g.dtype), copy=False) / self.scale
                for name, g in flat("LossScaler.step", "grads", grads).items()
            }
        if not all(np.isfinite(g).all() for g in unscaled.values()):
            self._good = 0
            self.scale = max(self.scale * self.backoff, _SMALLEST)
            return False
        if max_norm is not None:
            clip_by_global_norm(unscaled, max_norm)
        optimizer.step(unscaled)
        self._good += 1
        if self._good == self.interval:
            self._good = 0
            self.scale = min(self.scale * self.growth, _LARGEST)
        return True
