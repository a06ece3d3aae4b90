r"""The notations of papers, posts, notes and code are read, judged by what they say, and a slip in them is found."""

from __future__ import annotations

import pytest

from attngrad import audit_formula
from attngrad.formulas import FormulaError
from attngrad.formulas.parser import parse
from attngrad.formulas.readings import MAX_READINGS, OPTIONS, Reading, each
from attngrad.formulas.tree import show
from notations import CODE, NOTATIONS


@pytest.mark.parametrize(("right", "wrong"), [row[1:] for row in NOTATIONS], ids=[row[0] for row in NOTATIONS])
def test_a_notation_is_judged_by_what_it_says(right, wrong):
    report = audit_formula(right)
    assert report.ok, report
    assert report.error < 1e-12
    report = audit_formula(wrong)
    assert not report.ok, report
    assert report.corrected is None or audit_formula(report.corrected).ok


def test_nearly_every_slip_is_mended():
    """The formula that is offered has been judged; a few slips have none."""
    mended = [audit_formula(wrong).corrected is not None for _, _, wrong in NOTATIONS]
    assert len(mended) >= 55
    assert sum(mended) >= len(mended) - 2


SAME = {
    r"\hat{A}_{ij} = \widehat{A}_{ij}": "A_ij = A_ij",
    r"\mathbf{dV}_j = \mathrm{d}\mathbf{V}_j = d\mathbf{V}_j = \bar{V}_j": "dV_j = dV_j = dV_j = dV_j",
    r"\langle Q, dQ \rangle_F = \left\langle K, dK \right\rangle": "sum(Q * dQ) = sum(K * dK)",
    r"\frac{d\mathcal{L}}{dQ} = \frac{\mathrm{d} L}{\mathrm{d} Q} = \nabla_{\mathbf{Q}} \ell": "dQ = dQ = dQ",
    "np.sum(A, axis=-1, keepdims=True) = A.sum(1, keepdims=True)": "rowsum(A) = rowsum(A)",
    "A.sum(0) = colsum(A)": "colsum(A) = colsum(A)",
    "np.sum(A * dA, axis=-1) = D": "rowsum(A * dA) = delta",
    "torch.logsumexp(S, dim=-1) = lse": "log(rowsum(exp(S))) = L",
    "softmax(S, axis=0) = A": "softmax(S.T).T = A",
    "np.einsum('ij->ji', A) = A.T": "A.T = A.T",
    "np.einsum('ij,kj->ki', Q, K) = K @ Q.T": "(Q @ K.T).T = K @ Q.T",
    "np.einsum('ij,ij->', A, dA) = np.vdot(A, dA)": "sum(A * dA) = sum(A * dA)",
    "A_{:j}^T = A_{:, j}^T": "A_{:j}.T = A_{:j}.T",
    "attn_weights_ij = P_ij": "A_ij = A_ij",
    "grad_value = dL_dV = d_values = dv": "dV = dV = dV = dV",
    "k.shape[-1] = head_dim, v.size(0) = m": "d_k = d_k, m = m",
    r"dV = A^T dO \tag{3}": "dV = A.T @ dO",
    "dP = dO @ V.T\ndV = P.T @ dO": "dA = dO @ V.T, dV = A.T @ dO",
    "dK_j += dS_ij Q_i": "dK_j = sum_i dS_ij * Q_i",
}


@pytest.mark.parametrize(("text", "plain"), SAME.items())
def test_other_notations_are_the_same_formula(text, plain):
    assert show(parse(text)) == plain
    assert parse(show(parse(text))) == parse(text)


def test_a_column_of_a_matrix_has_its_entries():
    assert audit_formula(r"dV_j = A_{:j}^T dO, colsum(A)^T = colsum(A)^T").ok
    assert audit_formula(r"sum_j A_{:j} = \mathbf{1}").ok
    assert not audit_formula(r"sum_j S_{:j} = \mathbf{1}").ok


