"""``attngrad check --device``: what somebody with the hardware runs first."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner

import attngrad.torch as bridge
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
