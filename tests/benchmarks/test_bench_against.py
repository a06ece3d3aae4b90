"""The working tree against a revision: with made-up times, and in real processes whose times nobody looks at."""

import contextlib
import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import attngrad
from benchmarks import against, against_worker
from benchmarks.against import AGAIN, ORDERS, REVISION, TREE, MeasurementError, Result
from benchmarks.against_worker import FB, HVP, KINDS, ROWS, F, Row, square

ONE = square(1, 1, 5, 4)
OTHER = replace(ONE, dtype="float64")
MANY = [replace(ONE, batch=n) for n in range(1, 21)]
THIS = ["--python-a", sys.executable, "--python-b", sys.executable]


def result(row=ONE, ratio=1.0, own=1.0):
    return Result(row, {TREE: [1.0] * 6, REVISION: [ratio] * 6, AGAIN: [own] * 6})


def slower(first, second=()):
    """The labels that are called slower, and whether that is the exit status."""
    verdicts = against.judge(first, second)
    labels = [x.row.label for verdict in verdicts.values() for x in verdict.slower]
    return labels, against.failed([*first, *second], verdicts)


class Pretended:
    """Answers like a worker. A call takes a millisecond times the next of ``factors``, row by row; the last stays."""

    def __init__(self, *factors, sums=None, file="here", error=None):
        self.factors, self.sums, self.file, self.error = list(factors) or [1.0], sums or {}, file, error
        self.turns = Counter()

    def ask(self, do, **question):
        if do == "start":
            names = ("native", "version", "isa", "compiler", "python", "numpy")
            return {"file": self.file, "threads": 2} | dict.fromkeys(names, "some")
        if do == "row":
            self.now = self.factors.pop(0) if len(self.factors) > 1 else self.factors[0]
            self.turns["rows"] += 1
            return {"error": self.error} if self.error else {"sums": self.sums, "seconds": 1e-3}
        self.turns[self.turns["rows"]] += 1
        return {"seconds": 1e-3 * self.now}


@pytest.fixture
def pretend(monkeypatch, capsys):
    """Run the command with pretended workers; the exit status and what it prints."""

    def run(tree, revision, again, rows=(ONE,), *arguments):
        trio = {TREE: tree, REVISION: revision, AGAIN: again}
        monkeypatch.setattr(against, "processes", lambda a, b: contextlib.nullcontext(trio))
        monkeypatch.setattr(against, "ROWS", rows)
        monkeypatch.setattr(against, "commit_of", lambda revision: "0" * 40)
        status = against.main(["HEAD", *THIS, *arguments])
        return status, capsys.readouterr().out

    return run


# --- judging --------------------------------------------------------------------------------------------------------


def test_equal_speeds_are_not_slower(pretend):
    status, printed = pretend(Pretended(), Pretended(), Pretended())
    assert status == 0
    assert "1,1,5,4 forward                                 1 ms      1 ms   1.000   1.000      18" in printed
    assert "float32: 1 rows, geometric mean 1.000 (self 1.000), noise floor 1.0 %\nNo row is slower." in printed


def test_a_slowdown_is_timed_again_with_twice_the_rounds_and_called_slower(pretend):
    revision = Pretended(0.9)
    status, printed = pretend(Pretended(), revision, Pretended(), [ONE], "--rounds", "12")
    assert status == 1
    assert "slower, float32: 1,1,5,4 forward, ratio 0.900 (self 1.000)" in printed
    assert revision.turns == {"rows": 6, 1: 4, 2: 4, 3: 4, 4: 8, 5: 8, 6: 8}


def test_a_row_that_looks_slower_once_only_is_not_called_so(pretend):
    status, printed = pretend(Pretended(), Pretended(0.9, 0.9, 0.9, 1.0), Pretended())
    assert status == 0
    assert "1 of 1 rows look slower; once more, with twice the rounds:" in printed
    assert "No row is slower." in printed


def test_a_faster_tree_passes():
    assert slower([result(ratio=1.3)]) == ([], False)
    assert against.suspects([result(ratio=1.3)]) == []


def test_the_noise_of_any_row_of_the_group_is_that_of_all():
    quiet, noisy = result(ratio=0.9), result(MANY[1], ratio=1.1, own=1.2)
    assert against.suspects([quiet, noisy]) == []
    assert against.suspects([quiet, replace(noisy, row=OTHER)]) == [ONE]


def test_the_summary_says_what_a_high_floor_hides():
    said = "float32: the noise hides losses below 17 % per row; run it again when the machine is at rest."
    for own, high in ((1.2, True), (1.04, False)):
        assert (said in against.summary([], against.judge([result(own=own)]))) == high


