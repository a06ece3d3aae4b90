"""How long the command takes to start: ``attngrad --help`` in a fresh process, beside a bare interpreter."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.quiet import DISTURBED, UNSTEADY
from benchmarks.timing import Timing

HELP, BARE = "attngrad --help", "python -c pass"
NAME = f"startup {HELP}"
"""What --only matches and --list shows."""

_COMMANDS = {HELP: ("-m", "attngrad", "--help"), BARE: ("-c", "pass")}


@dataclass(frozen=True)
class Startup:
    """The times by command; ``others``: how many cores other processes used meanwhile."""

    times: dict[str, Timing] = field(default_factory=dict)
    others: float = 0.0

    @property
    def disturbed(self) -> bool:
        """Whether other processes took so much, or the times vary so much, that they say little."""
        return self.others > DISTURBED or any(timing.spread > UNSTEADY for timing in self.times.values())

    @property
    def milliseconds(self) -> dict[str, float]:
        """The medians by command."""
        return {name: timing.median * 1e3 for name, timing in self.times.items()}

    @property
    def sentence(self) -> str:
        """What was found, in one line."""
        mark = "~" if self.disturbed else ""
        return "Start: " + ", ".join(f"`{name}` {ms:.0f} ms" for name, ms in self.milliseconds.items()) + mark + "."


def calls() -> dict[str, Callable[[], object]]:
    """The commands, to be timed; each must succeed."""

    def start(arguments: tuple[str, ...]) -> Callable[[], object]:
        command = [sys.executable, *arguments]
        return lambda: subprocess.run(command, stdout=subprocess.DEVNULL, check=True)  # noqa: S603 fixed arguments

    return {name: start(arguments) for name, arguments in _COMMANDS.items()}
