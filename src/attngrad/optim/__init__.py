"""Optimisers that update arrays in place, for the parameters and gradients of ``attngrad.MultiHeadAttention``.

Parameters and gradients are mappings of names to arrays, or of names to such mappings, both of the same form:
``Adam({"embed": e, "first": layer.params})`` and ``step({"embed": de, "first": layer.grads})``.

16-bit parameters keep a float32 master copy here: an update too small for 16 bits adds up there and is not lost.
"""

from __future__ import annotations

from attngrad.optim._scaling import LossScaler, clip_by_global_norm
from attngrad.optim._updates import SGD, Adam, Optimizer

__all__ = ["SGD", "Adam", "LossScaler", "Optimizer", "clip_by_global_norm"]
