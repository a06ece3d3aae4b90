"""Random command lines: ``attngrad`` answers with a result, or with an error of its own, and never with a traceback.

What it writes is whole or not there: after an error the folder is as it was. Commands that run for long (demo, check,
bench without --list) are called rarely, with options that end them early. A part of `make fuzz`; see fuzz.py.
"""

from __future__ import annotations

import json
import random
import shlex
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

from fuzz_formulas import draw as draw_formula
from fuzz_tools import command

WHAT = "command lines"
_NUMBERS = """
    0 1 -1 2 0.5 -0.5 1e308 1e-320 nan inf -inf x ٣ 1_000 0x10 99999999999999999999 2147483648 9223372036854775807
    9223372036854775808 18446744073709551616
"""
NUMBERS = [*_NUMBERS.split(), "", " "]
_ROWS = "1,1,0,1 1,0,1,1/1,1,1,1/1,1,1,1/1,1,1,1 0,0,0,0 1 1,2/3 / , 1,,1 nan,0,0,0 -inf,0,0,0 1e308,-1e308,0,0"
ROWS = [*_ROWS.split(), "1,1,0,1" + ",1" * 5000, "1/" * 400 + "1"]
_SHAPES = """
    2,4,3 4,3 2,2,4,3 1,1 1x1x1 2,1,1 1,2,3,4,5 0,4,3 4 2,4,3, 2000,2000,2000 99999999999,99999999999 1,9999999,1 ٣,٣
    ²,4,3 -1,2,3 2.5,3 1,99999999
"""
SHAPES = [*_SHAPES.split(), ""]
_MARKUP = ["<script>alert(1)</script>", "[bold] [/x]", "\\input{x} $a$ % &", "{0} %s", "]]> --> </style>"]
WORDS = ["the cat sat down", "a", "", "  ", "\x00 a", "\ud83d\ude00 b", "\u202e rtl", *_MARKUP, "a " * 300, "d" * 20000]
NAMES = ["dK", "A", "dS", "O", "L", "Q", "nothing", "", "dQ_dot", "delta", "K"]
_OPTIONS = """
    causal=true window=4,0 window=none,2 mask=true scale=0.5 scale=nan = x=1 causal window=1,2,3 softcap=-1 dropout=0.1
    dropout=2 causal=1,1 offset=99999999999999999999
"""
OPTIONS = [*_OPTIONS.split(), ""]
EXPLAIN: dict[str, list[str]] = {
    "--tokens": WORDS,
    "--shape": SHAPES,
    "--kv-heads": NUMBERS,
    "--seed": NUMBERS,
    "--scale": NUMBERS,
    "--window": ["2,0", "0,0", "2,none", "none,none", "-1,0", "1", "99999999999999999999,0", "", "²,1", "a,b"],
    "--offset": NUMBERS,
    "--mask": ROWS,
    "--bias": ROWS,
    "--softcap": NUMBERS,
    "--sinks": ["0,0", "1,-1", "nan,0", "inf,0", "1", "", "1e308,1e308", "0,0,0"],
    "--dropout": NUMBERS,
    "--segments": ["0,0,1,1", "0,0,0", "0.5,0,0,0", "nan,0,0,0", "1e300,0,0,0", "-5,0,0,0"],
    "--head": NUMBERS,
    "--batch": NUMBERS,
    "--format": ["terminal", "html", "latex", "json", "pdf", ""],
}
FLAGS = ["--causal", "--no-causal", "--tangents", "--help", "--nonsense", "-x", "extra"]


@cache
def place() -> Path:
    """A folder of this process's own, with an input in it."""
    folder = Path(tempfile.mkdtemp(prefix="attngrad-fuzz-"))
    q = np.random.default_rng(0).standard_normal((2, 3, 4))
    np.savez(folder / "in.npz", q=q, k=q, v=q, dout=q)
    (folder / "folder").mkdir()
    (folder / "right.py").write_text("import attngrad\ndef f(q, k, v, dout):\n    raise ValueError('no')\n")
    return folder


