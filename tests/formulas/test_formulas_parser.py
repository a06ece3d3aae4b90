"""The parser reads what it should, refuses the rest with a place, and prints what it can read back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attngrad.formulas import FormulaError
from attngrad.formulas.parser import MAX_DEPTH, parse
from attngrad.formulas.symbols import FUNCTIONS, KNOWN, SCALAR
from attngrad.formulas.tokens import MAX_LENGTH
from attngrad.formulas.tree import (
    Binary,
    Call,
    Equation,
    Negate,
    Number,
    Power,
    Sum,
    Symbol,
    Transpose,
    is_number,
    show,
)

READ = {
    "dS = dA*A - A @ dA.T @ A": "dS = dA * A - A @ dA.T @ A",
    "dS = dA o A - A dA^T A": "dS = dA * A - A @ dA.T @ A",
    "dQ = dS K / sqrt(d)": "dQ = dS @ K / sqrt(d_k)",
    "dQ = 1/sqrt(d_k) dS K": "dQ = 1 / sqrt(d_k) * dS @ K",
    "Z = QK^T": "Z = Q @ K.T",
    "O = AV": "O = A @ V",
    "dL/dK = (dL/dA)^T Q": "dK = dA.T @ Q",
    "dA_i/dS_i = diag(A_i) - A_i^T A_i": "J_i = diag(A_i) - A_i.T @ A_i",
    "dA_ij/dS_ik = -A_ij A_ik": "dA_ij/dS_ik = -A_ij * A_ik",
    "A_ij = exp(S_ij) / sum_k exp(S_ik)": "A_ij = exp(S_ij) / (sum_k exp(S_ik))",
    "dX = dQ (W^Q)^T + dK W_K^T": "dX = dQ @ W_Q.T + dK @ W_K.T",
    "Omega = sum_i e_i e_i^T Lambda V^T dsigma(p_i)": "dS = sum_i e_i @ e_i.T @ dO @ V.T @ dsoftmax(p_i)",
    "S = Q K^T d_k^(-1/2); A = softmax(S), O = A V": "S = Q @ K.T * d_k**-0.5, A = softmax(S), O = A @ V",
    "dP = dO V^T, lse = L": "dA = dO @ V.T, L = L",
    "A * dO V^T = A o dO V^T": "(A * dO) @ V.T = A * (dO @ V.T)",
    "A = exp S / rowsum exp(S)": "A = exp(S) / rowsum(exp(S))",
    "dQ \N{MINUS SIGN} dQ = 2 \N{DOT OPERATOR} dQ": "dQ - dQ = 2 * dQ",
    "dK = ∂L/∂K = dSᵀQ": "dK = dK = dS.T @ Q",
    "A = A.": "A = A",
}

REFUSED = {
    "": (0, "something in it"),
    "dS": (2, "two things are equal"),
    "dS = ": (5, "expected a name, a number or '('; got the end"),
    "dS = dP2 * A": (5, "unknown name 'dP2'. Did you mean dP?"),
    "dS = d0 * A": (5, "unknown name 'd0'. Did you mean dO?"),
    "dS = softmx(A)": (5, "unknown name 'softmx'. Did you mean softmax?"),
    "dS = qq": (5, "unknown name 'qq'"),
    "dS = (A": (7, "expected ')'; got the end"),
    "dS = A)": (6, "an operator, or the end"),
    "dS = A @ @ A": (9, "expected a name"),
    "dS = A.sum": (6, "only .T is"),
    "dS = A.__class__": (7, "expected a name"),
    "dS = __import__(A)": (5, "expected a name"),
    "dS = __import__('os')": (16, "has no meaning"),
    "dS = eval(A)": (5, "unknown name 'eval'"),
    "dS = A ** A": (10, "only T, or a number up to 8"),
    "dS = d_k ** 9": (13, "only T, or a number up to 8"),
    "dS = 1e999 A": (5, "finite"),
    "dS = sum(A, 1)": (10, "rowsum or colsum"),
    "dS = A_1": (7, "an index must be a letter"),
    "dS = A_I": (5, "small letter"),
    "dS = A_ijk": (5, "at most 2 indices; got 3"),
    "dS = d_q": (5, "Sizes: d_k, d_v, d_model"),
    "dS = d_k_i": (8, "an operator, or the end"),
    "dS = W A": (7, "Q, K or V"),
    "dS = e": (5, "one index"),
    "dS = 'A'": (5, "has no meaning"),
    "dS = A \x00": (7, "has no meaning"),
    "dS = \uff21": (5, "has no meaning"),
    "dS = \\foo A": (5, r"\foo is no part of the language"),
    "dQ/dS = A": (0, "not of the list"),
    "A=A," * 17: (64, "at most 16 equations"),
    "A = " + "(" * 500: (64, f"nested at most {MAX_DEPTH}"),
    "A = " + "-" * 500 + "A": (65, f"nested at most {MAX_DEPTH}"),
    "A = " + "A + " * 100 + "A": (246, f"at most {MAX_DEPTH} operations"),
    "A = " + "A" * MAX_LENGTH: (MAX_LENGTH, f"at most {MAX_LENGTH} characters; got {MAX_LENGTH + 4}"),
}


@pytest.mark.parametrize(("text", "shown"), READ.items())
def test_a_formula_is_read_as_it_is_meant(text, shown):
    assert show(parse(text)) == shown
    assert parse(shown) == parse(text)


@pytest.mark.parametrize(("text", "place"), REFUSED.items(), ids=lambda x: repr(x)[:30])
def test_what_is_no_formula_is_refused_with_its_place(text, place):
    position, message = place
    with pytest.raises(FormulaError) as caught:
        parse(text)
    assert message in str(caught.value)
    assert caught.value.position == position
    first, line, caret = str(caught.value).split("\n")
    assert first.startswith("audit_formula: ")
    if len(text) < 60:
        assert line[4:] == "".join(c if c.isprintable() else "?" for c in text)
        assert caret.index("^") - 4 == position


def test_the_caret_stands_under_the_place_in_a_long_text():
    text = "A = " + "A + A - " * 25 + "bad"
    with pytest.raises(FormulaError) as caught:
        parse(text)
    _, line, caret = str(caught.value).split("\n")
    assert line[caret.index("^") :].startswith(text[caught.value.position :][:3])


# --- round trip ------------------------------------------------------------------------------------------------------

LETTERS = st.sampled_from("ijkab")
AXES = {name: 0 if dims == SCALAR else len(dims) for name, dims in KNOWN.items()}


@st.composite
def symbols(draw):
    name = draw(st.sampled_from(sorted(KNOWN)))
    if name in {"e", "p"}:
        count = 1
    elif "/" in name:
        count = draw(st.sampled_from([0, 4])) if name != "dA/dS" else 0
    else:
        count = draw(st.integers(0, AXES[name]))
    return Symbol(name, tuple(draw(LETTERS) for _ in range(count)))


def product_kind(op, left, right):
    """The parser writes a product with a number as one entry by entry."""
    return Binary("*" if op == "@" and (is_number(left) or is_number(right)) else op, left, right)


FINITE = st.floats(0, 1e300, allow_nan=False).map(abs) | st.integers(0, 99).map(float)
TREES = st.recursive(
    symbols() | FINITE.map(Number),
    lambda x: st.one_of(
        st.builds(product_kind, st.sampled_from("+-*/@"), x, x),
        st.builds(Negate, x),
        st.builds(Transpose, x),
        st.builds(Power, x, st.sampled_from([2.0, -0.5, 0.5, 3.0, -1.0])),
        st.builds(Call, st.sampled_from(sorted(FUNCTIONS)), x),
        st.builds(Sum, LETTERS, x),
    ),
    max_leaves=12,
)


@settings(max_examples=400)
@given(st.lists(TREES, min_size=2, max_size=3))
def test_what_is_printed_reads_back_as_the_same_tree(sides):
    equation = Equation(tuple(sides))
    assert parse(show(equation)) == (equation,)


@given(TREES)
def test_printing_is_settled_after_one_reading(side):
    text = show(Equation((Symbol("A"), side)))
    assert show(parse(text)) == text
