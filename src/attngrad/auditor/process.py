"""The process that a candidate runs in, seen from outside: started, listened to, and ended whatever becomes of it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from attngrad.auditor.report import CLOSED, AuditReport, Finding


def run_in_child(job: dict[str, Any]) -> AuditReport:
    """The report of a child process, whatever becomes of it."""
    reading, writing = os.pipe()
    silence = patience(job["keywords"]["time_limit"], job["keywords"]["effort"])
    said = tempfile.TemporaryFile()  # noqa: SIM115 - a file, which a candidate cannot fill up as it could a pipe
    process = subprocess.Popen(  # noqa: S603
        [sys.executable, "-m", "attngrad.auditor.child", str(writing)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=said,
        pass_fds=(writing,),
        text=True,
        start_new_session=True,  # so that what it starts can be ended with it
    )
    os.close(writing)
    assert process.stdin is not None  # noqa: S101
    outcome: dict[str, Any] = {}
    try:
        process.stdin.write(json.dumps(job))
        process.stdin.close()
        columns = (BarColumn(20), TextColumn("{task.description}", markup=False))
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("importing", total=None)
            for message in _messages(reading, silence):
                if "progress" in message:
                    done, total, text = message["progress"]
                    bar.update(task, completed=done, total=total, description=text)
                else:
                    outcome = message
                    break
    finally:
        os.close(reading)
        status = _end(process)
        said.seek(max(0, said.seek(0, os.SEEK_END) - 4000))
        last_words = said.read().decode(errors="replace")
        said.close()
    if "report" in outcome:
        return AuditReport.from_json(outcome["report"])
    if "failed" in outcome:
        found, last_words = Finding("crash", outcome["failed"]), outcome["traceback"]
    else:
        told = f"it was ended after {silence:g} s without a sign." if "silence" in outcome else _ending(status)
        found = Finding("exit", told)
    return AuditReport(job["target"], "not audited", findings=(found,), traceback=last_words)


def patience(time_limit: float, effort: str) -> float:
    """Seconds without a sign after which a process is ended: imports and single calls stay well below.

    >>> patience(10.0, "default")
    90.0
    """
    return 30.0 + 3.0 * time_limit + (90.0 if effort == "full" else 30.0)


def _end(process: subprocess.Popen[str]) -> int:
    """The exit status of a process that is at its end, or is now; nothing that it started stays behind."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1.0)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait(10.0)


def _ending(status: int) -> str:
    if status in (-signal.SIGKILL, CLOSED):
        return "it closed the descriptors of its process, or the system ended it for want of memory."
    if status < 0:
        return f"its process was ended by {signal.Signals(-status).name}."
    return f"its process ended by itself (exit status {status})."


def _messages(reading: int, silence: float) -> Any:
    """The lines of JSON that come through, until they end or none comes for too long."""
    pending = b""
    while True:
        ready, _, _ = select.select([reading], [], [], silence)
        if not ready:
            yield {"silence": True}
            return
        chunk = os.read(reading, 1 << 16)
        if not chunk:
            return
        pending += chunk
        *lines, pending = pending.split(b"\n")
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict):
                message = {"failed": "it wrote into the channel that its report comes through.", "traceback": ""}
            yield message
