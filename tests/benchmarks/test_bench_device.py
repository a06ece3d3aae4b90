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


@pytest.mark.parametrize("which", [0, -1])
def test_a_contender_with_nan_in_any_result_is_not_timed(which, monkeypatch):
    def spoiled(f, x, causal):
        found = list(device._backward(f, x, causal))
        found[which] = torch.full_like(found[which], float("nan"))
        return tuple(found)

    runs = iter([spoiled, device._backward])  # of the contender, of the reference
    monkeypatch.setitem(device.PASSES, "spoiled", lambda *x: next(runs)(*x))
    assert device._wrong(device.OURS, "spoiled", False, 2, torch.float32, "cpu") == "wrong: error nan"


def test_a_contender_that_runs_out_of_memory_leaves_the_others_to_be_timed(monkeypatch):
    right = device.CONTENDERS["SDPA math"]

    def too_large(q, k, v, causal):
        if q.shape[-2] > 24:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 45 GiB.\nMore.")
        return right(q, k, v, causal)

    def own_error(q, k, v, causal):
        raise AssertionError("head_dim must be 128")

    monkeypatch.setattr(device, "CONTENDERS", {device.OURS: device.CONTENDERS[device.OURS]})
    monkeypatch.setitem(device.CONTENDERS, "large", too_large)
    monkeypatch.setitem(device.CONTENDERS, "own", own_error)
    monkeypatch.setattr(device, "_peak", lambda *x: 0.0)
    found = CliRunner().invoke(device.command, ["--sizes", "24,32", "--rounds", "1"])
    assert found.exit_code == 0, found.output
    told = [" ".join(line.split()) for line in found.output.splitlines()]
    assert told.count("large 32 tokens OutOfMemoryError: CUDA out of memory. Tried to allocate 45 GiB.") == 6
    assert sum(line.startswith("large 24 tokens") and line.endswith("x ours") for line in told) == 6
    assert sum(line.startswith(device.OURS) and line.endswith("x ours") for line in told) == 12
    assert told.count("own AssertionError: head_dim must be 128") == 6


@pytest.mark.parametrize(("where", "expected"), [("cuda:1", [1]), ("cuda", []), ("cpu", [])])
def test_what_is_waited_for_is_the_device_that_is_named(where, expected, monkeypatch):
    current = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", current.append)
    monkeypatch.setattr(device, "_rows", lambda *x: False)
    assert CliRunner().invoke(device.command, ["--device", where]).exit_code == 0
    assert current == expected


def test_flex_attention_is_compiled_once_and_its_mask_made_once(monkeypatch):
    made = []
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    create = flex.create_block_mask
    monkeypatch.setattr(flex, "create_block_mask", lambda *x, **more: made.append(x[3:]) or create(*x, **more))
    monkeypatch.setattr(torch, "compile", lambda f: made.append(f) or (lambda q, k, v, block_mask: block_mask))
    device._causal_blocks.cache_clear()
    device._compiled_flex.cache_clear()
    q = torch.randn(1, 2, 24, 16)
    try:
        for _ in range(3):
            mask = device._flex(q, q, q, True)
    finally:
        device._causal_blocks.cache_clear()
        device._compiled_flex.cache_clear()
    assert made == [(24, 24), flex.flex_attention]
    i, j = torch.arange(24)[:, None], torch.arange(24)
    assert torch.equal(mask.mask_mod(None, None, i, j), i >= j)


def test_the_command_prints_time_and_memory_of_every_pass():
    found = CliRunner().invoke(device.command, ["--sizes", "24", "--rounds", "1"])
    assert found.exit_code == 0, found.output
    for work in device.PASSES:
        assert f"{work}, causal" in found.output
    rows = [line for line in found.output.splitlines() if line.split()[:1] == [device.OURS]]
    assert len(rows) == 2 * len(device.PASSES)
    assert all("MiB" in row and "1.00 x ours" in row for row in rows)
    assert "flash_attention_for_cpu" in found.output  # why it has no double backward
