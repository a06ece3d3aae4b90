"""Where and with what a run took place."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from attngrad import _native

ROOT = Path(__file__).resolve().parents[1]
"""Of the checkout: where processes of their own find this package."""


def cpu_model() -> str:
    """The name of the processor, from /proc/cpuinfo where there is one."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def cores() -> int:
    """How many processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe(threads: int) -> dict[str, Any]:
    """CPU, cores, instruction set, threads, system and compiler."""
    return {
        "cpu": cpu_model(),
        "cores": cores(),
        "isa": _native.isa(),
        "threads": threads,
        "system": f"{platform.system()} {platform.machine()}",
        "compiler": _native.compiler,
    }


def commit() -> str | None:
    """The commit of the checkout that this file is in, "+" where it has changes; None outside of one."""

    def git(*arguments: str) -> str | None:
        command = ["git", "--no-optional-locks", "-C", str(Path(__file__).parent), *arguments]
        try:
            result = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 fixed arguments
        except (OSError, subprocess.CalledProcessError):
            return None
        return result.stdout.strip()

    found = git("rev-parse", "--short=12", "HEAD")
    if found is None or git("ls-files", "--error-unmatch", str(Path(__file__).parent / "__init__.py")) is None:
        return None  # a site-packages inside of somebody else's checkout
    return found + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def python_version() -> str:
    """Of the interpreter."""
    return platform.python_version()


def now() -> str:
    """The time, in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
