"""attngrad explain: every source, option and format; and errors of one line with the remedy."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attngrad
from tests.docs.test_cli import python_m, run

Q, K, V = np.random.default_rng(0).standard_normal((3, 2, 3, 4))


def traced(*arguments: str) -> attngrad.Trace:
    """The trace that the command makes, through its JSON."""
    found = run("explain", "--format", "json", *arguments)
    assert found.exit_code == 0, found.output
    return attngrad.Trace.from_json(found.stdout)


def save(path: Path, **arrays: Any) -> str:
    np.savez(path, **arrays)
    return str(path)


# --- sources ---------------------------------------------------------------------------------------------------------


def test_the_built_in_example_is_small_causal_and_holds():
    found = run("explain")
    assert found.exit_code == 0
    assert "2 heads, 4 queries, 4 keys, D 3, E 3, scale 0.5774, causal" in found.output
    assert "✗" not in found.output
    assert found.output.count("✓") == 4
    assert max(map(len, found.output.splitlines())) <= 80
    assert run("explain").output == found.output


def test_tokens_get_seeded_embeddings():
    trace = traced("--tokens", "the cat saw the dog")
    assert trace.tokens == (("the", "cat", "saw", "the", "dog"),) * 2
    assert trace["Q"].shape == (2, 5, 3)
    assert np.array_equal(trace["Q"][:, 0], trace["Q"][:, 3])
    assert len(np.unique(trace["Q"][0, :, 0])) == 4
    assert np.array_equal(trace["Q"], traced("--tokens", "the cat saw the dog")["Q"])
    assert not np.array_equal(trace["Q"], traced("--tokens", "the cat saw the dog", "--seed", "1")["Q"])


@pytest.mark.parametrize(
    ("text", "shape"), [("4,3", (4, 3)), ("2,4,3", (2, 4, 3)), ("2x4x3", (2, 4, 3)), ("2,2,4,3", (2, 2, 4, 3))]
)
def test_shapes_are_taken(text, shape):
    assert traced("--shape", text)["Q"].shape == shape


def test_key_heads_group_the_queries():
    trace = traced("--shape", "4,3,2", "--kv-heads", "2")
    assert trace["dK"].shape == (2, 3, 2)
    assert trace.group == 2


def test_a_file_is_traced_as_it_is(tmp_path):
    dout = np.ones_like(Q)
    bias, mask = np.zeros((3, 3)), np.tri(3, dtype=bool)
    given = save(tmp_path / "x.npz", q=Q, k=K, v=V, dout=dout, bias=bias, mask=mask, scale=0.3, sinks=np.ones(2))
    expected = attngrad.trace(Q, K, V, dout, bias=bias, mask=mask, scale=0.3, sinks=np.ones(2))
    assert traced("--input", given).to_json() == expected.to_json()
    assert traced("--input", given, "--scale", "0.5").options.scale == 0.5
    assert traced("--input", given, "--tokens", "a b c").tokens == (("a", "b", "c"),) * 2


def test_a_file_may_have_tangents_segments_and_an_offset(tmp_path):
    ids = np.array([0, 0, 1])
    more = {"q_dot": Q, "dout": Q, "dout_dot": K, "q_segments": ids, "k_segments": ids, "offset": np.array(1)}
    trace = traced("--input", save(tmp_path / "x.npz", q=Q, k=K, v=V, **more), "--causal")
    assert "dQ_dot" in trace
    assert not trace.visible[0, 2, 0]
    assert trace.operands.offset == 1
    assert np.array_equal(trace["dO_dot"], K)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_narrow_files_are_taken(tmp_path, dtype):
    path = save(tmp_path / "x.npz", q=Q.astype(dtype), k=K.astype(dtype), v=V.astype(dtype))
    assert traced("--input", path, "--tangents", "--bias", "0,1,2").holds


# --- options ---------------------------------------------------------------------------------------------------------

ARGUMENTS = {
    "--scale 0.2": {"scale": 0.2},
    "--no-causal": {"causal": False},
    "--window 1,0": {"window": (1, 0)},
    "--window 1,none": {"window": (1, None)},
    "--offset -1": {"offset": -1},
    "--mask 1,1,0,1": {"mask": np.array([[1, 1, 0, 1]], bool)},
    "--bias 0,-1,-2,0.5": {"bias": np.array([[0, -1, -2, 0.5]])},
    "--softcap 1.5": {"softcap": 1.5},
    "--sinks 0.5,-1": {"sinks": np.array([0.5, -1])},
    "--dropout 0.5 --seed 3": {"dropout": 0.5, "seed": 3},
    "--segments 0,0,1,1": {"segments": (np.array([0, 0, 1, 1]),) * 2},
    "--mask 1,0,0,0/1,1,0,0/0,1,1,0/1,1,1,1": {
        "mask": np.array([[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [1, 1, 1, 1]], bool)
    },
}


@pytest.mark.parametrize("text", ARGUMENTS)
def test_every_option_is_that_of_attention(text):
    found = traced(*text.split())
    options = {"causal": True} | ARGUMENTS[text]
    expected = attngrad.trace(*(found[n].value for n in ("Q", "K", "V", "dO")), **options)
    assert list(found) == list(expected)
    for name in expected:
        assert np.array_equal(found[name], expected[name]), name


def test_tangents_bring_the_jvp_and_the_hvp():
    output = run("explain", "--tangents", "--sinks", "1,2", "--bias", "0,1,2,3").output
    assert "Forward mode: the JVP" in output
    assert "dsigma_dot" in output


def test_the_head_and_the_batch_are_chosen():
    trace = traced("--shape", "2,2,3,2")
    text = run("explain", "--shape", "2,2,3,2", "--head", "1", "--batch", "1").output
    assert "(head 1, batch 1)" in text
    assert f"{trace['Q'][1, 1, 0, 0]:.2f}" in text


def test_one_entry_is_explained():
    text = run("explain", "--entry", "dK", "2", "1").output
    value = traced()["dK"][0, 2, 1]
    assert text.startswith("dK[2, 1] = scale sum_i dS[i,2] Q[i,1]")
    assert f"{value:.6f}" in text
    assert f"by finite differences: {value:.6f}" in text
    assert "by finite differences" not in run("explain", "--entry", "A", "1", "0").output
    assert run("explain", "--entry", "L", "1", "0").exit_code == 0


# --- formats ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "start"), [("html", "<!doctype html>"), ("latex", "\\documentclass"), ("json", "{")])
def test_formats_go_to_the_output_stream(form, start):
    assert run("explain", "--format", form).stdout.startswith(start)


@pytest.mark.parametrize(
    ("name", "start"),
    [("a.html", "<!doctype"), ("a.tex", "\\documentclass"), ("a.json", "{"), ("a.txt", "2 heads"), ("a", "2 heads")],
)
def test_the_suffix_says_the_format(tmp_path, name, start):
    found = run("explain", "--output", str(tmp_path / name))
    assert found.exit_code == 0
    assert (tmp_path / name).read_text().startswith(start)
    assert found.stdout == ""
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_format_beats_suffix(tmp_path):
    run("explain", "--format", "json", "--output", str(tmp_path / "a.html"))
    assert json.loads((tmp_path / "a.html").read_text())["format"] == "attngrad trace"


def fake_browser(folder: Path, status: int) -> tuple[str, Path]:
    """A command that writes down the address it is given, and where it does."""
    program, said = folder / "browser", folder / "said"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >> "{said}"\nexit {status}\n')
    program.chmod(0o755)
    return str(program), said


def test_open_shows_the_page_in_the_browser_that_browser_names(tmp_path):
    browser, said = fake_browser(tmp_path, 0)
    page = tmp_path / "a page & more.html"
    assert python_m("explain", "--open", "--output", str(page), BROWSER=f"{browser} --new %s").returncode == 0
    assert python_m("explain", "--open", BROWSER=browser).returncode == 0
    flag, first, second = said.read_text().splitlines()
    assert (flag, first) == ("--new", page.as_uri())
    assert Path(second.removeprefix("file://")).read_text().startswith("<!doctype")


def test_open_without_a_browser_says_where_the_page_is(tmp_path):
    browser, said = fake_browser(tmp_path, 1)
    page = tmp_path / "a.html"
    nowhere = {"BROWSER": f"{browser} %s", "PATH": str(tmp_path), "DISPLAY": "", "WAYLAND_DISPLAY": ""}
    found = python_m("explain", "--open", "--output", str(page), **nowhere)
    assert found.returncode == 2
    assert f"--open found no browser; open {page.as_uri()} yourself, or set BROWSER.\n" in found.stderr
    assert "Traceback" not in found.stderr
    assert said.read_text().splitlines() == [page.as_uri()]
    assert page.read_text().startswith("<!doctype")


def test_it_runs_in_a_process_of_its_own(tmp_path):
    found = python_m("explain", "--output", str(tmp_path / "a.html"), NO_COLOR="1")
    assert found.returncode == 0
    assert found.stdout == ""
    assert re.fullmatch(r"wrote .*a\.html\n", found.stderr)


# --- errors ----------------------------------------------------------------------------------------------------------


def bad_file(tmp_path: Path, kind: str) -> str:
    path = tmp_path / "x.npz"
    nan = Q.copy()
    nan[0, 0, 0] = np.nan
    arrays = {
        "no q": {"k": K, "v": V},
        "nan": {"q": nan, "k": K, "v": V},
        "shapes": {"q": Q, "k": K[:, :, :2], "v": V},
        "unknown": {"q": Q, "k": K, "v": V, "kay": K},
        "integers": {"q": Q.astype(int), "k": K, "v": V},
        "text": {"q": np.array(["a"]), "k": K, "v": V},
        "objects": {"q": np.array([None]), "k": K, "v": V},
        "one segment": {"q": Q, "k": K, "v": V, "q_segments": np.zeros(3, int)},
        "scalar": {"q": np.array(1.0), "k": K, "v": V},
    }
    if kind in arrays:
        return save(path, **arrays[kind])
    contents = {"no zip": b"hello", "empty": b"", "cut": Path(save(path, q=Q, k=K, v=V)).read_bytes()[:200]}
    if kind == "npy":
        np.save(tmp_path / "x.npy", Q)
        return str(tmp_path / "x.npy")
    path.write_bytes(contents[kind])
    return str(path)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no q", r"must have q, k and v; q missing, got k, v\. Write one with numpy\.savez"),
        ("nan", r"q must be finite; got NaN in .*\. Hide positions by mask\."),
        ("shapes", r"trace: k must have 4 features \(axis -1\), like q; got shape \(2, 3, 2\)"),
        ("unknown", r"has an unknown array 'kay'\. Known: "),
        ("integers", r"q must be of a floating dtype; got int64\. Cast it"),
        ("text", r"trace: q must have dtype"),
        ("objects", r"must be an \.npz file of plain arrays; .* Write one"),
        ("one segment", r"must have both q_segments and k_segments"),
        ("scalar", r"trace: q must have at least 2 axes"),
        ("no zip", r"must be an \.npz file of plain arrays; .* Write one"),
        ("empty", r"must be a whole \.npz file; .* Write one"),
        ("cut", r"must be a whole \.npz file; .* Write one"),
        ("npy", r"must be an \.npz file; got one array in .* Write one"),
    ],
)
def test_a_bad_file_is_one_line_with_the_remedy(tmp_path, kind, message):
    found = run("explain", "--input", bad_file(tmp_path, kind))
    assert found.exit_code == 2
    assert found.stdout == ""
    assert found.stderr.count("\n") == 1
    assert found.stderr.startswith("Error: ")
    assert re.search(message, found.stderr), found.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "missing.npz"], "--input must name an .npz file; got 'missing.npz', which is no file"),
        (["--input", "."], "which is no file"),
        (["--mask", "1,1"], "mask must broadcast to"),
        (["--mask", "1,1,2,1"], "--mask must be of 0 and 1"),
        (["--sinks", "1"], "--sinks must have 2 numbers"),
        (["--segments", "0,0.5,1,1"], "--segments must be integer ids"),
        (["--segments", "0,1"], "must have 4 ids"),
        (["--softcap", "-1"], "softcap must be positive"),
        (["--scale", "nan"], "scale must be finite"),
        (["--dropout", "1"], "dropout must be in [0, 1)"),
        (["--kv-heads", "3"], "--kv-heads must divide the 2 heads; got 3"),
        (["--tokens", " "], "--tokens must have at least one word"),
        (["--tokens", "a b", "--shape", "4,3"], "--tokens must have 4 words"),
        (["--shape", "9000,4"], "at most 4,000,000 scores"),
        (["--head", "2"], "head must be in [0, 2)"),
        (["--batch", "1"], "batch must be in [0, 1)"),
        (["--entry", "dX", "0", "0"], "there is no step 'dX'"),
        (["--entry", "dK", "9", "0"], "row must be in [-4, 4)"),
        (["--open", "--format", "json"], "--open must come with --format html"),
        (["--output", "nowhere/at/all.html"], "--output must be in a folder that exists"),
        (["--output", "a.pdf"], "--output must end in one of .html, .tex, .json, .txt; got 'a.pdf'"),
        (["--entry", "dK", "0", "0", "--output", "a.txt"], "--entry prints one sum"),
        (["--output", "."], "--output must be a file; got the folder"),
    ],
)
def test_a_bad_argument_is_one_line(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = run("explain", *arguments)
    assert found.exit_code == 2
    assert found.stdout == ""
    assert message in found.stderr
    assert found.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


UNREADABLE = (
    "--shape a",
    "--shape 0,3",
    "--shape 1",
    "--window 1",
    "--mask x",
    "--mask 1,1/1",
    "--format pdf",
    "--seed -1",
    "--entry dK a 0",
)


@pytest.mark.parametrize("arguments", [text.split() for text in UNREADABLE], ids=UNREADABLE)
def test_what_cannot_be_read_is_a_usage_error(arguments):
    found = run("explain", *arguments)
    assert found.exit_code == 2
    assert f"Invalid value for '{arguments[0]}'" in found.stderr


def test_a_folder_that_may_not_be_written_is_one_line(tmp_path, monkeypatch):
    tmp_path.chmod(0o500)
    if os.geteuid() == 0:  # root may write everywhere: what the system would say to others
        real = Path.open

        def refuse(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if self.parent == tmp_path:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
            return real(self, mode, *args, **kwargs)

        monkeypatch.setattr(Path, "open", refuse)
    found = run("explain", "--output", str(tmp_path / "a.html"))
    assert found.exit_code == 2
    assert found.stderr.count("\n") == 1
    assert "Permission denied" in found.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_nothing_to_show_is_an_error_on_the_page(tmp_path):
    x = np.zeros((0, 3))
    found = run("explain", "--input", save(tmp_path / "x.npz", q=x, k=x, v=x), "--format", "html")
    assert found.exit_code == 2
    assert "there is nothing to show" in found.stderr
