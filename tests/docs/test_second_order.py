"""docs/studies/second_order.py tells raising, right and silently wrong apart; the page says what it found."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

DOCS = Path(__file__).parents[2] / "docs"
STUDIES = DOCS / "studies"
sys.path.insert(0, str(STUDIES))

import second_order  # noqa: E402
import second_order_subjects as subjects  # noqa: E402


def dense(q, k, v):
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v


class Silent(torch.autograd.Function):
    """A kernel that autograd cannot see into."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return dense(q, k, v)

    @staticmethod
    def backward(ctx, dout):
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = dense(*inputs)
        return torch.autograd.grad(out, inputs, dout.detach())


class Once(Silent):
    backward = staticmethod(torch.autograd.function.once_differentiable(Silent.backward))


@pytest.mark.parametrize(
    ("attention", "verdicts"),
    [
        (dense, ["right", "right", "right"]),
        (Silent.apply, ["silently wrong", "silently wrong", "silently wrong"]),
        (Once.apply, ["raises", "silently wrong", "silently wrong"]),
    ],
)
def test_the_three_verdicts_are_told_apart(attention, verdicts):
    assert [second_order.asked(attention, dense, way)["verdict"] for way in second_order.WAYS] == verdicts


def test_a_kernel_with_a_wrong_first_order_is_not_judged():
    with pytest.raises(SystemExit, match="first gradient is off"):
        second_order.asked(lambda q, k, v: dense(2 * q, k, v), dense, "grad")


def test_the_stand_in_kernel_is_attention_and_its_gradient():
    q, k, v, dout = torch.randn(4, 2, 9, 3, 8, dtype=torch.float64)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = subjects.swapped(lambda q, k, v: dense(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2))
    out = expected(*(x.transpose(1, 2) for x in inputs)).transpose(1, 2)
    found, lse = subjects.dense_forward(q, k, v, 8**-0.5)
    torch.testing.assert_close(found, out.detach())
    grads = torch.autograd.grad(out, inputs, dout)
    for x, y in zip(subjects.dense_backward(dout, q, k, v, found, lse, 8**-0.5), grads, strict=True):
        torch.testing.assert_close(x, y)
    assert not subjects.dense_forward(*inputs, 8**-0.5)[0].requires_grad


PAGE = (DOCS / "second_order.md").read_text()
ROWS = {
    row[0]: row
    for row in re.findall(r"^\| ([^|]+) \| ([^|]+) \| (ran|interpreted|stand-in kernel) \| (.*) \|$", PAGE, re.M)
}


def test_every_subject_has_its_row_on_the_page():
    assert set(ROWS) | {"flex_attention, eager"} == {subject.name for subject in subjects.SUBJECTS}
    for subject in subjects.SUBJECTS:
        assert subject.name not in ROWS or ROWS[subject.name][2] == subject.how


@pytest.mark.thorough
@pytest.mark.parametrize("subject", subjects.SUBJECTS, ids=lambda subject: subject.name)
def test_the_page_says_what_is_found_for_what_is_installed(subject):
    number = subjects.SUBJECTS.index(subject)
    environment = os.environ | {"PYTHONPATH": str(STUDIES), "TRITON_INTERPRET": "1"} | subject.environment
    command = [sys.executable, "-W", "ignore", STUDIES / "second_order.py", "--one", str(number)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)  # noqa: S603
    row = json.loads(done.stdout.splitlines()[-1])
    if "missing" in row:
        pytest.skip(row["missing"])
    if "failed" in row:
        assert subject.name not in ROWS
        return
    said = [cell.split(",")[0].strip("`") for cell in ROWS[subject.name][3].split(" | ")]
    assert said == [*(row[way]["verdict"] for way in second_order.WAYS), row["auditor"]]
