"""Each candidate of the corpus is right or wrong as the index says, judged by dense autograd and not by the auditor."""

from __future__ import annotations

import pytest

from tests.auditor.corpus.candidates import INDEX, VARIATIONS, label
from tests.auditor.corpus.dense_calls import error

ALL = [*INDEX, *VARIATIONS]
RIGHT = {"float64": 1e-10, "float32": 2e-5}  # largest error of a right one, relative to the largest entry or 1
WRONG = 1e-8  # least error of a wrong one; all of them are shown in float64


@pytest.mark.parametrize("entry", [e for e in ALL if e["right"]], ids=label)
def test_right_candidate_agrees_with_dense_autograd(entry):
    case = entry.get("case", {})
    assert error(entry, case) < RIGHT[case.get("dtype", "float64")]


@pytest.mark.parametrize("entry", [e for e in ALL if not e["right"]], ids=label)
def test_wrong_candidate_is_wrong(entry):
    assert error(entry, entry.get("shows", entry.get("case", {}))) > WRONG


@pytest.mark.parametrize("entry", [e for e in ALL if "shows" in e and e["name"] != "bwd_two_streams"], ids=label)
def test_fault_that_shows_at_its_own_case_does_not_show_at_an_ordinary_one(entry):
    assert error(entry, entry.get("case", {})) < RIGHT["float64"]


def test_index_is_complete_and_balanced():
    keys = {"file", "name", "framework", "right", "kind", "about"}
    assert all(keys <= e.keys() and e["right"] == ("named" not in e) for e in ALL)
    assert len({label(e) for e in ALL}) == len(ALL) >= 44
    assert 0.4 <= sum(e["right"] for e in INDEX) / len(INDEX) <= 0.6
