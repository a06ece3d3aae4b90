"""The command ``python -m benchmarks``."""

import json
import os
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner

from bench_tools import results_of, spoil, started
from benchmarks import grid, runner
from benchmarks.cli import command


@pytest.fixture
def saved(tmp_path):
    def save(results):
        path = tmp_path / "results.json"
        path.write_text(json.dumps(results.to_json()))
        return str(path)

    return save


def invoke(*arguments):
    return CliRunner().invoke(command, arguments)


def test_the_command_lists_rows_and_refuses_what_it_does_not_know(tmp_path):
    assert "decoding 1,32/8,1/4096,128 forward\n" in invoke("--quick", "--list").output
    assert len(invoke("--list").output.splitlines()) == len(grid.select(grid.DEFAULT)) + 1
    assert "must be of torch,jax,numpy; got tensorflow" in invoke("--peers", "torch,tensorflow").output
    assert "no row matches" in invoke("--only", "nothing like this").output
    other = tmp_path / "other.json"
    other.write_text("{}")
    assert "must name results written by --json" in invoke("--load", str(other)).output


def test_check_exits_with_one_where_a_bound_is_missed(saved):
    good, bad = invoke("--load", saved(results_of()), "--check"), invoke("--load", saved(results_of(1.1)), "--check")
    assert good.exit_code == 0
    assert bad.exit_code == 1
    assert "missed: up to 16 tokens: at least 4; found 1.1" in bad.output
    assert invoke("--load", saved(results_of(1.1))).exit_code == 0


def test_check_does_not_pass_on_rows_that_were_not_judged_or_not_verified(saved):
    assert invoke("--load", saved(spoil(results_of(), others=1.0)), "--check").exit_code == 1
    assert invoke("--load", saved(spoil(results_of(), failure="wrong", times={}))).exit_code == 1
    busy = invoke("--load", saved(results_of(startup=started(others=1.0))), "--check")
    assert busy.exit_code == 1
    assert "not judged: Start: `attngrad --help` 60 ms, `python -c pass` 10 ms~." in busy.output


def test_a_peer_left_out_of_a_row_does_not_fail_the_run(saved):
    found = invoke("--load", saved(spoil(results_of(), notes={"jax": "dq is off by 8.0e-03. Not timed."})), "--check")
    assert found.exit_code == 0
    assert "32,4,10,32 fwd: without jax, dq is off by 8.0e-03. Not timed." in found.output


def test_the_command_writes_the_page_from_saved_results(saved, tmp_path):
    target = tmp_path / "page.md"
    assert invoke("--load", saved(results_of()), "--markdown", str(target)).exit_code == 0
    assert target.read_text().startswith("# Benchmark\n")


def test_the_progress_is_in_words_from_the_first_second(monkeypatch):
    def run(settings, tell):
        for text, step in (("importing torch", 0), ("a row: timing", 0), ("a row 1 ms", 1), ("the next: timing", 0)):
            tell(text, step)
        return results_of()

    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setattr(runner, "steps", lambda settings: 2)
    lines = invoke("--quick", "--only", "overhead*").stderr.splitlines()
    assert lines[:2] == ["[0/2] importing torch", "[0/2] a row: timing"]
    assert re.fullmatch(r"\[1/2, about \d+ s left\] a row 1 ms", lines[2])
    assert re.fullmatch(r"\[1/2, about \d+ s left\] the next: timing", lines[3])


def test_wrong_usage_exits_2(tmp_path):
    other = tmp_path / "other.json"
    other.write_text("{}")
    for arguments in (("--only", "nothing like this"), ("--load", str(other)), ("--peers", "x"), ("--load", "absent")):
        assert invoke(*arguments).exit_code == 2, arguments


def test_the_help_loads_nothing_but_click():
    code = "import sys\nfrom benchmarks.cli import command\n"
    code += "try:\n    command(['--help'])\nexcept SystemExit:\n    pass\nprint(*sorted(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
    loaded = {name.split(".")[0] for name in result.stdout.splitlines()[-1].split()}
    assert not loaded & {"numpy", "ml_dtypes", "rich", "torch", "jax", "matplotlib"}


@pytest.mark.thorough
def test_a_run_names_the_instruction_set_that_it_was_forced_to(tmp_path):
    file = tmp_path / "results.json"
    options = ["--quick", "--only", "overhead*d", "--peers", "numpy", "--json", file]
    line = [sys.executable, "-m", "benchmarks", *options]
    subprocess.run(line, env={**os.environ, "ATTNGRAD_ISA": "baseline"}, check=True, capture_output=True)  # noqa: S603
    assert json.loads(file.read_text())["machine"]["isa"] == "baseline"
