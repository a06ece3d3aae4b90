"""What an audit finds depends on counted work, not on the clock; where the clock ends it, the report says so."""

import itertools
import json
from types import SimpleNamespace

import pytest

import planted
from attngrad.auditor import audit, budget
from attngrad.auditor.budget import LIMITS
from attngrad.auditor.process import patience

MISTAKES = ("mean", "dv")


def limits(report):
    return {f.name: f.text for f in report.findings if f.kind == "limit"}


def audited():
    return audit(planted.attention(*MISTAKES), effort="quick")


@pytest.fixture
def hurried(monkeypatch):
    """Each look at the clock is a minute after the last."""
    ticks = itertools.count(0.0, 60.0)
    monkeypatch.setattr(budget, "time", SimpleNamespace(monotonic=lambda: next(ticks)))


def test_seconds_of_computing_do_not_change_what_is_named(monkeypatch):
    ticks = itertools.count(0.0, 60.0)
    monkeypatch.setattr("time.process_time", lambda: next(ticks))
    report = audited()
    assert report.mistakes == ("mean-for-row-sum", "dv-not-transposed")
    assert limits(report) == {}


def test_a_search_that_the_clock_ends_says_so(hurried):
    report = audited()
    assert report.status == "wrong"
    assert report.mistakes == ()
    assert limits(report) == {
        "search": "The search for mistakes was cut off by the clock, after 12.5 s: another run may find more.",
        "smallest": "The search for the smallest case was cut off by the clock, after 2 s: another run may find more.",
    }
    assert "cut off by the clock" in " ".join(str(report).split())
    assert not any(f.fault for f in report.findings if f.kind == "limit")


@pytest.mark.parametrize("predictions", [0, 100, 300])
def test_a_search_that_ends_by_work_says_so_and_finds_the_same_each_time(predictions, monkeypatch):
    monkeypatch.setitem(LIMITS, "quick", LIMITS["quick"]._replace(predictions=predictions))
    one, two = audited(), audited()
    assert json.loads(one.to_json()) == json.loads(two.to_json())
    told = "Not every combination of mistakes was tried: effort 'quick' ends before that."
    assert limits(one) == {"search": told}


def test_the_clock_ends_a_search_before_the_command_takes_it_for_dead():
    for effort, limit in LIMITS.items():
        assert max(limit.seconds, limit.calling) < patience(1.0, effort)


def test_more_effort_searches_longer():
    efforts = list(LIMITS.values())
    assert [tuple(sorted(column)) for column in zip(*efforts, strict=True)] == list(zip(*efforts, strict=True))


@pytest.mark.parametrize("bugs", [("scale twice backward", "no row term"), ("no row term", "exchange dq dk")])
def test_two_mistakes_that_are_often_made_are_named_by_quick_within_its_work(bugs):
    candidate, options, expected = planted.plant(*bugs)
    report = audit(candidate, options=options, effort="quick")
    assert set(expected) <= set(report.mistakes), report
