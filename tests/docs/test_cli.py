"""The command: what it prints, its exit codes, and errors of one line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.cells import cell_len

import attngrad
from attngrad import cli, errata
from attngrad.explain import demo, speed

COMMANDS = ("demo", "explain", "errata", "check", "info")
SEEDED = ("demo", "errata", "check")


@pytest.fixture(autouse=True)
def small_speed(monkeypatch):
    """The demo times a small call here: tests are not about time."""
    monkeypatch.setattr(speed, "SHAPE", (1, 2, 16, 8))
    monkeypatch.setattr(speed, "PAUSES", (0.0, 0.0))
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))


def run(*arguments: str, charset: str = "utf-8", columns: int = 80) -> Result:
    """The command in this process; an exception that is no exit fails the test."""
    found = CliRunner(charset=charset, env={"COLUMNS": str(columns)}).invoke(cli.main, arguments)
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    return found


def python_m(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``python -m attngrad`` in a process of its own."""
    command = [sys.executable, "-m", "attngrad", *arguments]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)  # noqa: S603


# --- help and version ------------------------------------------------------------------------------------------------


def test_the_help_names_every_command():
    found = run("--help")
    assert found.exit_code == 0
    assert found.output.startswith("Usage: ")
    for name in COMMANDS:
        assert re.search(rf"^  {name} ", found.output, re.MULTILINE)
    assert set(COMMANDS) <= set(cli.main.commands)
    assert "..." not in found.output.partition("Commands:")[2], "a summary is cut"
    assert "Exit status: 0 all is well, 1 what was checked is wrong, 2 wrong usage" in found.output


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_help(name):
    assert run(name, "-h").exit_code == 0


def test_the_version_is_that_of_the_package():
    assert attngrad.__version__ in run("--version").output


def test_python_m_is_the_command():
    found = python_m("--help")
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.startswith("Usage: attngrad ")


# --- wrong usage -----------------------------------------------------------------------------------------------------

WRONG_USAGE = (
    "nonsense",
    "info extra",
    "demo --seed -1",
    "check --nonsense",
    "errata --document 004",
    "explain --input absent.npz",
    "explain --entry dX 0 0",
    "explain --output absent/a.html",
    "explain --nonsense",
    "audit",
    "audit absent.py:f",
    "audit os:nothing",
    "audit os:getcwd --option causal",
    "audit os:getcwd --html absent/a.html",
    "audit --formula d0=1",
)


