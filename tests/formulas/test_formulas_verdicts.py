"""Right formulas hold, wrong ones do not, mistakes are named, and every correction is right."""

from __future__ import annotations

import io
import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

import fuzz_formulas
from attngrad import FormulaReport, audit_formula, reference
from attngrad.formulas import FormulaError, cli, known, values, verdict
from attngrad.formulas.parser import parse
from attngrad.formulas.report import figure
from attngrad.formulas.tree import Symbol
from printed import PRINTED

HOLD = [
    "rowsum(A*dA) = rowsum(O*dO)",
    "rowsum(dS) = 0",
    "rowsum(A) = 1",
    "sum(A) = n",
    r"A \mathbf{1} = \mathbf{1}, n = \mathbf{1}_n^T A \mathbf{1}",
    r"\nabla_S L = A \odot (dA - (A \odot dA) \mathbf{1} \mathbf{1}^\top)",
    "rowmean(A) = 1/m",
    "delta = diag(A @ dA.T) = diag(dO O^T)",
    "L_i = log(sum_j exp(S_ij))",
    "dS_ij = A_ij (dA_ij - sum_k A_ik dA_ik)",
    "dS_ij = sum_k dA_ik J_ikj",
    "dZ_ij/dQ_ab = I_ia K_jb / sqrt(d_k)",
    "dZ_ij/dQ_ib = K_jb / sqrt(d_k)",
    "dQ = dS dS/dQ, dK = dS dS/dK, dA = dO dO/dA, dV = dO dO/dV",
    "dS = dA dA/dS",
    "trace(dO.T @ O_dot) = sum(dQ * Q_dot) + sum(dK * K_dot) + sum(dV * V_dot)",
    "A_dot_ij = sum_k J_ijk S_dot_ik",
    "scale = d_k**-0.5",
    "dX = dS X W_K W_Q^T scale + dS^T X W_Q W_K^T scale + A^T dO W_V^T",
    "dS = A * ((dO V^T) * M - delta)",
    "O = A V = softmax(S) V = softmax(Q K^T / sqrt(d)) V",
]

WRONG = {
    "dQ = dS @ K": ("scale-missing",),
    "dQ = dS @ K / d_k": ("scale-twice",),
    "dQ = dS @ K * sqrt(d_k)": ("scale-by-sqrt-d",),
    "dQ = -dS @ K / sqrt(d_k)": ("sign",),
    "dV = 2 * A.T @ dO": ("factor-2",),
    "dQ = dA @ K": ("dweights-for-dscores", "scale-missing"),
    "dQ = dA @ K / sqrt(d_k)": ("dweights-for-dscores",),
    "dQ = (A * (dA - colsum(A * dA))) @ K / sqrt(d_k)": ("row-term-over-columns",),
    "dK = Q^T dS / sqrt(d_k)": ("transposed",),
    "dV = A dO": ("transposed",),
    "dA = dO V": ("transposed",),
    "dK = dS Q / sqrt(d_k)": ("transposed",),
    "dQ = dS^T Q / sqrt(d_k)": ("transposed", "Q-for-K"),
    "dS = dA - delta": ("weights-missing",),
    "dA = dO @ V.T * A": ("factor-too-many",),
    "dQ = K dS / sqrt(d)": ("factors-exchanged",),
    "delta = rowmean(dO * O)": ("rowmean-for-rowsum",),
    "rowsum(A * dA) = rowsum(O * O)": ("O-for-dO",),
    "dS = A * (dA + delta)": ("sign",),
    "S = Q K^T": ("scale-missing",),
    "dX = dQ W_Q^T + dV W_V^T": ("input-gradient-dropped",),
    "dS_ab = A_ab dA_ab": ("row-term-missing",),
}


def test_the_command_of_the_manual():
    report = audit_formula("dS = dA*A - A @ dA.T @ A")
    assert isinstance(report, FormulaReport)
    assert (report.ok, report.kind) == (False, "wrong")
    assert report.corrected == "dS = A * (dA - rowsum(A * dA))"
    assert report.mistakes == ("row-term-matrix-product",)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("text", "holds", "scale"), PRINTED)
