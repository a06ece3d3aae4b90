"""The worked example of ``attngrad demo``: one backward pass of a layer, as a table and two matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

from attngrad.explain.terminal import CELL, heat_table, invariant_lines, plain_table
from attngrad.explain.windows import matrix
from attngrad.layers import MultiHeadAttention

if TYPE_CHECKING:
    from attngrad.explain.trace import Trace


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
    layer = MultiHeadAttention(128, 4, dtype=np.float64, rng=seed)
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
