"""Shapes are found part by part, and what does not fit is named with its sizes."""

from __future__ import annotations

import numpy as np
import pytest

from attngrad import audit_formula
from attngrad.formulas import FormulaError, evaluate, values
from attngrad.formulas.parser import parse
from attngrad.formulas.shapes import ShapeFault, infer
from attngrad.formulas.symbols import KNOWN, LAYER, SIZED
from attngrad.formulas.tree import names, walk

FITS = {
    "dQ = dS @ K": "n x d_k",
    "dK = dS.T @ Q": "m x d_k",
    "A = exp(S - L)": "n x m",
    "delta = rowsum(dO * O)": "n x 1",
    "colsum(A) = rowsum(A.T).T": "1 x m",
    "sum(A) = n": "1 x 1",
    "A_i = softmax(S_i)": "1 x m",
    "p_i = S_i.T": "m x 1",
    "J_i = diag(A_i) - A_i.T @ A_i": "m x m",
    "A_ij = A_ij": "1 x 1",
    "diag(A @ dA.T) = rowsum(A * dA)": "n x 1",
    "Q = I @ Q @ I": "n x d_k",
    "Q = sum_i e_i @ Q_i": "n x d_k",
    "K = sum_i e_i @ K_i": "m x d_k",
    "dQ = dZ dZ/dQ": "n x d_k",
    "dQ_ia = sum_j dS_ij K_ja scale": "1 x 1",
    "dX = dQ W_Q.T": "n x d_model",
    "trace(A @ dA.T) = sum(A * dA)": "1 x 1",
    "dA @ J = dA @ J": "n x n x m",
}

FAULTS = {
    "dV = A dO": "A is n x m and dO is n x d_v: the product needs m = n",
    "dK = Q^T dS": "dK is m x d_k, Q.T @ dS is d_k x m",
    "dS = dA + dO": "dA is n x m and dO is n x d_v: the sum needs equal shapes, or a row or column for each",
    "dS = A * V": "the product entry by entry needs equal shapes",
    "dS = A / rowsum(A.T)": "the quotient needs equal shapes",
    "dZ/dQ = K": "dZ/dQ is n x m x n x d_k, K is m x d_k",
    "dS = dA J": "dS is n x m, dA @ J is n x n x m",
    "dS = J.T": "J has 3 axes, n x m x m; a matrix is needed here",
    "dS = J @ dA": "the product needs two matrices",
    "dS = J * dA": "an equal number of axes",
    "dS = A**2": "A is n x m; only a number has powers here",
    "dS = trace(A)": "A is n x m; trace takes a square matrix",
    "dS = dsoftmax(S)": "S is n x m; dsoftmax takes one row or column",
    "dS_ij = A_ij dA_ji": "the index j runs to n in dA_ji, and elsewhere to m",
    "dS = dA_i": "dS is n x m, dA_i is 1 x m",
    "dS_i = dA_ij": "dS_i is 1 x m, dA_ij is 1 x 1",
    "dS = I": "dS is n x m, I is n x n",
    "dQ = dV dZ/dQ": "the axes of the left first on the right",
    r"dV = A^T dO \in \mathbb{R}^{n \times d_k}": "it is said to be n x d_k, and is m x d_v",
}


def shapes(text):
    (equation,) = parse(text)
    return equation, infer(equation, KNOWN.__getitem__)


@pytest.mark.parametrize(("text", "shape"), FITS.items())
def test_a_side_has_the_shape_that_its_sizes_give(text, shape):
    equation, found = shapes(text)
    assert " x ".join(found[equation.sides[0]]) == shape


@pytest.mark.parametrize("text", FITS)
def test_the_shapes_by_name_are_those_of_the_values(text):
    """Every part, at three cases."""
    (equation,) = parse(text)
    cases = values.cases(names(*equation.sides), None, 0)
    assert len(cases) == 3
    for case in cases:
        sizes = sizes_of(case)
        by_name, by_size = infer(equation, KNOWN.__getitem__), infer(equation, evaluate.dims_from(case))
        for side in equation.sides:
            for part in walk(side):
                assert tuple(str(sizes[d]) for d in by_name[part]) == by_size[part]
        first, *others = evaluate.sides(equation, case)
        assert all(first.shape == x.shape for x in others)


def sizes_of(case):
    h = case.head
    found = {"1": 1, "n": len(h.q), "m": len(h.k), "d_k": h.q.shape[1], "d_v": h.v.shape[1]}
    return found | ({"d_model": h.x.shape[1]} if "X" in set(case) else {})


@pytest.mark.parametrize(("text", "message"), FAULTS.items())
def test_what_does_not_fit_is_told_with_its_sizes(text, message):
    report = audit_formula(text)
    assert report.kind == "wrong shape"
    assert not report.ok
    assert message in report.notes[0]
    assert message in str(report)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("I = I", "nothing in the formula tells the size"),
        ("sum_i Q = Q", "index i of the sum is not used"),
        ("1 = sum_i e_i e_i^T", "nothing in the formula tells the size"),
        ("sum_i sum_j sum_k sum_l sum_a A_ij A_kl A_ia = 1", "at most 4 indices"),
        ("n = " + " + ".join(["sum_i L_i"] * 20), "16 in all"),
    ],
)
def test_what_has_no_size_is_refused(text, message):
    with pytest.raises(FormulaError, match=message):
        audit_formula(text)


def test_the_same_letter_may_be_summed_twice_over_different_ranges():
    assert audit_formula("(sum_i L_i) * sum_i K_ij = sum_i (sum_k L_k) * K_ij").ok
    assert audit_formula("n - m = sum_i L_i / L_i - sum_i K_ij / K_ij").ok


def test_shapes_stand_under_their_names():
    report = audit_formula("dK = Q^T dS / sqrt(d)")
    top, below = report.shapes.splitlines()
    assert top == "dK      = Q.T     @ dS    / sqrt(d_k)"
    assert below == "m x d_k   d_k x n   n x m"
    for name, shape in (("dK", "m x d_k"), ("Q.T", "d_k x n"), ("dS", "n x m")):
        assert top.index(name) == below.index(shape)


def test_shapes_of_what_fits_are_shown_where_the_rest_does_not():
    top, below = audit_formula("dS = (A @ dO) * rowsum(A)").shapes.splitlines()
    assert below[top.index("(A") + 1 :].startswith("n x m ")
    assert below[top.index("dO") :].startswith("n x d_v")
    assert "rowsum" in top


@pytest.mark.parametrize("used", ["Q", "X", "M"])
def test_every_name_has_a_value_of_its_shape(used):
    cases = values.cases({used}, None, 0)
    assert len(cases) == 3
    for case in cases:
        sizes = sizes_of(case)
        assert set(case) == set(KNOWN) - set(SIZED) - (set() if used == "X" else set(LAYER))
        assert len(case) == len(set(case))
        for name in case:
            assert case[name].shape == tuple(sizes[d] for d in KNOWN[name]), name
            assert np.isfinite(case[name]).all()


def test_no_two_sizes_of_a_case_agree():
    assert len(values.CASES) == 3
    for sizes, _ in values.CASES:
        own = (sizes.queries, sizes.keys, sizes.width, sizes.value_width, sizes.model)
        assert len(set(own)) == len(own)


def test_shape_faults_are_not_errors_of_the_reader():
    assert not issubclass(ShapeFault, ValueError)
