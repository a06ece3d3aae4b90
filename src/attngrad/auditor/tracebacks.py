"""What somebody's code raised, as a report tells it: in one line, and the frames that are theirs."""

from __future__ import annotations

import traceback
from pathlib import Path

_FRAMES = 50
_OURS = str(Path(__file__).parent)


def error_text(error: BaseException) -> str:
    """The kind of an error and the first line of its message, which may itself fail."""
    try:
        lines = f"{type(error).__name__}: {error}".strip().splitlines()
    except Exception:
        return f"{type(error).__name__}, whose message cannot be printed"
    return lines[0].removesuffix(":")


def their_frames(error: BaseException, *others: str, least: int = 1) -> str:
    """The traceback without the frames of the auditor, and of files with one of ``others`` in their path.

    Where none is left, the last ``least`` of ours.
    """
    frames = traceback.extract_tb(error.__traceback__, limit=_FRAMES)
    if len(frames) == _FRAMES:  # of a recursion: the others would take minutes to print
        frames += traceback.extract_tb(error.__traceback__, limit=-_FRAMES)
    theirs = [f for f in frames if not any(name in f.filename for name in (_OURS, *others))]
    lines = traceback.format_list(theirs or frames[len(frames) - least :]) + traceback.format_exception_only(error)
    return "Traceback (most recent call last):\n" + "".join(lines)
