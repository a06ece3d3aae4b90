"""Code in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap


def script(code: str, **environment: str) -> str:
    """What a fresh interpreter prints."""
    result = subprocess.run(  # noqa: S603
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | environment,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()
