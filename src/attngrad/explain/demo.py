"""What ``attngrad demo`` prints in about 100 lines: a backward pass, a check, errata, an audit, the speed of a call."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from attngrad.backends.cpu.threads import choose_isa
from attngrad.explain import check, examples, speed
from attngrad.explain.marks import print_hanging, print_hint, signs
from attngrad.explain.terminal import blocks, invariant_lines

if TYPE_CHECKING:
    from attngrad.core.arrays import NDArray

WORKED = ("A", "O", "dS", "dQ", "dK", "dV")
CLAIMS = ("equation-z-5", "back-pass-16", "back-pass-20", "transformer-5", "explicit-formula-12")
"""One of each document, and the update that comes too early."""


def show(console: Console, seed: int = 0) -> None:
    """Print everything, in order."""
    choose_isa()  # a bad ATTNGRAD_ISA is told before anything is printed
    for title, part in (
        ("A backward pass, worked", worked_example),
        ("Every derivative, checked", _check),
        ("Published formulas, judged", _errata),
        ("A wrong gradient, audited", _audit),
        ("One call, timed on this machine", speed.render),
    ):
        console.rule(f"[bold]{title}[/bold]", align="left")
        part(console, seed)
        console.print()


def worked_example(console: Console, seed: int = 0) -> None:
    """Print the weights, the output and the gradients of the example of ``attngrad explain``."""
    trace = examples.from_options(defaultdict(lambda: None, seed=seed))
    for told in (
        "Causal attention over four words, with a random dO; head 0 of 2.",
        "S = scale Q K^T, dA = dO V^T, delta = rowsum(dO o O)",
    ):
        print_hanging(Text(), Text(signs(told, console)), console)
    console.print()
    blocks(console, trace, WORKED, 0, 0)
    invariant_lines(console, trace)
    console.print()
    print_hint("Every number, and the sum behind it", "attngrad explain --format html --open", console)


def _check(console: Console, seed: int) -> None:
    check.render(check.run(seed), console, short=True)


def _errata(console: Console, seed: int) -> None:
    from attngrad import errata

    results = errata.run(seed=seed)
    errata.render_few([r for r in results if r.entry.id in CLAIMS], console)
    console.print()
    print_hanging(Text(), Text(errata.summary(results)), console)
    print_hint("All of them", "attngrad errata", console)


def homework(q: NDArray, k: NDArray, v: NDArray, dout: NDArray) -> tuple[NDArray, ...]:
    """A wrong backward pass: it has only the diagonal of the softmax Jacobian."""
    return speed.dense(q, k, v, dout, dscores=lambda a, da: da * a * (1 - a))


def _audit(console: Console, seed: int) -> None:
    from dataclasses import replace

    from attngrad.auditor import audit, terminal

    print_hanging(Text(), Text("A homework in NumPy, with the line ds = da * a * (1 - a):"), console)
    console.print()
    report = audit(homework, effort="quick", seed=seed % 2**63)
    terminal.render(replace(report, smallest="", findings=tuple(f for f in report.findings if f.fault)), console)
    console.print()
    print_hint("Yours", "attngrad audit FILE.py:FUNCTION", console)
