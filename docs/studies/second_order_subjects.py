"""Public attention implementations, each as ``fn(q, k, v) -> out`` on ``(batch, heads, tokens, features)``.

A subject is what is installed, or lies on a ``--path``. Where a kernel needs a GPU, its package's own autograd code is
run around a stand-in kernel: dense attention that autograd cannot see into, as it cannot see into a compiled extension.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Subject:
    """An implementation: how its kernel ran, and what makes the function; ``causal`` where it is so by itself."""

    name: str
    how: str
    make: Callable[[], Attention]
    package: str
    module: str
    causal: bool = False
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def version(self) -> str:
        """The version that is installed, or that its source says; "source" where neither does."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            found = getattr(sys.modules.get(self.module), "__version__", "")
            return found if found[:1].isdigit() else "source"


# --- the stand-in kernel ---------------------------------------------------------------------------------------------


def dense_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """``out``, ``lse`` on (batch, tokens, heads, features); lse is (batch, heads, tokens)."""
    with torch.no_grad():
        s = scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
        lse = s.logsumexp(-1)
        return torch.einsum("bhqk,bkhd->bqhd", (s - lse[..., None]).exp(), v).contiguous(), lse


def dense_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, by the formulas of FlashAttention."""
    with torch.no_grad():
        p = (scale * torch.einsum("bqhd,bkhd->bhqk", q, k) - lse[..., None]).exp()
        dp = torch.einsum("bqhd,bkhd->bhqk", dout, v)
        ds = p * (dp - torch.einsum("bqhd,bqhd->bhq", dout, out)[..., None])
        dq, dk = (scale * torch.einsum(f"bhqk,{x}", ds, y) for x, y in (("bkhd->bqhd", k), ("bqhd->bkhd", q)))
        return dq, dk, torch.einsum("bhqk,bqhd->bkhd", p, dout)


def module_of(name: str, **functions: Any) -> types.ModuleType:
    """A module of that name, for a compiled one that is not here; what it is asked for beyond these is None."""
    module = types.ModuleType(name)
    module.__dict__.update({"__getattr__": lambda _: None, **functions})
    sys.modules[name] = module
    return module


def on_cpu(op: Any) -> None:
    """Let an operator that is registered for CUDA alone run its own Python code on the CPU too."""
    if hasattr(op, "register_kernel"):
        op.register_kernel("cpu")(op._init_fn)


def swapped(f: Callable[..., Tensor]) -> Attention:
    """A function on (batch, tokens, heads, features)."""
    return lambda q, k, v: f(*(x.transpose(1, 2).contiguous() for x in (q, k, v))).transpose(1, 2)


# --- those of torch, and attngrad ------------------------------------------------------------------------------------


def _sdpa(backend: str) -> Attention:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return sdpa(q, k, v)

    return attention


def _flex() -> Attention:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention  # type: ignore[return-value]


def _attngrad(name: str) -> Attention:
    module = importlib.import_module("attngrad.torch")
    return swapped(module.flash_attn_func) if name == "flash_attn_func" else module.attention


# --- packages that run here ------------------------------------------------------------------------------------------


def _memory_efficient() -> Attention:
    from memory_efficient_attention_pytorch.flash_attention import FlashAttentionFunction

    return lambda q, k, v: FlashAttentionFunction.apply(q, k, v, None, False, 32, 32)


def _ring() -> Attention:
    from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

    return swapped(lambda q, k, v: ring_flash_attn(q, k, v, bucket_size=32))


def _jvp_flash() -> Attention:
    from jvp_flash_attention.jvp_attention import attention

    return attention


def _fla() -> Attention:
    from fla.ops.attn.parallel import parallel_attn

    return swapped(parallel_attn)


# --- packages around a stand-in kernel -------------------------------------------------------------------------------


def _flash_attn_2() -> Attention:
    def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        out, lse = dense_forward(q, k, v, rest[3])
        return out, lse, torch.empty(0), torch.empty(2, dtype=torch.int64)

    def backward(*given: Any) -> tuple[Tensor, ...]:
        for place, x in zip(given[6:9], dense_backward(*given[:6], given[11]), strict=True):
            place.copy_(x)
        return *given[6:9], torch.zeros_like(given[5])

    module_of("flash_attn_2_cuda", fwd=forward, bwd=backward)
    interface = importlib.import_module("flash_attn.flash_attn_interface")
    on_cpu(interface._flash_attn_forward)
    on_cpu(interface._flash_attn_backward)
    return swapped(interface.flash_attn_func)


def _flash_attn_3() -> Attention:
    def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        out, lse = dense_forward(q, k, v, rest[20])
        return out, lse, torch.empty(0), torch.empty(0)

    def backward(*given: Any) -> tuple[Tensor, ...]:
        for place, x in zip(given[6:9], dense_backward(*given[:6], given[15]), strict=True):
            place.copy_(x)
        return (torch.zeros_like(given[5]),)

    module_of("flash_attn_3._C")
    interface = importlib.import_module("flash_attn_interface")
    interface.flash_attn_3_gpu = types.SimpleNamespace(fwd=forward, bwd=backward)
    on_cpu(interface._flash_attn_forward)
    on_cpu(interface._flash_attn_backward)
    return swapped(interface.flash_attn_func)


def _natten() -> Attention:
    def forward(out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, _: bool, scale: float, *rest: Any) -> None:
        found, rows = dense_forward(q, k, v, scale)
        out.copy_(found), lse.copy_(rows.transpose(1, 2))

    def backward(*given: Any) -> None:
        q, k, v, out, dout, lse = given[3:9]
        found = dense_backward(dout, q, k, v, out, lse.transpose(1, 2), given[10])
        for place, x in zip(given[:3], found, strict=True):
            place.copy_(x)

    module_of("natten.libnatten", fmha_forward=forward, fmha_backward=backward)
    wrappers = importlib.import_module("natten._libnatten.torch_wrappers")
    on_cpu(wrappers.fmha_forward_torch_op)
    on_cpu(wrappers.fmha_backward_torch_op)
    function = importlib.import_module("natten.backends.fmha").CutlassFmhaAutogradFn
    tiles = (64, 64)
    return swapped(
        lambda q, k, v: function.apply(q, k, v, False, q.shape[-1] ** -0.5, tiles, tiles, 1, False, None, None, 0, 0)[0]
    )


def _xformers() -> Attention:
    fmha = importlib.import_module("mslk.attention.fmha")

    def forward(inp: Any, op: Any) -> tuple[Tensor, Any]:
        out, lse = dense_forward(inp.query, inp.key, inp.value, inp.query.shape[-1] ** -0.5)
        return out, fmha.Context(lse=lse, out=out)

    def backward(ctx: Any, inp: Any, grad: Tensor, **_: Any) -> Any:
        scale = inp.query.shape[-1] ** -0.5
        return fmha.Gradients(*dense_backward(grad, inp.query, inp.key, inp.value, ctx.out, ctx.lse, scale))

    fmha._memory_efficient_attention_forward_requires_grad = forward
    fmha._memory_efficient_attention_backward = backward
    fmha._dispatch_bw = lambda *_, **__: None
    return swapped(fmha.memory_efficient_attention)


RAN, INTERPRETED, STAND_IN = "ran", "interpreted", "stand-in kernel"

SUBJECTS = (
    Subject("SDPA, math", RAN, lambda: _sdpa("MATH"), "torch", "torch"),
    Subject("SDPA, fused", RAN, lambda: _sdpa("FLASH_ATTENTION"), "torch", "torch"),
    Subject("flex_attention, eager", RAN, _flex, "torch", "torch"),
    Subject("attngrad.torch.attention", RAN, lambda: _attngrad("attention"), "attngrad", "attngrad"),
    Subject("attngrad.torch.flash_attn_func", RAN, lambda: _attngrad("flash_attn_func"), "attngrad", "attngrad"),
    Subject("memory-efficient-attention-pytorch, FlashAttentionFunction", RAN, _memory_efficient,
            "memory-efficient-attention-pytorch", "memory_efficient_attention_pytorch"),
    Subject("ring-attention-pytorch, ring_flash_attn", RAN, _ring, "ring-attention-pytorch", "ring_attention_pytorch"),
    Subject("jvp_flash_attention, JVPAttn", INTERPRETED, _jvp_flash, "jvp-flash-attention", "jvp_flash_attention"),
    Subject("flash-linear-attention, parallel_attn", INTERPRETED, _fla, "flash-linear-attention", "fla", causal=True),
    Subject("flash-attn 2, flash_attn_func", STAND_IN, _flash_attn_2, "flash-attn", "flash_attn"),
    Subject("flash-attn 3 (hopper), flash_attn_func", STAND_IN, _flash_attn_3, "flash-attn-3", "flash_attn_interface"),
    Subject("NATTEN, CutlassFmhaAutogradFn", STAND_IN, _natten, "natten", "natten"),
    Subject("NATTEN, the same without torch's custom operators", STAND_IN, _natten, "natten", "natten",
            environment={"NATTEN_DISABLE_TORCH_OPS": "1"}),
    Subject("xformers, memory_efficient_attention (of mslk)", STAND_IN, _xformers, "mslk", "mslk"),
)  # fmt: skip
