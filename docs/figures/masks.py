"""Draw which keys each query sees, option by option, as the library sees it.

Run it: ``python docs/figures/masks.py`` draws docs/figures/masks.png (needs matplotlib).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import attngrad

_IDS = attngrad.segments_from_lengths([3, 5])
PANELS: list[tuple[str, int, int, dict[str, Any]]] = [
    ("causal=True", 8, 8, {"causal": True}),
    ("causal=True, T < S", 4, 8, {"causal": True}),
    ("causal=True, offset=0, T < S", 4, 8, {"causal": True, "offset": 0}),
    ("causal=True, T > S", 8, 4, {"causal": True}),
    ("window=(2, 1)", 8, 8, {"window": (2, 1)}),
    ("causal=True, window=(2, None)", 8, 8, {"causal": True, "window": (2, None)}),
    ("segments of 3 and 5", 8, 8, {"segments": (_IDS, _IDS)}),
    ("segments, causal=True", 8, 8, {"segments": (_IDS, _IDS), "causal": True}),
]


def seen(queries: int, keys: int, options: dict[str, Any]) -> np.ndarray:
    """True where a query sees a key: where its weight, with all scores equal, is not zero."""
    return attngrad.attention_weights(np.zeros((queries, 1)), np.zeros((keys, 1)), **options) > 0


def draw(path: Path) -> None:
    """One panel per option."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap

    figure, axes = plt.subplots(2, 4, figsize=(9, 4.9), dpi=120)
    for ax, (title, queries, keys, options) in zip(axes.flat, PANELS, strict=True):
        grid = seen(queries, keys, options)
        ax.pcolormesh(
            grid, cmap=ListedColormap(["#F2F2F2", "#0072B2"]), vmin=0, vmax=1, edgecolors="white", linewidth=1.5
        )
        ax.set(xlim=(0, 8), ylim=(8, 0), aspect="equal", xticks=[], yticks=[])
        ax.set_title(title, fontsize=8.5, family="monospace")
        for side in ax.spines.values():
            side.set_visible(False)
    axes[0, 0].set_xlabel("keys", fontsize=8)
    axes[0, 0].set_ylabel("queries", fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(__file__).with_suffix(".png"))
