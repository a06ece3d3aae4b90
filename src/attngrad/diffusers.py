"""Hugging Face Diffusers: the attention of one model by attngrad, with every derivative.

>>> from diffusers import DiTTransformer2DModel
>>> size = {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 8, "sample_size": 4, "in_channels": 4}
>>> model = DiTTransformer2DModel(**size)
>>> enable(model)

Diffusers has a fixed list of attention backends, and no public way to add one. What it lets others replace is the
processor of each attention layer (``set_processor``). ``enable`` replaces each by one that does the same, but for its
call of ``scaled_dot_product_attention``: projections, norms, masks and adapters stay Diffusers'. docs/transformers.md
is the guide.
"""

from __future__ import annotations

import copy
from functools import wraps
from typing import Any

try:
    import diffusers as _diffusers  # noqa: F401
    import torch
    from torch.overrides import TorchFunctionMode
except ImportError as error:
    message = "attngrad.diffusers: it needs PyTorch and Diffusers. Run: pip install 'attngrad[diffusers]'."
    raise ImportError(message) from error

from attngrad.core.arrays import kind_of
from attngrad.core.checks import fail
from attngrad.torch._attention import TORCHS, scaled_dot_product_attention

__all__ = ["disable", "enable"]


def __dir__() -> list[str]:
    return __all__


class _Route(TorchFunctionMode):
    """In this thread, calls of PyTorch's attention are calls of ours."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (scaled_dot_product_attention if func is TORCHS else func)(*args, **(kwargs or {}))


class _Routed:
    """What the processors of ``enable`` are, beside what they were."""


def _routed(kind: Any) -> Any:
    @wraps(kind.__call__)  # Diffusers reads its signature
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _Route():
            return kind.__call__(self, *args, **kwargs)

    return type(kind.__name__, (kind, _Routed), {"__call__": call, "__module__": kind.__module__})


def enable(model: torch.nn.Module) -> None:
    """Let the attention layers of a Diffusers model run by ``attngrad.torch.scaled_dot_product_attention``.

    For this model alone, in any thread, and also where activation checkpointing runs a layer again. A layer whose
    processor does not call PyTorch's attention (linear attention, another attention backend) stays what it was.

    >>> from diffusers.models.attention_processor import Attention
    >>> layer, x = Attention(8, heads=2, dim_head=4), torch.ones(1, 3, 8)
    >>> enable(layer)
    >>> torch.func.jvp(layer, (x,), (x,))[1].shape
    torch.Size([1, 3, 8])
    """
    for layer in _layers("enable", model):
        processor = layer.get_processor()
        if not isinstance(processor, _Routed):
            _exchange(layer, _routed(type(processor)))


def disable(model: torch.nn.Module) -> None:
    """Undo ``enable``.

    >>> from diffusers.models.attention_processor import Attention
    >>> layer = Attention(8, heads=2, dim_head=4)
    >>> enable(layer)
    >>> disable(layer)
    """
    for layer in _layers("disable", model):
        if isinstance(layer.get_processor(), _Routed):
            _exchange(layer, type(layer.get_processor()).__bases__[0])


def _exchange(layer: Any, kind: type) -> None:
    processor = copy.copy(layer.get_processor())  # other layers and models may have the same one
    processor.__class__ = kind
    layer.set_processor(processor)


def _layers(function: str, model: object) -> list[Any]:
    if not isinstance(model, torch.nn.Module):
        remedy = "Of a pipeline, take pipeline.unet or pipeline.transformer."
        fail(TypeError, function, "model", "be a torch.nn.Module", kind_of(model), remedy)
    found = [x for x in model.modules() if hasattr(x, "set_processor") and hasattr(x, "get_processor")]
    if not found:
        remedy = "attngrad.torch.sdpa() serves any model that calls PyTorch's attention."
        fail(ValueError, function, "model", "have attention layers of Diffusers", kind_of(model), remedy)
    return found
