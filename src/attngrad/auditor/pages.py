"""The pages of docs/mistakes, one per mistake, made from the catalogue.

``python -m attngrad.auditor.pages docs/mistakes`` writes them; a test holds the committed pages against this.
"""

from __future__ import annotations

import sys
from pathlib import Path

from attngrad.auditor.mistakes import Mistake, catalogue

_THEMES = {
    "scale": "The scale",
    "softmax": "Softmax and its derivative",
    "masks": "Causality, masks, windows",
    "dropout": "Dropout",
    "modifiers": "Softcap, bias, sinks",
    "products": "Matrix products",
    "heads": "Heads",
    "tiles": "Tiles, chunks, precision",
    "tangents": "Forward mode and second order",
    "layer": "The layer",
}


def page(mistake: Mistake) -> str:
    """The page of one mistake, in Markdown."""
    notes = list(dict.fromkeys(v.note for v in mistake.variants if v.note))
    shown = notes[:12]
    needs = {"gqa": "groups of query heads", "layer": '`level="layer"`', "tangents": "a JVP or HVP candidate"}
    lines = [
        *(f"# `{mistake.id}`: {mistake.title}", ""),
        *("What is computed:", "", f"    {mistake.formula}", ""),
        *("What it should be:", "", f"    {mistake.correct}", ""),
        *(f"**Why it is wrong.** {mistake.why}", ""),
        *(f"**The fix.** {mistake.fix}", ""),
    ]
    if mistake.needs:
        words = [needs.get(n, " or ".join(f"`{o}`" for o in n.split("|"))) for n in mistake.needs]
        lines += [f"It can be made, and is looked for, only with {', '.join(words)}.", ""]
    if shown:
        lines += ["The auditor knows it in these forms:", ""]
        lines += [f"- {note}" for note in shown]
        if len(notes) > len(shown):
            lines.append(f"- and {len(notes) - len(shown)} more (other tile sizes and places)")
        lines.append("")
    if not mistake.variants:
        lines += [
            "It is found by the size and spread of the errors, not by its numbers: these depend on the order of sums.",
            "",
        ]
    lines.append("[All mistakes](index.md) · [The auditor](../audit.md)")
    return "\n".join(lines) + "\n"


def index() -> str:
    """The list of all mistakes, by theme."""
    lines = [
        "# The catalogue of mistakes",
        "",
        "What [the auditor](../audit.md) can name. Each is a small function that computes what the mistake would",
        "compute; it is named only where that reproduces the candidate's numbers in every case.",
        "",
    ]
    for name, title in _THEMES.items():
        lines += [f"## {title}", "", "| id | what it is | computed |", "|---|---|---|"]
        for m in catalogue():
            if m.theme == name:
                formula = m.formula.replace("|", "\\|")
                lines.append(f"| [`{m.id}`]({m.id}.md) | {m.title} | `{formula}` |")
        lines.append("")
    lines += ["```{toctree}", ":hidden:", ":glob:", "", "*", "```"]  # for the site: the pages under this one
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """Every page by its file name."""
    return {"index.md": index(), **{f"{m.id}.md": page(m) for m in catalogue()}}


def main(folder: str) -> None:
    """Write the pages, and remove those of mistakes that are no more."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    made = pages()
    for old in target.glob("*.md"):
        if old.name not in made:
            old.unlink()
    for name, text in made.items():
        (target / name).write_text(text)


if __name__ == "__main__":
    main(sys.argv[1])
