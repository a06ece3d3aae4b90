"""Attention that people import, audited by name.

flash-attn and xformers want a GPU and are not installed: packages of their names stand in, with their signatures,
layouts and refusals (flash-attn 2.7, xformers 0.0.2x, as their sources have them) around attngrad's own attention.
"""

import importlib
import json
import warnings

import jax
import pytest
import torch
from click.testing import CliRunner
from torch.nn.attention.flex_attention import flex_attention

import attngrad.jax
from attngrad.auditor import audit
from attngrad.auditor.adapters import adapter_of
from attngrad.cli import main
from tiers import first

FLASH = """
import torch
import attngrad.torch

def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                    alibi_slopes=None, deterministic=False, return_attn_probs=False):
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if v.shape[-1] != q.shape[-1]:
        raise RuntimeError("v must have shape (batch_size, seqlen_k, num_heads_k, head_size)")
    wide = [x.float() for x in (q, k, v)]
    out = attngrad.torch.flash_attn_func(*wide, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return out.to(q.dtype)

def flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                              alibi_slopes=None, deterministic=False, return_attn_probs=False):
    return flash_attn_func(*qkv.unbind(2), dropout_p, softmax_scale, causal, window_size, softcap)

def flash_attn_kvpacked_func(q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                             alibi_slopes=None, deterministic=False, return_attn_probs=False):
    return flash_attn_func(q, *kv.unbind(2), dropout_p, softmax_scale, causal, window_size, softcap)

def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                           softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                           deterministic=False, return_attn_probs=False, block_table=None):
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert max_seqlen_q == int(cu_seqlens_q.diff().max()) and max_seqlen_k == int(cu_seqlens_k.diff().max())
    parts = [
        flash_attn_func(q[None, a:b], k[None, c:d], v[None, c:d], 0.0, softmax_scale, causal, window_size, softcap)
        for a, b, c, d in zip(cu_seqlens_q, cu_seqlens_q[1:], cu_seqlens_k, cu_seqlens_k[1:])
    ]
    return torch.cat(parts, 1)[0]
"""

XFORMERS = """
import torch

def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None):
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise NotImplementedError("No operator found for `memory_efficient_attention_forward` with inputs of float64")
    (b, t, h, d), s = query.shape, key.shape[1]
    if key.shape != (b, s, h, d):
        raise ValueError("Incompatible shapes for attention inputs")
    if attn_bias is not None and attn_bias.shape != (b, h, t, s):
        raise ValueError(f"Invalid shape for attention bias: {attn_bias.shape} (expected {(b, h, t, s)})")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    scores = q @ k.mT * (d**-0.5 if scale is None else scale) + (0 if attn_bias is None else attn_bias)
    return (torch.softmax(scores, -1) @ v).transpose(1, 2)
"""


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """A function of a stand-in: "flash_attn:flash_attn_func"."""
    for place, text in (("flash_attn", FLASH), ("xformers", ""), ("xformers/ops", XFORMERS)):
        (tmp_path / place).mkdir()
        (tmp_path / place / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = set(importlib.sys.modules)

    def load(name):
        module, _, function = name.partition(":")
        return getattr(importlib.import_module(module), function)

    yield load
    for name in set(importlib.sys.modules) - before:
        if name.split(".")[0] in ("flash_attn", "xformers"):
            del importlib.sys.modules[name]


@pytest.mark.parametrize("kind", first(2, ["", "varlen_", "qkvpacked_", "kvpacked_"]))
def test_flash_attn_is_called_by_its_signature(imported, kind):
    report = audit(imported(f"flash_attn:flash_attn_{kind}func"), device="cpu", effort="quick")
    assert report.ok, report
    assert report.settings["dtype"] == "float16"
    told = " ".join(report.tried)
    assert all(option in told for option in ("causal", "window", "scale")), report.tried
    assert {"out", "dq", "dk", "dv"} <= {s.name for s in report.stages}


def test_options_of_flash_attn_are_passed_by_its_names(imported):
    options = {"causal": True, "window": (3, None), "scale": 0.3, "softcap": 2.0}
    where = {"device": "cpu", "effort": "quick"}
    report = audit(imported("flash_attn:flash_attn_func"), options=options, dtype="bfloat16", **where)
    assert report.ok, report
    report = audit(imported("flash_attn:flash_attn_varlen_func"), options={"causal": True}, **where)
    assert report.ok, report  # with a corner in every sequence


def test_on_the_command_line_and_without_a_device_it_is_told_which_it_wants(imported):
    result = CliRunner().invoke(main, ["audit", "flash_attn:flash_attn_func", "--effort", "quick", "--json", "-"])
    if not torch.cuda.is_available():
        told = json.loads(result.stdout)["findings"][0]["text"]
        assert result.exit_code == 2
        assert "device must be a device of PyTorch that computes here; got 'cuda'" in told
    result = CliRunner().invoke(main, ["audit", "flash_attn:flash_attn_func", "--effort", "quick", "--device", "cpu"])
    assert result.exit_code == 0, result.output


def test_xformers_is_audited_in_float32_which_is_said(imported):
    function = imported("xformers.ops:memory_efficient_attention")
    report = audit(function, device="cpu", effort="quick")
    assert report.ok, report
    assert any("It does not take float64" in f.text and f.text.endswith("float32.") for f in report.findings)
    assert any("gqa" in (f.name or "") for f in report.findings if f.kind == "unsupported")
    biased = audit(function, options={"bias": True}, device="cpu", effort="quick")
    assert biased.ok, biased
    assert any(s.name == "dbias" for s in biased.stages)


def test_functions_of_torch_are_audited_by_name():
    report = audit(torch.nn.functional.scaled_dot_product_attention, effort="quick")
    assert report.ok, report
    assert "causal (top-left, as PyTorch's is_causal)" in report.tried
    assert any(text.startswith("mask (True = may attend") for text in report.tried), report.tried
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        report = audit(flex_attention, effort="quick")
    assert report.ok, report
    assert any(f.name == "a backward" for f in report.findings)  # which it has on no CPU


@pytest.mark.thorough
def test_the_function_of_jax_is_audited_in_float32_with_x64_off():
    function = jax.nn.dot_product_attention
    assert adapter_of(function) is not None
    report = audit(function, options={}, effort="quick")
    assert report.ok, report
    assert report.settings["dtype"] == "float32"
    # A query whose mask hides every key gets the mean of the values.
    assert audit(function, effort="quick").mistakes == ("masked-row-not-zero",)


def test_a_jax_function_in_float32_sees_float32_and_x64_off():
    seen = set()

    def function(q, k, v):
        seen.add((q.dtype.name, bool(jax.config.jax_enable_x64)))
        return jax.nn.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v

    report = attngrad.jax.audit(function, dtype="float32", effort="quick")
    assert report.ok, report
    assert seen == {("float32", False)}
    assert any("programs of JAX, compiled in" in text for text in report.tried)
