r"""What one notation may mean: the same letters are rows in one paper and columns in the next.

A formula is read in the house's convention first. Where it does not hold so, the other readings of what occurs in it
are tried, few changes first, each for the whole text; it holds if it holds in one, and the report names it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from attngrad.core.files import read_toml

T = TypeVar("T")
OPTIONS: dict[str, dict[str, str]] = read_toml("attngrad.formulas", "readings.toml")
"""Every question with its answers, the house's first; each answer with the words for it."""

MAX_READINGS = 24


@dataclass
class Reading:
    """Answers to the questions that a text raises, and the questions it has raised."""

    answers: dict[str, str] = field(default_factory=dict)
    asked: dict[str, None] = field(default_factory=dict)

    def of(self, question: str) -> str:
        """The answer; the first one where none was given."""
        self.asked[question] = None
        return self.answers.get(question) or next(iter(OPTIONS[question]))

    def notes(self) -> tuple[str, ...]:
        """What is read otherwise than the house would, in words."""
        told = [OPTIONS[question][answer] for question, answer in self.answers.items() if question in self.asked]
        return (f"read with {'; '.join(told)}",) if told else ()


def each(read: Callable[[Reading], T], unreadable: type[Exception]) -> Iterator[T]:
    """What ``read`` makes of a text in every reading that it can follow, the house's first; else its first error."""
    waiting: deque[dict[str, str]] = deque([{}])
    seen: list[dict[str, str]] = []
    error: Exception | None = None
    found = 0
    while waiting and len(seen) < MAX_READINGS:
        answers = waiting.popleft()
        if answers in seen:
            continue
        seen.append(answers)
        reading = Reading(answers)
        try:
            yield read(reading)
            found += 1
        except unreadable as fault:
            error = error or fault
        for question in reading.asked:
            if question not in answers:
                waiting += [answers | {question: answer} for answer in list(OPTIONS[question])[1:]]
    if error is not None and not found:
        raise error
