"""What a model gains: whole training and inference steps with attngrad's attention and with PyTorch's, step by step.

    python -m benchmarks.in_model [--only TEXT ...] [--rounds N] [--json FILE] [--markdown FILE] [--check]

Six models of plain PyTorch and three of Transformers, with random weights; the two variants of a model have the same
weights, are verified against one another, and take turns, step by step, in one process. ``ratio`` is PyTorch's median
over ours, above 1 we are faster, with the 95 % interval of a bootstrap over the rounds. ``kept`` is the share of what
attention alone gains, back to back, that the whole step gains: 1 where nothing is lost on the way, nothing where
attention alone gains less than the noise. ``--check`` exits with 1 where less than 0.8 is kept (within the interval),
or where the interval begins below 0.98. Leave the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import attngrad
from benchmarks import machine
from benchmarks.models import MODELS, Attention, Model

ROUNDS, SECONDS = 40, 4.0
"""How often each step is taken at the least, and how long both together: the interval of a short step wants more."""
LEAST_RATIO, LEAST_KEPT = 0.98, 0.8
OURS, THEIRS = "attngrad", "torch"


@dataclass(frozen=True)
class Row:
    """One model, training or inference. Times in milliseconds per step; attention's per step too, back to back."""

    model: str
    step: str
    theirs: float
    ours: float
    ratio: float
    low: float
    high: float
    their_attention: float
    our_attention: float

    @property
    def gain(self) -> float:
        """What attention alone gains."""
        return self.their_attention - self.our_attention

    @property
    def kept(self) -> float | None:
        """The share of it that the step gains; None where it is less than 2 % of the step, which is noise."""
        return (self.theirs - self.ours) / self.gain if self.gain > 0.02 * self.theirs else None

    @property
    def lost(self) -> bool:
        """Whether more than a fifth of the gain is lost, beyond what the interval leaves open."""
        at_best = self.theirs - self.theirs / self.high
        return self.gain > 0 and at_best < LEAST_KEPT * self.gain


def interleaved(
    calls: Sequence[Callable[[], object]], rounds: int, seconds: float = 0.0, warm: int = 3
) -> list[list[float]]:
    """Milliseconds of each call, in turn, at least so often and so long; who begins changes from round to round."""
    for _ in range(warm):
        for call in calls:
            call()
    times: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + seconds
    for i in count():
        if i >= rounds and time.perf_counter() >= end:
            break
        order = range(len(calls)) if i % 2 == 0 else reversed(range(len(calls)))
        for n in order:
            start = time.perf_counter()
            calls[n]()
            times[n].append((time.perf_counter() - start) * 1e3)
    return times


