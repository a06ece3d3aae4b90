"""The models of ``in_model``: each is built twice, with PyTorch's attention and with ours."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import attngrad.torch

RUN: dict[str, Callable[..., Tensor]] = {
    "torch": functional.scaled_dot_product_attention,
    "attngrad": attngrad.torch.scaled_dot_product_attention,
}


class Attention(NamedTuple):
    """One attention of a model: a function, its inputs as the model lays them out, and a cotangent."""

    run: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    dout: Tensor


@dataclass(frozen=True)
class Model:
    """``build`` and ``attention`` take "torch" or "attngrad"."""

    name: str
    layers: int
    build: Callable[[str], nn.Module]
    inputs: Callable[[], Tensor]
    attention: Callable[[str], Attention]


class Layer(nn.Module):
    """Self-attention: one projection to q, k and v, whose parts are views of it, as in most models."""

    def __init__(self, d: int, heads: int, causal: bool, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.heads, self.causal, self.run = heads, causal, run

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d) to (B, T, d)."""
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        out = self.run(q, k, v, is_causal=self.causal)
        y: Tensor = self.out(out.transpose(1, 2).reshape(b, t, d))
        return y


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm and beside a residual connection."""

    def __init__(self, d: int, heads: int, causal: bool, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend = Layer(d, heads, causal, run)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
        self.norms = nn.ModuleList([nn.LayerNorm(d), nn.LayerNorm(d)])

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d) to (B, T, d)."""
        x = x + self.attend(self.norms[0](x))
        y: Tensor = x + self.mlp(self.norms[1](x))
        return y


def blocks(b: int, t: int, d: int, heads: int, causal: bool = False, layers: int = 2) -> Model:
    """Two blocks; or, with no layers, a layer of attention alone."""

    def build(name: str) -> nn.Module:
        if not layers:
            return Layer(d, heads, causal, RUN[name])
        return nn.Sequential(*(Block(d, heads, causal, RUN[name]) for _ in range(layers)))

    def attention(name: str) -> Attention:
        qkv = torch.randn(b, t, 3, heads, d // heads, requires_grad=True).permute(2, 0, 3, 1, 4)
        inputs = tuple(x.detach().requires_grad_() for x in qkv)
        dout = torch.randn(b, t, heads, d // heads).transpose(1, 2)
        return Attention(lambda *x: RUN[name](*x, is_causal=causal), inputs, dout)

    kind = f"{layers} blocks" if layers else "attention layer"
    name = f"{kind}, {b} x {t}, d {d}{', causal' if causal else ''}"
    return Model(name, layers or 1, build, lambda: torch.randn(b, t, d), attention)


def of_transformers(name: str, b: int, t: int, config: Callable[[], Any], causal: bool) -> Model:
    """A model of Transformers, with random weights: attn_implementation "sdpa" and "attngrad"."""
    names = {"torch": "sdpa", "attngrad": "attngrad"}
    found = config()

    class Outer(nn.Module):
        def __init__(self, implementation: str) -> None:
            super().__init__()
            from transformers import AutoModel

            import attngrad.transformers  # noqa: F401 - registers the name

            build: Any = AutoModel.from_config
            self.model = build(deepcopy(found), attn_implementation=implementation).eval()

        def forward(self, ids: Tensor) -> Tensor:
            y: Tensor = self.model(input_ids=ids, use_cache=False)[0]
            return y

    def attention(which: str) -> Attention:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        import attngrad.transformers  # noqa: F401 - registers the name

        heads, kv = found.num_attention_heads, getattr(found, "num_key_value_heads", found.num_attention_heads)
        width = found.hidden_size // heads
        module: Any = nn.Module()
        module.is_causal, module.num_key_value_groups, module.training = causal, heads // kv, False
        run = ALL_ATTENTION_FUNCTIONS[names[which]]
        inputs = tuple(torch.randn(b, t, n, width).transpose(1, 2).requires_grad_() for n in (heads, kv, kv))
        dout = torch.randn(b, t, heads, width)
        return Attention(lambda *x: run(module, *x, None, dropout=0.0, scaling=width**-0.5)[0], inputs, dout)

    layers = found.num_hidden_layers
    return Model(name, layers, lambda which: Outer(names[which]), lambda: torch.randint(100, (b, t)), attention)


def _gpt2() -> Any:
    from transformers import GPT2Config

    return GPT2Config(vocab_size=1000, n_positions=512, n_embd=384, n_layer=3, n_head=6, bos_token_id=0, eos_token_id=0)


def _bert() -> Any:
    from transformers import BertConfig

    return BertConfig(
        vocab_size=1000, hidden_size=384, num_hidden_layers=3, num_attention_heads=12, intermediate_size=1536
    )


def _llama() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=1000,
        hidden_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=1376,
    )


MODELS = (
    blocks(32, 10, 128, 4),
    blocks(4, 77, 512, 8, causal=True),
    blocks(2, 197, 384, 6),
    blocks(1, 512, 768, 12, causal=True),
    blocks(1, 1024, 512, 8, causal=True, layers=0),
    blocks(1, 2048, 256, 4, causal=True, layers=0),
    of_transformers("GPT-2, 2 x 256, d 384", 2, 256, _gpt2, causal=True),
    of_transformers("BERT, 8 x 128, d 384", 8, 128, _bert, causal=False),
    of_transformers("Llama, 1 x 512, d 512, grouped 8/2", 1, 512, _llama, causal=True),
)
