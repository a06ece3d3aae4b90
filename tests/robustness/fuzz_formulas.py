"""Random texts for the formula language: whatever comes, a report or a FormulaError, and nothing is executed.

A part of `make fuzz`; see fuzz.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import fuzz_tools
from attngrad.formulas import FormulaError, audit_formula
from attngrad.formulas.symbols import ALIASES, FUNCTION_ALIASES, FUNCTIONS, KNOWN
from notations import NOTATIONS
from printed import PRINTED

WHAT = "texts"
SEEDS = [text for text, _, _ in PRINTED] + [text for _, *pair in NOTATIONS for text in pair]
SEEDS += [
    "dS = dA*A - A @ dA.T @ A",
    "dS = A * (dA - rowsum(A * dA))",
    "rowsum(A*dA) = rowsum(O*dO)",
    "dA_ij/dS_ik = A_ij * (I_jk - A_ik)",
    "dS_ij = A_ij (dA_ij - sum_k A_ik dA_ik)",
    "O_dot = A_dot V + A V_dot, L_dot = rowsum(A * S_dot)",
    "dV = (A * M)^T dO; dX = dQ W_Q^T + dK W_K^T + dV W_V^T",
]
_HOSTILE = r"""
    __import__('os').system('x')  A.__class__  ().__class__.__mro__  eval(A)  exec  lambda:0  import  9**9**9  1e308
    1e999  2**8**8  0/0  [0]  {A:A}  '  "  #  `  %s  {0}  ^^  __  \\  \  \end{}  \u0041  $$
"""
_UNICODE = "\x00 \u202e \ud800 \uff21 \ua4ee \u00e9 \u2211\u2211 \u221a\u221a \u2202 \u1d40"
HOSTILE = [*_HOSTILE.split(), *_UNICODE.split(), "1" * 400]
_WORDS = r"""
    @ * + - / = ( ) [ ] { } , ; ^ _ . .T ^T **2 o d _i _ij _{i,j} sum_i e_i 1 0 2.5 1e-3 W^Q W^{Q^T} dL/dS dA_i/dS_i
    \frac \partial \sum \sqrt \text \mathcal{L} \left( \right) \odot \cdot \in \mathbb{R}^{n\times\,m} \begin{align}
    \end{align} \\ \sigma \Lambda \tilde{Q} \frac{\partial\,L}{\partial\,S} \frac{1}{\sqrt{d_k}} \sum_{i=1}^{n} (\theta)
    \Attn \hat{A} \bar{Q} \langle \rangle \mathrm{d} \mathbf{A} ^{(i)} ^{(h)} _{i:} _{:j} ' j' _{ij'} \leftarrow += := #
    np. np.sum( torch. F.softmax( axis=-1 dim=0 keepdims=True .sum(-1) .transpose(-1,-2) .shape[-1] [:,None] [None,:]
    einsum( 'ij,jk->ik' "...ij->...i" grad_scores attn_weights dL_dQ D G a s p da \delta_{ij} \mathbb{1}_{i=j} ᵢ ⱼ ⟨ ⟩
"""
WORDS = [*_WORDS.split(), *KNOWN, *ALIASES, *FUNCTIONS, *FUNCTION_ALIASES]


def soup(rng: random.Random) -> str:
    """Words side by side."""
    words = rng.choices([*WORDS, *HOSTILE], k=rng.randint(1, 40))
    return rng.choice(["", "dS = ", "A = "]) + rng.choice(["", " "]).join(words)


def mutant(rng: random.Random) -> str:
    """A formula with a few characters or words changed."""
    text = rng.choice(SEEDS)
    for _ in range(rng.randint(1, 4)):
        i, j = sorted(rng.choices(range(len(text) + 1), k=2))
        j = min(j, i + rng.randint(0, 8))
        middle = rng.choice(["", text[i:j] * 2, rng.choice(WORDS), rng.choice(HOSTILE), chr(rng.randint(32, 126))])
        text = text[:i] + middle + text[j:]
    return text


def noise(rng: random.Random) -> str:
    """Characters of any kind."""
    top = rng.choice([127, 255, 0xFFFF, 0x10FFFF])
    return "".join(chr(rng.randint(0, top)) for _ in range(rng.randint(0, 200)))


def grown(rng: random.Random) -> str:
    """An equation that the grammar allows, whatever its shapes are."""

    def expression(depth: int) -> str:
        if depth == 0 or rng.random() < 0.2:
            return rng.choice([*(n for n in KNOWN if n not in "ep"), "A_ij", "S_ik", "e_i", "p_i", "J_i", "2", "0.5"])
        inner = expression(depth - 1)
        return rng.choice(
            [
                f"({inner})",
                f"{inner} {rng.choice('@*+-/')} {expression(depth - 1)}",
                f"({inner}) {rng.choice('@*/')} ({expression(depth - 1)})",
                f"({inner}).T",
                f"{rng.choice(list(FUNCTIONS))}({inner})",
                f"sum_{rng.choice('ijk')} {inner}",
                f"-{inner}",
            ]
        )

    return f"{expression(rng.randint(0, 2))} = {expression(rng.randint(0, 4))}"


def tower(rng: random.Random) -> str:
    """One thing many times over."""
    piece = rng.choice(
        [*WORDS, *HOSTILE, "-", "(", "((", "A+", "A@", r"\sqrt", r"\frac{1}{", "{", "sum_i ", "sum_i e_i+"]
    )
    times = rng.choice([3, 50, 120, 1000, 5000])
    return "A = " + piece * times + rng.choice(["", "A", "A" + ")" * times])


KINDS: tuple[Callable[[random.Random], str], ...] = (soup, mutant, mutant, noise, grown, grown, tower)


def draw(number: int) -> str:
    """The text of this number."""
    rng = random.Random(number)  # noqa: S311
    return rng.choice(KINDS)(rng)


class Watch(fuzz_tools.Watch):
    """Whether anything is compiled, executed, opened or started while it is on, by Python's own audit events."""

    FORBIDDEN = ("compile", "exec", "open", "os.", "subprocess.", "socket.", "ctypes.", "import")


def check(text: str, watch: Watch) -> str:
    """Judge a text: "read" or "refused"; AssertionError where something else happens."""
    report = None
    with watch:
        try:
            report = audit_formula(text)
            str(report), report.to_json()
        except FormulaError as refused:
            error = refused
    if report is None:
        assert 0 <= error.position <= len(text)
        assert str(error).startswith("audit_formula: ")
        return "refused"
    assert report.ok == (report.kind == "holds")
    assert not report.ok or (report.corrected is None and report.mistakes == ())
    if report.corrected is not None:
        assert audit_formula(report.corrected).ok, report.corrected
    return "read"


@cache
def watching() -> Watch:
    """The watch of this process: an audit hook cannot be taken off again."""
    audit_formula("A = softmax(S)"), audit_formula("A = S")  # what is loaded late is loaded now
    return Watch()


def describe(number: int) -> str:
    """The text of this number, as Python would print it."""
    return repr(draw(number))


def judge(number: int) -> str:
    """Whether the text of this number was "read" or "refused"."""
    return check(draw(number), watching())