def back_to_back(calls: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """The median milliseconds of each call among its own kind, in three turns."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(3):
        for call, found in zip(calls, times, strict=True):
            call()
            end = time.perf_counter() + seconds / 3
            while time.perf_counter() < end or len(found) < 3:
                start = time.perf_counter()
                call()
                found.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(found) for found in times]


def interval(theirs: Sequence[float], ours: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the ratio of medians, by a bootstrap over rounds."""
    rng = np.random.default_rng(0)
    pairs = np.array([theirs, ours])[:, rng.integers(len(ours), size=(1000, len(ours)))]
    medians = np.median(pairs, axis=2)
    low, high = np.percentile(medians[0] / medians[1], [2.5, 97.5])
    return float(low), float(high)


def steps(model: Model) -> Iterator[tuple[str, list[Callable[[], object]], list[Callable[[], object]]]]:
    """Training and inference: the two steps, and the attention of each; PyTorch's first."""
    pair = [model.build(name) for name in (THEIRS, OURS)]
    pair[1].load_state_dict(pair[0].state_dict())
    x = model.inputs()
    verify(model.name, [module(x) for module in pair])
    attentions = [model.attention(name) for name in (THEIRS, OURS)]
    optimisers = [torch.optim.SGD(module.parameters(), lr=1e-4) for module in pair]

    def train(module: torch.nn.Module, optimiser: torch.optim.Optimizer) -> None:
        optimiser.zero_grad()
        module(x).square().mean().backward()
        optimiser.step()

    def infer(module: torch.nn.Module) -> None:
        with torch.inference_mode():
            module(x)

    yield (
        "training",
        [lambda n=n: train(pair[n], optimisers[n]) for n in (0, 1)],  # type: ignore[misc]
        [lambda a=a: backward(a, model.layers) for a in attentions],  # type: ignore[misc]
    )
    yield (
        "inference",
        [lambda n=n: infer(pair[n]) for n in (0, 1)],  # type: ignore[misc]
        [lambda a=a: forward(a, model.layers) for a in attentions],  # type: ignore[misc]
    )


def forward(attention: Attention, layers: int) -> None:
    """Attention of one step, alone."""
    with torch.inference_mode():
        for _ in range(layers):
            attention.run(*attention.inputs)


def backward(attention: Attention, layers: int) -> None:
    """Attention of one training step, alone."""
    for _ in range(layers):
        out = attention.run(*attention.inputs)
        torch.autograd.grad(out, attention.inputs, attention.dout)


def verify(name: str, outputs: Sequence[Tensor]) -> None:
    """Both variants compute the same; what differs is not worth timing."""
    theirs, ours = (x.detach() for x in outputs)
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    if not error < 1e-4:
        raise SystemExit(f"in_model: {name} must be the same with both; got a difference of {error:.1e}.")


def measure(model: Model, rounds: int) -> Iterator[Row]:
    """The two rows of a model."""
    for step, whole, alone in steps(model):
        theirs, ours = interleaved(whole, rounds, SECONDS)
        middle = statistics.median(theirs), statistics.median(ours)
        yield Row(
            model.name,
            step,
            *middle,
            middle[0] / middle[1],
            *interval(theirs, ours),
            *back_to_back(alone, 0.02 * sum(middle)),
        )


HEAD = ("model", "step", "torch ms", "attngrad ms", "ratio", "95 %", "attention alone, ms", "kept")


def cells(row: Row) -> tuple[str, ...]:
    """A row of the table."""
    return (
        row.model,
        row.step,
        f"{row.theirs:.2f}",
        f"{row.ours:.2f}",
        f"{row.ratio:.2f}",
        f"{row.low:.2f} to {row.high:.2f}",
        f"{row.their_attention:.2f} and {row.our_attention:.2f}",
        "" if row.kept is None else f"{row.kept:.2f}",
    )


def mean(rows: Sequence[Row]) -> float:
    """The geometric mean of the ratios."""
    return statistics.geometric_mean(row.ratio for row in rows)


def page(rows: Sequence[Row], about: dict[str, Any]) -> str:
    """The table as a page."""
    table = [(*line[:5], line[-1]) for line in (HEAD, ("---",) * len(HEAD), *map(cells, rows))]
    lines = ["| " + " | ".join(line) + " |" for line in table]
    where = f"{about['cpu']}, {about['isa']}, {about['threads']} threads, torch {torch.__version__}"
    return f"""# In a model

Whole steps with `attngrad.torch` and with PyTorch's own attention, in turn, in one process: forward, loss, backward and
SGD, or forward alone. Two blocks of attention and MLP, attention layers alone, and three models of Transformers, with
random weights, in float32. `ratio` is PyTorch's time over ours: above 1 we are faster. `kept` is the share of what
attention alone gains, back to back, that the whole step gains; it is empty where that is less than 2 % of the step.
Intervals and attention's own times are in `benchmarks/in_model.json`.

{chr(10).join(lines)}

Geometric mean of the ratios: {mean(rows):.3f}. {where}; written by `python -m benchmarks.in_model`.
"""


def main() -> None:
    """Print the table row by row; write it on request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="models whose name has this text")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    models = [m for m in MODELS if not arguments.only or any(text in m.name for text in arguments.only)]
    print("".join(f"{name:>{width}}" for name, width in zip(HEAD, WIDTHS, strict=True)))
    rows = []
    for model in models:
        torch.manual_seed(0)
        for row in measure(model, arguments.rounds):
            rows.append(row)
            print("".join(f"{cell:>{width}}" for cell, width in zip(cells(row), WIDTHS, strict=True)), flush=True)
    print(f"geometric mean of the ratios: {mean(rows):.3f}")
    about = machine.describe(attngrad.get_num_threads())
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": about, "rows": [asdict(row) for row in rows]}, indent=1))
    if arguments.markdown:
        arguments.markdown.write_text(page(rows, about))
    bad = [f"{row.model}, {row.step}" for row in rows if row.lost or row.low < LEAST_RATIO]
    if arguments.check and bad:
        raise SystemExit(f"in_model: {'; '.join(bad)}: more than a fifth of the gain is lost, or slower than PyTorch")


WIDTHS = (38, 11, 10, 13, 8, 16, 22, 7)

if __name__ == "__main__":
    main()
