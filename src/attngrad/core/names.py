"""Names that a module does not have: what people ask for, and what is here instead."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_VJP = "Gradients: out, pullback = attngrad.vjp(q, k, v); grads = pullback(dout)"
_HVP = "Second derivatives: attngrad.hvp((q, k, v), (q_dot, k_dot, v_dot), dout)"
_TORCH = "attngrad.torch.attention is differentiated by PyTorch itself: loss.backward(), torch.func.{}"
_JAX = "attngrad.jax.attention is differentiated by JAX itself: jax.{}"
_PASSES = {"grad": "grad", "vjp": "vjp", "jvp": "jvp", "hvp": "jvp of {}grad", "hessian": "hessian"}

_ELSEWHERE = {
    "attngrad": {
        **dict.fromkeys(("grad", "gradient", "gradients", "backward", "attention_backward"), _VJP),
        **dict.fromkeys(("hessian", "double_backward"), _HVP),
        "scaled_dot_product_attention": "attngrad.torch has it; attngrad.attention takes NumPy arrays",
        "sdpa": "attngrad.torch has it",
        "flash_attn_func": "attngrad.torch has it",
        "MultiheadAttention": "attngrad.MultiHeadAttention is the layer of NumPy, attngrad.torch has that of PyTorch",
        "dot_product_attention": "attngrad.jax has it; attngrad.attention takes NumPy arrays",
        "ring_attention": "attngrad.distributed has it",
        "explain": "attngrad.trace(q, k, v, dout) is what the command explains",
    },
    "attngrad.torch": {name: _TORCH.format(call.format("torch.func.")) for name, call in _PASSES.items()},
    "attngrad.jax": {name: _JAX.format(call.format("jax.")) for name, call in _PASSES.items()},
}


def missing(module: str, name: str, names: Iterable[str]) -> AttributeError:
    """The error of a module that has ``names``, and is asked for another: where to look, or the nearest name."""
    text = f"module {module!r} has no attribute {name!r}"
    if name.startswith("_"):
        return AttributeError(text)
    if hint := _ELSEWHERE.get(module, {}).get(name):
        return AttributeError(f"{text}. {hint}.")
    near = get_close_matches(name, names, 1, 0.75)
    return AttributeError(f"{text}. Did you mean {near[0]!r}?" if near else text)
