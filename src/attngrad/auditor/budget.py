"""How long the auditor may go on searching."""

from __future__ import annotations

import time


class Budget:
    """Seconds of computing, and five times as many by the clock: a busy machine is no reason to find less.

    >>> Budget(0.0).over, Budget(60.0).over
    (True, False)
    """

    def __init__(self, seconds: float) -> None:
        self._computing = time.process_time() + seconds
        self._clock = time.monotonic() + 5.0 * seconds

    @property
    def over(self) -> bool:
        """Whether it is spent."""
        return time.process_time() >= self._computing or time.monotonic() >= self._clock
