"""State dicts of torch.nn.MultiheadAttention come and go bit exact."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

import attngrad
from attngrad import MultiHeadAttention


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sizes", [{}, {"kdim": 6, "vdim": 10}], ids=["stacked", "apart"])
@pytest.mark.parametrize("bias", [True, False])
def test_torch_state_dicts_come_and_go_bit_exact(dtype, sizes, bias):
    module = torch.nn.MultiheadAttention(8, 2, bias=bias, dtype=dtype, **sizes)
    if bias:
        torch.nn.init.normal_(module.in_proj_bias)
    state = MultiHeadAttention.from_torch(module.state_dict(), 2).to_torch()
    assert {name: x.dtype for name, x in state.items()} == dict.fromkeys(module.state_dict(), dtype)
    assert all(torch.equal(state[name], x) for name, x in module.state_dict().items())
    torch.nn.MultiheadAttention(8, 2, bias=bias, dtype=dtype, **sizes).load_state_dict(state)


def test_from_torch_takes_numpy_arrays_and_copies():
    module = torch.nn.MultiheadAttention(8, 2)
    arrays = {name: x.numpy().copy() for name, x in module.state_dict().items()}
    layer = MultiHeadAttention.from_torch(arrays, 2)
    arrays["in_proj_weight"][...] = 0.0
    assert torch.equal(layer.to_torch()["in_proj_weight"], module.in_proj_weight)
    state = layer.to_torch()
    state["in_proj_weight"][...] = 0.0
    assert layer.params["w_q"].all()


def test_one_bias_without_the_other_is_kept_and_completed_for_torch():
    state = torch.nn.MultiheadAttention(8, 2).state_dict()
    del state["in_proj_bias"]
    layer = MultiHeadAttention.from_torch(state, 2)
    assert list(layer.params) == ["w_q", "w_k", "w_v", "w_o", "b_o"]
    assert torch.equal(layer.to_torch()["in_proj_bias"], torch.zeros(24))
    y = layer(np.ones((2, 3, 8), np.float32))
    layer.backward(y)
    assert list(layer.grads) == list(layer.params)


STATE = torch.nn.MultiheadAttention(8, 2).state_dict()
BAD_STATES: dict[str, tuple[Any, int, type[Exception], str]] = {
    "bias_k": ({**STATE, "bias_k": torch.ones(1, 1, 8)}, 2, ValueError, "be without bias_k and bias_v; got 'bias_k'"),
    "prefix": ({"attn.in_proj_weight": STATE["in_proj_weight"]}, 2, ValueError, "the key 'attn.in_proj_weight'"),
    "missing": ({"in_proj_weight": STATE["in_proj_weight"]}, 2, ValueError, "got no out_proj.weight"),
    "apart, missing": (
        {"q_proj_weight": torch.ones(8, 8), "out_proj.weight": torch.ones(8, 8)},
        2,
        ValueError,
        "no k_proj_weight",
    ),
    "shape": (
        {**STATE, "in_proj_weight": torch.ones(8, 8)},
        2,
        ValueError,
        "in_proj_weight must have 2 axes and 24 rows",
    ),
    "kind": ({**STATE, "in_proj_weight": [1.0]}, 2, TypeError, "in_proj_weight must be a torch.Tensor"),
    "dtype": ({**STATE, "in_proj_weight": torch.ones(24, 8).double()}, 2, TypeError, "all of them the same"),
    "heads": (STATE, 3, ValueError, "num_heads must divide the 8 columns of w_q; got 3"),
    "not a mapping": ([1], 2, TypeError, "state_dict must be a mapping"),
}


@pytest.mark.parametrize(("state", "heads", "error", "message"), BAD_STATES.values(), ids=BAD_STATES.keys())
def test_a_state_dict_that_does_not_fit_is_refused_by_name(state, heads, error, message):
    with pytest.raises(error) as caught:
        MultiHeadAttention.from_torch(state, heads)
    assert message in str(caught.value)
    assert str(caught.value).startswith("MultiHeadAttention.from_torch: ")


@pytest.mark.parametrize("config", [{"num_kv_heads": 1}, {"rope": 10.0}, {"d_head": 6}])
def test_to_torch_refuses_what_torch_cannot_hold(config):
    with pytest.raises(ValueError, match="to_torch: the layer must have num_kv_heads == num_heads, no rope"):
        MultiHeadAttention(8, 2, **config).to_torch()


def test_to_torch_without_torch_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"pip install 'attngrad\[torch\]'"):
        MultiHeadAttention(8, 2).to_torch()


def test_the_layer_imports_neither_torch_nor_safetensors():
    code = "import sys, attngrad.layers, attngrad.optim; print(*{'torch', 'safetensors', 'rich'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
    assert found.stdout.strip() == ""


def test_the_layer_is_public():
    assert attngrad.MultiHeadAttention is MultiHeadAttention
