"""Optimisers that update arrays in place, for the parameters and gradients of ``attngrad.MultiHeadAttention``.

Parameters and gradients are mappings of names to arrays, or of names to such mappings, both of the same form:
``Adam({"embed": e, "first": layer.params})`` and ``step({"embed": de, "first": layer.grads})``.

16-bit parameters keep a float32 master copy here: an update too small for 16 bits adds up there and is not lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from attngrad.core import checks
from attngrad.core.arrays import NDArray, kind_of
from attngrad.core.binding import require_numpy
from attngrad.core.checks import check_floating, fail
from attngrad.core.dtypes import ACCUMULATE

__all__ = ["SGD", "Adam", "LossScaler", "Optimizer", "clip_by_global_norm"]

Tree = Mapping[str, Any]
"""Names to arrays, or to such mappings."""

_SMALLEST, _LARGEST = 2.0**-100, 2.0**100
"""The scale stays within float32, so that neither endless overflow nor endless growth leads to 0 or inf."""


def _leaves(function: str, argument: str, tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, Mapping):
        fail(TypeError, function, argument, "be a mapping of names to arrays", kind_of(tree))
    for name, x in tree.items():
        if isinstance(x, Mapping):
            yield from _leaves(function, argument, x, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", x


def _flat(function: str, argument: str, tree: Tree) -> dict[str, NDArray]:
    """The arrays by their dotted names."""
    arrays: dict[str, NDArray] = {}
    for name, x in _leaves(function, argument, tree):
        if name in arrays:
            fail(ValueError, function, argument, "have distinct names, inner mappings dotted", f"{name!r} twice")
        require_numpy(function, **{f"{argument}[{name!r}]": x})
        check_floating(function, f"{argument}[{name!r}]", x)
        arrays[name] = x
    return arrays


def _require_writable(function: str, argument: str, arrays: Mapping[str, NDArray]) -> None:
    """All of them, before the first is written to."""
    for name, x in arrays.items():
        if not x.flags.writeable:
            fail(ValueError, function, f"{argument}[{name!r}]", "be writable", "a read-only array", "Copy it.")


def _number(function: str, name: str, x: object, low: float, high: float = math.inf) -> float:
    """A real number in [low, high)."""
    value = checks.check_real(function, name, x)
    if not low <= value < high:
        fail(ValueError, function, name, f"be >= {low:g}" if high == math.inf else f"be in [{low:g}, {high:g})", value)
    return value


class Optimizer(Protocol):
    """What ``LossScaler`` drives.

    >>> weight = np.ones(2, np.float32)
    >>> optimizer: Optimizer = SGD({"w": weight}, lr=0.5)
    >>> optimizer.step({"w": np.ones(2, np.float32)})
    >>> weight
    array([0.5, 0.5], dtype=float32)
    """

    def step(self, grads: Tree) -> None:
        """Update the parameters, in place."""


class _InPlace:
    """The frame of SGD and Adam: checks, master copies, and one update a parameter."""

    lr: float

    def __init__(self, params: Tree, lr: float) -> None:
        self._name = type(self).__name__
        self.lr = _number(self._name, "lr", lr, 0.0)
        self._params = _flat(self._name, "params", params)
        _require_writable(self._name, "params", self._params)
        self._masters = {
            name: p.astype(ACCUMULATE[p.dtype]) for name, p in self._params.items() if p.dtype in ACCUMULATE
        }
        self._steps = 0

    def _state(self) -> dict[str, NDArray]:
        """Zeros for every parameter, in the dtype it is updated in."""
        return {name: np.zeros_like(self._masters.get(name, p)) for name, p in self._params.items()}

    def step(self, grads: Tree) -> None:
        """Update every parameter in place; ``grads`` may hold others, which are ignored.

        All gradients are checked first: an error leaves every parameter as it was.
        """
        function = f"{self._name}.step"
        found = _flat(function, "grads", grads)
        for name, p in self._params.items():
            if name not in found:
                fail(
                    ValueError, function, "grads", f"have the names of params, {name!r} too", ", ".join(found) or "none"
                )
            g, argument = found[name], f"grads[{name!r}]"
            wide = ACCUMULATE.get(p.dtype, p.dtype)
            if g.dtype not in (p.dtype, wide):
                rule = f"have the dtype of the parameter, {p.dtype}{'' if wide == p.dtype else f', or {wide}'}"
                fail(TypeError, function, argument, rule, g.dtype, "Cast it with astype.")
            if g.shape != p.shape:
                fail(ValueError, function, argument, f"have the shape of the parameter, {p.shape}", f"shape {g.shape}")
        self._steps += 1
        with np.errstate(all="ignore"):
            for name, p in self._params.items():
                if name not in self._masters:
                    self._update(name, p, found[name])
                    continue
                master = self._masters[name]
                # where p is no longer the rounded master, someone wrote to p: that is the value to go on from
                np.copyto(master, p.astype(master.dtype), where=master.astype(p.dtype) != p)
                self._update(name, master, found[name].astype(master.dtype, copy=False))
                p[...] = master.astype(p.dtype)

    def _update(self, name: str, p: NDArray, g: NDArray) -> None:
        raise NotImplementedError


class SGD(_InPlace):
    """Stochastic gradient descent: ``p -= lr * g``, with momentum ``p -= lr * m``.

    ::

        g = g + weight_decay * p
        m = momentum * m + g
        p = p - lr * m                        nesterov: p - lr * (g + momentum * m)

    ``lr`` may be changed between steps.

    >>> p = {"w": np.array([1.0, 2.0])}
    >>> SGD(p, lr=0.5).step({"w": np.array([1.0, 0.0])})
    >>> p["w"]
    array([0.5, 2. ])
    """

    def __init__(
        self, params: Tree, lr: float, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, lr)
        self.momentum = _number(self._name, "momentum", momentum, 0.0)
        self.nesterov = checks.check_flag(self._name, "nesterov", nesterov)
        self.weight_decay = _number(self._name, "weight_decay", weight_decay, 0.0)
        if self.nesterov and self.momentum == 0.0:
            fail(ValueError, self._name, "momentum", "be positive where nesterov is True", self.momentum)
        self._momenta = self._state() if self.momentum > 0.0 else {}

    def _update(self, name: str, p: NDArray, g: NDArray) -> None:
        if self.weight_decay > 0.0:
            g = g + self.weight_decay * p
        if self.momentum > 0.0:
            m = self._momenta[name]
            m *= self.momentum
            m += g
            g = g + self.momentum * m if self.nesterov else m
        p -= self.lr * g


class Adam(_InPlace):
    """Adam (Kingma and Ba, 2015), with decoupled weight decay AdamW (Loshchilov and Hutter, 2019).

    ::

        p = p - lr * weight_decay * p
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g^2
        p = p - lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)        at step t = 1, 2, ...

    ``lr`` may be changed between steps.

    >>> p = {"w": np.array([1.0, 2.0])}
    >>> Adam(p, lr=0.5).step({"w": np.array([1e-3, -10.0])})
    >>> p["w"].round(4)
    array([0.5, 2.5])
    """

    def __init__(
        self,
        params: Tree,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr)
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            fail(TypeError, self._name, "betas", "be a pair (beta1, beta2)", repr(betas))
        self.betas = (
            _number(self._name, "betas", betas[0], 0.0, 1.0),
            _number(self._name, "betas", betas[1], 0.0, 1.0),
        )
        self.eps = _number(self._name, "eps", eps, 0.0)
        self.weight_decay = _number(self._name, "weight_decay", weight_decay, 0.0)
        self._means, self._squares = self._state(), self._state()

    def _update(self, name: str, p: NDArray, g: NDArray) -> None:
        (beta1, beta2), m, v = self.betas, self._means[name], self._squares[name]
        p *= 1.0 - self.lr * self.weight_decay
        m += (1.0 - beta1) * (g - m)
        v *= beta2
        v += (1.0 - beta2) * g * g
        correction = math.sqrt(1.0 - beta2**self._steps)
        p -= (self.lr / (1.0 - beta1**self._steps)) * m / (np.sqrt(v) / correction + self.eps)


def clip_by_global_norm(grads: Tree, max_norm: float) -> float:
    """Scale ``grads`` in place so that their norm, all of them one vector, is at most ``max_norm``; give the old norm.

    A norm that is not finite is given back and the gradients are left as they are. ``max_norm=math.inf`` only measures.

    >>> g = {"w": np.array([3.0, 4.0])}
    >>> clip_by_global_norm(g, 1.0), g["w"]
    (5.0, array([0.6, 0.8]))
    """
    function = "clip_by_global_norm"
    arrays = _flat(function, "grads", grads)
    if max_norm != math.inf:
        if checks.check_real(function, "max_norm", max_norm) <= 0.0:
            fail(ValueError, function, "max_norm", "be positive", max_norm)
        _require_writable(function, "grads", arrays)
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
        self.growth = _number(name, "growth", growth, 1.0)
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
                for name, g in _flat("LossScaler.step", "grads", grads).items()
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