def test_the_noise_of_the_second_time_widens_the_floor():
    assert slower([result(ratio=0.9)], [result(ratio=0.9)]) == (["1,1,5,4 forward"], True)
    assert slower([result(ratio=0.9)], [result(ratio=0.9, own=1.2)]) == ([], False)


def test_a_slower_row_of_another_dtype_is_named_and_fails_by_the_mean_only():
    many = [result(replace(row, dtype="float64"), ratio=1.001) for row in MANY[1:]]
    assert slower([result(OTHER, 0.9), *many], [result(OTHER, 0.9)]) == (["1,1,5,4 f64 forward"], False)
    assert slower([result(OTHER, 0.9)], [result(OTHER, 0.9)]) == (["1,1,5,4 f64 forward"], True)


def test_a_mean_below_0_99_fails_though_no_row_is_slower():
    own = [0.97, 1 / 0.97] * 10
    for ratio, fails in ((0.985, True), (0.995, False)):
        rows = [result(row, ratio, x) for row, x in zip(MANY, own, strict=True)]
        assert against.suspects(rows) == []
        assert slower(rows) == ([], fails)


def test_the_noise_of_the_mean_excuses_the_mean():
    assert slower([result(row, 0.975, 0.97) for row in MANY]) == ([], False)


def test_a_machine_that_slows_down_slows_both_and_one_disturbed_round_counts_little():
    pace = [1.0, 1.0, 1.0, 3.0, 3.0, 3.0]
    times = {TREE: pace, REVISION: [1.1 * x for x in pace], AGAIN: [*pace[:5], 90.0]}
    found = Result(ONE, times)
    assert (found.ratio, found.own) == (pytest.approx(1.1), 1.0)


def test_the_rounds_of_all_laps_count_so_that_one_disturbed_lap_of_three_does_not(pretend):
    status, printed = pretend(Pretended(), Pretended(1.0, 0.5, 1.0), Pretended(), [ONE], "--rounds", "12")
    assert status == 0
    assert "lap 2 of 3: 1 rows" in printed
    assert "1,1,5,4 forward                                 1 ms      1 ms   1.000   1.000      12\n" in printed


def test_everybody_follows_everybody_equally_often_and_nobody_itself():
    turns = [name for order in (*ORDERS, ORDERS[0]) for name in order][: 3 * len(ORDERS) + 1]
    follows = Counter(pairwise(turns))
    assert all(set(order) == {TREE, REVISION, AGAIN} for order in ORDERS)
    assert len(follows) == 6
    assert set(follows.values()) == {3}


# --- results --------------------------------------------------------------------------------------------------------


def sums_of(row, change=lambda x: x):
    found = against_worker.prepare(row)()
    changed = change(found) if row.name == F else (found[0], found[1]._replace(v=change(found[1].v)))
    return against_worker.sums(row.name, changed)


def one_entry_off(x):
    return np.where(np.arange(x.size).reshape(x.shape) == x.size - 1, x + x.dtype.type(0.1), x)


@pytest.mark.parametrize("change", [np.negative, lambda x: x * x.dtype.type(1.01), one_entry_off, lambda x: x * np.nan])
@pytest.mark.parametrize("name", [F, FB, HVP])
def test_a_wrong_result_differs(name, change):
    row = replace(ONE, name=name)
    right, wrong = sums_of(row), sums_of(row, change)
    assert against_worker.difference(right, sums_of(row), "float32") is None
    array = {F: "out", FB: "dv", HVP: "dv_dot"}[name]
    assert f"gives another {array}: off by" in against_worker.difference(wrong, right, "float32")


def test_other_results_and_other_shapes_differ():
    right = sums_of(ONE)
    assert "of shape [1, 1, 4, 5]" in against_worker.difference(
        sums_of(ONE, lambda x: x.swapaxes(2, 3)), right, "float32"
    )
    assert "gives out, dq, dk, dv" in against_worker.difference(sums_of(replace(ONE, name=FB)), right, "float32")


def test_rounding_in_another_order_does_not_differ():
    rounded = sums_of(ONE, lambda x: np.nextafter(x, x.dtype.type(9.0)))
    assert rounded != sums_of(ONE)
    assert against_worker.difference(rounded, sums_of(ONE), "float32") is None


def test_a_revision_with_another_result_is_reported_and_not_timed(pretend):
    revision = Pretended(sums=sums_of(ONE, np.negative))
    status, printed = pretend(Pretended(sums=sums_of(ONE)), revision, Pretended(sums=sums_of(ONE)), [ONE, OTHER])
    assert status == 1
    assert "1,1,5,4 forward                           differs: the revision gives another out: off by" in printed
    assert revision.turns == {"rows": 2}  # once each: it is not tried again in later laps


