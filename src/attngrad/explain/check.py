"""What ``attngrad check`` finds: VJP, JVP and HVP beside the complex step, with every option on."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import attngrad
from attngrad.core.arrays import NDArray
from attngrad.core.operands import Gradients, Tangents
from attngrad.explain.marks import mark, print_hanging
from attngrad.testing import complex_step_hvp, complex_step_jvp, complex_step_vjp, relative_error

if TYPE_CHECKING:
    from rich.console import Console

TOLERANCE = 1e-12
SENTENCE = "VJP, JVP and HVP against the complex step: causal, window, mask, bias, softcap, sinks, dropout, GQA."


class Row(NamedTuple):
    """One result of a pass, and its error relative to the largest entry."""

    name: str
    result: str
    error: float

    @property
    def ok(self) -> bool:
        """Whether the error is below TOLERANCE."""
        return self.error < TOLERANCE


@dataclass(frozen=True, repr=False)
class CheckReport:
    """Every result of every pass, checked.

    >>> run(seed=0)
    CheckReport(ok: VJP, JVP and HVP agree with the complex step, 11 results)
    """

    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        """Whether every result is right."""
        return all(row.ok for row in self.rows)

    def __repr__(self) -> str:
        wrong = ", ".join(f"{row.name} {row.result}" for row in self.rows if not row.ok)
        told = f"WRONG: {wrong}" if wrong else "ok: VJP, JVP and HVP agree with the complex step"
        return f"CheckReport({told}, {len(self.rows)} results)"

    def _repr_html_(self) -> str:
        from attngrad.explain import notebook

        rows = [(notebook.sign(row.ok), row.name, row.result, f"{row.error:.1e}") for row in self.rows]
        return notebook.report(self.ok, SENTENCE, notebook.table(("", "pass", "result", "relative error"), rows))


def run(seed: int = 0) -> CheckReport:
    """Check each derivative on seeded inputs, all options on.

    >>> run().ok
    True
    """
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal(n) for n in ((2, 4, 3, 5), (2, 2, 6, 5), (2, 2, 6, 4)))
    options: dict[str, Any] = {
        "causal": True,
        "window": (4, None),
        "mask": rng.random((3, 6)) > 0.2,
        "bias": rng.standard_normal((4, 1, 6)),
        "softcap": 2.0,
        "sinks": rng.standard_normal(4),
        "dropout": 0.2,
        "seed": seed,
    }
    inputs = (q, k, v, options["bias"], options["sinks"])
    t = Tangents(*(rng.standard_normal(a.shape) for a in inputs))
    dout, dout_dot = rng.standard_normal((2, 2, 4, 3, 4))

    _, pullback = attngrad.vjp(q, k, v, **options)
    _, out_dot = attngrad.jvp((q, k, v), t[:3], bias_dot=t.bias, sinks_dot=t.sinks, **options)
    _, grads_dot = attngrad.hvp((q, k, v), t[:3], dout, dout_dot, bias_dot=t.bias, sinks_dot=t.sinks, **options)
    truth = complex_step_vjp(q, k, v, dout, **options)
    rows = [Row("VJP", f"d{n}", relative_error(a, b)) for n, a, b in _pairs(pullback(dout), truth)]
    rows += [Row("JVP", "out_dot", relative_error(out_dot, complex_step_jvp(q, k, v, t, **options)[0]))]
    truth = complex_step_hvp(q, k, v, t, dout, dout_dot, **options)
    rows += [Row("HVP", f"d{n}_dot", relative_error(a, b)) for n, a, b in _pairs(grads_dot, truth)]
    return CheckReport(tuple(rows))


def render(report: CheckReport, console: Console, *, short: bool = False) -> None:
    """Print a line for each result; in ``short``, one for each pass, with its worst error."""
    from rich.text import Text

    from attngrad.explain.terminal import plain_table

    if not short:
        console.rule("[bold]Gradient check[/bold]", align="left")
    print_hanging(Text(), Text(SENTENCE), console)
    console.print()
    if short:
        for name, found in groupby(report.rows, key=lambda row: row.name):
            rows = list(found)
            head = Text.assemble(mark(console, all(row.ok for row in rows)), f" {name}  ")
            told = f"{', '.join(row.result for row in rows)}  [{max(row.error for row in rows):.0e}]"
            print_hanging(head, Text(told), console)
        return
    table = plain_table("pass", "result", "relative error", "")
    for i, row in enumerate(report.rows):
        first = i == 0 or report.rows[i - 1].name != row.name
        name = f"[bold]{row.name}[/bold]" if first else ""
        table.add_row(name, row.result, f"{row.error:.1e}", mark(console, row.ok))
    console.print(table)


def _pairs(a: Gradients, b: Gradients) -> list[tuple[str, NDArray, NDArray]]:
    return [(n, x, y) for n, x, y in zip(Gradients._fields, a, b, strict=True) if x is not None and y is not None]
