"""The renderings of a trace: the same numbers in the terminal, LaTeX, JSON and notebooks, nothing cut or unescaped."""

from __future__ import annotations

import html
import io
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console

import attngrad
from attngrad.explain import files, latex, terminal
from attngrad.explain import html as page
from attngrad.explain.rules import STAGES
from attngrad.explain.windows import number, shown
from cases import EVERYTHING, SHAPES, label, make

GOLDEN = Path(__file__).parent / "golden"
EVIL = ["<b>&", "$x_1^2\\", "日本語", "a\x1b[31mb\n", "#%{}~"]
PDFLATEX = shutil.which("pdflatex")


def example(tangents: bool = True, **options: Any) -> attngrad.Trace:
    """Two query heads, one key head, four tokens; numbers that print alike on every machine."""
    rng = np.random.default_rng(11)
    q, dout, q_dot = rng.standard_normal((3, 2, 4, 3)).round(1)
    k, v, k_dot, v_dot = rng.standard_normal((4, 1, 4, 3)).round(1)
    moved = (q_dot, k_dot, v_dot) if tangents else None
    return attngrad.trace(
        q, k, v, dout, tangents=moved, tokens=["the", "cat", "sat", "down"], causal=True, scale=0.6, **options
    )


def everything(shape: str = "grouped", tokens: Any = None) -> attngrad.Trace:
    case = make(EVERYTHING, SHAPES[shape])
    more = {"dlse": case.dlse, "dout_dot": case.dout_dot, "dlse_dot": case.dlse_dot, "tokens": tokens}
    return attngrad.trace(*case.qkv, case.dout, tangents=case.t, **more, **case.options)


def printed(trace: attngrad.Trace, width: int, **settings: Any) -> str:
    stream = io.StringIO()
    trace.print(Console(file=stream, width=width, legacy_windows=False, **settings))
    return stream.getvalue()


def without_errors(text: str) -> str:
    """Errors are rounding, and differ between machines."""
    return re.sub(r"off by \S+", "off by ...", text)


