"""What the notebooks share: the path to the recipes in examples/, the way their code is shown, the look of figures."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from IPython.display import Markdown

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT)]

from benchmarks.plots import INK, RULES  # noqa: E402

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#999999"  # Okabe and Ito's

plt.rcParams.update(RULES | {"figure.dpi": 110, "figure.facecolor": "white", "text.color": INK, "axes.labelcolor": INK})
plt.rcParams.update({"axes.titlesize": 10, "legend.frameon": False, "figure.constrained_layout.use": True})


def code(*things: Any) -> Markdown:
    """The source of functions and classes, as it stands in examples/."""
    text = "\n\n".join(inspect.getsource(thing).rstrip() for thing in things)
    return Markdown(f"```python\n{text}\n```")
