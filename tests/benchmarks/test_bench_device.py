"""The benchmark of a device: it verifies before it times, and says why a contender is left out."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner

from benchmarks import device


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(device, "SIZES", (24,))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("work", device.PASSES)
def test_a_wrong_contender_is_not_timed(work, causal, monkeypatch):
    ours = device.CONTENDERS[device.OURS]
    monkeypatch.setitem(device.CONTENDERS, "scaled", lambda q, k, v, c: ours(1.01 * q, k, v, c))
    monkeypatch.setitem(device.CONTENDERS, "cut off", lambda q, k, v, c: (q + k + v).detach().requires_grad_())
    told = {
        name: device._wrong(name, work, causal, 2, torch.float32, "cpu") for name in (device.OURS, "scaled", "cut off")
    }
    assert told[device.OURS] == ""
    assert told["scaled"].startswith("wrong: error")
    assert told["cut off"]


def test_the_command_prints_time_and_memory_of_every_pass():
    found = CliRunner().invoke(device.command, ["--sizes", "24", "--rounds", "1"])
    assert found.exit_code == 0, found.output
    for work in device.PASSES:
        assert f"{work}, causal" in found.output
    rows = [line for line in found.output.splitlines() if line.split()[:1] == [device.OURS]]
    assert len(rows) == 2 * len(device.PASSES)
    assert all("MiB" in row and "1.00 x ours" in row for row in rows)
    assert "flash_attention_for_cpu" in found.output  # why it has no double backward