def test_printed_formulas_are_judged_rightly(text, holds, scale, seed):
    report = audit_formula(text, scale=scale, seed=seed)
    assert report.ok == holds
    if holds:
        assert (report.kind, report.corrected, report.mistakes, report.why) == ("holds", None, (), "")
        assert report.error < 1e-12
    else:
        assert audit_formula(report.corrected, scale=scale, seed=seed).ok
        assert report.corrected_error < 1e-12
        assert report.error is None or report.error > 1e-2


@pytest.mark.parametrize("text", HOLD)
def test_identities_hold(text):
    assert audit_formula(text).ok


@pytest.mark.parametrize(("text", "mistakes"), WRONG.items())
def test_a_mistake_is_named_and_mended(text, mistakes):
    report = audit_formula(text)
    assert not report.ok
    assert report.mistakes == mistakes
    assert report.why
    assert audit_formula(report.corrected).ok


@pytest.mark.parametrize("scale", [None, 1.0, 0.3])
@pytest.mark.parametrize("key", known.RIGHT)
def test_every_formula_that_is_called_right_is(key, scale):
    target = next(s for s in parse(f"{key} = {key}")[0].sides if isinstance(s, Symbol))
    for style in {known.scale_style(set(), scale), known.scale_style({"scale"}, scale)}:
        forms = known.right_forms(target, style)
        assert len(forms) == len(known.RIGHT[key]) >= 1
        for form in forms:
            report = audit_formula(verdict.show(form), scale=scale)
            assert report.ok, report


@pytest.mark.parametrize("mistake", known.MISTAKES, ids=lambda m: f"{m.target}-{m.id}")
def test_every_mistake_of_the_table_is_wrong_and_found_by_its_numbers(mistake):
    right_side = mistake.text.replace("{s}", " / sqrt(d_k)")
    for text in (f"{mistake.target} = {right_side}", f"{mistake.target} = 0 * {mistake.target} + ({right_side})"):
        report = audit_formula(text)
        assert report.kind == "wrong"
        assert report.mistakes == (mistake.id,)
        assert report.error > 1e-2
        assert audit_formula(report.corrected).ok


def test_the_correction_speaks_in_the_names_of_the_formula():
    assert audit_formula("dQ = dS K").corrected == "dQ = dS @ K / sqrt(d_k)"
    assert audit_formula("dQ = scale * dS.T K").corrected == "dQ = dS @ K * scale"
    assert audit_formula("dQ = dA K").corrected == "dQ = (A * (dA - rowsum(A * dA))) @ K / sqrt(d_k)"
    assert audit_formula("dS = A * (dA - 2 delta)").corrected == "dS = A * (dA - delta)"
    assert audit_formula("dS_uv = A_uv").corrected == "dS_uv = A_uv * (dA_uv - sum_i A_ui * dA_ui)"
    assert audit_formula("O = (A * M) K").corrected == "O = (A * M) @ V"
    assert audit_formula("O = A K").corrected == "O = A @ V"


def test_the_scale_may_be_another_one():
    assert audit_formula("dQ = dS K", scale=1.0).ok
    assert not audit_formula("dQ = dS K / sqrt(d)", scale=1.0).ok
    assert audit_formula("dQ = scale dS K", scale=0.7).ok
    assert audit_formula("A = softmax(Q K^T)", scale=1.0).ok


def test_a_formula_without_the_mask_is_wrong_under_dropout():
    assert audit_formula("dV = A^T dO").ok
    report = audit_formula("O = (A*M) V, dV = A^T dO")
    assert not report.ok
    assert report.corrected == "O = (A * M) @ V, dV = (A * M).T @ dO"
    for target in ("dS", "dQ", "dK", "dV", "dA", "O_dot", "O"):
        report = audit_formula(f"{target} = 0 * sum(M) * sum(dO * O) * sum(V) * {target}")
        assert report.corrected_error < 1e-12