def test_the_reading_is_told_and_the_house_has_none():
    told = audit_formula(r"\frac{\partial A_i}{\partial S_i} = \mathrm{diag}(A_i) - A_i A_i^T")
    assert told.notes == ("read with A_i, q_i, do_i as columns",)
    assert told.formula == "J_i = diag(A_i.T) - A_i.T @ A_i"
    assert audit_formula("J_i = diag(A_i) - A_i.T @ A_i").notes == ()


def test_one_reading_holds_for_a_whole_text():
    """Rows in one equation and columns in the next is not a convention."""
    rows, columns = "O_i = A_i V", "J_i = diag(A_i) - A_i A_i^T"
    assert audit_formula(rows).ok
    assert audit_formula(columns).ok
    assert not audit_formula(f"{rows}, {columns}").ok


def test_a_sum_without_keepdims_is_a_row_beside_a_matrix():
    report = audit_formula("dS = P * (dP - np.sum(P * dP, axis=-1))")
    assert report.kind == "wrong shape"
    assert "1 x n" in report.notes[0]
    assert audit_formula(report.corrected).ok


def test_readings_are_few_and_the_first_is_the_house():
    seen = []

    def read(reading):
        seen.append({question: reading.of(question) for question in OPTIONS})
        return seen[-1]

    found = list(each(read, FormulaError))
    assert found[0] == {question: next(iter(answers)) for question, answers in OPTIONS.items()}
    assert len(found) == MAX_READINGS
    assert len({tuple(x.items()) for x in found}) == MAX_READINGS
    changes = [sum(x[q] != found[0][q] for q in OPTIONS) for x in found]
    assert changes == sorted(changes)
    assert Reading().notes() == ()


REFUSED = {
    "dS = np.foo(A)": "np.foo is no part of the language",
    "dS = np.load": "np.load is no part",
    "dS = A.tofile(A)": "'.tofile' is no part",
    "dS = A.sum(3)": "an axis must be -1 or 1",
    "dS = sum(A, axis=Q)": "an axis must be -1 or 1",
    "dS = A[:, 0]": "only [:, None]",
    "dS = A[:, None]": "belongs behind a vector",
    "dS = np.max(A)": "max needs an axis",
    "dS = np.einsum(A, A)": "needs its pattern first",
    "dS = np.einsum('ijk,kl->il', A, A)": "einsum is read for",
    "dS = np.einsum('ij,jk,kl->il', A, A, A)": "einsum is read for",
    "dS = np.einsum('ii->i', A)": "einsum is read for",
    "dS = np.einsum('ij,kl->ik', A, A)": "einsum is read where",
    r"dS = \langle A, A": r"expected '\rangle'",
    r"dS = \hat{f}": "unknown name 'f'",
    "dS = A.shape[-1] * Q_i.shape[-1]": "only the sizes of a named matrix",
}


@pytest.mark.parametrize(("text", "message"), REFUSED.items())
def test_code_beyond_the_list_is_refused(text, message):
    with pytest.raises(FormulaError) as caught:
        audit_formula(text)
    assert message in str(caught.value)


def test_code_is_judged_as_numpy_computes_it():
    """Every right line of code, run by NumPy itself on the values of a case."""
    import numpy as np

    from attngrad.formulas import values

    ran = 0
    for _, right, _ in CODE:
        if "np." not in right or "\n" in right or "_i" in right or "bq" in right:
            continue
        case = values.cases({"Q"}, None, 0)[0]
        known = {"dS": "dS", "ds": "dS", "P": "A", "A": "A", "dP": "dA", "S": "S", "dO": "dO", "O": "O", "V": "V"}
        scope = {name: case[value] for name, value in known.items()} | {
            "np": np,
            "q": case["Q"],
            "D": case["delta"][:, 0],
        }
        target, _, code = right.partition(" = ")
        truth = case["delta"][:, 0] if target == "D" else case[{"dk": "dK"}.get(target, known.get(target, target))]
        np.testing.assert_allclose(eval(code, scope), truth, rtol=1e-10, atol=1e-12)  # noqa: S307
        ran += 1
    assert ran >= 7
