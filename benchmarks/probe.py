"""Whether a peer survives a dtype on this machine, tried in a process of its own.

Some virtual machines announce AMX and do not describe its tiles (CPUID leaf 0x1D is empty): torch then crashes (SIGILL)
in its first bfloat16 product, and would take the benchmark along. So 16-bit dtypes are tried first; where torch
crashes, without AMX; where it still crashes, its rows are left out. Either way the report says so.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from benchmarks.cases import Case, dims
from benchmarks.machine import ROOT
from benchmarks.peers import load

WITHOUT_AMX = {"torch": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}}
"""By peer, the environment that keeps it from using AMX; it must be set before the peer is imported."""


def death(peer: str, dtype: str, environment: Mapping[str, str]) -> str | None:
    """The signal that ends a process in which the peer computes in this dtype, or None."""
    command = [sys.executable, "-m", "benchmarks.probe", peer, dtype]
    given = os.environ | environment
    result = subprocess.run(command, env=given, cwd=ROOT, capture_output=True, check=False)  # noqa: S603 ours
    return signal.Signals(-result.returncode).name if result.returncode < 0 else None


def survey(peers: Sequence[str], dtypes: Sequence[str]) -> tuple[dict[str, str], dict[tuple[str, str], str], list[str]]:
    """What to set in the environment, which (peer, dtype) to leave out and why, and remarks."""
    environment: dict[str, str] = {}
    refused: dict[tuple[str, str], str] = {}
    remarks: list[str] = []
    for peer in peers:
        for dtype in (d for d in dtypes if d in ("bfloat16", "float16")):
            reason = death(peer, dtype, environment)
            if reason is None:
                continue
            remedy = {} if environment else WITHOUT_AMX.get(peer, {})
            if remedy and death(peer, dtype, remedy) is None:
                environment |= remedy
                setting = " ".join(f"{name}={value}" for name, value in remedy.items())
                remarks.append(f"bench: {peer} crashes in {dtype} here ({reason}); it runs without AMX ({setting}).")
            else:
                refused[peer, dtype] = f"crashes here ({reason})"
                remarks.append(f"bench: {peer} crashes in {dtype} here ({reason}); those rows are without it.")
    return environment, refused, remarks


def main(peer: str, dtype: str) -> None:
    """What the subprocess does."""
    case = Case("probe", dims(1, 2, 512, 64), dtype=dtype)
    contender, x = load(peer, 1), case.inputs()
    for name in case.passes:
        contender.prepare(case, name, x).call()


if __name__ == "__main__":
    main(*sys.argv[1:])
