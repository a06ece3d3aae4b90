"""Why the scores are divided by sqrt(d_k): how sharp the softmax gets, and what is left of its gradient.

Queries and keys have independent entries of mean 0 and variance 1, so a product q . k has variance d_k. For each d_k we
draw 32 sets of 64 queries and 64 keys, and measure every row with the factor 1/sqrt(d_k) and without:

    largest     max_j a_j, mean over the rows: 1/64 is even, 1 is all on one key
    keys        exp(-sum_j a_j log a_j), mean: the number of keys attended to, in effect
    softmax     ||diag(a) - a a^T||_F, the size of the softmax's Jacobian, median: 0 is saturated
    dead        the share of rows where that is below 1e-3
    dq          ||dq|| / ||dout|| for random v and dout, median; the factor of the scale itself is in it

Run it: ``python -m docs.figures.scale`` prints the table and draws docs/figures/scale.png (needs matplotlib).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import attngrad

SIZES = [4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
SETS, KEYS, QUERIES, E = 32, 64, 64, 16


class Measured(NamedTuple):
    """Over all rows of one size and one scale."""

    largest: float
    keys: float
    softmax: float
    dead: float
    dq: float


def measure(d_k: int, scale: float, seed: int = 0) -> Measured:
    """The numbers for one size and one scale."""
    rng = np.random.default_rng(seed)
    q, k = (rng.standard_normal((SETS, n, d_k)) for n in (QUERIES, KEYS))
    v, dout = (rng.standard_normal((SETS, n, E)) for n in (KEYS, QUERIES))
    a = attngrad.attention_weights(q, k, scale=scale)
    entropy = -np.sum(a * np.log(np.where(a > 0, a, 1.0)), axis=-1)
    # The rows of diag(a) - a a^T have the entries a_j (1 - a_j) and -a_j a_l; the sum of squares without cancellation:
    rest = np.sum(a, axis=-1, keepdims=True) - a  # 1 - a_j, but for the rounding of 1
    others = np.sum(a**2, axis=-1, keepdims=True) - a**2
    jacobian = np.sqrt(np.sum(a**2 * (rest**2 + others), axis=-1))
    _, pullback = attngrad.vjp(q, k, v, scale=scale)
    dq = np.linalg.norm(pullback(dout).q, axis=-1) / np.linalg.norm(dout, axis=-1)
    return Measured(
        largest=float(np.mean(np.max(a, axis=-1))),
        keys=float(np.mean(np.exp(entropy))),
        softmax=float(np.median(jacobian)),
        dead=float(np.mean(jacobian < 1e-3)),
        dq=float(np.median(dq)),
    )


def table() -> dict[int, tuple[Measured, Measured]]:
    """By d_k: with the factor 1/sqrt(d_k), and without."""
    return {d: (measure(d, d**-0.5), measure(d, 1.0)) for d in SIZES}


def markdown(found: dict[int, tuple[Measured, Measured]]) -> str:
    """The table of docs/meaning.md."""
    lines = [
        "| d_k | largest | raw | keys | raw | softmax' | raw | dead | raw |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for d, (with_, without) in found.items():
        pairs = [f"{x:.2g} | {y:.2g}" for x, y in zip(with_[:3], without[:3], strict=True)]
        pairs.append(f"{with_.dead:.0%} | {without.dead:.0%}")
        lines.append(f"| {d} | {' | '.join(pairs)} |")
    return "\n".join(lines)


def draw(found: dict[int, tuple[Measured, Measured]], path: Path) -> None:
    """Three panels over d_k, in the colours of the benchmarks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sys.path.insert(0, str(Path(__file__).parents[2]))
    from benchmarks.plots import INK, RULES

    panels: list[tuple[str, str, bool]] = [
        ("largest", "Largest weight of a row", False),
        ("keys", f"Keys in effect, of {KEYS}", False),
        ("softmax", "Gradient of the softmax, median row", True),
    ]
    styles: list[dict[str, Any]] = [
        {"color": "#0072B2", "marker": "o", "label": r"scores / $\sqrt{d_k}$"},
        {"color": "#D55E00", "marker": "s", "label": "scores as they are"},
    ]
    with plt.rc_context(RULES):
        figure, axes = plt.subplots(1, 3, figsize=(10, 3.4))
        for ax, (field, title, logarithmic) in zip(axes, panels, strict=True):
            for style, which in zip(styles, (0, 1), strict=True):
                ax.plot(SIZES, [getattr(found[d][which], field) for d in SIZES], lw=1.5, ms=4.5, **style)
            ax.set_xscale("log", base=2)
            ax.set_xticks(SIZES[::2], [str(d) for d in SIZES[::2]], fontsize=8)
            ax.minorticks_off()
            ax.set_xlabel("$d_k$")
            ax.set_title(title, fontsize=10, color=INK)
            if logarithmic:
                ax.set_yscale("log", base=10)
            else:
                ax.set_ylim(0, None)
        axes[0].set_ylim(0, 1.02)
        axes[0].legend(frameon=False, fontsize=8, loc="center right")
        figure.tight_layout()
        figure.savefig(path)
        plt.close(figure)


if __name__ == "__main__":
    measured = table()
    print(markdown(measured))
    print("\nnorm of dq over norm of dout, scaled and not:")
    print("\n".join(f"{d:>5} {with_.dq:.3g} {without.dq:.3g}" for d, (with_, without) in measured.items()))
    draw(measured, Path(__file__).with_suffix(".png"))
