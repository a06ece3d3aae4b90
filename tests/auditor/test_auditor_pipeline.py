"""The pipeline of the auditor: names are checked, errors of mistakes surface, dependencies are those of the code."""

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import planted
from attngrad.auditor import audit
from attngrad.auditor.cases import cases
from attngrad.auditor.mistakes import catalogue, find
from attngrad.auditor.pipeline import ATTENTION_STEPS, LAYER_STEPS, NAMES, OPTIONAL, RESULTS, Pipeline, Undefined, reads

LONG = np.longdouble
ATTENTION = [
    {},
    {"causal": True, "softcap": 1.5, "offset": 0},
    {"mask": True, "bias": True, "sinks": True},
    {"window": (2, 1), "dropout": 0.3, "seed": 4, "scale": 0.4},
    {"window": (None, 0), "segments": True, "dropout": 0.0},
]
LAYER = [
    {},
    {"causal": True, "window": (2, 0), "scale": 0.4},
    {"mask": True, "softcap": 2.0},
    {"bias": True, "sinks": True, "dropout": 0.3, "seed": 4, "segments": True},
]
SETTINGS = [("attention", options) for options in ATTENTION] + [("layer", options) for options in LAYER]
TELLING = [SETTINGS[0], SETTINGS[2], SETTINGS[-1]]
"""Of what takes long, those for ``make test``: without options, and two with many."""
each_setting = pytest.mark.parametrize(
    ("level", "options"), SETTINGS, ids=lambda x: x if isinstance(x, str) else "+".join(x)
)


def a_case(level="attention", **options):
    return next(iter(cases(level, options=options, effort="quick")))


# --- names -----------------------------------------------------------------------------------------------------------


def test_a_name_that_no_pipeline_has_is_an_error_that_tells_the_nearest():
    p = Pipeline(a_case().given, LONG)
    with pytest.raises(AttributeError, match=r"'dscorse'\. Did you mean 'dscores'"):
        _ = p.dscorse


def test_a_mistake_in_a_step_that_does_not_exist_is_an_error():
    with pytest.raises(AttributeError, match=r"'weights_bakc'\. Did you mean 'weights_back'"):
        Pipeline(a_case().given, LONG, [{"weights_bakc": lambda p, base: base()}])


def test_a_step_that_is_redone_with_what_it_does_not_read_is_an_error():
    p = Pipeline(a_case().given, LONG)
    assert np.array_equal(p.redo("dscores"), p.dscores)
    assert not np.array_equal(p.redo("dscores", delta=np.zeros_like(p.delta)), p.dscores)
    with pytest.raises(AttributeError, match="'dscores' does not read 'weights'"):
        p.redo("dscores", weights=p.weights)


def test_only_what_is_declared_optional_is_none_where_it_was_not_given():
    p = Pipeline(a_case().given, LONG)
    assert {name: getattr(p, name) for name in OPTIONAL} == dict.fromkeys(OPTIONAL)
    for name in ("query", "y", "dx"):
        with pytest.raises(Undefined):
            getattr(p, name)
    with pytest.raises(Undefined):
        _ = Pipeline(a_case("layer").given, LONG).out_dot


