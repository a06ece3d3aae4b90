"""The fuzzer: random inputs for every door of the library, for as long as you like. Run by `make fuzz`.

    python tests/robustness/fuzz.py --minutes 60                 every part, by its share of the time
    python tests/robustness/fuzz.py files --minutes 5            one part
    python tests/robustness/fuzz.py files --only 123             one input again, by its number

Each part is a module ``fuzz_PART`` with ``WHAT`` (what its inputs are), ``describe(number)`` (the input of a number)
and ``judge(number)``, which returns a word for what happened (they are counted) and raises where something is wrong. A
part runs in a process of its own, one after the other: so a crash and a hang are findings too, with the number that led
to them. What atheris finds by following the branches taken (part ``guided``) is kept as a file instead of a number.

Exit status: 0 nothing found, 1 a finding, which is printed with the command that makes it again.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT), str(ROOT / "tests" / "support")]  # the benchmark, whose files are read, too; the cases

SHARES = {"kernels": 6, "arguments": 2, "formulas": 2, "files": 3, "commands": 2, "state": 1, "guided": 4}
HANG = 300.0
"""Seconds that one input may take; the slowest take a few."""
MEMORY = 4 << 30
"""Bytes of address space beyond what a part starts with: a file that claims to be larger must not be believed."""


def main() -> None:
    """Run the parts asked for; exit 1 after the first finding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(SHARES))
    parser.add_argument("--minutes", type=float, default=10.0, help="for all parts together")
    parser.add_argument("--first", type=int, default=0, help="the number to begin with")
    parser.add_argument("--only", type=int, help="this number alone, in this process")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    parts = arguments.parts or list(SHARES)
    if unknown := [part for part in parts if importlib.util.find_spec(f"fuzz_{part}") is None]:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(SHARES)}")
    if arguments.only is not None:
        module = load(parts[0])
        print(module.describe(arguments.only))
        print(module.judge(arguments.only))
        return
    if arguments.worker is not None:
        raise SystemExit(work(parts[0], arguments.first, 60 * arguments.minutes, arguments.worker))
    whole = sum(SHARES.get(part, 1) for part in parts)
    tried = 0
    for part in parts:
        minutes = arguments.minutes * SHARES.get(part, 1) / whole
        tried += guided(minutes) if part == "guided" else watch(part, arguments.first, minutes)
    print(f"{tried} inputs in all, nothing found")


def load(part: str) -> Any:
    """The module of a part; warnings are errors from here on."""
    module = importlib.import_module(f"fuzz_{part}")
    warnings.simplefilter("error")
    return module


# --- the process of a part --------------------------------------------------------------------------------------------


def work(part: str, first: int, seconds: float, status_file: str) -> int:
    """Judge numbers from ``first`` on until the time is up; each is written to ``status_file`` before it is tried."""
    faulthandler.enable()
    module = load(part)
    limit_memory()
    status = os.open(status_file, os.O_WRONLY)
    counts: Counter[str] = Counter()
    slowest, end, number = (0.0, first), time.monotonic() + seconds, first
    while (start := time.monotonic()) < end:
        os.pwrite(status, f"{number:<20}".encode(), 0)
        try:
            counts[module.judge(number)] += 1
        except Exception:
            traceback.print_exc()
            return 1
        slowest = max(slowest, (time.monotonic() - start, number))
        number += 1
    used = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    told = {"tried": number - first, "what": module.WHAT, "counts": counts, "slowest": slowest, "used": used}
    os.pwrite(status, json.dumps(told).encode(), 0)
    return 0


def limit_memory() -> None:
    """Let this process have ``MEMORY`` more than it has now."""
    with contextlib.suppress(OSError), open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))


# --- the process that watches -----------------------------------------------------------------------------------------


def watch(part: str, first: int, minutes: float) -> int:
    """Run a part in a process of its own; how many inputs it tried."""
    with tempfile.NamedTemporaryFile("r+") as status:
        command = [sys.executable, __file__, part, "--first", str(first), "--minutes", str(minutes)]
        process = subprocess.Popen([*command, "--worker", status.name])  # noqa: S603
        code = patience(process, Path(status.name))
        told = Path(status.name).read_text().strip()
    if code != 0:
        why = f"no answer in {HANG:g} s" if code is None else "a finding" if code == 1 else ending(code)
        found(f"{part} {told}: {why}", f"python tests/robustness/fuzz.py {part} --only {told}")
    result = json.loads(told)
    counts = ", ".join(f"{n} {word}" for word, n in sorted(result["counts"].items()))
    slowest = "the slowest took {:.2f} s (number {})".format(*result["slowest"])
    took = f"{minutes:.1f} minutes ({result['used'] / 60:.1f} of processor time)"
    print(f"{part}: {result['tried']} {result['what']} in {took}: {counts}; {slowest}", flush=True)
    return int(result["tried"])


def patience(process: subprocess.Popen[bytes], status: Path) -> int | None:
    """The exit status of a process; None where it stood still for too long, and was ended."""
    seen, stood = "", 0.0  # by our own waits: where both processes are stopped, nobody waits
    while True:
        try:
            return process.wait(0.5)
        except subprocess.TimeoutExpired:
            stood += 0.5
            if (told := status.read_text()) != seen:
                seen, stood = told, 0.0
            elif stood > HANG:
                process.kill()
                process.wait()
                return None
        except BaseException:
            process.kill()
            raise


def ending(code: int) -> str:
    """What an exit status says."""
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def guided(minutes: float) -> int:
    """Run atheris on each of its targets; how many inputs it tried."""
    import fuzz_guided

    if importlib.util.find_spec("atheris") is None:
        print("guided: left out, for atheris is not installed (pip install atheris)", flush=True)
        return 0
    tried = 0
    for target in fuzz_guided.TARGETS:
        folder = Path(tempfile.mkdtemp(prefix=f"attngrad-fuzz-{target}-"))
        seconds = max(1, round(60 * minutes / len(fuzz_guided.TARGETS)))
        command = [sys.executable, str(Path(fuzz_guided.__file__)), target, str(folder), f"-max_total_time={seconds}"]
        process = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        if process.returncode:
            print(process.stdout[-4000:], process.stderr[-8000:])
            kept = ", ".join(str(p) for p in folder.glob("finding-*")) or "none kept"
            found(f"guided {target}: {ending(process.returncode)}", f"python {command[1]} {target} {folder} {kept}")
        runs = fuzz_guided.runs(process.stderr)
        print(f"guided: {runs} inputs for {target} in {seconds / 60:.1f} minutes", flush=True)
        tried += runs
    return tried


def found(what: str, again: str) -> None:
    """Say what was found and how to see it again, and stop."""
    print(f"{what}\n  again: {again}", flush=True)
    raise SystemExit(1)


if __name__ == "__main__":
    main()
