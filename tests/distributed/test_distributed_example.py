"""The example learns under torchrun, and the number of ranks does not change what it learns."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attngrad.distributed import plan

EXAMPLE = Path(__file__).parents[2] / "examples" / "ring_train.py"


def losses(ranks: int) -> list[float]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    arguments = [str(EXAMPLE), "--tokens", "101", "--steps", "21"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ATTNGRAD_NUM_THREADS": "1"}
    found = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True)  # noqa: S603
    assert found.returncode == 0, found.stderr
    return [float(line.split()[-1]) for line in found.stdout.splitlines() if line.startswith("step")]


@pytest.mark.thorough
def test_the_example_learns_the_same_on_two_ranks_as_on_one():
    one, two = losses(1), losses(2)
    assert len(one) == len(two) == 3
    assert one[-1] < 0.7 * one[0]
    assert two == pytest.approx(one, rel=1e-4)


def test_a_plan_adds_up():
    one, two, four = (plan(4096, ranks, 4, 64, bandwidth=1e9, flops=1e11) for ranks in (1, 2, 4))
    assert one.total_bytes == one.forward_bytes == 0
    assert one.efficiency == 1.0
    for p in (one, two, four):
        assert p.memory == p.held + p.travelling + p.tile
    assert one.held == 2 * two.held == 4 * four.held
    long = [ranks * plan(2**20, ranks, 4, 64, bandwidth=1e9, flops=1e11).memory for ranks in (3, 4, 8)]
    assert max(long) < 1.02 * long[0]
    assert 2 * plan(2**20, 2, 4, 64, bandwidth=1e9, flops=1e11).memory < long[0]  # two blocks of sums, not three
    assert four.forward_bytes == 2 * 4 * 1024 * 64 * 4
    assert four.backward_bytes == 2 * four.forward_bytes
    assert four.total_bytes == 3 * four.forward_bytes + 3 * four.backward_bytes
    assert four.time == pytest.approx(one.time / 4, rel=0.1)
    slow = plan(4096, 4, 4, 64, bandwidth=1e6, flops=1e11)
    assert (four.bound, slow.bound) == ("compute", "transfer")
    assert slow.time > 3 * slow.transfer_time


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"n": 0}, ValueError, "n must be at least 1"),
        ({"ranks": 1.5}, TypeError, "ranks must be an integer"),
        ({"key_heads": 3}, ValueError, "key_heads must divide heads, 4"),
        ({"bandwidth": 0.0}, ValueError, "bandwidth must be positive"),
        ({"itemsize": 3}, ValueError, "itemsize must be 2, 4 or 8 bytes"),
    ],
)
def test_a_plan_of_nonsense_is_an_error(change, kind, message):
    sizes = {"n": 64, "ranks": 2, "heads": 4, "dim": 8, "bandwidth": 1e9, "flops": 1e9}
    with pytest.raises(kind, match=message):
        plan(**(sizes | change))
