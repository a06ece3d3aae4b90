"""What every report shares: marks in characters that the terminal has, and text that hangs beside its label."""

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


def print_hanging(prefix: Text, body: Text, console: Console) -> None:
    """``prefix`` once, and ``body`` beside it, wrapped to the width that is left; no trailing blanks."""
    from rich.text import Text

    width = max(console.width - prefix.cell_len, 1)
    for i, text in enumerate(body.wrap(console, width)):
        text.rstrip()
        console.print(Text.assemble(prefix if i == 0 else " " * prefix.cell_len, text))


def signs(text: str, console: Console | None = None) -> str:
    """A formula with ∘ for the product entry by entry; with ``o`` still where the console writes no Unicode.

    >>> signs("dS = A o (dA - delta)")
    'dS = A ∘ (dA - delta)'
    """
    return text if console is not None and console.options.ascii_only else text.replace(" o ", " ∘ ")


def print_hint(words: str, command: str, console: Console) -> None:
    """``words: command`` on one line; where that is too narrow, the command on a line of its own, never broken."""
    from rich.text import Text

    line = f"{words}: {command}"
    if len(line) > console.width:
        print_hanging(Text(), Text(f"{words}:"), console)
        line = f"  {command}"
    console.print(Text(line), soft_wrap=True)
