"""The claims, put together: their words from ``claims.toml``, their checks from the formulas there or from Python."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from attngrad.core.files import read_toml, require_same_ids
from attngrad.errata import _heads, _transformer
from attngrad.errata._back_pass import code, example, optimised
from attngrad.errata._claim import Entry
from attngrad.errata._formula import Also, Formula, formula_claim
from attngrad.formulas.report import figure

_TOLD = read_toml("attngrad.errata", "claims.toml")

DOCUMENTS: dict[str, str] = {name: told["title"] for name, told in _TOLD.items()}
"""The title of each document as it is printed there (the first heading where it has none), by a name from its words."""

_NUMBERS = dict(zip(("000", "001", "002", "003"), DOCUMENTS, strict=True))

CHECKS: dict[str, Any] = _heads.CHECKS | code.CHECKS | example.CHECKS | optimised.CHECKS | _transformer.CHECKS
"""The checks of the claims that are no formulas, by id."""

FIGURES: dict[str, Callable[[Any], Any]] = _heads.FIGURES | code.FIGURES | example.FIGURES | _transformer.FIGURES
"""What the notes show: errors, as numbers, and other figures, as text."""

_FIGURE = re.compile(r"\{(.+?)\}")


def name_of(document: str) -> str:
    """The name of a document; also from the number that it had in earlier versions."""
    name = _NUMBERS.get(document, document)
    if name not in DOCUMENTS:
        raise ValueError(f"run: document must be None or one of {', '.join(DOCUMENTS)}; got {document!r}.")
    return name


@cache
def entries() -> tuple[Entry, ...]:
    """Every claim of the four documents, by id; the ids are stable, and later ones may stand earlier in a document.

    >>> entries()[0].id, entries()[-1].document
    ('equation-z-1', 'explicit-formula')
    """
    return assembled(_TOLD)


def assembled(documents: dict[str, dict[str, Any]]) -> tuple[Entry, ...]:
    """The claims that are told of these documents, each with its check."""
    told: dict[str, dict[str, Any]] = {}
    for name, document in documents.items():
        shared = {key: value for key, value in document.items() if key in ("case", "letters")}
        told |= {f"{name}-{key}": shared | words for key, words in document.items() if isinstance(words, dict)}
    require_same_ids("errata: claims.toml and the checks", [i for i, w in told.items() if "formula" not in w], CHECKS)
    named = [x for w in told.values() for x in _FIGURE.findall(w.get("note", "")) if "=" not in x]
    require_same_ids("errata: the notes of claims.toml and the figures", named, FIGURES)
    return tuple(_entry(id_, **words) for id_, words in told.items())


def _entry(
    id_: str,
    case: str = "head",
    letters: str = "usual",
    note: str = "",
    formula: str = "",
    corrected: str = "",
    reading: dict[str, str] | None = None,
    **said: str,
) -> Entry:
    """A claim from what is told of it; ``said`` are the words that are shown."""
    also = _heads.LETTERS[letters]
    if formula:
        check = formula_claim(_heads.CASES[case], " ".join(formula.split()), corrected, reading, also)
        said = {"correct": corrected} | said
    else:
        check = CHECKS[id_]
    return Entry(id_, check=replace(check, evidence=_noted(note, also)) if note else check, **said)


def _noted(note: str, also: Also) -> Callable[[Any], str]:
    """The note at a case, with the figures that it names, and the errors of the formulas that it has."""
    made = {x: Formula(x, also).error if "=" in x else FIGURES[x] for x in _FIGURE.findall(note)}

    def shown(case: Any, name: str) -> str:
        value = made[name](case)
        return value if isinstance(value, str) else figure(value)

    return lambda case: _FIGURE.sub(lambda found: shown(case, found[1]), note)
