"""Bad input: the right error, with function, argument, rule and what came; and nothing is written to."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
import torch

import attngrad
from attngrad import Operands, Options
from attngrad._options import bind

RNG = np.random.default_rng(0)
Q = RNG.standard_normal((2, 4, 3, 8))
K = RNG.standard_normal((2, 2, 5, 8))
V = RNG.standard_normal((2, 2, 5, 6))
DOUT = RNG.standard_normal((2, 4, 3, 6))
for _x in (Q, K, V, DOUT):
    _x.flags.writeable = False  # any write is an error

BAD_QKV: dict[str, tuple[Any, Any, Any, type[Exception], str]] = {
    "list": (Q.tolist(), K, V, TypeError, r"q must be a numpy.ndarray; got list"),
    "torch tensor": (torch.ones(2, 4, 3, 8), K, V, TypeError, r"q must be .*got Tensor.*attngrad.reference"),
    "masked array": (np.ma.masked_array(Q), K, V, TypeError, r"q must be a plain numpy.ndarray; got MaskedArray"),
    "none": (Q, None, V, TypeError, r"k must be a numpy.ndarray; got None"),
    "integers": (np.ones((2, 4, 3, 8), int), K, V, TypeError, r"q must have dtype float64.*got int64.*astype"),
    "booleans": (Q > 0, K, V, TypeError, r"q must have dtype .*got bool"),
    "objects": (Q.astype(object), K, V, TypeError, r"q must have dtype .*got object"),
    "strings": (np.full((2, 4, 3, 8), "x"), K, V, TypeError, r"q must have dtype"),
    "longdouble": (Q.astype(np.longdouble), K, V, TypeError, r"got float128.*attngrad.reference"),
    "complex": (Q.astype(complex), K, V, TypeError, r"got complex128.*attngrad.reference"),
    "byte order": (Q.astype(">f8"), K, V, TypeError, r"got >f8.*newbyteorder"),
    "mixed k": (Q, K.astype(np.float32), V, TypeError, r"k must have the dtype of q, float64; got float32"),
    "mixed v": (Q, K, V.astype(np.float16), TypeError, r"v must have the dtype of q, float64; got float16"),
    "rank 1": (Q[0, 0, 0], K, V, ValueError, r"q must have at least 2 axes.*got shape \(8,\)"),
    "rank 0": (np.array(3.0), K, V, ValueError, r"q must have at least 2 axes"),
    "other rank": (Q, K[0], V, ValueError, r"k must have as many axes as q"),
    "other batch": (Q, K[:1], V[:1], ValueError, r"k must have .*leading axes \(2,\).*do not broadcast"),
    "heads": (
        Q,
        np.ones((2, 3, 5, 8)),
        V,
        ValueError,
        r"k must have 4 or a divisor of 4 heads \(axis -3\), like q; got 3\. Repeat or regroup the key heads\.",
    ),
    "no key heads": (Q, K[:, :0], V[:, :0], ValueError, r"k must have 4 or a divisor of 4 heads"),
    "heads of v": (Q, K, np.ones((2, 4, 5, 6)), ValueError, r"v must have 2 heads \(axis -3\), like k; got 4"),
    "features": (Q, K[..., :7], V, ValueError, r"k must have 8 features \(axis -1\), like q"),
    "tokens of v": (Q, K, V[..., :4, :], ValueError, r"v must have 5 tokens \(axis -2\), like k"),
}

BAD_OPTIONS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "unknown": ({"casual": True}, TypeError, r"unknown option 'casual'. Did you mean 'causal'\?"),
    "unknown and far": ({"zzz": 1}, TypeError, r"unknown option 'zzz'. Options are: scale, causal"),
    "scale of text": ({"scale": "1"}, TypeError, r"scale must be a real number; got '1' \(str\)"),
    "scale nan": ({"scale": float("nan")}, ValueError, r"scale must be finite; got nan"),
    "scale bool": ({"scale": True}, TypeError, r"scale must be a real number"),
    "causal 1": ({"causal": 1}, TypeError, r"causal must be True or False; got 1 \(int\)"),
    "window int": ({"window": 3}, TypeError, r"window must be a pair \(left, right\); got 3"),
    "window long": ({"window": (1, 2, 3)}, ValueError, r"window must be a pair .*got 3 values"),
    "window negative": ({"window": (-1, 0)}, ValueError, r"window must have sides >= 0; got \(-1, 0\). None on a side"),
    "window float": ({"window": (1.5, 0)}, TypeError, r"window must be an integer"),
    "offset float": ({"offset": 1.5}, TypeError, r"offset must be an integer or an integer array; got 1.5"),
    "offset huge": ({"offset": 2**70}, ValueError, r"offset must be within"),
    "offset far": ({"offset": np.array([0, 2**62])}, ValueError, r"offset must be within 2\*\*61 of zero"),
    "offset unsigned": ({"offset": np.array([2**64 - 1], np.uint64)}, ValueError, r"offset must be within"),
    "scale huge": ({"scale": 10**400}, ValueError, r"scale must be finite"),
    "offset floats": ({"offset": np.ones(2)}, TypeError, r"offset must have an integer dtype; got float64"),
    "offset shape": ({"offset": np.ones(3, int)}, ValueError, r"offset must broadcast to the leading axes.*\(2,\)"),
    "mask floats": ({"mask": np.ones((3, 5))}, TypeError, r"mask must be boolean; got dtype float64.*use bias"),
    "mask shape": ({"mask": np.ones((4, 5), bool)}, ValueError, r"mask must broadcast to .*\(2, 4, 3, 5\)"),
    "mask rank": ({"mask": np.ones((1, 1, 1, 3, 5), bool)}, ValueError, r"mask must broadcast to"),
    "mask list": ({"mask": [[True]]}, TypeError, r"mask must be a numpy.ndarray; got list"),
    "bias dtype": ({"bias": np.ones((3, 5), np.float32)}, TypeError, r"bias must have the dtype of q, float64; got"),
    "bias shape": ({"bias": np.ones((5, 3))}, ValueError, r"bias must broadcast to .*got shape \(5, 3\)"),
    "softcap zero": ({"softcap": 0.0}, ValueError, r"softcap must be positive; got 0.0. None means no cap"),
    "softcap inf": ({"softcap": np.inf}, ValueError, r"softcap must be finite"),
    "sinks shape": ({"sinks": np.ones(2)}, ValueError, r"sinks must have shape \(4,\), one logit a query head"),
    "sinks dtype": ({"sinks": np.ones(4, int)}, TypeError, r"sinks must have the dtype of q"),
    "dropout one": ({"dropout": 1.0, "seed": 0}, ValueError, r"dropout must be in \[0, 1\); got 1.0"),
    "dropout negative": ({"dropout": -0.1, "seed": 0}, ValueError, r"dropout must be in \[0, 1\)"),
    "dropout unseeded": ({"dropout": 0.1}, ValueError, r"seed must be given where dropout is; got None. Pass seed"),
    "seed float": ({"dropout": 0.1, "seed": 1.0}, TypeError, r"seed must be an integer"),
    "seed negative": ({"dropout": 0.1, "seed": -1}, ValueError, r"seed must be in \[0, 2\*\*64\)"),
    "segments one": ({"segments": np.zeros(5, int)}, TypeError, r"segments must be a pair .*Use \(ids, ids\)"),
    "segments long": ({"segments": (1, 2, 3)}, TypeError, r"segments\[0\] must be a numpy.ndarray"),
    "segments floats": ({"segments": (np.zeros(3), np.zeros(5, int))}, TypeError, r"q_segments must have an integer"),
    "segments shape": (
        {"segments": (np.zeros(3, int), np.zeros(4, int))},
        ValueError,
        r"k_segments must have 5 ids along axis -1, one a token; got shape \(4,\)",
    ),
    "segments batch": (
        {"segments": (np.zeros((3, 3), int), np.zeros(5, int))},
        ValueError,
        r"q_segments must broadcast to",
    ),
    "return_lse": ({"return_lse": "yes"}, TypeError, r"return_lse must be True or False"),
}


def call(function: str, q: Any, k: Any, v: Any, **options: Any) -> Any:
    """Call a public function by name with these inputs."""
    if function in ("jvp", "hvp"):
        extra = (DOUT,) if function == "hvp" else ()
        return getattr(attngrad, function)((q, k, v), (None, None, None), *extra, **options)
    return getattr(attngrad, function)(q, k, v, **options)


@pytest.mark.parametrize("function", ["attention", "vjp", "jvp", "hvp", "jacobian"])
@pytest.mark.parametrize(("q", "k", "v", "error", "message"), BAD_QKV.values(), ids=BAD_QKV)
def test_bad_inputs_name_function_argument_and_rule(function, q, k, v, error, message):
    with pytest.raises(error, match=message) as caught:
        call(function, q, k, v)
    assert str(caught.value).startswith(f"{function}: ")
    assert caught.type is error


@pytest.mark.parametrize("function", ["attention", "vjp", "jvp", "hvp", "jacobian"])
@pytest.mark.parametrize(("options", "error", "message"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_bad_options_name_function_option_and_rule(function, options, error, message):
    with pytest.raises(error, match=message) as caught:
        call(function, Q, K, V, **options)
    assert str(caught.value).startswith(f"{function}: ")
    assert caught.type is error


BAD_COTANGENTS: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "neither": (None, None, TypeError, r"dout must be an array where dlse is not given"),
    "list": (DOUT.tolist(), None, TypeError, r"dout must be a numpy.ndarray; got list"),
    "tensor": (torch.tensor(DOUT), None, TypeError, r"dout must be a numpy.ndarray; got Tensor"),
    "masked": (np.ma.masked_array(DOUT), None, TypeError, r"dout must be a plain numpy.ndarray"),
    "dtype": (DOUT.astype(np.float32), None, TypeError, r"dout must have dtype float64; got float32"),
    "shape": (DOUT[:1], None, ValueError, r"dout must have the shape of out, \(2, 4, 3, 6\); got shape \(1, 4, 3, 6\)"),
    "dlse shape": (DOUT, DOUT, ValueError, r"dlse must have the shape of lse, \(2, 4, 3\)"),
    "dlse dtype": (DOUT, np.ones((2, 4, 3), np.float32), TypeError, r"dlse must have dtype float64"),
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
        with pytest.raises(TypeError, match=rf"{function}: q_dot must have dtype float64; got float32"):
            f((Q, K, V), (Q.astype(np.float32), None, None), *extra)
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


def test_the_small_functions_check_their_arguments():
    with pytest.raises(TypeError, match="softmax_jacobian: scores must have dtype"):
        attngrad.softmax_jacobian(np.ones(3, int))
    with pytest.raises(TypeError, match=r"softmax_jacobian: scores must be a numpy.ndarray"):
        attngrad.softmax_jacobian([1.0])
    with pytest.raises(ValueError, match="softmax_jacobian: scores must have at least 1 axis"):
        attngrad.softmax_jacobian(np.ones(()))
    with pytest.raises(ValueError, match=r"dropout_mask: rate must be in \[0, 1\)"):
        attngrad.dropout_mask((2, 3), 1.5, 0)
    with pytest.raises(ValueError, match="dropout_mask: shape must be"):
        attngrad.dropout_mask((3,), 0.5, 0)
    with pytest.raises(TypeError, match="dropout_mask: shape must be"):
        attngrad.dropout_mask("ab", 0.5, 0)
    with pytest.raises(ValueError, match="segments_from_lengths: lengths must be >= 0; got -1"):
        attngrad.segments_from_lengths([2, -1])
    with pytest.raises(TypeError, match="segments_from_lengths: lengths must be integers"):
        attngrad.segments_from_lengths([1.5])
    with pytest.raises(ValueError, match="segments_from_lengths: lengths must be one flat list"):
        attngrad.segments_from_lengths([[1], [2, 3]])
    with pytest.raises(TypeError, match="segments_from_lengths: lengths must be integers; got None"):
        attngrad.segments_from_lengths(None)
    with pytest.raises(TypeError, match="softmax_jacobian: scores must have a real or complex floating dtype"):
        attngrad.reference.softmax_jacobian(np.ones(3, int))


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
