"""Tensors of a ring, and arrays that share their memory for a backend that wants those."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attngrad.backends.protocol import Backend
from attngrad.torch._tensors import to_array


class Memory(NamedTuple):
    """Memory of a device, for a backend."""

    backend: Backend
    device: torch.device

    @property
    def on_arrays(self) -> bool:
        """Whether the backend takes NumPy arrays, which share the memory of the tensors."""
        return self.backend.LIBRARY == "numpy"

    def taken(self, x: Any) -> Any:
        """A tensor, or a record of them, as the backend takes it; numbers stay."""
        if not self.on_arrays:
            return x
        if not isinstance(x, tuple):
            return to_array(x)
        found = map(self.taken, x)
        return type(x)(*found) if hasattr(x, "_fields") else tuple(found)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """``torch.empty``; for the kernels from memory that earlier results have left: steps use the same again."""
        size = prod(shape) * dtype.itemsize
        if not self.on_arrays or not size:
            return torch.empty(shape, dtype=dtype, device=self.device)
        from attngrad import _native

        memory: Tensor = torch.from_numpy(_native.buffer(size))
        return memory.view(dtype).view(shape)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The same, of zeros."""
        return self.empty(shape, dtype).zero_()