def compare(name: str, text: str) -> None:
    """With the golden file of this name; ATTNGRAD_GOLDEN=write writes it anew."""
    path = GOLDEN / name
    if os.environ.get("ATTNGRAD_GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


# --- terminal --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_in_colour_is_the_golden_one(width):
    text = printed(example(), width, force_terminal=True, color_system="truecolor", no_color=False)
    compare(f"terminal-{width}.ansi", without_errors(text))


def test_no_colour_is_the_golden_one(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    text = printed(example(), 80, force_terminal=True, color_system="truecolor")
    assert not re.search(r"\x1b\[[0-9;]*[34]8;", text)
    compare("terminal-80-no-color.ansi", without_errors(text))


def test_a_file_has_the_same_text_without_escapes():
    assert files.text(example(), "terminal").isprintable() is False  # newlines
    assert "\x1b" not in files.text(example(), "terminal")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", printed(example(), 80, force_terminal=True, color_system="truecolor"))
    assert [line.rstrip() for line in plain.splitlines()] == files.text(example(), "terminal").splitlines()


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("shape", ["grouped", "odd", "no batch"])
def test_nothing_is_wider_than_the_terminal(width, shape):
    n = SHAPES[shape]
    tokens = ([f"query{i}" for i in range(n.t)], [f"a long key {j}" for j in range(n.s)])
    for trace in (everything(shape), everything(shape, tokens)):
        lines = printed(trace, width, color_system=None).splitlines()
        assert max(map(cell_len, lines)) <= width
        assert not any("…" in line for line in lines)


def test_the_terminal_shows_every_step_and_its_numbers():
    trace = example()
    lines = printed(trace, 80, color_system=None).splitlines()
    for name in shown(trace):
        assert any(re.search(rf"(^| ){name} ", line) for line in lines), name
    [at] = [n for n, line in enumerate(lines) if line.startswith("dS = A ∘ (dA - delta)")]
    rows = [line.split()[1:5] for line in lines[at + 2 : at + 6]]
    for i, j in np.ndindex(4, 4):
        value = float(trace["dS"][0, i, j])
        assert rows[i][j] == ("." if j > i else number(0.0 if abs(value) < 1e-14 else value))
    for title in STAGES.values():
        assert any(line.startswith(title) for line in lines)


def test_large_matrices_are_cut_and_say_so():
    x = np.random.default_rng(0).standard_normal((30, 20))
    text = printed(attngrad.trace(x, x, x, x), 80, color_system=None)
    assert "rows 0 to 11 of 30, columns 0 to 10 of 20" in text


def test_labels_do_not_reach_the_terminal_as_escapes():
    tokens = (EVIL[:3], EVIL)
    text = printed(everything(tokens=tokens), 80, color_system=None)
    assert "\x1b" not in text
    assert "[31m" not in text or "\\u1b" in text


def test_a_wrong_trace_has_a_red_mark():
    case = make()
    case.q[0, 0, 0, 0] = np.nan
    assert "✗" in printed(attngrad.trace(*case.qkv, case.dout), 80, color_system=None)


def test_the_explanation_of_an_entry_is_printed_with_its_difference():
    trace = example()
    stream = io.StringIO()
    found = trace.explain("dK", 2, 1)
    terminal.explanation(Console(file=stream, width=80), found, trace.finite_difference("dK", 2, 1))
    text = stream.getvalue()
    assert text.startswith("dK[2, 1] = scale sum_i dS[i,2] Q[i,1]\n")
    assert f"times the scale, 0.600000: {found.value:.6f}" in text
    assert f"by finite differences: {found.value:.6f}" in text
    assert text.count("* Q[h") == len(found.terms)


def test_what_rounding_leaves_is_shown_as_zero():
    x = np.array([[1.0, 0.1, 0.7], [0.3, 0.2, 0.9]])
    trace = attngrad.trace(x, x, x, np.array([[0.1, 0.2, 0.3], [0.7, 0.9, 1.1]]), causal=True)
    noisy = trace["dS"].value.copy()
    noisy[0, 0] = 3e-17
    trace._steps["dS"] = attngrad.explain.trace.make_step(trace.rules["dS"], noisy, trace)
    assert "3e-17" not in printed(trace, 80, color_system=None)
    assert ">3e-17<" not in trace._repr_html_()


# --- LaTeX -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["example", "everything", "layer", "evil"])
def test_the_latex_compiles(tmp_path, which):
    if PDFLATEX is None:
        pytest.skip("no TeX on this machine: the LaTeX was NOT compiled. apt-get install texlive-latex-base")
    layer = attngrad.MultiHeadAttention(4, 2, bias=True, rope=10.0, dtype=np.float64)
    x = np.random.default_rng(0).standard_normal((2, 3, 4))
    traces = {
        "example": example,
        "everything": lambda: everything("odd"),
        "layer": lambda: layer.trace(x, x, causal=True),
        "evil": lambda: everything(tokens=(EVIL[:3], EVIL)),
    }
    path = tmp_path / "trace.tex"
    traces[which]().save(path)
    command = [PDFLATEX, "-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape", path.name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace")  # noqa: S603
    assert done.returncode == 0, done.stdout[-2000:]
    assert path.with_suffix(".pdf").stat().st_size > 10_000


def test_the_latex_has_every_step_with_its_number():
    trace = example()
    text = trace.to_latex()
    assert text.isascii()
    for name in shown(trace):
        rule = trace.rules[name]
        assert f"{latex.symbol(name)} = " in text, name
        if rule.number:
            assert rf"\tag{{{rule.number}}}" in text
    assert r"dS = A \circ (dA - \delta) \tag{R4}" in text
    assert r"A^{\top} dO" in text


# --- JSON ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [(), ("causal ragged",), ("segments", "mask"), EVERYTHING], ids=label)
@pytest.mark.parametrize("shape", SHAPES)
def test_json_round_trips_bit_for_bit(names, shape):
    case = make(names, SHAPES[shape])
    trace = attngrad.trace(*case.qkv, case.dout, tangents=case.t, **case.options)
    text = trace.to_json()
    again = attngrad.Trace.from_json(text)
    assert list(again) == list(trace)
    for name in trace:
        assert np.array_equal(again[name], trace[name]), name
        assert (again[name].formula, again[name].inputs) == (trace[name].formula, trace[name].inputs)
    assert again.invariants == trace.invariants
    assert again.to_json() == text
    assert again.explain("dV", 0, 0) == trace.explain("dV", 0, 0)
    assert again.finite_difference("dQ", 0, 0) == trace.finite_difference("dQ", 0, 0)
    assert again.to_html() == trace.to_html()


def test_a_page_refuses_a_modifier_that_its_script_does_not_compute(monkeypatch):
    trace = example(softcap=2.0)
    assert trace.to_html()
    monkeypatch.setattr(page, "MODIFIERS", {"softcap": None, "scale": None})  # scale stands for a modifier to come
    with pytest.raises(
        ValueError, match=r"^trace\.to_html: trace must have options that the page computes; got 'scale'"
    ):
        trace.to_html()
    assert trace.to_latex()


def test_json_keeps_layers_empty_steps_and_what_is_not_finite():
    layer = attngrad.MultiHeadAttention(4, 2, rope=10.0, dtype=np.float64)
    x = np.random.default_rng(0).standard_normal((3, 4))
    x[0, 0] = np.nan
    for trace in (layer.trace(x, x), attngrad.trace(*np.zeros((3, 0, 2)))):
        again = attngrad.Trace.from_json(trace.to_json())
        assert all(np.array_equal(again[n], trace[n], equal_nan=True) for n in trace)
    json.loads(trace.to_json(), parse_constant=pytest.fail)


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", "null", '{"format": "attngrad trace", "version": 99}', '{"format": 3}']
)
def test_what_is_no_trace_is_refused(text):
    with pytest.raises(ValueError, match=r"Trace\.from_json: text must be a trace, version 1; got .* Write one with"):
        attngrad.Trace.from_json(text)


# --- notebooks -------------------------------------------------------------------------------------------------------


def test_a_notebook_shows_the_trace():
    import nbformat
    from nbclient import NotebookClient

    code = "import attngrad, numpy as np\nx = np.eye(3)\nattngrad.trace(x, x, x, x, causal=True)"
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    NotebookClient(book, timeout=120).execute()
    [output] = book.cells[0].outputs
    shown_html = output["data"]["text/html"]
    assert "A ∘ (dA - delta)" in shown_html
    assert shown_html.count("<table") == 15
    assert "rows of dS sum to 0" in shown_html
    assert output["data"]["text/plain"].startswith("Trace(Q, K, V")


def test_the_notebook_has_no_script_and_escapes_labels():
    text = everything(tokens=(EVIL[:3], EVIL))._repr_html_()
    assert "<script" not in text
    assert "<b>&<" not in text
    assert html.escape(EVIL[0]) in text
    numbers = [float(n) for n in re.findall(r'<td style="[^"]*" title="([^"]*)">', text) if n != "hidden"]
    assert everything()["dK"][0, 0, 0, 0] in numbers


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", files.SUFFIXES)
def test_save_writes_all_or_nothing(tmp_path, suffix, monkeypatch):
    trace = example()
    path = tmp_path / f"trace{suffix}"
    trace.save(path)
    before = path.read_bytes()
    assert before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device", "x")))
    with pytest.raises(OSError, match="No space left"):
        trace.save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
