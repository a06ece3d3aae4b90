"""Backends: what computes the passes; by name, or by the library and device of the arrays.

A new one is a folder with the functions of ``protocol.Backend``, and a line of the registry.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import NamedTuple, cast

from attngrad.backends.protocol import Backend


class Entry(NamedTuple):
    """One line of the registry: the module, and the libraries and devices whose arrays it takes; None: any device."""

    module: str
    libraries: tuple[str, ...] = ()
    devices: tuple[str, ...] | None = ()

    def takes(self, library: str, device: str | None) -> bool:
        """Whether it takes arrays of a library, on a device or on any."""
        return library in self.libraries and (device is None or self.devices is None or device in self.devices)


REGISTRY = {
    "cpu": Entry("attngrad.backends.cpu", ("numpy", "torch", "jax"), ("cpu",)),
    "blocked": Entry("attngrad.backends.blocked", ("torch",), None),
    "reference": Entry("attngrad.backends.reference"),  # dense: only where it is named
}


def get(name: str) -> Backend:
    """The backend of this name.

    >>> get("cpu").NAME
    'cpu'
    """
    if name not in REGISTRY:
        raise ValueError(f"attngrad: backend must be one of {', '.join(REGISTRY)}; got {name!r}.")
    return cast(Backend, importlib.import_module(REGISTRY[name].module))


@lru_cache
def find(library: str, device: str) -> Backend:
    """The backend for arrays of a library on a device: the first of the registry that names it, or takes any.

    >>> find("numpy", "cpu").NAME
    'cpu'
    """
    fitting = [name for name, entry in REGISTRY.items() if entry.takes(library, device)]
    if fitting:
        return get(min(fitting, key=lambda name: REGISTRY[name].devices is None))
    there = "; ".join(
        f"{name}: {', '.join(entry.libraries)} on {'any device' if entry.devices is None else ', '.join(entry.devices)}"
        for name, entry in REGISTRY.items()
        if entry.libraries
    )
    raise ValueError(f"attngrad: arrays must be where a backend computes ({there}); got {library} on {device}.")