def test_a_row_that_the_revision_does_not_have_is_left_out_and_one_that_the_tree_has_not_fails(pretend):
    broken = Pretended(error="TypeError: no softcap")
    assert against.measure({TREE: Pretended(), REVISION: broken, AGAIN: Pretended()}, ONE, 6, 0.1) == Result(
        ONE, remark="not compared: the revision raises TypeError: no softcap"
    )
    status, printed = pretend(broken, Pretended(), broken)
    assert status == 1
    assert "fails: the working tree raises TypeError: no softcap" in printed
    assert "No row was timed." in printed


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind])
def test_the_options_of_a_row_change_its_results(kind):
    row = Row(1, (2, 2), (300, 300), (4, 4), name=FB)
    found = sums_of(replace(row, kind=kind))
    assert {"dbias", "dsinks"} & set(found) == {f"d{name}" for name in ("bias", "sinks") if name in KINDS[kind]}
    common = {name: found[name] for name in ("out", "dq", "dk", "dv")}
    assert against_worker.difference(common, sums_of(row), "float32") is not None


def test_every_row_runs_and_has_a_label_of_its_own():
    assert len({row.label for row in ROWS}) == len(ROWS)
    for row in ROWS:
        small = replace(row, batch=1, tokens=tuple(min(n, 6) for n in row.tokens))
        first, second = (against_worker.sums(row.name, against_worker.prepare(small)()) for _ in range(2))
        assert first
        assert against_worker.difference(first, second, row.dtype) is None, row.label


# --- processes ------------------------------------------------------------------------------------------------------