def explain(rng: random.Random) -> list[str]:
    """Options of explain, a few at a time, most of them with a value that could be meant."""
    words = []
    for name in rng.sample(list(EXPLAIN), rng.choice([0, 1, 1, 2, 2, 3, 5])):
        values = EXPLAIN[name]
        words += [name, values[0] if rng.random() < 0.4 else rng.choice(values)]
    words += [flag for flag in FLAGS if rng.random() < (0.15 if flag.endswith(("causal", "tangents")) else 0.01)]
    if rng.random() < 0.2:
        words += ["--input", str(place() / rng.choice(["in.npz", "in.npz", "absent.npz", "folder", ""]))]
    if rng.random() < 0.2:
        words += ["--entry", rng.choice(NAMES), rng.choice(["0", "1", *NUMBERS]), rng.choice(["0", "1", *NUMBERS])]
    if rng.random() < 0.3:
        name = rng.choice(
            ["out.html", "out.tex", "out.json", "out.txt", "out", "folder", "absent/out.html", "x" * 300, ""]
        )
        words += ["--output", str(place() / name)]
    return words


def audit(rng: random.Random) -> list[str]:
    """Mostly formulas; a child process at times."""
    if rng.random() < 0.95:
        words = ["--formula", draw_formula(rng.getrandbits(24))]
        return words + rng.choice([[], [], ["--json", "-"], ["--seed", "1"], ["--json", "x"], ["a.py:f"]])
    target = rng.choice(["right.py:f", "right.py:g", "absent.py:f", "right.py", ":", "os:getcwd", "folder:f", ""])
    words = [str(place() / target) if target.startswith(("right", "absent", "folder")) else target, "--effort", "quick"]
    if rng.random() < 0.5:
        words += ["--option", rng.choice(OPTIONS)]
    for name, values in {
        "--time-limit": ["1", "0", "nan"],
        "--memory": ["1", "-1", "1e300"],
        "--dtype": ["float32", "int8"],
        "--supports": ["gqa", "flying"],
    }.items():
        if rng.random() < 0.15:
            words += [name, rng.choice(values)]
    return words


def draw(number: int) -> list[str]:
    """The command line of this number."""
    rng = random.Random(number)  # noqa: S311
    name = rng.choices(["explain", "audit", "errata", "info", "other"], (60, 25, 3, 1, 2))[0]
    if name == "explain":
        return [name, *explain(rng)]
    if name == "audit":
        return [name, *audit(rng)]
    if name == "errata":
        return [
            name,
            "--document",
            rng.choice(["equation-z", "back-pass", "transformer", "003", "004"]),
            "--seed",
            rng.choice(NUMBERS),
            "--json",
        ]
    return rng.choice([["info"], [], ["--help"], ["explian"], ["demo", "--seed", "x"], ["check", "--seed", "-1"], [""]])


def describe(number: int) -> str:
    """The command line of this number, as a shell would take it."""
    return shlex.join(["attngrad", *draw(number)])


def judge(number: int) -> str:
    """The command, and how it ended."""
    folder = place()
    words = draw(number)
    before = {p.name for p in folder.iterdir()}
    status, out, errors = command(*words)
    after = {p.name: p for p in folder.iterdir()}
    made = [after[name] for name in after.keys() - before]
    assert status in (0, 1, 2), status
    assert "Traceback" not in out + errors or words[0] == "audit", errors
    if words[:1] == ["explain"] and status:
        assert not made, made
        assert errors.startswith(("Error: ", "Usage: ")), errors
    for path in made:
        text = path.read_text()
        assert text.endswith("\n"), path
        if path.suffix == ".json" and "--format" not in words:
            json.loads(text)
        path.unlink()
    return f"{words[0] if words and words[0] in ('explain', 'audit', 'errata') else 'other'} {status}"
