"""Messages between neighbours on the ring, none of which can hang; and who is to blame when one fails.

A wait ends at the timeout. Its error names the rank that caused it, which need not be the neighbour: that one may have
been waiting itself. So a rank that has waited for long leaves a note in the store of the group and renews it, one that
has failed leaves one for good, and who is to blame is found by going from note to note until a rank has left none.
Nothing is written while all goes well.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch import distributed as dist

from attngrad.core.checks import check_real, fail
from attngrad.torch._private import store_of, without_transforms

TIMEOUT = 60.0
"""Seconds that a wait may take, unless the caller says otherwise."""

_HEADER = 4096  # bytes: one size whatever it says, for a message of another size would abort the receiver
_PROBE = 1 << 20  # a tag
_FOREVER = 86400.0 * 365


class RingError(RuntimeError):
    """A peer is gone, has stalled, or has failed: ``rank`` of the group, while this one was at ``step``.

    Step 0 is the exchange of shapes and options; then come the steps of the ring, from 1. The group is of no use after.

    >>> error = RingError("rank 3 is gone.", rank=3, step=2)
    >>> error.rank, error.step, str(error)
    (3, 2, 'rank 3 is gone.')
    """

    def __init__(self, message: str, rank: int, step: int) -> None:
        super().__init__(message)
        self.rank, self.step = rank, step


class _State:
    """What a group remembers: how many passes it has run, and what broke it."""

    def __init__(self) -> None:
        self.passes = 0
        self.broken: tuple[str, int, int] | None = None


_states: WeakKeyDictionary[Any, _State] = WeakKeyDictionary()


def find_group(function: str, group: Any) -> Any:
    """``group``, or the default one; an error where there is none, or where this process is not in it."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(f"{function}: there is no process group. Call torch.distributed.init_process_group first.")
    if group is None:
        return dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        fail(ValueError, function, "group", "be a process group that this rank is in", type(group).__name__)
    return group


def check_timeout(function: str, timeout: object) -> float:
    """``timeout`` in seconds, if it is positive."""
    seconds = check_real(function, "timeout", timeout)
    if not 0.0 < seconds <= _FOREVER:
        fail(ValueError, function, "timeout", "be a positive number of seconds, a year at most", seconds)
    return seconds


# --- devices --------------------------------------------------------------------------------------------------------

_SENDS_FROM = {"gloo": ("cpu",)}
"""The devices whose memory a transport sends from rank to rank, where these are fewer than it is registered for."""


def _transports(group: Any) -> dict[str, str]:
    """By device, what sends its memory: {"cpu": "gloo", "cuda": "nccl"}."""
    pairs = [entry.split(":") for entry in dist.get_backend_config(group).split(",")]
    return {device: name for device, name in pairs if device in _SENDS_FROM.get(name, (device,))}


def check_device(function: str, name: str, x: Tensor, group: Any) -> None:
    """The group can send ``x`` from rank to rank; where there is one rank, nothing is sent."""
    device, transports = x.device.type, _transports(group)
    if dist.get_world_size(group) > 1 and device not in transports:
        sent = ", ".join(f"{where} by {what}" for where, what in transports.items())
        known = dist.Backend.default_device_backend_map.get(device, "...")
        remedy = f'Make the group with init_process_group("cpu:gloo,{device}:{"..." if known == "gloo" else known}").'
        fail(ValueError, function, name, f"be on a device that the group sends from ({sent})", x.device, remedy)


def header_device(group: Any, x: object) -> torch.device:
    """Where headers are: on the CPU if the group sends from there, else beside the tensor ``x`` if it can."""
    transports = _transports(group)
    if "cpu" in transports or not transports:
        return torch.device("cpu")
    if isinstance(x, Tensor) and x.device.type in transports:
        return x.device
    return torch.device(next(iter(transports)))


