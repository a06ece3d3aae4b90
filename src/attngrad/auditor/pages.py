"""The pages of docs/mistakes, one per mistake, made from the catalogue.

``python -m attngrad.auditor.pages docs/mistakes`` writes them; a test holds the committed pages against this.
"""

from __future__ import annotations

import sys
from pathlib import Path

from attngrad.auditor.mistakes import Mistake, catalogue
from attngrad.explain.template import fill, text

_NEEDS = {"gqa": "groups of query heads", "layer": '`level="layer"`', "tangents": "a JVP or HVP candidate"}
_FOUND = {
    "low-precision": "by the size and spread of the errors, not by its numbers: these depend on the order of sums",
    "uninitialised-tail": "by filling the memory of `np.empty` and `torch.empty` with NaN",
    "not-deterministic": "by calling one small case many times with the same inputs, and a failing one again",
}


def page(mistake: Mistake) -> str:
    """The page of one mistake, in Markdown."""
    notes = list(dict.fromkeys(v.note for v in mistake.variants if v.note))
    shown, more = notes[:12], len(notes[12:])
    lines = []
    if mistake.needs:
        words = [_NEEDS.get(n, " or ".join(f"`{o}`" for o in n.split("|"))) for n in mistake.needs]
        lines += [f"It can be made, and is looked for, only with {', '.join(words)}.", ""]
    if shown:
        lines += ["The auditor knows it in these forms:", "", *(f"- {note}" for note in shown)]
        lines += [f"- and {more} more (other tile sizes and places)", ""] if more else [""]
    if not mistake.variants:
        lines += [f"It is found {_FOUND[mistake.id]}.", ""]
    told = {name.upper(): getattr(mistake, name) for name in ("id", "title", "formula", "correct", "why", "fix")}
    return fill(text("attngrad.auditor", "mistake.md"), told | {"MORE": "".join(f"{line}\n" for line in lines)})


def index() -> str:
    """The list of all mistakes, by theme."""
    lines = []
    for title in dict.fromkeys(m.theme for m in catalogue()):
        lines += [f"## {title}", "", "| id | what it is | computed |", "|---|---|---|"]
        for m in catalogue():
            if m.theme == title:
                formula = m.formula.replace("|", "\\|")
                lines.append(f"| [`{m.id}`]({m.id}.md) | {m.title} | `{formula}` |")
        lines.append("")
    return fill(text("attngrad.auditor", "index.md"), {"THEMES": "".join(f"{line}\n" for line in lines)})


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
    for name, content in made.items():
        (target / name).write_text(content)


if __name__ == "__main__":
    main(sys.argv[1])
