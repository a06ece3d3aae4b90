"""``make bench DEVICE=cuda``: derivatives of attention beside PyTorch's own on one device, time and peak memory.

Verify first, at 512 tokens, against the float64 reference on the CPU; then time, contenders in turn. Peak memory is
what a call takes beyond its inputs: of the caching allocator on a GPU, of a fresh process on the CPU.
"""

from __future__ import annotations

import importlib
import json
import math
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import click
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attngrad.torch
from attngrad import reference
from benchmarks.machine import ROOT
from benchmarks.memory import _highest, _reset
from benchmarks.verify import TOLERANCE

Function = Callable[..., Any]
OURS = "attngrad"
SIZES = (512, 1024, 2048, 4096, 8192)
D = 64


# --- contenders: attention of q, k, v, and whether it is causal -------------------------------------------------------


def _sdpa(kind: SDPBackend) -> Function:
    def run(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        with sdpa_kernel(kind):
            return sdpa(q, k, v, is_causal=causal)

    return run


def _flex(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Any:
    mask = _causal_blocks(q.shape[-2], q.device) if causal else None
    return _compiled_flex()(q, k, v, block_mask=mask)


# Both once: a model makes them before its first step, and a mask of tokens by tokens would be most of the time.
@cache
def _compiled_flex() -> Any:
    flex: Any = importlib.import_module("torch.nn.attention.flex_attention")
    return torch.compile(flex.flex_attention)


@cache
def _causal_blocks(n: int, device: torch.device) -> Any:
    flex: Any = importlib.import_module("torch.nn.attention.flex_attention")
    return flex.create_block_mask(_earlier, None, None, n, n, device=device)


def _earlier(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def _jvp_flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Any:
    return importlib.import_module("jvp_flash_attention.jvp_attention").attention(q, k, v, causal=causal)


CONTENDERS: dict[str, Function] = {
    OURS: lambda q, k, v, causal: attngrad.torch.attention(q, k, v, causal=causal),
    "SDPA math": _sdpa(SDPBackend.MATH),
    "SDPA flash": _sdpa(SDPBackend.FLASH_ATTENTION),
    "SDPA efficient": _sdpa(SDPBackend.EFFICIENT_ATTENTION),
    "FlexAttention": _flex,
    "jvp_flash_attention": _jvp_flash,
}


# --- passes -----------------------------------------------------------------------------------------------------------


def _backward(f: Function, x: list[Tensor], causal: bool) -> tuple[Tensor, ...]:
    leaves = [y.detach().requires_grad_() for y in x[:3]]
    return torch.autograd.grad(f(*leaves, causal), leaves, x[3])


def _jvp(f: Function, x: list[Tensor], causal: bool) -> tuple[Tensor, ...]:
    out: tuple[Tensor, ...] = torch.func.jvp(lambda *y: f(*y, causal), tuple(x[:3]), tuple(x[1:4]))
    return out


def _double_backward(f: Function, x: list[Tensor], causal: bool) -> tuple[Tensor, ...]:
    leaves = [y.detach().requires_grad_() for y in x]
    grads = torch.autograd.grad(f(*leaves[:3], causal), leaves[:3], leaves[3], create_graph=True)
    if not all(g.requires_grad for g in grads):
        raise RuntimeError("its gradients are cut off from the graph")
    return torch.autograd.grad(grads, leaves, [y.detach() for y in leaves[:3]])


PASSES = {"forward + backward": _backward, "jvp": _jvp, "double backward": _double_backward}


def _inputs(n: int, heads: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, n, D, generator=generator).to(device, dtype) for _ in range(4)]


def _wrong(name: str, work: str, causal: bool, heads: int, dtype: torch.dtype, device: str) -> str:
    """Empty, or why the contender is not timed."""
    x = _inputs(SIZES[0], heads, dtype, device)
    try:
        found = PASSES[work](CONTENDERS[name], x, causal)
    except Exception as error:  # whatever a contender raises, the others are timed
        return _line(error)
    dense = PASSES[work](
        lambda q, k, v, c: reference.attention(q, k, v, causal=c), [y.cpu().double() for y in x], causal
    )
    pairs = zip(found, dense, strict=True)
    worst = float(torch.stack([(a.cpu().double() - b).abs().max() / b.abs().max() for a, b in pairs]).max())  # or NaN
    return "" if worst <= TOLERANCE[str(dtype).removeprefix("torch.")] else f"wrong: error {worst:.1e}"


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:110]


def _wait(device: str) -> None:
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize()


def _warm_up(calls: dict[str, Callable[[], Any]], device: str) -> dict[str, str]:
    """Call each once, and take out those that raise, as for want of memory; by name, what they said."""
    told: dict[str, str] = {}
    for name, call in tuple(calls.items()):
        try:
            call()
            _wait(device)
        except Exception as error:  # likewise
            told[name] = _line(error)
            del calls[name]
    return told


def _time(calls: dict[str, Callable[[], Any]], device: str, rounds: int) -> dict[str, float]:
    """Median seconds, contenders in turn."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            _wait(device)
            start = time.perf_counter()
            call()
            _wait(device)
            found[name].append(time.perf_counter() - start)
    return {name: statistics.median(samples) for name, samples in found.items()}


def _peak(name: str, work: str, causal: bool, x: list[Tensor], device: str) -> float:
    """Bytes of one call beyond its inputs; NaN where the device does not tell."""
    if torch.device(device).type == "cpu":
        given = json.dumps([name, work, causal, x[0].shape[-2], x[0].shape[1], str(x[0].dtype).removeprefix("torch.")])
        backend = attngrad.torch.backend_of(x[0])
        command = [sys.executable, "-m", "benchmarks.device", "--backend", backend, "--one", given]
        told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)  # noqa: S603 our own
        return float(told.stdout.splitlines()[-1])
    try:
        torch.accelerator.reset_peak_memory_stats()
    except RuntimeError:  # not every allocator counts
        return math.nan
    before = torch.accelerator.memory_allocated()
    PASSES[work](CONTENDERS[name], x, causal)
    return float(torch.accelerator.max_memory_allocated() - before)


def _one(name: str, work: str, causal: bool, n: int, heads: int, dtype: str) -> int:
    """What a fresh process does: a short call, then the high-water mark of one of length ``n``."""
    for length in (128, n):
        x = _inputs(length, heads, getattr(torch, dtype), "cpu")
        before = _reset()
        PASSES[work](CONTENDERS[name], x, causal)
    return max(_highest() - before, 0)


@click.command(name="bench")
@click.option("--device", default="cpu", show_default=True)
@click.option("--backend", help="Of attngrad: cpu, blocked. [default: by device; on the CPU blocked]")
@click.option("--dtype", type=click.Choice(list(TOLERANCE)), default="float32", show_default=True)
@click.option("--heads", type=click.IntRange(1), help="[default: 1 on the CPU, else 16]")
@click.option("--sizes", default=",".join(map(str, SIZES)), show_default=True, help="Tokens.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--one", hidden=True)
def command(
    device: str, backend: str | None, dtype: str, heads: int | None, sizes: str, rounds: int, one: str | None
) -> None:
    """Time and peak memory of derivatives of attention on a device, beside PyTorch's."""
    on_cpu = torch.device(device).type == "cpu"
    if torch.device(device).index is not None and not on_cpu:
        torch.accelerator.set_device_index(torch.device(device).index)  # what is waited for, and measured
    torch.set_float32_matmul_precision("highest")  # TF32, which containers may have chosen, would be taken for wrong
    with attngrad.torch.use_backend(backend or ("blocked" if on_cpu else None)):
        if one is not None:
            click.echo(_one(*json.loads(one)))
            return
        warnings.simplefilter("ignore")  # of contenders that raise in the end
        click.echo(f"torch {torch.__version__}, {device}, {dtype}, {torch.get_num_threads()} threads; ms, MiB at most")
        failed = False
        for work in PASSES:
            for causal in (False, True):
                failed |= _rows(
                    work, causal, device, getattr(torch, dtype), heads or (1 if on_cpu else 16), sizes, rounds
                )
    raise SystemExit(failed)


def _rows(work: str, causal: bool, device: str, dtype: torch.dtype, heads: int, sizes: str, rounds: int) -> bool:
    """Print one pass, all sizes; True where attngrad itself is wrong."""
    click.echo(f"\n{work}{', causal' if causal else ''}")
    reasons = {name: _wrong(name, work, causal, heads, dtype, device) for name in CONTENDERS}
    for name, reason in reasons.items():
        if reason:
            click.echo(f"  {name:20} {reason}")
    names = [name for name, reason in reasons.items() if not reason]
    for n in map(int, sizes.split(",")):
        x = _inputs(n, heads, dtype, device)
        calls: dict[str, Callable[[], Any]] = {
            name: partial(PASSES[work], CONTENDERS[name], x, causal) for name in names
        }
        for name, reason in _warm_up(calls, device).items():
            click.echo(f"  {name:20} {n:6} tokens {reason}")
        seconds = _time(calls, device, rounds)
        for name in calls:
            peak = _peak(name, work, causal, x, device) / 2**20
            ratio = seconds[name] / seconds[OURS] if OURS in seconds else float("nan")
            click.echo(f"  {name:20} {n:6} tokens {seconds[name] * 1e3:10.1f} ms {peak:9.0f} MiB   {ratio:6.2f} x ours")
    return bool(reasons[OURS])


if __name__ == "__main__":
    command()
