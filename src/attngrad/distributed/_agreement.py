"""What ranks must agree on before the first message of a pass, and the one error that all raise where they do not."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from attngrad.distributed._layout import words
from attngrad.distributed._transport import Ring

_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (TypeError, ValueError, NotImplementedError, RuntimeError)
}

Record = dict[str, Any]


def failed(error: Exception) -> Record:
    """The record of a rank whose own arguments are wrong: all ranks will raise its error."""
    kind = next((name for name, known in _ERRORS.items() if isinstance(error, known)), "RuntimeError")
    return {"error": [kind, str(error)[:500]]}


def agree(ring: Ring, record: Record, same: Iterable[tuple[str, type[Exception]]] = ()) -> list[Record]:
    """The records of all ranks, which are equal in the fields ``same``; else every rank raises the same error."""
    records = ring.exchange(record)
    for field in ("pass", "number"):
        _compare(
            ring.function, field, [r[field] for r in records], RuntimeError, "Call in the same order on every rank."
        )
    for rank, r in enumerate(records):
        if "error" in r:
            kind, text = r["error"]
            raise _ERRORS[kind](f"{ring.function}: on rank {rank}, {text.removeprefix(f'{ring.function}: ')}")
    for field, error in same:
        _compare(ring.function, field, [r[field] for r in records], error)
    return records


def _compare(function: str, field: str, values: list[Any], error: type[Exception], remedy: str = "") -> None:
    """All values are the same; else an error that names the ranks outside the largest party (of two: the later)."""
    parties: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        parties.setdefault(json.dumps(value), []).append(rank)
    if len(parties) == 1:
        return
    largest = max(parties, key=lambda value: len(parties[value]))
    others = [value for value in parties if value != largest]
    got = ", ".join(f"{_words(value)} on {words(parties[value])}" for value in others)
    rest = f"but {_words(largest)} on {words(parties[largest])}"
    raise error(
        f"{function}: {field} must be the same on every rank; got {got}, {rest}.{' ' + remedy if remedy else ''}"
    )


def _words(value: str) -> str:
    """A value as Python writes it, lists as tuples."""
    x = json.loads(value)
    return str(tuple(x)) if isinstance(x, list) else repr(x) if isinstance(x, (bool, type(None))) else str(x)