@pytest.mark.parametrize("line", WRONG_USAGE)
def test_wrong_usage_exits_2_in_every_command(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = run(*line.split())
    assert found.exit_code == 2, found.output
    assert "Traceback" not in found.output
    assert list(tmp_path.iterdir()) == []


# --- seeds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SEEDED)
@pytest.mark.parametrize("seed", ["-1", str(2**64), "1e3", "x"])
def test_a_seed_out_of_range_is_a_usage_error(name, seed):
    found = run(name, "--seed", seed)
    assert found.exit_code == 2
    assert "Invalid value for '--seed'" in found.output


@pytest.mark.parametrize("name", SEEDED)
def test_the_largest_seed_is_taken(name):
    assert run(name, "--seed", str(2**64 - 1)).exit_code == 0


# --- errata ----------------------------------------------------------------------------------------------------------


def test_errata_takes_one_document():
    found = run("errata", "--document", "explicit-formula")
    assert found.exit_code == 0
    assert "explicit-formula-15" in found.output
    assert not re.search(r"(equation-z|back-pass|transformer)-\d", found.output)
    assert found.output.rstrip().endswith("15 claims: 15 hold, 0 are wrong.")


def test_errata_names_the_documents_and_takes_their_former_numbers():
    shown = run("errata", "--help").output
    for number, (name, title) in enumerate(errata.DOCUMENTS.items()):
        assert re.search(rf"(?m)^  {name} +{re.escape(title)}$", shown)
        by_number = run("errata", "--json", "--document", f"00{number}")
        assert by_number.output == run("errata", "--json", "--document", name).output


def test_errata_refuses_an_unknown_document():
    found = run("errata", "--document", "004")
    assert found.exit_code == 2
    assert "'004' is not one of" in found.output


def test_errata_as_json_is_that_of_the_module():
    found = run("errata", "--json", "--seed", "5", "--document", "transformer")
    assert found.output == errata.to_json(errata.run("transformer", seed=5)) + "\n"
    assert json.loads(run("errata", "--json").output)["summary"]["claims"] == len(errata.entries())


# --- check -----------------------------------------------------------------------------------------------------------


def test_check_passes():
    found = run("check")
    assert found.exit_code == 0
    assert found.output.count("✓") == 11
    assert "✗" not in found.output


def wrong_vjp(*args: Any, **options: Any) -> Any:
    out, pullback = attngrad.functional.vjp(*args, **options)
    return out, lambda dout: (g := pullback(dout))._replace(k=1.001 * g.k)


def wrong_jvp(*args: Any, **options: Any) -> Any:
    out, out_dot = attngrad.functional.jvp(*args, **options)
    return out, out_dot * float("nan")


def wrong_hvp(*args: Any, **options: Any) -> Any:
    grads, grads_dot = attngrad.functional.hvp(*args, **options)
    return grads, grads_dot._replace(sinks=grads_dot.sinks + 1e-9)


@pytest.mark.parametrize(
    ("name", "wrong", "row"),
    [("vjp", wrong_vjp, "dk"), ("jvp", wrong_jvp, "out_dot"), ("hvp", wrong_hvp, "dsinks_dot")],
)
def test_check_fails_where_a_derivative_is_wrong_and_marks_it(monkeypatch, name, wrong, row):
    monkeypatch.setattr(attngrad, name, wrong)
    found = run("check")
    assert found.exit_code == 1
    [line] = [line for line in found.output.splitlines() if "✗" in line]
    assert row in line.split()


# --- terminals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("columns", [40, 80])
def test_a_terminal_without_unicode_is_served(name, columns):
    found = run(name, charset="ascii", columns=columns)
    assert found.exit_code == 0
    assert found.output.isascii()
    assert name == "info" or re.search(r"\bok\b", found.output)


# --- the demo --------------------------------------------------------------------------------------------------------

SECTIONS = ("A backward pass, worked", "Every derivative, checked", "Published formulas, judged",
            "A wrong gradient, audited", "One call, timed on this machine")  # fmt: skip


@pytest.mark.parametrize("columns", [40, 41, 60, 80, 100, 120])
def test_the_demo_fits_the_terminal_and_breaks_no_command(columns):
    lines = run("demo", columns=columns).output.splitlines()
    assert max(map(cell_len, lines)) <= columns
    assert not any("…" in line for line in lines)
    for hint in ("attngrad explain --format html --open", "attngrad errata", "attngrad audit FILE.py:FUNCTION"):
        assert any(line.endswith(hint) for line in lines), hint
    assert [line.strip(" ─") for line in lines if "──" in line] == list(SECTIONS)
    assert len(lines) <= 140 or columns < 100


def test_the_demo_shows_the_pass_five_claims_an_audit_and_the_speed():
    text = run("demo", columns=100).output
    assert "dS = A ∘ (dA - delta)" in text
    assert " o " not in text
    trace = attngrad.Trace.from_json(run("explain", "--format", "json").stdout)
    assert f"{trace['dK'][0, 1, 0]:.2f}" in text, "the numbers are those of attngrad explain"
    assert text.count("✓ VJP") == text.count("✓ JVP") == text.count("✓ HVP") == 1
    claims = re.findall(r"^[✓✗] ([a-z-]+-\d+)  ", text, re.MULTILINE)
    assert claims == list(demo.CLAIMS)
    assert len(claims) == 5
    for title in errata.DOCUMENTS.values():
        assert f"\n{title}\n" in text
    assert errata.summary(errata.run()) in text
    assert "WRONG: dQ and dK are wrong; only the diagonal of the softmax Jacobian is used." in text
    found = re.findall(r"^(attngrad|NumPy, dense|torch SDPA) +[\d.]+ ms  █+(?: [\d.]+x)?$", text, re.MULTILINE)
    assert set(found) == {"attngrad", "NumPy, dense", *(["torch SDPA"] if find_spec("torch") else [])}


def test_the_demo_in_ascii_keeps_its_signs():
    text = run("demo", charset="ascii", columns=100).output
    assert "dS = A o (dA - delta)" in text
    assert re.search(r"^attngrad +[\d.]+ ms  #+", text, re.MULTILINE)


def test_the_speed_is_told_without_torch_and_with_one_that_does_not_load(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    medians, remarks = speed.measure()
    assert set(medians) == {"attngrad", "NumPy, dense"}
    assert remarks == []
    monkeypatch.setattr(speed, "find_spec", lambda name: True)
    medians, [remark] = speed.measure()
    assert set(medians) == {"attngrad", "NumPy, dense"}
    assert remark.startswith("torch SDPA: ")


def test_a_busy_machine_is_told_beside_the_speed(monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (2.0 * os.cpu_count(), 0.0, 0.0))
    assert re.search(r"\nOther programs are running \(load \d+\.0\): the ratios say little\.\n", run("demo").output)


def test_what_is_wrong_is_not_timed(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    right = speed.dense
    monkeypatch.setattr(speed, "dense", lambda *args: (*right(*args)[:3], 1.01 * right(*args)[3]))
    medians, [remark] = speed.measure()
    assert set(medians) == {"attngrad"}
    assert re.fullmatch(r"NumPy, dense is off by \de-0[23]; not timed", remark)


# --- info and the environment ----------------------------------------------------------------------------------------


def test_info_prints_the_instruction_set_and_the_threads():
    rows = dict(line.split(maxsplit=1) for line in run("info").output.splitlines())
    assert rows["attngrad"] == attngrad.__version__
    assert int(rows["threads"]) == attngrad.get_num_threads()
    chosen, others = re.fullmatch(r"(\S+) \(of (.*)\)", rows["kernels"]).groups()
    assert chosen in others.split(", ")


def test_info_gives_the_versions_of_frameworks_without_importing_them():
    names = ("torch", "jax", "transformers", "diffusers", "triton")
    told = python_m("info").stdout
    rows = dict(line.split(maxsplit=1) for line in told.splitlines())
    for name in names:
        try:
            assert rows[name] == metadata.version(name)
        except metadata.PackageNotFoundError:
            assert rows[name] == "not installed"
    code = "import sys\nfrom attngrad.cli import main\ntry:\n    main(['info'])\nexcept SystemExit:\n    pass\n"
    code += f"print(*[name for name in {names} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
    assert found.stdout.endswith("\n\n"), "nothing of them is loaded"


@pytest.mark.parametrize("name", ["info", "check", "demo"])
def test_a_bad_instruction_set_is_one_line_and_exit_code_2(name):
    found = python_m(name, ATTNGRAD_ISA="pdp11")
    assert found.returncode == 2
    assert found.stdout == ""
    assert re.fullmatch(r"Error: attngrad: ATTNGRAD_ISA must be one of .*; got 'pdp11'\.\n", found.stderr)


def test_output_in_ascii_works_in_a_process_of_its_own():
    found = python_m("check", PYTHONIOENCODING="ascii")
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.isascii()


@pytest.mark.parametrize(("shell", "position"), [("zsh", "1"), ("fish", "au")])
def test_a_shell_completes_the_names_of_commands(shell, position):
    environment = {"_ATTNGRAD_COMPLETE": f"{shell}_complete", "COMP_WORDS": "attngrad au", "COMP_CWORD": position}
    told = subprocess.run(
        [sys.executable, "-c", "from attngrad.cli import main; main(prog_name='attngrad')"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )
    assert "audit" in told.stdout
    assert "explain" not in told.stdout
