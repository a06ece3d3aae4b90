"""One row of the table: a bad or awkward input, and what must come of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

Errors = type[BaseException] | tuple[type[BaseException], ...]


@dataclass(frozen=True)
class Row:
    """``do`` makes the input: what it is given, and who is called with it, its section says.

    ``error`` None: the right result must come, that of the same numbers in plain arrays. Else this error, whose text
    has ``words`` (a pattern; ``{name}`` stands for the argument).
    """

    name: str
    do: Callable[..., Any]
    error: Errors | None = None
    words: str = ""


def judge(row: Row, run: Callable[[], Any], label: str = "", name: str = "") -> Any:
    """What ``run`` gives where the right result is due; else None, and its error is that of the row.

    The text of the error begins with ``label``, the function, and a colon.
    """
    if row.error is None:
        return run()
    with pytest.raises(row.error) as caught:
        run()
    text = str(caught.value)
    assert re.search(row.words.replace("{name}", re.escape(name)), text), text
    assert text.startswith(f"{label}: " if label else ""), text
    assert caught.type not in (UnicodeDecodeError, UnicodeEncodeError, RecursionError)  # subclasses by chance
    return None
