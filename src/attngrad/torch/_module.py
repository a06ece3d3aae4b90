"""``torch.nn.MultiheadAttention`` with our attention inside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from attngrad.core.checks import fail
from attngrad.torch._attention import attention, autocast
from attngrad.torch._passes import draw_seed
from attngrad.torch._tensors import check_tensor
from attngrad.torch._weights import attention_weights

_NAME = "MultiheadAttention"


class MultiheadAttention(nn.MultiheadAttention):
    """A drop-in for ``torch.nn.MultiheadAttention``: its arguments, its parameters and state dict, its results.

    Everything is served: batch_first or not, unbatched input, kdim and vdim, add_bias_kv, add_zero_attn, dropout, both
    masks (boolean True = may not attend, as PyTorch has it here; floating ones are added), need_weights with its
    gradient. A query that may attend to nothing gives 0 before the output projection, where PyTorch's gives NaN.

    >>> layer = MultiheadAttention(8, 2, batch_first=True)
    >>> _ = layer.load_state_dict(nn.MultiheadAttention(8, 2).state_dict())
    >>> x = torch.ones(1, 3, 8)
    >>> out, weights = layer(x, x, x)
    >>> out.shape, weights.shape
    (torch.Size([1, 3, 8]), torch.Size([1, 3, 3]))
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """``out, weights``; weights is None without need_weights, else the mean over heads or each head's."""
        single = query.ndim == 2
        _check(self, query, key, value, key_padding_mask, attn_mask)
        if is_causal and attn_mask is None:
            remedy = "It is a hint that attn_mask is the causal mask."
            fail(ValueError, _NAME, "attn_mask", "be given with is_causal", "None", remedy)
        if single:
            query, key, value = query[None], key[None], value[None]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))

        q, k, v = autocast(*(self._heads(x) for x in self._project(query, key, value)))
        if key_padding_mask is None and is_causal and not need_weights:
            attn_mask = None  # then the hint stands for it
        else:
            is_causal = False
        mask, bias = _masks(attn_mask, key_padding_mask, q, k.shape[-2] - key.shape[1])
        options: dict[str, Any] = {"causal": is_causal, "offset": 0, "mask": mask, "bias": bias}
        if self.training and self.dropout > 0.0:
            options |= {"dropout": self.dropout, "seed": draw_seed(q)}
        out, lse = attention(q, k, v, **options, return_lse=True)
        out = functional.linear(out.transpose(1, 2).flatten(-2), self.out_proj.weight, self.out_proj.bias)
        weights = None
        if need_weights:
            weights = attention_weights(q, k, lse, **options)
            weights = weights.mean(dim=1) if average_attn_weights else weights
        if single:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The three input projections (N, tokens, E), with the extra keys and values that the module may add."""
        biases: Any = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        if self._qkv_same_embed_dim and query is key and key is value:
            q, k, v = functional.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
        else:
            if self._qkv_same_embed_dim:
                weights = self.in_proj_weight.chunk(3)
            else:
                weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            inputs = (query, key, value)
            q, k, v = (functional.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True))
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.expand(k.shape[0], 1, -1)], dim=1)
            v = torch.cat([v, self.bias_v.expand(v.shape[0], 1, -1)], dim=1)
        if self.add_zero_attn:
            k, v = (functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
        return q, k, v

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.num_heads, self.head_dim).transpose(1, 2)


def _check(
    module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, padding: Any, attn_mask: Any
) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(_NAME, name, x)
        if x.ndim != query.ndim or x.ndim not in (2, 3):
            fail(ValueError, _NAME, name, "have 3 axes, or 2 without a batch, like query", f"shape {tuple(x.shape)}")
    batch, tokens = (0, 1) if module.batch_first or query.ndim == 2 else (1, 0)
    tokens = 0 if query.ndim == 2 else tokens
    n = 1 if query.ndim == 2 else query.shape[batch]
    t, s = query.shape[tokens], key.shape[tokens]
    if padding is not None:
        shape = (s,) if query.ndim == 2 else (n, s)
        if tuple(padding.shape) != shape:
            fail(ValueError, _NAME, "key_padding_mask", f"have shape {shape}", f"shape {tuple(padding.shape)}")
    if attn_mask is not None and tuple(attn_mask.shape) not in ((t, s), (n * module.num_heads, t, s)):
        rule = f"have shape {(t, s)} or {(n * module.num_heads, t, s)}"
        fail(ValueError, _NAME, "attn_mask", rule, f"shape {tuple(attn_mask.shape)}")
    for name, x in (("key_padding_mask", padding), ("attn_mask", attn_mask)):
        if x is not None and x.dtype is not torch.bool and not x.is_floating_point():
            fail(TypeError, _NAME, name, "be boolean or floating", x.dtype)


def _masks(
    attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, extra: int
) -> tuple[Tensor | None, Tensor | None]:
    """Where to attend, and what to add: both (N or 1, Hq or 1, T or 1, S + extra); the extra keys are always seen."""
    n, heads = q.shape[:2]
    if attn_mask is not None and attn_mask.ndim == 3:
        attn_mask = attn_mask.view(n, heads, *attn_mask.shape[-2:])
    given = [x for x in (attn_mask, None if padding is None else padding[:, None, None, :]) if x is not None]
    mask: Tensor | None = None
    bias: Tensor | None = None
    for x in given:
        x = functional.pad(x, (0, extra)) if extra else x
        if x.dtype is torch.bool:
            mask = ~x if mask is None else mask & ~x
        else:
            x = x.to(q.dtype)
            bias = x if bias is None else bias + x
    return mask, bias
