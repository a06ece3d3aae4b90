"""Options, operands, and the checks of cotangents and tangents; bad inputs are tabled in tests/robustness."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
import torch

import attngrad
from attngrad import Operands, Options
from attngrad.core.binding import bind

RNG = np.random.default_rng(0)
Q = RNG.standard_normal((2, 4, 3, 8))
K = RNG.standard_normal((2, 2, 5, 8))
V = RNG.standard_normal((2, 2, 5, 6))
DOUT = RNG.standard_normal((2, 4, 3, 6))
for _x in (Q, K, V, DOUT):
    _x.flags.writeable = False  # any write is an error

BAD_COTANGENTS: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "neither": (None, None, TypeError, r"dout must be an array where dlse is not given"),
    "ragged": ([[1.0], []], None, ValueError, r"dout must be a rectangular array; got a ragged list"),
    "tensor": (torch.tensor(DOUT), None, TypeError, r"dout must be a numpy.ndarray; got Tensor"),
    "masked": (np.ma.masked_array(DOUT), None, TypeError, r"dout must be a plain numpy.ndarray"),
    "dtype": (DOUT.astype(np.longdouble), None, TypeError, r"dout must have dtype float64; got .*: cast it"),
    "shape": (DOUT[:1], None, ValueError, r"dout must have the shape of out, \(2, 4, 3, 6\); got shape \(1, 4, 3, 6\)"),
    "dlse shape": (DOUT, DOUT, ValueError, r"dlse must have the shape of lse, \(2, 4, 3\)"),
    "dlse dtype": (DOUT, np.ones((2, 4, 3), bool), TypeError, r"dlse must have dtype float64; got bool"),
}


@pytest.mark.parametrize(("dout", "dlse", "error", "message"), BAD_COTANGENTS.values(), ids=BAD_COTANGENTS)
def test_bad_cotangents_name_the_cotangent(dout, dlse, error, message):
    _, pullback = attngrad.vjp(Q, K, V)
    with pytest.raises(error, match="pullback: " + message):
        pullback(dout, dlse)
    with pytest.raises(error, match="hvp: " + message):
        attngrad.hvp((Q, K, V), (None, None, None), dout, dlse=dlse)


def test_bad_tangents_name_the_tangent():
    for function, extra in (("jvp", ()), ("hvp", (DOUT,))):
        f = getattr(attngrad, function)
        with pytest.raises(ValueError, match=rf"{function}: k_dot must have the shape of k"):
            f((Q, K, V), (None, Q, None), *extra)
        with pytest.raises(TypeError, match=rf"{function}: q_dot must have dtype float64; got complex128"):
            f((Q, K, V), (Q.astype(complex), None, None), *extra)
        with pytest.raises(TypeError, match=r"tangents must be \(q_dot, k_dot, v_dot\)"):
            f((Q, K, V), Q, *extra)
        with pytest.raises(ValueError, match=r"tangents must be .*got 2 values"):
            f((Q, K, V), (Q, K), *extra)
        with pytest.raises(ValueError, match=r"primals must be a tuple \(q, k, v\); got 2 values"):
            f((Q, K), (None, None, None), *extra)
        with pytest.raises(TypeError, match=r"primals must be a tuple \(q, k, v\); got ndarray"):
            f(Q, (None, None, None), *extra)
        with pytest.raises(ValueError, match=r"bias_dot was given without bias. Pass bias= as well"):
            f((Q, K, V), (None, None, None), *extra, bias_dot=np.ones((3, 5)))
    with pytest.raises(ValueError, match=r"hvp: dout_dot must have the shape of out"):
        attngrad.hvp((Q, K, V), (None, None, None), DOUT, DOUT[:1])


def test_what_a_function_has_no_meaning_for_is_refused():
    with pytest.raises(ValueError, match=r"hvp: return_lse must be False"):
        attngrad.hvp((Q, K, V), (None, None, None), DOUT, return_lse=True)
    with pytest.raises(ValueError, match=r"jacobian: wrt must be one of q, k, v, bias, sinks; got 'w'"):
        attngrad.jacobian(Q, K, V, wrt="w")
    with pytest.raises(ValueError, match=r"jacobian: wrt='bias', but bias was not given"):
        attngrad.jacobian(Q, K, V, wrt="bias")


def test_a_wider_bias_or_sinks_is_refused_too():
    q, k, v = (x.astype(np.float32) for x in (Q, K, V))
    for name, x in (("bias", np.zeros((3, 5))), ("sinks", np.zeros(4))):
        for module in (attngrad, attngrad.reference):
            with pytest.raises(TypeError, match=f"{name} must have the dtype of q, float32; got float64"):
                module.attention(q, k, v, **{name: x})


def test_the_reference_takes_what_the_kernels_do_not():
    wide = [x.astype(np.longdouble) for x in (Q, K, V)]
    assert attngrad.reference.attention(*wide).dtype == np.longdouble
    with pytest.raises(TypeError, match="attention: q must have a real or complex floating dtype; got int64"):
        attngrad.reference.attention(Q.astype(int), K, V)


def test_options_are_frozen_hashable_and_resolved():
    x, o, return_lse = bind("test", Q, K, V, {"causal": True, "window": [2, None]})
    assert o == Options(scale=1 / np.sqrt(8.0), causal=True, window=(2, None))
    assert hash(o) == hash(Options(scale=1 / np.sqrt(8.0), causal=True, window=(2, None)))
    assert x.offset == 2
    assert not return_lse
    assert isinstance(x, Operands)
    with pytest.raises(FrozenInstanceError):
        o.causal = False
    with pytest.raises(AttributeError):
        x.q = Q


def test_operands_know_their_shapes():
    x, _, _ = bind("test", Q, K, V, {})
    assert x.heads == 4
    assert x.group == 2
    assert x.scores_shape == (2, 4, 3, 5)
    assert x.out_shape == (2, 4, 3, 6)


def test_numpy_scalars_are_taken_as_numbers():
    options = {"scale": np.float32(0.5), "causal": np.True_, "window": (np.int64(1), None), "offset": np.int8(1)}
    plain = {"scale": 0.5, "causal": True, "window": (1, None), "offset": 1}
    assert np.array_equal(attngrad.attention(Q, K, V, **options), attngrad.attention(Q, K, V, **plain))