class Ring:
    """One pass around the ring: this rank, its neighbours, and the messages under way."""

    def __init__(self, function: str, stage: str, group: Any, timeout: float, device: torch.device) -> None:
        self.function, self.stage, self.group, self.timeout = function, stage, group, timeout
        self.device = device  # of headers
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.before, self.after = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        self.state = _states.setdefault(group, _State())
        self.number = self.state.passes
        self.state.passes += 1
        self.step, self.steps = 0, self.size
        self.sent = 0  # bytes
        self.grace = min(timeout / 4, 5.0)  # left for finding out whom to blame
        self._flight: list[tuple[Any, list[int]]] = []
        self._kept: list[Any] = []
        self._notes = _Notes(group, self.rank, self.number, timeout, self.grace)
        if self.state.broken is not None:
            text, rank, step = self.state.broken
            raise RingError(f"{function}: this group is broken. Make a new one. What broke it: {text}", rank, step)

    def source(self, step: int) -> int:
        """The rank whose keys are here at ``step``."""
        return (self.rank - step) % self.size

    # --- messages ---------------------------------------------------------------------------------------------------

    def start(self, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> None:
        """Let ``sends`` go to the next rank and ``receives`` be filled by the last one, while the caller computes."""
        if self.size == 1:
            for x, y in zip(receives, sends, strict=True):
                x.copy_(y)
            return
        operations, peers = [], []
        for tag, x in enumerate(receives):
            if x.numel():
                operations.append(self._operation(dist.irecv, x, self.before, tag))
                peers.append([self.before])
        for tag, x in enumerate(sends):
            if x.numel():
                operations.append(self._operation(dist.isend, x, self.after, tag))
                peers.append([self.after])
                self.sent += x.numel() * x.element_size()
        if not operations:
            return
        self._kept = [*sends, *receives]
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            closed = [peer for peer in (self.before, self.after) if self._is_closed(peer)]
            self._fail(closed or [self.before, self.after], False, error)
        if len(works) != len(peers):  # a backend that makes one of all
            peers = [[self.before, self.after]] * len(works)
        self._flight = list(zip(works, peers, strict=True))

    def wait(self) -> None:
        """Until what was started is done."""
        if not self._flight:
            return
        limit = self.timeout - self.grace
        begin = time.monotonic()
        try:
            for work, peers in self._flight:
                self._notes.waiting_for(peers[0])
                left = max(limit - (time.monotonic() - begin), 0.001)
                try:
                    work.wait(timedelta(seconds=left))
                except RuntimeError as error:
                    self._fail(peers, time.monotonic() - begin > 0.95 * limit, error)
        finally:
            self._notes.done_waiting()
        self._flight, self._kept = [], []

    def _is_closed(self, peer: int) -> bool:
        """Whether the connection is: to begin to receive fails at once then. No message has this tag.

        Where tags and closed connections are gloo's; others do not say.
        """
        if _transports(self.group).get("cpu") != "gloo":
            return False
        probe = torch.empty(1, dtype=torch.uint8, device="cpu")
        try:
            self._kept.append(dist.irecv(probe, dist.get_global_rank(self.group, peer), self.group, _PROBE))
        except RuntimeError:
            return True
        return False

    def _operation(self, kind: Any, x: Tensor, peer: int, tag: int) -> Any:
        flat = x.detach().view(-1).view(torch.uint8)
        return dist.P2POp(kind, flat, dist.get_global_rank(self.group, peer), self.group, tag)

    def exchange(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        """The records of all ranks, by rank: small dictionaries that JSON can hold."""
        text = json.dumps({"pass": self.stage, "number": self.number, **record}).encode()
        if len(text) > _HEADER:
            raise RuntimeError(f"{self.function}: the shapes and options take {len(text)} bytes, {_HEADER} at most.")
        # Inside torch.func new tensors would belong to the transform: headers are none of its business.
        with without_transforms(), self.guarded():
            mine = torch.zeros(_HEADER, dtype=torch.uint8, device="cpu")
            mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            mine = mine.to(self.device)
            headers = {self.rank: mine}
            for step in range(self.size - 1):
                theirs = torch.empty_like(mine)
                self.start([headers[self.source(step)]], [theirs])
                self.wait()
                headers[self.source(step + 1)] = theirs
            found = [bytes(headers[rank].cpu().numpy()).rstrip(b"\0") for rank in range(self.size)]
        self.sent = 0
        return [json.loads(header) for header in found]

    # --- failures ---------------------------------------------------------------------------------------------------

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Where an error leaves messages unsent: the others are told, and the group is broken."""
        try:
            yield
        except RingError:
            raise
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"[:1000]
            self._notes.leave({"rank": self.rank, "reason": f"failed: {text}"})
            self.state.broken = (f"rank {self.rank} failed: {text}", self.rank, self.step)
            raise
        finally:
            self._notes.stop()

    def _fail(self, peers: list[int], late: bool, error: RuntimeError) -> NoReturn:
        self._notes.leave({"peer": peers[0], "late": late})
        culprit, reason = self._notes.blame(peers, late)
        self._notes.leave({"rank": culprit, "reason": reason})  # who looks for it need not wait as long
        where = f"step {self.step} of {self.steps}" if self.step else "step 0, the exchange of shapes and options"
        name = f"rank {culprit}"
        world = dist.get_global_rank(self.group, culprit)
        if world != culprit:
            name += f" of the group (global rank {world})"
        text = (
            f"{self.function}: {name} {reason}. This is rank {self.rank}, in {where} of the {self.stage} pass. "
            "Nothing was returned; start the job again with a new group."
        )
        self.state.broken = (text, culprit, self.step)
        raise RingError(text, culprit, self.step) from error


class _Notes:
    """The notes of a rank in the store of the group: whom it waits for, and why it gave up.

    The store may stall or be gone, with the rank that keeps it: so nobody waits for it without a limit. The ring is not
    known here: in a circle of references its group would outlive it until the next garbage collection, and threads of a
    group that is alive when the interpreter ends can abort the process.
    """

    def __init__(self, group: Any, rank: int, number: int, timeout: float, grace: float) -> None:
        self._group, self._rank, self._number, self._timeout, self._grace = group, rank, number, timeout, grace
        self._peer: int | None = None
        self._since = 0.0
        self._gone = False  # the store
        self._found: tuple[int, str] | None = None  # who is to blame, and for what
        self._watcher: tuple[threading.Thread, threading.Event] | None = None  # and what ends it

    def waiting_for(self, peer: int) -> None:
        if self._peer is None:
            self._since = time.monotonic()
        self._peer = peer
        if self._watcher is None:
            over = threading.Event()
            thread = threading.Thread(target=self._watch, args=(over,), name="attngrad-ring", daemon=True)
            thread.start()
            self._watcher = thread, over

    def done_waiting(self) -> None:
        self._peer = None

    def stop(self) -> None:
        """End the watch; unless the store does not answer, it holds nothing any more."""
        if self._watcher is not None:
            thread, over = self._watcher
            over.set()
            thread.join(0.1 * self._grace)
            self._watcher = None

    def _watch(self, over: threading.Event) -> None:
        """Of a wait that takes long, leave a note and renew it, until it is over."""
        beat, left, interval = 0, False, self._grace / 6
        while not over.wait(interval) or left:
            peer = self._peer
            if peer is not None and not over.is_set() and time.monotonic() - self._since > self._grace:
                beat += 1
                left = self._set("waits", {"peer": peer, "late": True, "beat": [self._number, beat]})
            elif left:
                left = not self._set("waits", {})
                if over.is_set():
                    return

    def leave(self, note: dict[str, Any]) -> None:
        """For good: this rank gives up. Others may look for the note as soon as its connections close."""
        self.stop()
        _within(0.1 * self._grace, self._set, "fails", note)

    def blame(self, peers: list[int], late: bool) -> tuple[int, str]:
        """The rank that the notes lead to from ``peers``, and what it has done; all within the grace."""
        self._found = None
        grace = self._grace
        _within(0.8 * grace, self._blame, peers, late, time.monotonic() + 0.5 * grace)
        culprit, reason = self._found or (peers[0], self._reason(late))
        if self._found is None or self._gone:
            reason += "; the store of the group, where it would say who failed first, does not answer"
        return culprit, reason

    def _reason(self, late: bool) -> str:
        return f"has not answered for {self._timeout:g} s" if late else "is gone: its connection is closed"

    def _blame(self, peers: list[int], late: bool, end: float) -> None:
        first: dict[int, Any] = {}
        # A rank that gives up may close its connections a moment before its note is there: look again.
        while self._found is None or time.monotonic() < end:
            ends = [self._follow(peer, late, first) for peer in peers]
            known = [found for found in ends if found[2]]
            said = [found for found in ends if found[1]]
            self._found = next((found[:2] for found in known + said), (peers[0], self._reason(late)))
            if known:
                return
            time.sleep(0.02)

    def _follow(self, rank: int, late: bool, first: dict[int, Any]) -> tuple[int, str, bool]:
        """The first rank from ``rank`` on that has left no note, what is said of it, and whether that is the last word.

        Where they go round in a circle, one of them has stopped while it waited: the one whose note is still that in
        ``first``. Nothing is said where all are renewed.
        """
        seen: list[int] = []
        while rank not in (self._rank, *seen):
            seen.append(rank)
            fails = self._get("fails", rank)
            note = fails or self._get("waits", rank)
            if not note:
                return rank, self._reason(late), False
            if "reason" in note:
                return note["rank"], note["reason"], True
            if fails or first.setdefault(rank, note["beat"]) != note["beat"]:
                first[rank] = None
            rank, late = note["peer"], note["late"]
        return next(((r, self._reason(True), False) for r in seen if first[r] is not None), (seen[0], "", False))

    def _key(self, kind: str, rank: int) -> str:
        return f"attngrad/ring/{kind}/{rank}"

    def _set(self, kind: str, note: dict[str, Any]) -> bool:
        try:
            self._store().set(self._key(kind, self._rank), json.dumps(note))
        except (RuntimeError, AttributeError):
            self._gone = True
            return False
        return True

    def _get(self, kind: str, rank: int) -> dict[str, Any]:
        key = self._key(kind, rank)
        try:
            store = self._store()
            return dict(json.loads(store.get(key))) if store.check([key]) else {}
        except (RuntimeError, AttributeError):
            self._gone = True
            return {}

    def _store(self) -> Any:
        return store_of(self._group)


def _within(seconds: float, function: Any, *args: Any) -> None:
    """Call what may never return, and wait for it so many seconds at most."""
    thread = threading.Thread(target=function, args=args, name="attngrad-ring", daemon=True)
    thread.start()
    thread.join(seconds)