def test_several_equations_are_judged_together():
    report = audit_formula("S = Q K^T, A = softmax(S), O = V A")
    assert report.formula == "S = Q @ K.T, A = softmax(S), O = V @ A"
    assert "of 3 equations 2 fail" in report.notes[0]
    assert report.corrected == "S = Q @ K.T / sqrt(d_k), A = softmax(S), O = A @ V"


def test_a_chain_is_wrong_where_one_link_is():
    assert audit_formula("O = A V = softmax(S) V").ok
    assert not audit_formula("O = A V = softmax(S) V / 2").ok
    assert not audit_formula("O = A V / 2 = softmax(S) V").ok


def test_what_is_right_only_where_sizes_agree_says_so():
    assert "it is right only where n = m" in audit_formula("sum(A) = m").notes
    assert not audit_formula("sum(A) = m + 1").notes


def test_a_formula_that_says_nothing_says_so():
    assert audit_formula("dO = dO").notes == ("both sides are the same, so it says nothing",)


def test_what_is_not_finite_does_not_hold():
    for text in ("A = A * 1e300 * 1e300", "A = A / 0", "A = log(0 - A)", "A = 1e308"):
        report = audit_formula(text)
        assert report.kind == "wrong"
        json.loads(report.to_json())
    assert audit_formula("A = A / 0").error is None


def test_small_errors_are_seen():
    assert not audit_formula("dQ = 1.000001 * dS @ K / sqrt(d_k)").ok
    assert not audit_formula("dS = A * (dA - rowsum(A * dA)) + 0.0000001 * dA").ok
    assert not audit_formula("rowsum(dS) = 0.0000001").ok


def test_no_repair_is_invented():
    assert audit_formula("rowsum(A) = rowsum(S)").corrected is None  # rowsum(A) = rowsum(A) says nothing
    assert audit_formula("rowsum(A) = n + 4").corrected is None  # n - 4 is 1 in one of the cases
    assert audit_formula("S = A").mistakes == ()
    report = audit_formula("rowsum(A) @ colsum(V) = exp(Q @ K.T) @ V")
    assert (report.corrected, report.mistakes) == (None, ())
    assert "none found" in str(report)


def test_the_report_reads_in_plain_text():
    assert str(audit_formula("dK = Q^T dS / sqrt(d)")) == (
        "wrong shape\n"
        "    dK      = Q.T     @ dS    / sqrt(d_k)\n"
        "    m x d_k   d_k x n   n x m\n"
        "  found    dK is m x d_k, Q.T @ dS / sqrt(d_k) is d_k x m\n"
        "  mistake  The whole is transposed. (transposed)\n"
        f"  correct  dK = dS.T @ Q / sqrt(d_k)   [{figure(audit_formula('dK = dS.T @ Q / sqrt(d_k)').error)}]"
    )
    assert str(audit_formula("dV = A^T dO")).startswith("holds   [")


def test_json_holds_the_whole_report():
    report = audit_formula("dS = dA * A")
    told = json.loads(report.to_json())
    for name in ("text", "kind", "ok", "formula", "shapes", "corrected", "error", "corrected_error", "why"):
        assert told[name] == getattr(report, name)
    assert told["mistakes"] == ["row-term-missing"]


def test_bad_arguments_are_told():
    with pytest.raises(TypeError, match="text must be a str; got bytes"):
        audit_formula(b"A = A")
    for scale, error in (
        (0.0, ValueError),
        (-1.0, ValueError),
        (np.inf, ValueError),
        ("1", TypeError),
        (True, TypeError),
    ):
        with pytest.raises(error, match="scale must be"):
            audit_formula("A = A", scale=scale)
    with pytest.raises(TypeError, match="seed must be"):
        audit_formula("A = A", seed=0.5)
    with pytest.raises(ValueError, match="seed must be"):
        audit_formula("A = A", seed=-1)
    assert issubclass(FormulaError, ValueError)


