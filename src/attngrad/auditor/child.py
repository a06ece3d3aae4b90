"""The process that a candidate runs in when it is audited from the command line: its memory and its life are its own.

It reads what to do from standard input, as JSON, and writes lines of JSON to the file descriptor that it is given:
``{"progress": [done, total, text]}``, and last ``{"report": ...}`` or ``{"failed": ...}``.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import io
import json
import os
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from attngrad.auditor.candidate import error_text, their_frames
from attngrad.auditor.report import CLOSED, AuditReport, Finding

_LOADERS = ("<frozen importlib._bootstrap", "importlib/__init__.py")


class NotFound(Exception):  # noqa: N818
    """The target does not lead to a candidate."""


def load(target: str, root: str | None = None) -> Any:
    """The object that ``path/to/file.py:name`` or ``package.module:name`` leads to; for ``forward,backward`` a pair."""
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise NotFound(f"audit: the target must be path/to/file.py:function; got {target!r}.")
    sys.path.insert(0, str(Path(root).resolve()) if root is not None else os.getcwd())
    path = Path(place)
    if root is not None and not path.exists() and (Path(root) / place).exists():
        path = Path(root) / place
    if path.suffix == ".py" or path.is_file():
        module = _from_file(path, place, root)
    else:
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is not None and place.startswith(error.name):
                raise NotFound(f"audit: there is no file and no module {place!r}.") from error
            raise
    found = [_named(module, place, part.strip()) for part in name.split(",")]
    if len(found) > 2:
        raise NotFound(f"audit: the target must name a function, or a forward and a backward; got {target!r}.")
    return found[0] if len(found) == 1 else tuple(found)


def _from_file(path: Path, place: str, root: str | None) -> Any:
    """The module of a file: by its name within its package, so that its relative imports work, or by itself."""
    if not path.is_file():
        raise NotFound(f"audit: there is no file {place!r}.")
    path = path.resolve()
    folder = path.parent
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    if root is not None and path.is_relative_to(Path(root).resolve()):
        folder = Path(root).resolve()
    parts = [*path.relative_to(folder).parts[:-1], path.stem]
    sys.path.insert(0, str(folder))
    if len(parts) > 1 and all(part.isidentifier() for part in parts):
        return importlib.import_module(".".join(parts))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise NotFound(f"audit: {place!r} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


def _named(module: Any, place: str, name: str) -> Any:
    found = module
    for part in name.split("."):
        if not hasattr(found, part):
            known = [n for n in dir(found) if not n.startswith("_") and callable(getattr(found, n))]
            near = difflib.get_close_matches(part, known, n=1)
            more = f" and {len(known) - 8} more" if len(known) > 8 else ""
            hint = f" It has {', '.join(known[:8])}{more}." if known else ""
            hint = f" Did you mean {near[0]!r}?" if near else hint
            raise NotFound(f"audit: {place!r} has no {part!r}.{hint}")
        found = getattr(found, part)
    return found


def die_with_parent() -> None:
    """Ask the system to end this process when the one that started it is gone, however that came about (Linux)."""
    if sys.platform == "linux":
        import ctypes
        import signal

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def limit_memory(gigabytes: float) -> bool:
    """Allow so much beyond what is in use now, and no core file; False where the system has no such limit."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        pages = Path("/proc/self/statm").read_text().split()[0]
    except OSError:
        return False
    limit = int(pages) * resource.getpagesize() + int(gigabytes * 2**30)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    return True


def main() -> None:
    """Limit, load, limit anew, audit, report."""
    die_with_parent()
    job = json.load(sys.stdin)
    limited = limit_memory(job["memory"])
    channel = os.fdopen(int(sys.argv[1]), "w")

    def send(**message: Any) -> None:
        try:
            channel.write(json.dumps(message) + "\n")
            channel.flush()
        except OSError:  # the candidate has closed it: nothing can be said any more
            os._exit(CLOSED)

    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            candidate = load(job["target"], job["root"])
    except NotFound as error:
        send(failed=str(error), traceback="")
        return
    except BaseException as error:
        send(
            failed=f"{job['target']} cannot be imported: {error_text(error)}",
            traceback=their_frames(error, *_LOADERS, least=0),
        )
        return
    try:
        report = _audit(candidate, job, lambda done, total, text: send(progress=[done, total, text]))
    except Exception as error:
        told = isinstance(error, ImportError) or str(error).startswith("audit:")  # meant for the user as it is
        send(failed=str(error) if told else _broken(error), traceback="")
        return
    send(report=_with_limits(report, job["memory"], limited).to_json())


def _with_limits(report: AuditReport, gigabytes: float, limited: bool) -> AuditReport:
    """The report, with what is to be said of the limit on memory."""
    told = ""
    if not limited:
        told = "Its memory was not limited: this system has no such limit."
    elif any("MemoryError" in finding.text for finding in report.findings):
        told = f"It wanted more than the {gigabytes:g} GB of memory that it may take; --memory allows more."
    note = (Finding("memory", told, fault=False),) if told else ()
    return replace(report, findings=report.findings + note, settings={**report.settings, "command": True})


def _broken(error: Exception) -> str:
    """What is said where the auditor itself fails, as it does when a candidate has changed NumPy under it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"the auditor failed: {error_text(error)} ({Path(last.filename).name}, line {last.lineno}). If the candidate "
        "changes nothing outside itself, this is a fault of attngrad's: please report it."
    )


def _audit(candidate: Any, job: dict[str, Any], progress: Any) -> Any:
    keywords = {**job["keywords"], "progress": progress, "name": job["target"].rpartition(":")[2]}
    if keywords.get("inputs") is not None:
        keywords["inputs"] = importlib.import_module("attngrad.auditor.recorded").read(keywords["inputs"])
    run = importlib.import_module("attngrad.auditor.run").audit
    framework = keywords["framework"] or importlib.import_module("attngrad.auditor.adapters").framework_of(candidate)
    if framework != "numpy":
        importlib.import_module(framework)
    limit_memory(job["memory"])  # anew, beyond what the framework took
    return run(candidate, **keywords)


if __name__ == "__main__":
    main()
