"""Models of Diffusers, tiny and random: with attngrad's attention and with PyTorch's, values and derivatives."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

import diffusers
import pytest
import torch
from diffusers.models.attention_processor import Attention, AttnProcessor, AttnProcessor2_0
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import attngrad.diffusers as bridge
from attngrad import torch as attngrad_torch
from attngrad.torch import _attention


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unet():
    blocks = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "block_out_channels": (16, 32),
    }
    size = {"sample_size": 8, "layers_per_block": 1, "norm_num_groups": 8, "cross_attention_dim": 12}
    model = diffusers.UNet2DConditionModel(**blocks, **size, attention_head_dim=4)
    text, mask = draw(2, 5, 12, seed=1), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    return model, lambda x, t: model(x, t, text, encoder_attention_mask=mask).sample


def dit():
    size = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8, "sample_size": 8, "in_channels": 4}
    model = diffusers.DiTTransformer2DModel(**size, num_embeds_ada_norm=10)
    return model, lambda x, t: model(x, t, torch.tensor([3, 4])).sample


def flux():
    size = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2}
    width = {"in_channels": 4, "joint_attention_dim": 12, "pooled_projection_dim": 6, "axes_dims_rope": (4, 4, 8)}
    model = diffusers.FluxTransformer2DModel(patch_size=1, **size, **width)
    text, pooled, places = draw(2, 5, 12, seed=1), draw(2, 6, seed=2), torch.arange(64.0)[:, None].expand(64, 3)

    def function(x, t):
        tokens = x.flatten(2).transpose(1, 2)
        return model(tokens, text, pooled, t / 1000, places, places[:5]).sample

    return model, function


MODELS = {"unet": unet, "dit": dit, "flux": flux}
X, T = draw(2, 4, 8, 8, seed=5), torch.tensor([20.0, 700.0], dtype=torch.float64)


def build(name):
    """A model without biases of zero and gates of zero: as initialised, some let attention through to nothing."""
    torch.manual_seed(0)
    model, function = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.double().eval(), function


def derivatives(model, function):
    """The output; along a direction of x and t; the gradients of all parameters; a second derivative."""
    tangents = draw(*X.shape, seed=6), torch.ones_like(T)
    out, out_dot = torch.func.jvp(function, (X, T), tangents)
    parameters = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(
        (out * draw(*out.shape, seed=7)).sum(), parameters, create_graph=True, allow_unused=True
    )
    norm = sum((g * g).sum() for g in grads if g is not None)
    second = torch.autograd.grad(norm, parameters, allow_unused=True)
    return [x.detach() for x in (out, out_dot, *grads, *second) if x is not None]


@pytest.mark.parametrize("name", MODELS)
def test_values_and_derivatives_are_those_of_the_default_processors(name, monkeypatch):
    model, function = build(name)
    with sdpa_kernel(SDPBackend.MATH):  # the one of PyTorch's that has them
        expected = derivatives(model, function)
    calls, ours = [], bridge.scaled_dot_product_attention
    monkeypatch.setattr(bridge, "scaled_dot_product_attention", lambda *x, **o: calls.append(1) or ours(*x, **o))
    bridge.enable(model)
    found = derivatives(model, function)
    assert len(calls) == sum(isinstance(m.get_processor(), bridge._Routed) for m in bridge._layers("", model)) > 0
    assert len(found) == len(expected) > 20
    largest = max(float(b.abs().max()) for b in expected)  # the gradient of a key's bias is rounding alone
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() <= 1e-9 * float(b.abs().max()) + 1e-12 * largest


@pytest.mark.parametrize("name", MODELS)
def test_pytorchs_attention_has_no_forward_mode_and_ours_has(name):
    model, function = build(name)
    tangents = torch.ones_like(X), torch.ones_like(T)
    with pytest.raises(NotImplementedError, match="forward AD"):
        torch.func.jvp(function, (X, T), tangents)
    bridge.enable(model)
    assert torch.func.jvp(function, (X, T), tangents)[1].abs().max() > 0
    bridge.disable(model)
    with pytest.raises(NotImplementedError, match="forward AD"):
        torch.func.jvp(function, (X, T), tangents)


def test_enable_keeps_what_the_processors_are_and_disable_gives_them_back():
    model, _ = build("unet")
    shared = AttnProcessor2_0()
    model.set_attn_processor(shared)
    state = model.state_dict().keys()
    for _ in range(2):  # a second time is harmless
        bridge.enable(model)
    processors = set(model.attn_processors.values())
    assert all(isinstance(p, AttnProcessor2_0) and type(p).__name__ == "AttnProcessor2_0" for p in processors)
    assert all(type(p).__bases__[0] is AttnProcessor2_0 for p in processors)
    assert type(shared) is AttnProcessor2_0  # another model may have it
    assert model.state_dict().keys() == state
    for _ in range(2):
        bridge.disable(model)
    assert {type(p) for p in model.attn_processors.values()} == {AttnProcessor2_0}
    model.set_default_attn_processor()


def test_only_the_model_is_ours_and_only_while_its_layers_run():
    model, function = build("dit")
    _, other_function = build("dit")
    bridge.enable(model)
    torch.func.jvp(function, (X, T), (X, T))
    with pytest.raises(NotImplementedError, match="forward AD"):
        torch.func.jvp(other_function, (X, T), (X, T))
    with attngrad_torch.sdpa():
        torch.func.jvp(other_function, (X, T), (X, T))
        torch.func.jvp(function, (X, T), (X, T))
    assert torch.nn.functional.scaled_dot_product_attention is _attention.TORCHS


def test_checkpointing_and_threads_run_it_again():
    model, function = build("unet")
    bridge.enable(model)
    grads = []
    x = X.clone().requires_grad_()
    for run in (function, lambda *inputs: checkpoint(function, *inputs, use_reentrant=False)):
        out = run(x, T)
        # A backward of PyTorch's own could not be differentiated again.
        thread = threading.Thread(
            target=lambda out=out: grads.append(torch.autograd.grad(out.square().sum(), x, create_graph=True)[0])
        )
        thread.start()
        thread.join()
    torch.testing.assert_close(*grads)
    assert torch.autograd.grad(grads[1].square().sum(), x)[0].abs().max() > 0


def test_a_processor_that_does_not_call_pytorchs_attention_stays_what_it_was():
    layer, x = Attention(8, heads=2, dim_head=4, processor=AttnProcessor()).double(), draw(1, 3, 8)
    expected = layer(x)
    bridge.enable(layer)
    assert torch.equal(layer(x), expected)


def test_what_a_layer_hands_to_its_processor_by_name_still_arrives():
    class Scaling(AttnProcessor2_0):
        def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, factor=1.0):
            return factor * super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask)

    layer, x = Attention(8, heads=2, dim_head=4, processor=Scaling()).double(), draw(1, 3, 8)
    bridge.enable(layer)
    torch.testing.assert_close(layer(x, factor=3.0), 3.0 * layer(x))


def test_errors_say_what_to_do():
    with pytest.raises(ValueError, match=r"enable: model must have attention layers .*attngrad.torch.sdpa"):
        bridge.enable(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"disable: model must be a torch.nn.Module; .*pipeline.unet"):
        bridge.disable(object())


def test_compiled_it_is_the_same():
    model, function = build("dit")
    with torch.no_grad():
        expected = function(X, T)
        bridge.enable(model)
        found = torch.compile(function, backend="eager")(X, T)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def run(*command):
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)  # noqa: S603


@pytest.mark.parametrize("missing", ["torch", "diffusers"])
def test_a_missing_package_gives_the_name_of_the_extra(missing):
    found = run("-c", f"import sys\nsys.modules[{missing!r}] = None\nimport attngrad\nattngrad.diffusers")
    assert found.returncode == 1
    assert "ImportError: attngrad.diffusers: " in found.stderr
    assert "pip install 'attngrad[diffusers]'" in found.stderr


def test_the_example_learns_and_draws_in_one_step():
    found = run(Path(__file__).parents[2] / "examples" / "diffusers_jvp.py")
    assert found.returncode == 0, found.stderr
    assert "without attngrad: Trying to use forward AD" in found.stdout
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", found.stdout)]
    assert losses[-1] < 0.6 * losses[0]
    drawn, noise = map(float, re.search(r"data ([\d.]+), noise's ([\d.]+)", found.stdout).groups())
    assert drawn < 0.75 * noise
