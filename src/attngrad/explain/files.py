"""A trace in a file; the suffix says which rendering."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

from attngrad.core.checks import fail
from attngrad.core.files import FilePath, replace

if TYPE_CHECKING:
    from attngrad.explain.trace import Trace

SUFFIXES = {".html": "html", ".tex": "latex", ".json": "json", ".txt": "terminal"}
WIDTH = 80


def text(trace: Trace, form: str, *, head: int = 0, batch: int = 0, width: int = WIDTH) -> str:
    """One rendering: html, latex, json or terminal (without colour)."""
    if form == "html":
        return trace.to_html(head=head, batch=batch)
    if form == "latex":
        return trace.to_latex(head=head, batch=batch)
    if form == "json":
        return trace.to_json() + "\n"
    from rich.console import Console

    stream = io.StringIO()
    trace.print(Console(file=stream, width=width, color_system=None, highlight=False), head=head, batch=batch)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def save(trace: Trace, path: FilePath, *, head: int = 0, batch: int = 0) -> None:
    """Write the rendering that the suffix of ``path`` names, all or nothing."""
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        fail(ValueError, "trace.save", "path", f"end in {', '.join(SUFFIXES)}", repr(os.fspath(path)))
    replace(path, text(trace, SUFFIXES[suffix], head=head, batch=batch).encode())
