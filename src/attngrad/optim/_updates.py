"""SGD and Adam."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np

from attngrad.core import checks
from attngrad.core.arrays import NDArray
from attngrad.core.checks import fail
from attngrad.core.dtypes import ACCUMULATE
from attngrad.optim._trees import Tree, flat, number, require_writable


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
    """The frame of SGD and Adam: checks, master copies, and one update per parameter."""

    lr: float

    def __init__(self, params: Tree, lr: float) -> None:
        self._name = type(self).__name__
        self.lr = number(self._name, "lr", lr, 0.0)
        self._params = flat(self._name, "params", params)
        require_writable(self._name, "params", self._params)
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
        found = flat(function, "grads", grads)
        for name, p in self._params.items():
            if name not in found:
                rule = f"have the names of params, {name!r} too"
                fail(ValueError, function, "grads", rule, ", ".join(found) or "none")
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
        self.momentum = number(self._name, "momentum", momentum, 0.0)
        self.nesterov = checks.check_flag(self._name, "nesterov", nesterov)
        self.weight_decay = number(self._name, "weight_decay", weight_decay, 0.0)
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
        beta1, beta2 = (number(self._name, "betas", beta, 0.0, 1.0) for beta in betas)
        self.betas = beta1, beta2
        self.eps = number(self._name, "eps", eps, 0.0)
        self.weight_decay = number(self._name, "weight_decay", weight_decay, 0.0)
        self._means, self._squares = self._state(), self._state()

    def _update(self, name: str, p: NDArray, g: NDArray) -> None:
        (beta1, beta2), m, v = self.betas, self._means[name], self._squares[name]
        p *= 1.0 - self.lr * self.weight_decay
        m += (1.0 - beta1) * (g - m)
        v *= beta2
        v += (1.0 - beta2) * g * g
        correction = math.sqrt(1.0 - beta2**self._steps)
        p -= (self.lr / (1.0 - beta1**self._steps)) * m / (np.sqrt(v) / correction + self.eps)
