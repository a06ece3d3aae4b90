"""What a newcomer writes first, and gets wrong: the error says what to write instead."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from typing import Any

import numpy as np
import pytest

import attngrad
from attngrad import Gradients, reference
from attngrad.core.operands import Tangents
from attngrad.core.options import ELSEWHERE, OPTION_NAMES

X = np.eye(3)
GRADS = attngrad.vjp(X, X, X)[1](X)

# --- fields ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("dq", "q"),
        ("dK", "k"),
        ("grad_v", "v"),
        ("v_grad", "v"),
        ("dbias", "bias"),
        ("dq_dot", "q"),
        ("sinks_dot", "sinks"),
    ],
)
def test_a_gradient_by_another_name_is_told_its_field(name: str, field: str):
    for record in (GRADS, Tangents(q=X)):
        with pytest.raises(AttributeError, match=rf"has no field '{name}'\. Use \.{field}\. Fields are q, k, v, bias"):
            getattr(record, name)


def test_a_name_like_no_field_has_no_hint_but_the_fields():
    with pytest.raises(AttributeError, match=r"^Gradients has no field 'loss'\. Fields are q, k, v, bias, sinks\.$"):
        _ = GRADS.loss


def test_gradients_stay_tuples_that_are_copied_and_pickled():
    assert not hasattr(GRADS, "dq")
    assert "dq" not in dir(GRADS)
    assert getattr(GRADS, "dq", None) is None
    for other in (copy.copy(GRADS), copy.deepcopy(GRADS), pickle.loads(pickle.dumps(GRADS))):  # noqa: S301
        assert type(other) is Gradients
        assert all(np.array_equal(a, b) for a, b in zip(other, GRADS, strict=True) if a is not None)


# --- calls -----------------------------------------------------------------------------------------------------------

JVP = r"Call jvp\(\(q, k, v\), \(q_dot, k_dot, v_dot\)\)\.$"
HVP = r"Call hvp\(\(q, k, v\), \(q_dot, k_dot, v_dot\), dout\)\.$"
modules = pytest.mark.parametrize("module", [attngrad, reference], ids=["kernels", "reference"])


@modules
@pytest.mark.parametrize(
    "arguments", [(), (X,), (X, X), (X, X, X), (X,) * 6, ((X,) * 3, X), ((X,) * 3, X, X, X)], ids=str
)
def test_jvp_says_how_it_is_called(module: Any, arguments: tuple[Any, ...]):
    with pytest.raises(TypeError, match="^jvp: .*" + JVP):
        module.jvp(*arguments)


@modules
@pytest.mark.parametrize(
    "arguments", [(), (X, X, X), (X, X, X, X), (X,) * 7, ((X,) * 3, (X,) * 3), ((X,) * 3, X, X)], ids=str
)
def test_hvp_says_how_it_is_called(module: Any, arguments: tuple[Any, ...]):
    with pytest.raises(TypeError, match="^hvp: .*" + HVP):
        module.hvp(*arguments)


@modules
def test_inputs_by_name_and_two_of_three_are_told_too(module: Any):
    with pytest.raises(TypeError, match=r"^jvp: missing 2 required positional arguments.*" + JVP):
        module.jvp(q=X, k=X, v=X)
    with pytest.raises(ValueError, match=r"^jvp: primals must be a tuple \(q, k, v\); got 2 values\. " + JVP):
        module.jvp((X, X), (X, X))


@modules
def test_an_error_of_the_arguments_themselves_is_not_taken_for_one_of_the_call(module: Any):
    with pytest.raises(TypeError, match=r"^jvp: unknown option 'casual'\. Did you mean 'causal'\?$"):
        module.jvp((X, X, X), (X, X, X), casual=True)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_other_libraries_call_an_option_is_told(name: str):
    ours, told = ELSEWHERE[name]
    assert ours is None or (ours in OPTION_NAMES and f"{ours}=" in told)
    with pytest.raises(TypeError, match=rf"^attention: unknown option '{name}'\. {re.escape(told)}$"):
        attngrad.attention(X, X, X, **{name: None})


def test_what_is_told_of_masks_and_packed_sequences_is_what_they_mean_elsewhere():
    q, k, v = np.random.default_rng(0).standard_normal(
        (3, 3, 2, 3, 4)
    )  # as many sequences as tokens: nothing else fits
    padded = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1]])
    hints = {
        "attention_mask": padded.astype(bool)[:, None, None],
        "key_padding_mask": ~(padded == 0)[:, None, None],
    }
    for name, mask in hints.items():
        assert (f"{name}.astype(bool)" if name == "attention_mask" else f"~{name}") in ELSEWHERE[name][1]
        out = attngrad.attention(q, k, v, mask=mask)
        for i, n in enumerate([2, 1, 3]):
            assert np.allclose(out[i], attngrad.attention(q[i], k[i, :, :n], v[i, :, :n]))
    ids = attngrad.segments_from_lengths([2, 1])
    packed = attngrad.attention(q[0], k[0], v[0], segments=(ids, ids))
    assert np.allclose(packed[:, :2], attngrad.attention(q[0, :, :2], k[0, :, :2], v[0, :, :2]))


def test_a_function_with_names_of_its_own_is_not_told_those_of_attention():
    bridge = pytest.importorskip("attngrad.torch")
    x = pytest.importorskip("torch").eye(3)
    with pytest.raises(TypeError, match=r"unknown option 'softmax_scale'\. Use scale=\.$"):
        bridge.scaled_dot_product_attention(x, x, x, softmax_scale=1.0)
    with pytest.raises(TypeError, match=r"unknown option 'dropout_rate'\. Did you mean 'dropout_p'\?$"):
        bridge.scaled_dot_product_attention(x, x, x, dropout_rate=0.1)


def test_names_of_other_libraries_are_no_options_here():
    assert not ELSEWHERE.keys() & set(OPTION_NAMES)


@modules
def test_the_signatures_are_those_that_are_written(module: Any):
    assert [*inspect.signature(module.jvp).parameters] == ["primals", "tangents", "bias_dot", "sinks_dot", "options"]
    assert [*inspect.signature(module.hvp).parameters][:4] == ["primals", "tangents", "dout", "dout_dot"]
    assert module.jvp.__name__ == "jvp"
    assert module.jvp.__module__ == ("attngrad.functional" if module is attngrad else "attngrad.reference.functions")


# --- modules ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("grad", r"out, pullback = attngrad\.vjp\(q, k, v\)"),
        ("scaled_dot_product_attention", r"attngrad\.torch has it"),
        ("MultiheadAttention", r"attngrad\.MultiHeadAttention is the layer of NumPy"),
        ("atention", r"Did you mean 'attention'\?$"),
        ("loss", r"has no attribute 'loss'$"),
        ("__absent__", r"has no attribute '__absent__'$"),
    ],
)
def test_a_name_that_is_elsewhere_is_told_where(name: str, hint: str):
    with pytest.raises(AttributeError, match=hint):
        getattr(attngrad, name)


@pytest.mark.parametrize(("framework", "call"), [("torch", "torch.func.jvp"), ("jax", "jax.jvp")])
def test_the_bridges_say_who_differentiates(framework: str, call: str):
    bridge = pytest.importorskip(f"attngrad.{framework}")
    with pytest.raises(AttributeError, match=rf"attngrad\.{framework}\.attention is differentiated by .*{call}\.$"):
        _ = bridge.jvp
    with pytest.raises(AttributeError, match=f"{call} of .*grad"):
        _ = bridge.hvp
    with pytest.raises(AttributeError, match=r"Did you mean 'attention'\?$"):
        _ = bridge.attenton


# --- frameworks ------------------------------------------------------------------------------------------------------


def test_a_number_that_jit_traces_is_told_to_be_static():
    jax = pytest.importorskip("jax")
    aj = pytest.importorskip("attngrad.jax")
    x = jax.numpy.eye(3)
    for name, value in (("scale", 0.5), ("causal", True), ("softcap", 2.0)):
        with pytest.raises(TypeError, match=rf"attention: {name} must be a number that is known .*static_argnames"):
            jax.jit(lambda y, name=name: aj.attention(x, x, x, **{name: y}))(value)
    found = jax.jit(lambda scale: aj.attention(x, x, x, scale=scale), static_argnames="scale")(scale=0.5)  # as it says
    assert np.allclose(found, aj.attention(x, x, x, scale=0.5))
