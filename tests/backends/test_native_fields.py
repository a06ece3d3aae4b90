"""The options of a native call by name: what differs from the defaults, and nothing else."""

import math

import numpy as np
import pytest
import torch

import attngrad
from attngrad import _native
from attngrad.core.philox import keep_mask

Q, K, V = (np.random.default_rng(n).standard_normal((1, 2, 5, 8)).astype(np.float32) for n in range(3))


def forward(fields, q=Q, k=K, v=V):
    out, lse, row_max, inv_row_sum = np.empty_like(v), *(np.empty(q.shape[:-1], np.float32) for _ in range(3))
    _native.Call(q, k, v, fields).forward(out, None, lse, row_max, inv_row_sum)
    return out, lse, row_max, inv_row_sum


def test_tensors_are_read_as_they_are():
    assert _native.set_exchange(torch.Tensor.__dlpack_c_exchange_api__)
    fields = {"scale": 0.5, "softcap": 2.0, "causal": True}
    expected, lse, row_max, inv_row_sum = forward(fields)
    q, k, v = map(torch.from_numpy, (Q, K, V))
    out, out_lse = torch.empty(V.shape), torch.empty(V.shape[:-1])
    saved = _native.forward_of_tensors(q, k, v, fields, out, out_lse, True, 0)
    results = out.numpy(), out_lse.numpy(), *_native.residuals_of(saved)
    for x, y in zip(results, (expected, lse, expected, row_max, inv_row_sum), strict=True):
        assert np.array_equal(x, y)


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v, out: (q.double(), k, v, out),
        lambda q, k, v, out: (q.int(), k, v, out),
        lambda q, k, v, out: (q[0, 0], k[0, 0], v[0, 0], out[0, 0]),
        lambda q, k, v, out: (q[None], k[None], v[None], out[None]),
        lambda q, k, v, out: (q[:, :, :0], k, v, out[:, :, :0]),
        lambda q, k, v, out: (q.mT.contiguous().mT, k, v, out),
        lambda q, k, v, out: (q, k[..., :4], v, out),
        lambda q, k, v, out: (q, k, v[:, :, :3], out),
        lambda q, k, v, out: (q, k, v, out[:, :, :3]),
        lambda q, k, v, out: (q, k, v, out.mT.contiguous().mT),
        lambda q, k, v, out: (q, k, v, out.double()),
        lambda q, k, v, out: (q.to("meta"), k, v, out),
        lambda q, k, v, out: (q.to_sparse(), k, v, out),
        lambda q, k, v, out: (q, k, v.numpy(), out),
    ],
)
def test_tensors_that_do_not_fit_are_left_alone(change):
    assert _native.set_exchange(torch.Tensor.__dlpack_c_exchange_api__)
    tensors = change(*map(torch.from_numpy, (Q, K, V)), torch.full(V.shape, 7.0))
    assert _native.forward_of_tensors(*tensors[:3], {}, tensors[3], None, False, 0) is False
    assert bool((tensors[3] == 7.0).all())


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"tilt": 1.0}, TypeError, "unknown field 'tilt'."),
        ({"scale": "1"}, TypeError, "field 'scale' must be a number in range; got str."),
        ({"causal": 1}, TypeError, "field 'causal' must be True or False; got int."),
        ({"window": 3}, TypeError, "field 'window' must be a pair of int or None; got int."),
        (
            {"sinks": np.zeros(2)},
            TypeError,
            "field 'sinks' must be of the compute type; got ndarray.",
        ),
        ({"seed": 1 << 64}, TypeError, "field 'seed' must be a number in range; got int."),
        ({"dropout": 1.0}, ValueError, "dropout must be in [0, 1)."),
    ],
)
def test_a_field_that_is_unknown_or_wrong_is_refused(fields, error, text):
    with pytest.raises(error) as caught:
        _native.Call(Q, K, V, fields)
    assert str(caught.value) == f"attngrad._native.Call: {text}"


def test_options_that_are_arrays_are_not_taken_beside_tensors():
    mask = {"mask": np.ones((1, 1, 1, 1), bool)}
    q, k, v = map(torch.from_numpy, (Q, K, V))
    with pytest.raises(TypeError, match=r"^attngrad._native.forward_of_tensors: field 'mask' takes an array.$"):
        _native.forward_of_tensors(q, k, v, mask, torch.empty(V.shape), None, False, 0)


def test_arrays_of_other_types_are_refused():
    with pytest.raises(TypeError, match="float64, float32, float16 or uint16"):
        _native.Call(Q.astype(np.int32), K, V, {})


def test_fields_that_are_not_given_have_their_defaults():
    given = {"scale": 1.0, "softcap": 0.0, "causal": False, "window": (None, None), "dropout": 0.0, "natural": False}
    for x, y in zip(forward({}), forward(given), strict=True):
        assert np.array_equal(x, y)


@pytest.mark.parametrize("offset", [{}, {"offset": 2}, {"offset": np.array([2])}], ids=["default", "int", "array"])
def test_the_offset_is_a_number_or_an_array_and_by_default_aligns_the_last_query_and_key(offset):
    q = np.ascontiguousarray(Q[:, :, :3])
    out = np.empty((1, 2, 3, 8), np.float32)
    lse = np.empty((1, 2, 3), np.float32)
    _native.Call(q, K, V, {"scale": 0.5, "causal": True, **offset}).forward(out, None, lse, None, None)
    assert np.array_equal(out, attngrad.attention(q, K, V, scale=0.5, causal=True))


def test_natural_units_change_the_row_maximum_alone():
    out, lse, row_max, inv_row_sum = forward({"scale": 0.5})
    natural = forward({"scale": 0.5, "natural": True})
    assert np.allclose(natural[2] * math.log2(math.e), row_max, rtol=1e-6)
    for x, y in zip(natural, (out, lse, None, inv_row_sum), strict=True):
        assert y is None or np.allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rate", [1e-12, 0.1, 1 / 3, 0.5, 0.9999, math.nextafter(1.0, 0.0)])
def test_the_rate_of_dropout_keeps_what_python_keeps(rate):
    zeros, eye = np.zeros((1, 1, 16, 16), np.float32), np.eye(16, dtype=np.float32)[None, None]
    out, *_ = forward({"dropout": rate, "seed": 7}, zeros, zeros, eye)
    assert np.array_equal(out != 0, keep_mask((1, 1, 16, 16), rate, 7))
