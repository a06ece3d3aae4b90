"""``flash_attn_func`` with the signature and the layout of the flash-attn package."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attngrad.core.arrays import kind_of
from attngrad.core.checks import check_flag, check_integer, check_real, fail
from attngrad.torch._attention import call
from attngrad.torch._passes import draw_seed
from attngrad.torch._tensors import check_tensor, wide_dtype

_NAME = "flash_attn_func"


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """``flash_attn.flash_attn_func``, by ``attention``: ``(batch, seqlen, nheads, headdim)``.

    As flash-attn's: ``causal`` and ``window_size`` align bottom-right, -1 leaves a side of the window open, ``softcap``
    0 means none, key heads divide query heads, and a query that may see nothing gives 0. Beyond flash-attn's: every
    derivative of ``attention``, float32 and float64, any headdim, dropout beside softcap, the gradient of
    ``alibi_slopes``.

    Args:
        q, k, v: ``(B, T, Hq, D)``, ``(B, S, Hk, D)``, ``(B, S, Hk, E)``; read where they lie.
        dropout_p: its seed is drawn from PyTorch's generator: ``torch.manual_seed`` repeats it.
        alibi_slopes: ``(Hq,)`` or ``(B, Hq)``; ``-slope * |i + S - T - j|`` is added to the score of query i and key j.
            With ``causal`` this takes S numbers per head; without, T x S.
        deterministic: every pass is, either way.
        return_attn_probs: return ``(out, lse, None)``.

    Returns:
        out ``(B, T, Hq, E)``, contiguous; with ``return_attn_probs=True`` also lse ``(B, Hq, T)``, -inf where a query
        sees nothing, and None in the place of flash-attn's ``S_dmask``: ``attention_weights`` has the weights.

    >>> x = torch.eye(2)[None, :, None]
    >>> flash_attn_func(x, x, x, softmax_scale=0.0, causal=True).squeeze()
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]])
    """
    _check_shapes(q, k, v)
    check_flag(_NAME, "deterministic", deterministic)
    want_lse = check_flag(_NAME, "return_attn_probs", return_attn_probs)
    if not (isinstance(window_size, (tuple, list)) and len(window_size) == 2):
        fail(TypeError, _NAME, "window_size", "be a pair (left, right)", kind_of(window_size))
    left, right = (None if check_integer(_NAME, "window_size", side) < 0 else side for side in window_size)
    cap = check_real(_NAME, "softcap", softcap)
    given: dict[str, Any] = {"scale": softmax_scale, "causal": causal, "return_lse": want_lse}
    if (left, right) != (None, None):
        given["window"] = left, right
    if cap > 0.0:
        given["softcap"] = cap
    if dropout_p != 0.0:
        given |= {"dropout": dropout_p, "seed": draw_seed(q)}
    shift = None
    if alibi_slopes is not None:
        given["bias"], shift = _alibi(q, k, alibi_slopes, causal or right == 0)
    found = call(_NAME, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), given)
    if not want_lse:
        return found.transpose(1, 2).contiguous()  # as the original's is: callers take .view of it
    out, lse = found
    return out.transpose(1, 2).contiguous(), lse if shift is None else lse + shift, None


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(_NAME, name, x)
        if x.ndim != 4:
            fail(ValueError, _NAME, name, "have 4 axes, (batch, seqlen, nheads, headdim)", f"shape {tuple(x.shape)}")
    (batch, _, heads, features), keys = q.shape, k.shape
    if keys[0] != batch or keys[3] != features or v.shape[:3] != keys[:3] or heads % max(keys[2], 1):
        rule = "be (B, T, Hq, D), (B, S, Hk, D) and (B, S, Hk, E), Hq a multiple of Hk"
        got = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        remedy = "Here tokens come before heads; attngrad.torch.attention takes (batch, heads, tokens, features)."
        fail(ValueError, _NAME, "q, k and v", rule, got, remedy)


def _alibi(q: Tensor, k: Tensor, slopes: Tensor, causal: bool) -> tuple[Tensor, Tensor | None]:
    """The bias of ALiBi, and what is added to lse.

    Where all keys that are seen lie before the query, ``-slope (i + S - T - j)`` is ``slope (j - S + 1)``, the same for
    all queries, plus ``slope (T - 1 - i)``, the same for all keys: the softmax ignores the second.
    """
    check_tensor(_NAME, "alibi_slopes", slopes, q)
    (batch, queries, heads, _), keys = q.shape, k.shape[1]
    if slopes.shape not in ((heads,), (batch, heads)) or not slopes.is_floating_point():
        got = f"shape {tuple(slopes.shape)}, {slopes.dtype}"
        fail(ValueError, _NAME, "alibi_slopes", f"be floating, of shape ({heads},) or ({batch}, {heads})", got)
    slopes = slopes.to(wide_dtype(q.dtype))[..., None]
    i, j = (torch.arange(n, device=q.device) for n in (queries, keys))
    if causal:
        return (slopes * (j - (keys - 1)))[..., None, :], slopes * (queries - 1 - i)
    return slopes[..., None] * -(i[:, None] + (keys - queries) - j).abs(), None
