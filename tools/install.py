"""Run pip for the Makefile, and say what goes on while it runs.

    install.py GROUP ...                  the packages of dependency groups; nothing is compiled
    install.py --package [KEY=VALUE ...]  compile what has changed of the kernels, with these CMake definitions, and
                                          install the package as editable

Shown are the packages by name, the units as they are compiled, and a sign of life where neither comes for a while.
What fails is shown in full.
"""

from __future__ import annotations

import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterable

SILENCE = 10.0
"""Seconds without a line after which one is printed."""
UNIT = re.compile(r"\[(\d+)/(\d+)\] (?:Building CXX object CMakeFiles/|Linking CXX \w+ \w+ )(\S+)")
PACKAGE = re.compile(r"(?:Collecting|Installing collected packages:) (.*)")


def shown(line: str) -> str | None:
    """What a person is told of a line of pip, CMake or Ninja; None: nothing."""
    if unit := UNIT.search(line):
        number, count, path = unit.groups()
        target = path.partition("/")[0].partition(".")[0]
        file = path.rpartition("/")[2].partition(".")[0] if "/" in path else "linked"
        return f"  {number} of {count}  {target}: {file}"
    if package := PACKAGE.match(line):
        name = package[1].partition(" (from ")[0]
        return f"  package {name}" if line.startswith("Collecting") else f"  installing {name}"
    return None


def run(command: list[str]) -> int:
    """Run a command and show its lines as ``shown`` has them; all of them where it fails. Its exit status."""
    started = said = time.monotonic()
    everything: list[str] = []
    lines: queue.Queue[str | None] = queue.Queue()

    def read(output: Iterable[str]) -> None:
        for line in output:
            lines.put(line.rstrip("\n"))
        lines.put(None)

    with subprocess.Popen(  # noqa: S603
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        threading.Thread(target=read, args=(process.stdout,), daemon=True).start()
        while True:
            try:
                line = lines.get(timeout=max(0.1, said + SILENCE - time.monotonic()))
            except queue.Empty:
                said = time.monotonic()
                print(f"  ... {said - started:.0f} s", flush=True)
                continue
            if line is None:
                break
            everything.append(line)
            if text := shown(line):
                said = time.monotonic()
                print(text, flush=True)
    if process.returncode:
        print(*everything, f"failed with status {process.returncode}: {' '.join(command)}", sep="\n", flush=True)
    return process.returncode


def main(arguments: list[str]) -> int:
    """See the module."""
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar=off"]
    if arguments[0] != "--package":
        print(f"Installing packages: {', '.join(arguments)}", flush=True)
        return run([*pip, *(word for group in arguments for word in ("--group", group))])
    print("Compiling what is new of the kernels; all of them take one to two minutes on 2 cores.", flush=True)
    definitions = [word for text in arguments[1:] for word in ("-C", f"cmake.define.{text}")]
    return run([*pip, "--verbose", "--no-build-isolation", *definitions, "--editable", "."])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