def test_the_values_are_those_of_the_reference():
    cases = values.cases({"Q"}, None, 3)
    assert len(cases) == 3
    for case in cases:
        q, k, v, dout = (case[name] for name in ("Q", "K", "V", "dO"))
        _, pullback = reference.vjp(q, k, v)
        grads = pullback(dout)
        tangents = (case["Q_dot"], case["K_dot"], case["V_dot"])
        (out, lse), (out_dot, lse_dot) = reference.jvp((q, k, v), tangents, return_lse=True)
        pairs = {"dQ": grads.q, "dK": grads.k, "dV": grads.v, "O": out, "O_dot": out_dot}
        pairs |= {"L": lse[:, None], "L_dot": lse_dot[:, None]}
        for name, truth in pairs.items():
            np.testing.assert_allclose(case[name], truth, rtol=1e-12, atol=1e-13)


def test_values_with_a_large_mean_are_among_the_cases():
    means = [abs(case["V"].mean()) for case in values.cases({"Q"}, None, 0)]
    assert max(means) > 3 > min(means)


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "code"), [("dV = A^T dO", 0), ("dV = A dO", 1), ("dS = dA A^T A", 1), ("dS = fo", 2)])
@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_exits_by_its_verdict(text, code, as_json, capsys):
    assert cli.run(text, as_json) == code
    out, err = capsys.readouterr()
    if as_json:
        assert json.loads(out)["ok"] == (code == 0)
    elif code == 2:
        assert out == ""
        assert "unknown name 'fo'" in err
    else:
        assert ("holds" in out) == (code == 0)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_report_on_a_terminal_says_all_that_the_text_says(width, encoding):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    report = audit_formula("dS = dA*A - A @ dA.T @ A")
    cli.render(report, Console(file=stream, width=width))
    stream.flush()
    lines = stream.buffer.getvalue().decode(encoding).splitlines()
    assert lines[0].split()[1] == "wrong"
    assert all(line == line.rstrip() for line in lines)
    assert all(len(line) <= width for line in lines[3:])
    words = " ".join(lines[3:]).split()
    for _, text in report.rows():
        assert all(word in words for word in text.split())


# --- whatever comes --------------------------------------------------------------------------------------------------


def test_random_texts_give_a_report_or_a_formula_error_and_nothing_is_executed():
    counts = Counter(fuzz_formulas.judge(number) for number in range(700))
    assert counts["read"] > 100
    assert counts["refused"] > 200


def test_a_correction_that_loses_the_layer_holds_where_keys_are_not_queries():
    """In a text with a name of the layer m is n; the correction, a text without one, must not rely on it."""
    corrected = audit_formula("n = sum(W_Q.T @ diag(m))").corrected
    assert corrected is None or audit_formula(corrected).ok


def test_the_fuzzer_sees_what_is_executed_and_what_crashes(monkeypatch):
    def compiles(text):
        compile("1", "", "eval")
        return audit_formula(text)

    monkeypatch.setattr(fuzz_formulas, "audit_formula", compiles)
    with pytest.raises(AssertionError, match="compile"):
        fuzz_formulas.check("A = A", fuzz_formulas.Watch())
    monkeypatch.setattr(fuzz_formulas, "audit_formula", lambda text: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fuzz_formulas.check("A = A", fuzz_formulas.Watch())
    monkeypatch.setattr(fuzz_formulas, "audit_formula", lambda text: replace(audit_formula("S = Q"), corrected="S = Q"))
    with pytest.raises(AssertionError, match="S = Q"):
        fuzz_formulas.check("S = Q", fuzz_formulas.Watch())


def test_a_mistake_has_the_same_name_in_a_formula_as_in_the_catalogue_of_the_auditor():
    """What only a formula can get wrong has an id of its own."""
    from attngrad.auditor.mistakes import catalogue
    from attngrad.formulas.known import MISTAKES

    own = {"weights-missing", "sum-over-all", "softmax-skipped", "log-missing", "diagonal-missing"}
    ids = {mistake.id for mistake in MISTAKES}
    assert own <= ids
    assert ids - own <= {mistake.id for mistake in catalogue()}
