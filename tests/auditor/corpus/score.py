"""Audits the corpus without a wrapper and counts: ``python -m tests.auditor.corpus.score [--apply] [WORD ...]``.

Keywords that the index states and that ``attngrad.audit`` does not take yet (layout, sizes) are left out.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import time
from dataclasses import dataclass
from typing import Any

import attngrad

from .candidates import INDEX, VARIATIONS, label, load

KEYWORDS = ("layout", "sizes", "level", "options")


@dataclass(frozen=True)
class Row:
    """What the audit of one candidate gave."""

    entry: dict[str, Any]
    status: str
    """"right", "wrong", "not audited" or "raised"."""
    mistakes: tuple[str, ...]
    in_full: bool
    note: str
    seconds: float

    @property
    def audited(self) -> bool:
        """Whether there is a verdict."""
        return self.status in ("right", "wrong")

    @property
    def verdict_right(self) -> bool:
        """Whether the verdict is what the index says."""
        return self.status == ("right" if self.entry["right"] else "wrong")

    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        named = "" if self.entry["right"] else "in full" if self.in_full else "no"
        told = ", ".join(self.mistakes) or self.note.replace("|", "/").replace("\n", " ")[:110]
        is_so = "right" if self.entry["right"] else "wrong"
        judged = "as it is" if self.verdict_right else "false alarm" if self.entry["right"] else "missed"
        verdict = judged if self.audited else ""
        return label(self.entry), is_so, self.status, verdict, named, told, f"{self.seconds:.1f}"


def audit_of(framework: str) -> Any:
    """attngrad.audit, attngrad.torch.audit or attngrad.jax.audit."""
    return attngrad.audit if framework == "numpy" else importlib.import_module(f"attngrad.{framework}").audit


def stated(entry: dict[str, Any]) -> dict[str, Any]:
    """The keywords of the index that today's audit takes."""
    taken = inspect.signature(attngrad.audit).parameters
    return {n: entry[n] for n in KEYWORDS if n in entry and n in taken}


def named_in_full(entry: dict[str, Any], report: Any) -> bool:
    """Whether the report's mistakes, or one of its explanations, are a naming of the index, and leave nothing open."""
    told = [set(report.mistakes), *({m.id for m in state} for state in report.explanations)]
    whole = report.status == "wrong" and all(f.kind != "unexplained" for f in report.findings)
    return whole and any(set(names) in told for names in entry.get("named", ()))


def score(entry: dict[str, Any], apply: bool = False, **keywords: Any) -> Row:
    """Audits one candidate; an audit that raises is a row like any other."""
    candidate = load(entry)
    if apply and isinstance(candidate, type) and hasattr(candidate, "apply"):
        candidate = candidate.apply
    start = time.perf_counter()
    try:
        report = audit_of(entry["framework"])(candidate, **stated(entry), **keywords)
    except Exception as error:  # what a user would see as a traceback
        return Row(entry, "raised", (), False, f"{type(error).__name__}: {error}", time.perf_counter() - start)
    full, seconds = named_in_full(entry, report), time.perf_counter() - start
    return Row(entry, report.status, report.mistakes, full, report.verdict, seconds)


def summary(rows: list[Row]) -> str:
    """One line: audited, verdicts, names."""
    wrong = [r for r in rows if not r.entry["right"]]
    return (
        f"audited {sum(r.audited for r in rows)} of {len(rows)}, "
        f"verdicts right {sum(r.verdict_right for r in rows)} of {len(rows)}, "
        f"wrong ones named in full {sum(r.in_full for r in wrong)} of {len(wrong)}"
    )


def main() -> None:
    """Prints a Markdown table, row by row, a line per file, and the summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only candidates whose file:name contains one of these")
    parser.add_argument("--effort", default="default", choices=("quick", "default", "full"))
    parser.add_argument("--apply", action="store_true", help="pass Function.apply in place of the Function")
    parser.add_argument("--variations", action="store_true", help="those of variations.toml")
    chosen = parser.parse_args()
    columns = ("candidate", "is", "audit says", "verdict", "named", "mistakes, or what it said", "s")
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    rows = []
    for entry in VARIATIONS if chosen.variations else INDEX:
        if not chosen.words or any(word in label(entry) for word in chosen.words):
            rows.append(score(entry, chosen.apply, effort=chosen.effort))
            print("| " + " | ".join(rows[-1].cells()) + " |", flush=True)
    print()
    for file in dict.fromkeys(r.entry["file"] for r in rows):
        print(f"{file}: {summary([r for r in rows if r.entry['file'] == file])}")
    print(f"\nall: {summary(rows)}; {sum(r.seconds for r in rows):.0f} s, longest {max(r.seconds for r in rows):.1f} s")


if __name__ == "__main__":
    main()
