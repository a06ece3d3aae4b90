"""The row-by-row and the block-matrix derivations give what the fast formulas give."""

import numpy as np
import pytest

from attngrad import reference
from attngrad.core.binding import bind
from attngrad.reference.forms import block_diagonal, reciprocal, selector
from attngrad.testing import relative_error

RNG = np.random.default_rng(7)


@pytest.mark.parametrize(("t", "s", "d", "e"), [(5, 5, 3, 3), (4, 7, 3, 2), (1, 6, 2, 5)])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_the_row_form_of_omega_equals_the_fast_one(t, s, d, e, scale):
    q, k, v, dout = (RNG.standard_normal(n) for n in ((t, d), (s, d), (s, e), (t, e)))
    x, o, _ = bind("test", q, k, v, {"scale": scale}, kernels=False)
    f = reference.forward(x, o)
    b = reference.backward(x, o, f, dout)
    assert relative_error(reference.omega_rows(q, k, v, dout, scale), b.dscores) < 1e-12
    for ours, theirs in zip(reference.per_row_gradients(q, k, v, dout, scale), b.grads[:3], strict=True):
        assert relative_error(ours, theirs) < 1e-12


@pytest.mark.parametrize(("heads", "t", "s"), [(1, 4, 4), (3, 5, 5), (2, 3, 6)])
def test_the_trace_form_equals_the_fast_one(heads, t, s):
    d_model, d_head = 6, 4
    query, key, value = (RNG.standard_normal((n, d_model)) for n in (t, s, s))
    w_q, w_k, w_v = (RNG.standard_normal((heads, d_model, d_head)) for _ in range(3))
    w_o, dy = RNG.standard_normal((heads * d_head, d_model)), RNG.standard_normal((t, d_model))
    got = reference.block_trace_form(query, key, value, w_q, w_k, w_v, w_o, dy)

    out, pullback = reference.vjp(query @ w_q, key @ w_k, value @ w_v)  # (H, T, d_head)
    merged = out.transpose(1, 0, 2).reshape(t, -1)
    grads = pullback((dy @ w_o.T).reshape(t, heads, d_head).transpose(1, 0, 2))
    assert relative_error(got.d_w_o, merged.T @ dy) < 1e-12
    assert relative_error(got.d_w_q, query.T @ grads.q) < 1e-12
    assert relative_error(got.d_w_k, key.T @ grads.k) < 1e-12
    assert relative_error(got.d_w_v, value.T @ grads.v) < 1e-12


def test_only_the_diagonal_blocks_of_the_value_weights_are_parameters():
    n, d_model, d_head, heads = 4, 3, 2, 2
    x, dy = RNG.standard_normal((n, d_model)), RNG.standard_normal((n, d_model))
    w = RNG.standard_normal((3, heads, d_model, d_head))
    got = reference.block_trace_form(x, x, x, *w, RNG.standard_normal((heads * d_head, d_model)), dy)
    off_diagonal = got.d_w_v_blocks - block_diagonal(got.d_w_v)
    assert np.abs(off_diagonal).max() > 1e-3


def test_the_pieces_of_the_trace_form():
    a = RNG.standard_normal((3, 2, 4))
    wide = block_diagonal(a)
    assert wide.shape == (6, 12)
    assert np.array_equal(wide[2:4, 4:8], a[1])
    assert np.count_nonzero(wide) == a.size
    assert np.array_equal(reciprocal(np.array([[2.0, -4.0]])), [[0.5, -0.25]])
    row = RNG.standard_normal((5, 12))
    assert np.array_equal(row @ selector(1, 3, 4).T, row[:, 4:8])
    assert np.array_equal(sum(row @ selector(h, 3, 4).T @ selector(h, 3, 4) for h in range(3)), row)
