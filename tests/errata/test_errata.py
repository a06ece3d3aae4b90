"""The errata finds what is wrong in the documents, passes what is right, and really computes each verdict."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console

import attngrad
from attngrad import errata, reference
from attngrad.core.files import read_toml
from attngrad.errata import _claim, _entries, _formula
from attngrad.errata._back_pass import example, optimised
from attngrad.errata._back_pass.layer import Layer
from attngrad.explain.marks import signs
from attngrad.formulas.case import AWKWARD, Head

BY_ID = {e.id: e for e in errata.entries()}

FINDINGS = {
    "equation-z-3": "dZ/dQ is a four-index tensor, not K",
    "equation-z-5": "dL/dA for dL/dZ in dQ, and no scale",
    "equation-z-6": "dZ/dK is a four-index tensor, not Q^T",
    "equation-z-7": "dL/dA for dL/dZ in dK, and no scale",
    "back-pass-4": "the softmax Jacobian A_i (I - A_i^T)",
    "back-pass-5": "dS = dA o A - A dA^T A",
    "back-pass-8": "dK = Q^T dS / sqrt(d)",
    "back-pass-10": "wQ beside WQ",
    "back-pass-12": "np.softmax",
    "back-pass-13": "d0 beside dO",
    "back-pass-15": "dV without the transpose",
    "back-pass-16": "the mean in dS",
    "back-pass-18": "the length of dout used for the keys",
    "back-pass-19": "np.dot(query.T, dQ) on arrays of three axes",
    "back-pass-20": "weights updated before the input gradients",
    "back-pass-21": "the output shape line prints the cotangent's",
    "back-pass-22": "no W^O",
    "back-pass-23": "the optimised class does the same arithmetic",
    "back-pass-31": "three dS that disagree",
    "back-pass-39": "the example inside the class body",
    "transformer-4": "dW^v outside its diagonal blocks",
    "transformer-5": "exp without the maximum subtracted",
    "transformer-10": "the sum over heads is missing",
    "transformer-13": "the stray differential in dW^K",
    "transformer-16": "the differential on the softmax where W^V moves",
}

BEYOND = {
    "equation-z-2": "Z without the scale is not what the softmax receives",
    "back-pass-28": "dA J with a J of three indices",
    "back-pass-30": "dA o A is not the share of the Jacobian's diagonal",
    "back-pass-32": "scores without the scale, once more",
    "back-pass-34": "a weighted sum over the rows where it should run along each",
}

KINDER = {
    "equation-z-2": "before scale and softmax",
    "equation-z-3": "row by row",
    "equation-z-6": "transposed",
    "back-pass-4": "entry by entry",
    "back-pass-8": "(dK)^T",
    "back-pass-28": "row by row, dS_i = dA_i J_i",
    "back-pass-30": "diag(A_i)",
    "back-pass-32": "before scale and softmax",
    "back-pass-34": "over the keys of each row",
    "transformer-4": "a full matrix W^v",
    "transformer-5": "mathematics",
    "transformer-10": "where only the weights of head h move",
    "transformer-13": "whose trace is df",
    "transformer-16": "d((S_1 V, ..., S_H V) diag(W_1^V, ..., W_H^V))",
}

RAISES = {
    "back-pass-10": "AttributeError",
    "back-pass-12": "AttributeError",
    "back-pass-13": "UnboundLocalError",
    "back-pass-15": "ValueError",
    "back-pass-18": "ValueError",
    "back-pass-19": "ValueError",
    "back-pass-39": "NameError",
}

OTHER_SHAPE = {"equation-z-3", "equation-z-6", "back-pass-4", "back-pass-8", "back-pass-28", "transformer-13"}

CLAIMS = [e for e in errata.entries() if isinstance(e.check, errata.Claim)]


@pytest.fixture(scope="module")
def results():
    found = {r.entry.id: r for r in errata.run()}
    assert found
    return found


def times(factor, f):
    """``f`` with its value, or every array of it, off by a factor."""

    def off(case):
        value = f(case)
        return tuple(factor * x for x in value) if isinstance(value, tuple) else factor * value

    return off


# --- the findings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("id_", FINDINGS | BEYOND, ids=lambda i: i)
def test_every_known_mistake_is_found(results, id_):
    assert not results[id_].holds
    assert results[id_].entry.wrong
    assert results[id_].entry.correct


def test_nothing_else_is_found_wrong(results):
    assert {i for i, r in results.items() if not r.holds} == set(FINDINGS | BEYOND)


def test_the_right_claims_hold_to_rounding(results):
    right = [r for r in results.values() if r.holds]
    assert len(right) == len(results) - len(FINDINGS | BEYOND)
    assert max(r.error for r in right) < 1e-12


def test_the_document_on_omega_is_right_throughout_and_only_for_scale_one(results):
    assert {r.holds for i, r in results.items() if i.startswith("explicit-formula")} == {True}
    head = Head.random(AWKWARD, np.random.default_rng(0))
    claim = BY_ID["explicit-formula-12"].check
    assert _claim.relative_error(claim.claimed(head), claim.truth(head)) > 0.1


def test_of_the_three_dS_the_one_with_the_row_sum_is_right(results):
    assert results["back-pass-29"].holds
    assert not results["back-pass-5"].holds
    assert not results["back-pass-16"].holds


def test_every_corrected_form_holds(results):
    for r in results.values():
        assert r.holds or r.corrected_error < 1e-10, r.entry.id
        assert not r.holds or r.corrected_error is None, r.entry.id


@pytest.mark.parametrize("seed", range(1, 6))
def test_verdicts_do_not_depend_on_the_seed(results, seed):
    assert {r.entry.id: r.holds for r in errata.run(seed=seed)} == {i: r.holds for i, r in results.items()}


@pytest.mark.parametrize(("id_", "error"), RAISES.items())
def test_code_that_cannot_run_says_how_it_stops(results, id_, error):
    assert f"raises {error}" in results[id_].evidence


def test_only_the_expected_claims_raise_or_misshape(results):
    assert {i for i, r in results.items() if "raises" in r.evidence} == set(RAISES)
    assert {i for i, r in results.items() if r.evidence.startswith("has shape")} == OTHER_SHAPE


@pytest.mark.parametrize("id_", ["back-pass-8", "back-pass-15", "transformer-13"])
def test_a_shape_fault_is_also_wrong_in_value_where_the_shapes_fit(results, id_):
    assert results[id_].error > 0.1


def test_the_length_of_the_queries_serves_the_keys_only_where_they_agree(results):
    assert not results["back-pass-18"].holds
    assert "right only where all sizes are equal" in results["back-pass-18"].evidence


def test_no_figure_beside_a_wrong_claim_looks_right(results):
    figures = [r.error for r in results.values() if not r.holds and r.error is not None]
    assert min(figures) > 1e-3


def test_the_optimised_class_is_judged_by_its_arithmetic_not_by_time(results):
    result = results["back-pass-23"]
    assert result.error is None
    assert result.evidence == "results bit-identical; 10 array operations in class 1, the same in class 2"
    assert result.timing.startswith("class 2 over class 1, now: ")
    assert "time" not in result.entry.says


def test_the_printed_shape_is_the_cotangents_whatever_the_output_is():
    layer = Layer(AWKWARD, np.random.default_rng(0))
    outputs = [o.shape for o in example._outputs(layer)]
    assert len(set(outputs)) == 2
    printed = [tuple(x) for x in example._printed_for_each(layer, example.PRINTS_THE_COTANGENT)]
    assert printed == [layer.dy.shape, layer.dy.shape] != outputs
    assert [tuple(x) for x in example._printed_for_each(layer, example.PRINTS_THE_OUTPUT)] == outputs


def test_the_note_is_quoted_and_not_completed():
    assert BY_ID["equation-z-2"].says == "Z = Q K^T represents the attention scores before applying softmax"


# --- one rule: the literal reading decides, a kinder one is told -----------------------------------------------------


def test_a_kinder_reading_is_told_wherever_one_holds_and_never_decides(results):
    assert {i for i, r in results.items() if "holds if read as" in r.evidence} == set(KINDER)
    assert not any("does not hold even if" in r.evidence for r in results.values())
    for id_, how in KINDER.items():
        assert not results[id_].holds
        assert how in BY_ID[id_].check.reading.how
        assert re.search(
            rf"holds if read as {re.escape(BY_ID[id_].check.reading.how)} \[(0|\de-\d\d)\]", results[id_].evidence
        )


@pytest.mark.parametrize("id_", KINDER)
def test_a_reading_with_a_wrong_value_planted_is_said_not_to_hold(id_):
    claim = BY_ID[id_].check
    reading = dataclasses.replace(claim.reading, value=times(1.5, claim.reading.value))
    result = errata.check(dataclasses.replace(BY_ID[id_], check=dataclasses.replace(claim, reading=reading)))
    assert f"does not hold even if read as {reading.how} [0.5]" in result.evidence
    assert not result.holds


# --- every verdict is computed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", [e for e in CLAIMS if e.correct], ids=lambda e: e.id)
def test_a_wrong_claim_with_the_right_formula_planted_holds(entry):
    planted = dataclasses.replace(entry, check=dataclasses.replace(entry.check, claimed=entry.check.corrected))
    result = errata.check(planted)
    assert result.holds
    assert result.error < 1e-10


@pytest.mark.parametrize("entry", [e for e in CLAIMS if not e.correct], ids=lambda e: e.id)
def test_a_right_claim_with_a_wrong_formula_planted_does_not_hold(entry):
    check = dataclasses.replace(entry.check, claimed=times(1.001, entry.check.claimed))
    result = errata.check(dataclasses.replace(entry, check=check))
    assert not result.holds
    assert result.error == pytest.approx(1e-3, rel=0.1)


def test_an_optimised_class_that_did_less_would_pass(monkeypatch):
    monkeypatch.setattr(optimised, "_class_2", lambda q, k, v, a, dout: (q, k, v))
    assert errata.check(BY_ID["back-pass-23"]).holds


def test_the_same_result_from_other_operations_would_pass(monkeypatch):
    class_1 = optimised._class_1
    monkeypatch.setattr(optimised, "_class_2", lambda *arrays: class_1(*(+x for x in arrays)))
    assert errata.check(BY_ID["back-pass-23"]).holds


def test_the_operations_of_a_function_are_counted_with_their_sizes():
    counts = optimised.operations(lambda x: (x * x).mean(axis=-1), np.ones((3, 4)))
    assert counts == {("multiply", "__call__", 12): 1, ("add", "reduce", 3): 1, ("divide", "__call__", 3): 1}


def test_the_complex_step_agrees_with_the_reference_backward():
    head = Head.random(AWKWARD, np.random.default_rng(0))
    _, pullback = reference.vjp(head.q, head.k, head.v)
    grads = pullback(head.dout)
    assert _claim.relative_error((head.dq, head.dk, head.dv), (grads.q, grads.k, grads.v)) < 1e-14


def test_relative_error_sees_a_shape_and_a_nan():
    one = np.ones((2, 3))
    assert _claim.relative_error(one * np.nan, one) == np.inf
    assert _claim.relative_error(one, one * np.nan) == np.inf
    assert _claim.relative_error((one, one), (one, one * np.nan)) == np.inf
    with pytest.raises(ValueError, match=r"shapes differ: \(3,\) and \(2, 3\)"):
        _claim.relative_error(np.ones(3), one)


# --- formulas are judged from their text -----------------------------------------------------------------------------

FROM_TEXT = [e for e in CLAIMS if e.check.printed]
OWN_LETTERS = {f"explicit-formula-{i}" for i in (3, 4, 5, 6, 8, 10)}  # one tangent moves, where O_dot has all three


def test_every_matrix_formula_of_one_head_is_read_from_its_text():
    counts = {key: sum(e.document == key for e in FROM_TEXT) for key in errata.DOCUMENTS}
    assert counts == {"equation-z": 7, "back-pass": 18, "transformer": 0, "explicit-formula": 15}


@pytest.mark.parametrize("entry", [e for e in FROM_TEXT if e.id not in OWN_LETTERS], ids=lambda e: e.id)
def test_audit_formula_gives_the_verdict_of_the_errata(results, entry):
    scale = 1.0 if entry.document == "explicit-formula" else None
    report = attngrad.audit_formula(entry.check.printed, scale=scale)
    assert report.ok == results[entry.id].holds
    assert (report.kind == "wrong shape") == (entry.id in OTHER_SHAPE)
    assert report.ok or attngrad.audit_formula(report.corrected, scale=scale).ok


def test_another_text_gives_another_verdict():
    def judged(*texts):
        return errata.check(errata.Entry("planted-1", "", "", "", _formula.formula_claim(Head.random, *texts)))

    assert judged("dK = dS^T Q / sqrt(d)").holds
    assert not judged("dK = dS^T Q / d").holds
    misshapen = judged("dK = Q^T dS / sqrt(d)", "dK = dS^T Q / d")
    assert misshapen.evidence.startswith("has shape (3, 7), not (7, 3)")
    assert misshapen.corrected_error > 0.1


# --- the interface ---------------------------------------------------------------------------------------------------


def test_ids_number_the_claims_of_each_document():
    for key in errata.DOCUMENTS:
        numbers = [e.id for e in errata.entries() if e.document == key]
        assert numbers, key
        assert numbers == [f"{key}-{i + 1}" for i in range(len(numbers))]


def told():
    return read_toml("attngrad.errata", "claims.toml")


def test_a_claim_without_a_check_is_refused():
    documents = told()
    documents["transformer"]["19"] = {"where": "", "title": "", "says": ""}
    with pytest.raises(KeyError, match=r"claims.toml and the checks differ in \['transformer-19'\]"):
        _entries.assembled(documents)


def test_a_check_without_a_claim_is_refused():
    documents = told()
    del documents["back-pass"]["2"]
    with pytest.raises(KeyError, match=r"claims.toml and the checks differ in \['back-pass-2'\]"):
        _entries.assembled(documents)


def test_a_claim_in_words_and_as_a_formula_has_one_check():
    documents = told()
    documents["back-pass"]["2"]["formula"] = "dO = dO"
    with pytest.raises(KeyError, match=r"differ in \['back-pass-2'\]"):
        _entries.assembled(documents)


def test_a_note_names_figures_that_there_are():
    documents = told()
    documents["back-pass"]["19"]["note"] = "where batch and length agree it has {sides} sides"
    with pytest.raises(KeyError, match=r"the notes of claims.toml and the figures differ in \['axes', 'sides'\]"):
        _entries.assembled(documents)


def test_a_misspelt_field_is_refused():
    documents = told()
    documents["equation-z"]["5"]["wrnog"] = documents["equation-z"]["5"].pop("wrong")
    with pytest.raises(TypeError, match="wrnog"):
        _entries.assembled(documents)


def test_a_right_entry_has_no_correction_and_a_wrong_one_has(results):
    for r in results.values():
        assert r.holds == (r.entry.wrong == "") == (r.entry.correct == "")


def test_run_takes_one_document_and_refuses_an_unknown_one():
    assert {r.entry.document for r in errata.run("equation-z")} == {"equation-z"}
    with pytest.raises(ValueError, match="one of equation-z, back-pass, transformer, explicit-formula; got '004'"):
        errata.run("004")


def test_the_numbers_of_earlier_versions_are_taken_and_never_printed(results):
    for i, name in enumerate(errata.DOCUMENTS):
        assert {r.entry.document for r in errata.run(f"00{i}")} == {name}
    found = tuple(results.values())
    for text in (rendered(results, width=80), errata.to_json(found), errata.summary(found)):
        assert not re.search(r"(?<![.\d])00[0-3]\b", text)


def test_every_document_is_shown_by_its_title(results):
    text = rendered(results, width=80)
    for name, title in errata.DOCUMENTS.items():
        of_document = [r for r in results.values() if r.entry.document == name]
        wrong = sum(not r.holds for r in of_document) or "none"
        assert re.search(rf"(?m)^{re.escape(title)} ─+\n{name}: {len(of_document)} claims, {wrong} wrong$", text)


def test_an_id_that_a_text_refers_to_is_that_of_a_claim(results):
    mistakes = (Path(attngrad.__file__).parent / "explain/page/mistakes.js").read_text()
    said = " ".join([mistakes, *(f"{r.evidence} {r.entry.wrong} {r.entry.correct}" for r in results.values())])
    found = set(re.findall(rf"\b(?:{'|'.join(errata.DOCUMENTS)})-\d+\b", said))
    assert len(found) > 12
    assert found <= set(results)


def rendered(results, **options):
    stream = io.StringIO()
    errata.render(tuple(results.values()), Console(file=stream, **options))
    return re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())


@pytest.mark.parametrize("width", [60, 80, 120])
def test_nothing_is_cut(results, width):
    assert "…" not in rendered(results, width=width, color_system=None)


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("colour", [False, True])
def test_no_line_is_wider_than_the_terminal(results, width, colour):
    options = {"force_terminal": True, "color_system": "truecolor"} if colour else {"color_system": None}
    text = rendered(results, width=width, **options)
    assert max(cell_len(line) for line in text.splitlines()) <= width
    assert all(line == line.rstrip() for line in text.splitlines())


def test_every_entry_is_rendered_with_its_formula_and_correction(results):
    text = rendered(results, width=1000)
    for r in results.values():
        assert ("✓ " if r.holds else "✗ ") + r.entry.id in text
        assert signs(r.entry.says) in text
        assert signs(r.entry.correct) in text
        assert r.entry.wrong in text
    assert text.rstrip().endswith(errata.summary(tuple(results.values())))


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_terminal_without_unicode_is_served(results, width):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    errata.render(tuple(results.values()), Console(file=stream, width=width))
    stream.flush()
    assert b"XX back-pass-8 " in stream.buffer.getvalue()


def test_the_summary_counts_and_warns_of_a_correction_that_fails(results):
    found = tuple(results.values())
    assert re.fullmatch(
        r"79 claims: 49 hold, 30 are wrong; every corrected form holds to \de-1\d\.", errata.summary(found)
    )
    assert errata.summary((results["equation-z-1"],)) == "1 claim: 1 holds, 0 are wrong."
    failed = dataclasses.replace(results["back-pass-8"], corrected_error=0.5)
    assert "does not hold for back-pass-8" in errata.summary((failed,))


def test_json_round_trips(results):
    data = json.loads(errata.to_json(tuple(results.values())))
    assert data["documents"] == errata.DOCUMENTS
    assert data["summary"]["wrong"] == len(FINDINGS | BEYOND)
    for claim in data["claims"]:
        r = results[claim["id"]]
        for name in ("document", "where", "title", "says", "wrong", "correct"):
            assert claim[name] == getattr(r.entry, name)
        for name in ("holds", "error", "corrected_error", "evidence"):
            assert claim[name] == getattr(r, name)


def test_json_is_the_same_in_every_run_of_a_seed_whatever_the_clock_says(monkeypatch):
    first = errata.run("back-pass", seed=3)
    monkeypatch.setattr(optimised, "_medians", lambda *functions: [1.0, 7.0])
    second = errata.run("back-pass", seed=3)
    assert "7.00" in next(r.timing for r in second if r.timing)
    assert errata.to_json(first) == errata.to_json(second)
    assert errata.to_json(errata.run("back-pass", seed=4)) != errata.to_json(first)


def test_the_timing_is_printed(results):
    assert results["back-pass-23"].timing in rendered(results, width=120)


def test_the_module_imports_and_runs_without_rich():
    code = "import sys; sys.modules['rich'] = None; from attngrad import errata as e; e.to_json(e.run('equation-z'))"
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603
