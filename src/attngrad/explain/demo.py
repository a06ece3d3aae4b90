"""What ``attngrad demo`` prints: one backward pass of a layer, worked, and every derivative beside the complex step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

import attngrad
from attngrad.core.arrays import NDArray
from attngrad.core.operands import Gradients, Tangents
from attngrad.explain.marks import mark
from attngrad.explain.terminal import CELL, heat_table, invariant_lines, plain_table
from attngrad.explain.windows import matrix
from attngrad.testing import complex_step_hvp, complex_step_jvp, complex_step_vjp, relative_error

if TYPE_CHECKING:
    from attngrad.explain.trace import Trace

TOLERANCE = 1e-12


def summary_table(trace: Trace, names: Sequence[str], head: int = 0) -> Table:
    """Name, formula, shape and one entry of each step."""
    table = plain_table("", "is", "shape", "one entry", wraps="is")
    stage = ""
    for name in names:
        rule, array = trace.rules[name], trace[name].value
        if rule.stage != stage:
            stage = rule.stage
            table.add_row(f"[dim]{stage}[/dim]")
        m = matrix(trace, name, head, 0, array.shape[-1] + array.shape[-2], 1)
        shape = " x ".join(map(str, array.shape))
        table.add_row(f"[bold]{name}[/bold]", rule.formula, shape, f"{m.values[-1, 0]: .4f}")
    return table


WORKED = ("Q", "K", "V", "Z", "S", "L", "A", "O", "dO", "dV", "dA", "delta", "dS", "dQ", "dK")


def worked_example(console: Console, seed: int = 0) -> None:
    """Print one forward and backward pass of a layer: d_model 128, 4 heads, batch 32, 10 tokens, causal."""
    rng = np.random.default_rng(seed)
    layer = attngrad.MultiHeadAttention(128, 4, dtype=np.float64, rng=seed)
    x, dy = rng.standard_normal((2, 32, 10, 128))
    trace = layer.trace(x, dy, causal=True)
    console.rule("[bold]A worked backward pass[/bold]", align="left")
    console.print("One causal layer: d_model 128, 4 heads, batch 32, 10 tokens; float64.\n")
    console.print(summary_table(trace, WORKED))
    for name, title in (
        ("A", "A, batch 0, head 0: rows sum to 1"),
        ("dS", "dS = A o (dA - delta), the one matrix behind dQ and dK: rows sum to 0"),
    ):
        console.print(f"\n{title}", highlight=False, style="italic")
        console.print(heat_table(matrix(trace, name, 0, 0, 10, min(10, console.width // CELL))))
    console.print()
    invariant_lines(console, trace)
    console.print("\nEvery matrix of a small one: attngrad explain. As a page: attngrad explain --format html --open\n")


def gradient_check(console: Console, seed: int = 0) -> bool:
    """Print how far each derivative is from the complex step, with every option on; True if none exceeds TOLERANCE."""
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
    rows: list[tuple[str, str, float]] = []
    truth = complex_step_vjp(q, k, v, dout, **options)
    rows += [("VJP", f"d{n}", relative_error(a, b)) for n, a, b in _pairs(pullback(dout), truth)]
    rows += [("JVP", "out_dot", relative_error(out_dot, complex_step_jvp(q, k, v, t, **options)[0]))]
    truth = complex_step_hvp(q, k, v, t, dout, dout_dot, **options)
    rows += [("HVP", f"d{n}_dot", relative_error(a, b)) for n, a, b in _pairs(grads_dot, truth)]

    console.rule("[bold]Gradient check[/bold]", align="left")
    console.print(
        "Each derivative against the complex step: causal, window, mask, bias, softcap, sinks, dropout, GQA.\n"
    )
    table = plain_table("pass", "result", "relative error", "")
    for i, (name, result, error) in enumerate(rows):
        first = i == 0 or rows[i - 1][0] != name
        table.add_row(f"[bold]{name}[/bold]" if first else "", result, f"{error:.1e}", mark(console, error < TOLERANCE))
    console.print(table)
    console.print()
    return all(error < TOLERANCE for _, _, error in rows)


def _pairs(a: Gradients, b: Gradients) -> list[tuple[str, NDArray, NDArray]]:
    return [(n, x, y) for n, x, y in zip(Gradients._fields, a, b, strict=True) if x is not None and y is not None]
