"""The worked backward pass and the gradient check, in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from attngrad import reference
from attngrad._options import Gradients, Tangents, bind
from attngrad.explain.marks import mark
from attngrad.layers import MultiHeadAttention
from attngrad.testing import complex_step_hvp, complex_step_jvp, complex_step_vjp, relative_error

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

NDArray = npt.NDArray[Any]

# name, formula; in the order of the data flow. Notation: docs/notation.md
FORWARD = (
    ("Q, K, V", "X W_q, X W_k, X W_v by heads"),
    ("Z", "scale Q K^T"),
    ("S", "Z + bias, masked"),
    ("L", "log sum exp of a row of S"),
    ("A", "exp(S - L)"),
    ("O", "A V"),
)
BACKWARD = (
    ("dV", "A^T dO"),
    ("dA", "dO V^T"),
    ("delta", "rowsum(dO o O)"),
    ("dS", "A o (dA - delta)"),
    ("dQ", "scale dS K"),
    ("dK", "scale dS^T Q"),
)
TOLERANCE = 1e-12
BLUE, ORANGE = (33, 102, 172), (230, 97, 1)  # told apart in all common kinds of colour blindness


def heat_table(matrix: NDArray, title: str) -> Table:
    """A small matrix as a table of numbers on a signed heat: blue below zero, orange above."""
    from rich.style import Style
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=None, padding=(0, 0), show_header=False, pad_edge=False)
    for _ in range(matrix.shape[1]):
        table.add_column(justify="right", no_wrap=True, overflow="crop")
    largest = float(np.max(np.abs(matrix))) or 1.0
    for row in matrix:
        cells = []
        for value in row:
            strength = abs(float(value)) / largest
            red, green, blue = (round(255 + (c - 255) * strength) for c in (ORANGE if value > 0 else BLUE))
            ink = "white" if strength > 0.7 else "black"
            cells.append(Text(f"{value:6.2f} ", Style(color=ink, bgcolor=f"rgb({red},{green},{blue})")))
        table.add_row(*cells)
    return table


def worked_example(console: Console, seed: int = 0) -> None:
    """Print one forward and backward pass of a layer: d_model 128, 4 heads, batch 32, 10 tokens, causal."""
    rng = np.random.default_rng(seed)
    layer = MultiHeadAttention(128, 4, dtype=np.float64, rng=seed)
    x_in, dy = rng.standard_normal((2, 32, 10, 128))
    q, k, v = (np.moveaxis((x_in @ layer.params[w]).reshape(32, 10, 4, 32), 2, 1) for w in ("w_q", "w_k", "w_v"))
    dout = np.moveaxis((dy @ layer.params["w_o"].T).reshape(32, 10, 4, 32), 2, 1)
    x, o, _ = bind("worked_example", q, k, v, {"causal": True})
    f = reference.forward(x, o)
    b = reference.backward(x, o, f, dout)
    arrays = {
        "Q, K, V": x.q,
        "Z": f.z,
        "S": f.scores,
        "L": f.lse,
        "A": f.weights,
        "O": f.out,
        "dV": b.grads.v,
        "dA": b.dweights,
        "delta": b.delta,
        "dS": b.dscores,
        "dQ": b.grads.q,
        "dK": b.grads.k,
    }

    console.rule("[bold]A worked backward pass[/bold]", align="left")
    console.print("One causal layer: d_model 128, 4 heads, batch 32, 10 tokens; float64.\n")
    table = _table("", "is", "shape", "one entry", wraps="is")
    for name_of_pass, lines in (("forward", FORWARD), ("backward", BACKWARD)):
        table.add_row(f"[dim]{name_of_pass}[/dim]")
        for name, formula in lines:
            array = arrays[name]
            entry = float(array[0, 0, -1] if array.ndim == 3 else array[0, 0, -1, 0])
            table.add_row(f"[bold]{name}[/bold]", formula, " x ".join(map(str, array.shape)), f"{entry: .4f}")
    console.print(table)
    console.print()
    console.print(heat_table(f.weights[0, 0], "A, batch 0, head 0: rows sum to 1"))
    console.print()
    console.print(heat_table(b.dscores[0, 0], "dS = A o (dA - delta), the one matrix behind dQ and dK: rows sum to 0"))
    console.print()

    t = Tangents(*(rng.standard_normal(a.shape) for a in (q, k, v)))
    out_dot = reference.forward_tangent(x, o, f, t).out_dot
    along = sum(float(np.sum(g * d)) for g, d in zip(b.grads, t, strict=True) if g is not None)
    invariants = {
        "rows of A sum to 1": relative_error(f.weights.sum(-1), np.ones(f.lse.shape)),
        "rows of dS sum to 0": float(np.max(np.abs(b.dscores.sum(-1)))),
        "delta = rowsum(A o dA)": relative_error((f.weights * b.dweights).sum(-1), b.delta),
        "<dO, JVP(t)> = <VJP(dO), t>": abs(float(np.sum(dout * out_dot)) - along) / abs(along),
    }
    for claim, error in invariants.items():
        console.print(mark(console, error < TOLERANCE), f"{claim:<29} off by {error:.0e}")
    console.print()


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

    from attngrad import hvp, jvp, vjp

    _, pullback = vjp(q, k, v, **options)
    _, out_dot = jvp((q, k, v), t[:3], bias_dot=t.bias, sinks_dot=t.sinks, **options)
    _, grads_dot = hvp((q, k, v), t[:3], dout, dout_dot, bias_dot=t.bias, sinks_dot=t.sinks, **options)
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
    table = _table("pass", "result", "relative error", "")
    for i, (name, result, error) in enumerate(rows):
        first = i == 0 or rows[i - 1][0] != name
        table.add_row(f"[bold]{name}[/bold]" if first else "", result, f"{error:.1e}", mark(console, error < TOLERANCE))
    console.print(table)
    console.print()
    return all(error < TOLERANCE for _, _, error in rows)


def _table(*columns: str, wraps: str | None = None) -> Table:
    """A table without lines. In a narrow terminal the column ``wraps`` takes more rows, and none is cut."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=column != wraps, overflow="fold")
    return table


def _pairs(a: Gradients, b: Gradients) -> list[tuple[str, NDArray, NDArray]]:
    return [(n, x, y) for n, x, y in zip(Gradients._fields, a, b, strict=True) if x is not None and y is not None]
