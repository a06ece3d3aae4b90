"""Hugging Face Transformers: ``attn_implementation="attngrad"``, once this module is imported.

>>> import attngrad.transformers
>>> from transformers import AutoModelForCausalLM, LlamaConfig
>>> config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
>>> model = AutoModelForCausalLM.from_config(config, attn_implementation="attngrad")

The import makes the name known to the attention interface and to the mask interface: without the second a model would
build no mask, and causality and padding would be lost in silence. docs/transformers.md is the guide.
"""

from __future__ import annotations

from typing import Any

try:
    import torch
    from torch import Tensor
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask
except ImportError as error:
    message = "attngrad.transformers: it needs PyTorch and Transformers 5. Run: pip install 'attngrad[transformers]'."
    raise ImportError(message) from error

from attngrad.core.checks import fail
from attngrad.torch._attention import attention, autocast
from attngrad.torch._passes import draw_seed
from attngrad.torch._tensors import wide_dtype
from attngrad.torch._weights import attention_weights

__all__ = ["attention_forward", "register"]


def __dir__() -> list[str]:
    return __all__


_NAME = "attngrad.transformers"

_UNSERVED = {
    "cache": "a paged cache",
    "indices": "keys chosen by index",
    "block_indices": "blocks of keys chosen by index",
    "head_mask": "a mask over heads",
    "layer_head_mask": "a mask over heads",
}
"""Arguments that change the result and that we have no pass for; all that models of Transformers 5 hand over."""


def register(name: str = "attngrad") -> None:
    """Make ``attn_implementation=name`` known to Transformers; importing the module has done so for "attngrad".

    Calling it again is harmless.

    >>> register("attngrad-again")
    """
    AttentionInterface.register(name, attention_forward)
    # Boolean masks; None where is_causal says it all.
    AttentionMaskInterface.register(name, sdpa_mask)


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool | None = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention as the layers of Transformers call it.

    Args:
        module: the layer; ``module.is_causal`` counts where ``is_causal`` is not given.
        query, key, value: ``(B, Hq, T, D)``, ``(B, Hk, S, D)``, ``(B, Hk, S, E)``.
        attention_mask: ``(B or 1, Hq or 1, T, S)``, boolean (True = may attend) or floating (added); None: causal where
            the layer is, else everything.
        scaling, dropout, softcap, sliding_window, position_bias: as the layers have them; s_aux is the sinks.

    Returns:
        out ``(B, T, Hq, E)``, and the weights ``(B, Hq, T, S)`` where ``output_attentions`` asks for them.

    >>> x = torch.randn(1, 2, 5, 4)
    >>> out, weights = attention_forward(torch.nn.Identity(), x, x, x, None)
    >>> out.shape, weights
    (torch.Size([1, 5, 2, 4]), None)
    """
    for name, what in _UNSERVED.items():
        if kwargs.get(name) is not None:
            fail(ValueError, _NAME, name, "be None", what, "Load the model with attn_implementation='eager'.")
    query, key, value = autocast(query, key, value)
    options: dict[str, Any] = {"scale": scaling}
    bias = None if position_bias is None else position_bias.to(query.dtype)
    if attention_mask is None:
        options |= _without_mask(module, query, key, is_causal, sliding_window, kwargs)
    else:  # the mask has all of it in: causality, padding, window, packing
        mask = _fit(attention_mask, key)
        if mask.dtype is torch.bool:
            options["mask"] = mask
        else:
            mask = mask.to(query.dtype)
            bias = mask if bias is None else bias + mask
    if bias is not None:
        options["bias"] = bias
    if softcap is not None:
        options["softcap"] = softcap
    if s_aux is not None:
        options["sinks"] = s_aux if s_aux.dtype is wide_dtype(query.dtype) else s_aux.to(query.dtype)
    if dropout:
        options |= {"dropout": dropout, "seed": draw_seed(query)}
    if not output_attentions:
        return attention(query, key, value, **options).transpose(1, 2).contiguous(), None
    out, lse = attention(query, key, value, **options, return_lse=True)
    return out.transpose(1, 2).contiguous(), attention_weights(query, key, lse, **options)


def _fit(mask: Tensor, key: Tensor) -> Tensor:
    if mask.ndim != 4 or not (mask.dtype is torch.bool or mask.is_floating_point()):
        got = f"shape {tuple(mask.shape)}, {mask.dtype}"
        remedy = "Register a name by attngrad.transformers.register(name): it registers the mask as well."
        fail(ValueError, _NAME, "attention_mask", "be a boolean or floating mask (B, heads, T, S)", got, remedy)
    return mask[..., : key.shape[-2]]  # a mask may be longer, made for keys that are yet to come


def _without_mask(
    module: torch.nn.Module, query: Tensor, key: Tensor, is_causal: bool | None, window: int | None, kwargs: Any
) -> dict[str, Any]:
    """What the absence of a mask means: causality by the layer, the window, packed sequences."""
    options: dict[str, Any] = {}
    tokens = query.shape[-2]
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    if is_causal and tokens > 1:
        options["causal"] = True
        if tokens != key.shape[-2]:  # queries start where keys do: a prefill, with keys of a static cache beyond it
            options["offset"] = 0
    if window is not None and is_causal:
        options["window"] = (window - 1, None)
    lengths = kwargs.get("cu_seq_lens_q")
    if lengths is not None:
        of_keys = kwargs.get("cu_seq_lens_k", lengths)
        # Mostly they are one tensor; to compare two, the host waits for the device.
        if not (of_keys is lengths or torch.equal(lengths, of_keys)) or query.shape[0] != 1:
            remedy = "Load the model with attn_implementation='eager'."
            fail(ValueError, _NAME, "cu_seq_lens_q", "equal cu_seq_lens_k, in a batch of one", "others", remedy)
        positions = torch.arange(tokens, device=lengths.device)
        ids = torch.bucketize(positions, lengths[1:].to(torch.int64), right=True)
        options["segments"] = (ids, ids)
    return options


register()