def test_both_sides_may_be_one_interpreter_and_every_time_is_kept(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(against, "ROWS", (ONE, replace(ONE, name=HVP), OTHER))
    monkeypatch.setattr(against, "LAPS", 1)
    monkeypatch.setattr(against, "commit_of", lambda revision: "0" * 40)
    path = tmp_path / "report.json"
    short = ["--rounds", "3", "--seconds", "0.001"]
    status = against.main(["HEAD", *THIS, *short, "--json", str(path), "--rows", "5,4 forward", "*hvp"])
    report = json.loads(path.read_text())
    assert status == report["status"]
    assert status in (0, 1)
    assert [row["label"] for row in report["rows"]] == ["1,1,5,4 forward", "1,1,5,4 hvp"]
    for row in report["rows"]:
        assert {name: len(times) for name, times in row["times"].items()} == {TREE: 3, REVISION: 3, AGAIN: 3}
        assert min(min(times) for times in row["times"].values()) > 0
    assert {x["file"] for x in report["processes"].values()} == {attngrad.__file__}
    assert f"exit status {status}" in capsys.readouterr().out


def test_a_worker_imports_what_its_environment_has(monkeypatch, tmp_path):
    (tmp_path / "attngrad.py").write_text("raise SystemExit('the wrong attngrad')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(against_worker.tempfile, "gettempdir", lambda: str(tmp_path))
    worker = against_worker.Process("it", [sys.executable, "-P", "-s", against_worker.__file__])
    with contextlib.closing(worker):
        assert worker.ask("start", threads=1)["file"] == attngrad.__file__
        assert worker.ask("start")["threads"] == 1


def test_what_attngrad_prints_does_not_come_between_the_answers():
    code = "import runpy, sys, attngrad; attngrad.set_num_threads = lambda n: print('noise', flush=True); "
    code += "runpy.run_path(sys.argv[1], run_name='__main__')"
    worker = against_worker.Process("it", [sys.executable, "-P", "-c", code, against_worker.__file__])
    with contextlib.closing(worker):
        assert worker.ask("start", threads=1)["file"] == attngrad.__file__
        worker.errors.seek(0)
        assert worker.errors.read() == b"noise\n"


def test_a_worker_verifies_then_times_and_survives_what_it_cannot_do():
    worker = against_worker.Worker()
    assert worker.row({"row": vars(replace(ONE, heads=(3, 2)))})["error"].startswith("ValueError: attention: k must")
    ready = worker.row({"row": vars(ONE)})
    assert against_worker.difference(ready["sums"], sums_of(ONE), "float32") is None
    calls = []
    worker.call, worker.estimate = lambda: calls.append(1), against_worker.SLOW
    assert worker.turn({"seconds": 1e-9})["calls"] == len(calls) == 1


def test_an_interpreter_may_be_given_by_a_relative_path_and_stays_in_its_environment(tmp_path, monkeypatch):
    (tmp_path / "python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    given = against.parse(["HEAD", "--python-a", "./python", "--python-b", "missing/python"])
    assert (given.python_a, given.python_b) == (str(tmp_path / "python"), str(tmp_path / "missing" / "python"))


def test_one_attngrad_in_two_environments_is_refused():
    trio = {name: Pretended(file="site/attngrad") for name in (TREE, REVISION, AGAIN)}
    with pytest.raises(MeasurementError, match="must have an attngrad each; both import site/attngrad"):
        against.introduce(trio, same=False)
    trio[REVISION] = Pretended(file="other/attngrad")
    assert against.introduce(trio, same=False)[REVISION]["file"] == "other/attngrad"


def test_the_tree_must_be_the_one_that_the_script_is_in(tmp_path):
    with pytest.raises(MeasurementError, match=r"must import attngrad from src/; got .* Run it by make"):
        against.check_tree({"file": str(tmp_path / "attngrad" / "__init__.py"), "native": None})


@pytest.mark.parametrize(
    ("code", "patience", "message"),
    [
        ("import sys; sys.exit('out of luck')", 60.0, "the process of it ended with status 1. It said:\nout of luck"),
        ("import time; time.sleep(60)", 0.1, "the process of it did not answer within 0.1 s"),
        ("import os; os.write(1, b'{'); os.kill(os.getpid(), 9)", 60.0, "the process of it ended with status -9"),
    ],
    ids=["dies", "hangs", "is killed"],
)
def test_a_worker_that_dies_or_hangs_is_an_error_with_its_last_words(code, patience, message):
    worker = against_worker.Process("it", [sys.executable, "-I", "-S", "-c", code], patience)
    with contextlib.closing(worker), pytest.raises(MeasurementError) as error:
        worker.ask("start")
    assert str(error.value).startswith(message)
    assert worker.process.poll() is not None


@pytest.mark.parametrize(
    ("raised", "status", "said"), [(KeyboardInterrupt, 130, "interrupted"), (MeasurementError("x"), 2, "x")]
)
def test_all_workers_end_when_the_run_ends_early(raised, status, said, monkeypatch, capsys):
    started = []
    real = against.Process

    def kept(*arguments):
        started.append(real(*arguments))
        return started[-1]

    def introduce(trio, same):
        raise raised

    monkeypatch.setattr(against, "Process", kept)
    monkeypatch.setattr(against, "introduce", introduce)
    monkeypatch.setattr(against, "commit_of", lambda revision: "0" * 40)
    assert against.main(["HEAD", *THIS]) == status
    assert capsys.readouterr().err == f"against: {said}\n"
    assert len(started) == 3
    assert all(worker.process.poll() is not None for worker in started)


# --- the revision ---------------------------------------------------------------------------------------------------


def test_an_unknown_revision_is_an_error(capsys):
    assert against.main(["no-such-revision"]) == 2
    assert capsys.readouterr().err == (
        "against: REV must name a commit of this repository, such as HEAD~1, a tag or a hash; got 'no-such-revision'\n"
    )


def test_rows_that_do_not_exist_are_an_error(capsys):
    assert against.main(["HEAD", "--rows", "sideways"]) == 2
    assert "--rows must match the label of a row, such as '1,1,10,32 forward'; got sideways" in capsys.readouterr().err


def test_a_revision_is_built_once_with_the_numpy_that_is_here(monkeypatch, tmp_path, capsys):
    commit, commands = "0123456789abcdef" * 2, []
    folder = tmp_path / "build" / "against" / commit[:12]

    def pretended(command, **settings):
        commands.append(command)
        if "venv" in command:
            (folder / "venv" / "bin").mkdir(parents=True)
            (folder / "venv" / "bin" / "python").touch()

    monkeypatch.setattr(against, "run_quietly", pretended)
    monkeypatch.setattr(against, "git", lambda *_, root: subprocess.CompletedProcess([], 0, b"", b""))
    for _ in range(2):
        assert against.build(commit, tmp_path) == str(folder / "venv" / "bin" / "python")
    assert len(commands) == 3
    assert capsys.readouterr().out == f"Building {commit[:12]} in build/against/{commit[:12]}, some minutes\n"
    assert f"numpy=={np.__version__}" in Path(commands[-1][commands[-1].index("--constraint") + 1]).read_text()
    monkeypatch.setattr(against.platform, "python_version", lambda: "3.99.0")
    against.build(commit, tmp_path)
    assert len(commands) == 6


def test_what_a_failed_command_says_is_shown_in_full(capfd):
    code = "print('a\\n' * 3); raise SystemExit(3)"
    with pytest.raises(MeasurementError, match="failed with status 3"):
        against.run_quietly([sys.executable, "-c", code])
    assert capfd.readouterr().err.count("a\n") == 3
    against.run_quietly([sys.executable, "-c", "print('a')"])
    assert capfd.readouterr() == ("", "")
