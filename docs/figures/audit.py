"""Draw docs/figures/audit.svg: what ``attngrad audit`` prints of a wrong gradient."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
from rich.console import Console

import attngrad
from attngrad.auditor.terminal import render


def mine(q, k, v, dout):  # type: ignore[no-untyped-def]
    """The candidate of the README: the mean in place of the weighted row sum."""
    root = np.sqrt(q.shape[-1])
    s = q @ k.swapaxes(-1, -2) / root
    a = np.exp(s - s.max(-1, keepdims=True))
    a /= a.sum(-1, keepdims=True)
    da = dout @ v.swapaxes(-1, -2)
    ds = a * da - np.mean(a * da, -1, keepdims=True)
    return a @ v, ds @ k / root, ds.swapaxes(-1, -2) @ q / root, a.swapaxes(-1, -2) @ dout


def main() -> None:
    """Write the picture; its letters are the reader's own, for no font is fetched."""
    console = Console(record=True, width=96, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print("[bold]$[/bold] attngrad audit mine.py:mine")
    render(attngrad.audit(mine), console)
    svg = console.export_svg(title="attngrad audit", unique_id="audit")
    svg = re.sub(r"@font-face \{.*?\}\s*|<!--.*?-->\s*", "", svg, flags=re.S)
    path = Path(__file__).with_suffix(".svg")
    path.write_text(re.sub(r"[ \t]+$", "", svg, flags=re.M))


if __name__ == "__main__":
    main()