def test_a_mistake_may_change_an_input():
    def candidate(q, k, v, dout):
        tokens = q.shape[-2]
        return planted.right(q, k, v, np.where(np.arange(tokens)[:, None] < tokens // 4 * 4, dout, 0))

    report = audit(candidate, effort="quick")
    assert report.mistakes == ("tile-tail",), report
    assert report.explanations[0][0].note == "queries dropped in the backward, tiles of 4"


# --- errors ----------------------------------------------------------------------------------------------------------


def test_an_error_inside_a_mistake_is_an_error_of_the_audit(monkeypatch):
    def broken(p, base):
        raise ValueError("planted")

    known = find("row-term-missing")
    wrong = replace(known, id="broken", variants=(replace(known.variants[0], steps={"dscores": broken}),))
    monkeypatch.setattr("attngrad.auditor.diagnose.catalogue", lambda: (wrong, *catalogue()))
    with pytest.raises(ValueError, match="planted") as caught:
        audit(planted.attention("no row term"), effort="quick")
    assert "an error of the auditor, not of the candidate: in broken" in caught.value.__notes__[0]


def applicable(level, case):
    there = {name for name, x in case.options.items() if x is not None} | case.dims.features | {level, "tangents"}
    for m in catalogue():
        if m.level in ("", level) and all(there & set(need.split("|")) for need in m.needs):
            yield from m.variants


def compute(case, dtype, *variants):
    """Every result with these mistakes: computed, or undefined; anything else is raised. And whether a shape is new."""
    exact = Pipeline(case.given, dtype)
    given = {**case.given, "candidate_dtype": np.dtype(np.float64)}
    for v in variants:
        if v.fit is not None:
            given["fitted"] = 0.1 if "dquery" in v.steps else None
    p = Pipeline(given, dtype, [v.steps for v in variants], exact)
    new = False
    with np.errstate(all="ignore"):
        for name in RESULTS:
            try:
                getattr(p, name)
                new |= p.reshaped(name)
            except Undefined:
                pass
    return new


@pytest.mark.parametrize(
    ("level", "options"),
    [
        pytest.param(*x, id=f"{x[0]}-{'+'.join(x[1])}", marks=[] if x in TELLING else pytest.mark.thorough)
        for x in SETTINGS
    ],
)
@pytest.mark.parametrize(
    "dtype",
    [LONG, *(pytest.param(t, marks=pytest.mark.thorough) for t in (np.float32, np.float16, ml_dtypes.bfloat16))],
)
def test_a_mistake_is_computed_or_says_that_it_has_no_meaning(level, options, dtype):
    narrow = np.float64 if dtype is LONG else dtype
    found = {
        c.dims.features: c for c in cases(level, options=options, effort="quick", dtype=narrow) if not c.dims.large
    }
    tried = [compute(case, dtype, v) for case in found.values() for v in applicable(level, case)]
    assert len(tried) > 500


@each_setting
@pytest.mark.thorough
def test_two_mistakes_are_computed_or_have_no_meaning_where_one_changes_a_shape(level, options):
    found = {c.dims.features: c for c in cases(level, options=options, effort="quick") if not c.dims.large}
    for case in found.values():
        variants = list(applicable(level, case))
        reshaping = [v for v in variants if compute(case, LONG, v)]
        assert reshaping
        for a, b in itertools.product(reshaping, variants):
            compute(case, LONG, a, b)
            if a.steps.keys() & b.steps.keys():  # the order tells
                compute(case, LONG, b, a)


# --- dependencies ----------------------------------------------------------------------------------------------------


class Recording(Pipeline):
    """Which step reads which, as they run."""

    def __init__(self, *args):
        self.stack, self.seen = [], set()
        super().__init__(*args)

    def __getattribute__(self, name):  # also of what is computed already
        if name in NAMES and self.stack:
            self.seen.add((self.stack[-1], name))
        return super().__getattribute__(name)

    def _compute(self, name):
        self.stack.append(name)
        try:
            return super()._compute(name)
        finally:
            self.stack.pop()


@each_setting
def test_what_a_step_reads_is_known_from_its_code(level, options):
    p = Recording(a_case(level, **options).given, LONG)
    for name in {**ATTENTION_STEPS, **LAYER_STEPS}:
        try:
            getattr(p, name)
        except Undefined:
            p.stack.clear()
    assert ("dscores", "weights_back") in p.seen
    assert {(step, name) for step, name in p.seen if name not in reads()[step]} == set()


AUDITS = """
import json, sys
import numpy as np
import planted
from attngrad.auditor import audit
large = {"mask": np.ones((24, 24), bool)}
audits = {
    "attention": lambda: audit(planted.attention("scale missing dq"), options=large, effort="quick"),
    "layer": lambda: audit(planted.layer("scale missing dq"), level="layer", options=large, effort="quick"),
    "tangents": lambda: audit(planted.tangents("tangent-term-missing"), effort="quick"),
}
print(json.dumps({name: json.loads(audits[name]().to_json()) for name in sys.argv[1:]}))
"""


def in_a_process(*names):
    """The reports of these audits, in this order, in a process of their own."""
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", AUDITS, *names],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(planted.__file__).parents[1],
    )
    return json.loads(done.stdout)


def test_what_is_named_does_not_depend_on_the_audits_before():
    names = ("attention", "layer", "tangents")
    forwards, backwards = in_a_process(*names), in_a_process(*reversed(names))
    assert forwards == backwards
    assert forwards["layer"] == in_a_process("layer")["layer"]
    assert forwards["layer"]["mistakes"] == ["scale-missing-in-dq"]
