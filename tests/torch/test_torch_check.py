"""``attngrad check --device``: what somebody with the hardware runs first."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from click.testing import CliRunner

import attngrad.torch as bridge
from attngrad.backends.blocked import blocks, passes
from attngrad.cli import main
from attngrad.core.options import OPTIONS
from attngrad.torch import check


@pytest.mark.parametrize("backend", ["cpu", "blocked"])
def test_every_pass_and_option_of_a_device_is_checked_in_every_dtype(backend):
    with bridge.use_backend(backend):
        rows = list(check.check("cpu"))
    assert len(rows) == 4 * 12
    assert all(row.ok for row in rows)
    assert set(rows[0].errors) == {"forward", "backward", "double backward", "third order", "forward mode"}


def test_no_option_of_the_table_is_left_out():
    assert set(check.options(torch.Generator())["all"]) == set(OPTIONS)


def test_a_wrong_pass_is_told_and_is_exit_status_1(monkeypatch):
    right = check.attention
    monkeypatch.setattr(
        check, "attention", lambda *x, **options: right(*x, **options) * (1.5 if "softcap" in options else 1)
    )
    found = CliRunner().invoke(main, ["check", "--device", "cpu"])
    assert found.exit_code == 1
    assert found.output.count("WRONG") == 8  # softcap and all, in four dtypes
    assert "40 of 48 rows agree" in found.output


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_result_that_is_no_number_is_wrong(wrong, monkeypatch):
    """Of all results of a pass: the first is right."""
    right = check._passes

    def with_one(function, inputs, given):
        found = right(function, inputs, given)
        if function is check.attention:
            found["backward"][-1] = torch.full_like(found["backward"][-1], wrong)
        return found

    monkeypatch.setattr(check, "_passes", with_one)
    row = next(check.check("cpu"))
    assert row.errors["forward"] < 1e-14
    assert row.errors["backward"] == float("inf")
    assert not row.ok


def test_a_dtype_that_a_device_lacks_is_said_and_is_no_mistake(monkeypatch):
    ones = torch.ones

    def without_float64(*size, dtype=None, **more):
        if dtype is torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype.\nPlease use float32 instead.")
        return ones(*size, dtype=dtype, **more)

    monkeypatch.setattr(torch, "ones", without_float64)
    found = CliRunner().invoke(main, ["check", "--device", "cpu"])
    assert found.exit_code == 0
    said = "-      float64   not on this device: TypeError: Cannot convert a MPS Tensor to float64 dtype.\n"
    assert said in found.output
    assert "36 of 36 rows agree" in found.output
    assert "third order" in found.output


def test_tf32_of_the_process_is_off_while_a_device_is_checked_and_sequences_are_cut(monkeypatch):
    right, seen, cuts = check.attention, set(), []

    def attention(*x, **options):
        seen.add(torch.get_float32_matmul_precision())
        return right(*x, **options)

    cut = passes.cut
    monkeypatch.setattr(check, "attention", attention)
    monkeypatch.setattr(passes, "cut", lambda *x: cuts.append(len(cut(*x))) or cut(*x))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with bridge.use_backend("blocked"):
            rows = list(islice(check.check("cpu"), 3))
        assert [row.option for row in rows] == ["none", "scale", "causal"]
        assert all(row.ok for row in rows)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == {"highest"}
    assert cuts[0] == 1
    assert min(cuts[-5:]) > 1  # of the passes of causal
    assert blocks.BUDGET > 0


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("nonsense", "device must be one that PyTorch has here"),
        ("cuda:7", "device must be one that PyTorch has here"),
        ("xpu", "device must be one that PyTorch has here"),
        ("meta", "computes"),
    ],
)
def test_a_device_that_is_not_there_is_one_line_and_exit_status_2(device, words):
    found = CliRunner().invoke(main, ["check", "--device", device])
    assert found.exit_code == 2
    assert words in found.output
    assert found.output.count("\n") == 1
    assert len(found.output) < 400


def test_a_backend_may_be_named_and_one_that_is_not_there_is_exit_status_2(monkeypatch):
    monkeypatch.setattr(check, "check", lambda device: iter(()))
    found = CliRunner().invoke(main, ["check", "--device", "cpu", "--backend", "blocked"])
    assert found.exit_code == 0
    assert "backend blocked" in found.output
    for arguments in (["--device", "cpu", "--backend", "nonsense"], ["--backend", "blocked"]):
        assert CliRunner().invoke(main, ["check", *arguments]).exit_code == 2
