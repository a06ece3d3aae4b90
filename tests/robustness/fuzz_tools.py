"""What the fuzzers of files and commands share: spoiled bytes, spoiled JSON, and a watch over what is executed."""

from __future__ import annotations

import random
import sys
from typing import Any

import click
from click.testing import CliRunner

from attngrad import cli

NUMBERS = [0, -1, 1, 7, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63), 10**40, 0.5, -0.0, 1e308]
ODD = [
    *NUMBERS,
    None,
    True,
    False,
    "",
    "x",
    "\x00",
    "\ud83d\ude00",
    [],
    {},
    [[]],
    {"": None},
    [1, [2, [3]]],
    "F64",
    "1e5",
]


def spoil(rng: random.Random, data: bytes) -> bytes:
    """The bytes with a few places changed, cut out, doubled, or the end cut off."""
    spoiled = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 3, 8])):
        n = len(spoiled)
        i = rng.randrange(n + 1)
        j = min(n, i + rng.choice([1, 2, 4, 8, 64]))
        how = rng.randrange(6)
        if how == 0:
            spoiled[i:j] = rng.randbytes(j - i)
        elif how == 1:
            spoiled[i:j] = b""
        elif how == 2:
            spoiled[i:i] = bytes(spoiled[i:j]) * rng.choice([1, 2, 50])
        elif how == 3:
            spoiled[i:] = b""
        elif how == 4:
            spoiled[i:j] = rng.choice([b"\x00", b"\xff"]) * (j - i)
        elif i < n:
            spoiled[i] ^= 1 << rng.randrange(8)
    return bytes(spoiled)


def spoil_json(rng: random.Random, value: Any) -> Any:
    """The value with one of its parts, however deep, replaced, removed, doubled or renamed."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        how = rng.randrange(8)
        if how == 0:
            return {k: v for k, v in value.items() if k != key}
        if how == 1:
            return value | {rng.choice(["", "x", "__metadata__", key + "_"]): rng.choice([*ODD, value[key]])}
        return value | {key: spoil_json(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.85:
        i = rng.randrange(len(value))
        how = rng.randrange(8)
        if how == 0:
            return value[:i] + value[i + 1 :]
        if how == 1:
            return value[:i] + [value[i]] * rng.choice([2, 3, 100]) + value[i + 1 :]
        return [*value[:i], spoil_json(rng, value[i]), *value[i + 1 :]]
    if isinstance(value, str) and value and rng.random() < 0.5:
        return spoil(rng, value.encode("utf-8", "surrogatepass")).decode("utf-8", "replace")
    return rng.choice(ODD)


def refused(error: Exception, *beginnings: str) -> str:
    """The word for an error of our own, by how it begins; any other is a finding."""
    assert str(error).startswith(beginnings), error
    return "refused"


class Watch:
    """The audit events of Python that no file and no argument may cause."""

    FORBIDDEN: tuple[str, ...] = (
        "pickle.find_class",
        "os.system",
        "os.exec",
        "os.posix_spawn",
        "subprocess.Popen",
        "socket.connect",
    )

    def __init__(self) -> None:
        self.on, self.seen = False, []  # type: ignore[var-annotated]
        sys.addaudithook(self.hook)

    def hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.on and event.startswith(self.FORBIDDEN):
            self.seen.append((event, str(arguments)[:200]))

    def __enter__(self) -> None:
        self.on = True

    def __exit__(self, *_: object) -> None:
        self.on = False
        assert not self.seen, self.seen


def command(*arguments: str, of: click.Command = cli.main) -> tuple[int, str, str]:
    """Exit status, output and errors of ``attngrad`` in this process; an exception that is no exit is raised."""
    found = CliRunner(env={"COLUMNS": "80"}).invoke(of, arguments)
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    return found.exit_code, found.stdout, found.stderr
