"""What every report shares: the mark of what holds and of what does not, in characters that the terminal has."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


def mark(console: Console, holds: bool) -> Text:
    """A green tick or a red cross; ok or XX where the console writes no Unicode."""
    from rich.text import Text

    good, bad = ("ok", "XX") if console.options.ascii_only else ("✓", "✗")
    return Text(good, "bold green") if holds else Text(bad, "bold red")
