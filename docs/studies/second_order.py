"""Which attention implementations raise, are right, or are silently wrong under ``create_graph=True``.

Run it: ``python docs/studies/second_order.py [--path FOLDER ...] [--json]`` audits what is installed, and what lies in
the folders; each in a process of its own, kernels of Triton in its interpreter. Nothing is downloaded.

The question is that of a gradient penalty, a force loss or a Hessian-vector product. q, k and v are made from leaves by
linear maps, as in every model; the loss is the squared norm of the gradient at the leaves, and its gradient is compared
with that of dense attention in float64. It is asked in three ways: by ``backward()``; by ``torch.autograd.grad``, which
visits only what leads to its inputs; and by ``backward()`` with a first loss that is linear in the output, so that the
gradient which enters the attention is a constant.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WAYS = {"backward": "`backward()`", "grad": "`autograd.grad`", "linear": "linear loss, `backward()`"}
SIZES = (1, 2, 64, 32)
TOLERANCE = 1e-3
"""Relative, in float32; right ones reach 1e-6, wrong ones are off by a tenth or more."""


def gradients(attention: Any, dtype: Any, way: str) -> tuple[Any, Any]:
    """The gradient at the leaves, and that of its squared norm."""
    import torch

    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(SIZES, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3)]
    maps = [torch.randn(SIZES[-1], SIZES[-1], generator=generator, dtype=torch.float64).to(dtype) / 5 for _ in range(3)]
    dout = torch.randn(SIZES, generator=generator, dtype=torch.float64).to(dtype)
    for x in (*leaves, *maps):
        x.requires_grad_()
    q, k, v = (x @ w for x, w in zip(leaves, maps, strict=True))
    out = attention(q, k, v)
    loss = ((out if way == "linear" else out.tanh()) * dout).sum()
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    penalty = sum((x**2).sum() for x in first)
    inputs = [*leaves, *maps]
    if way == "grad":
        second = torch.autograd.grad(penalty, inputs, materialize_grads=True)
    else:
        penalty.backward()
        second = tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in inputs)
    one, two = (torch.cat([x.detach().double().flatten() for x in xs]) for xs in (first, second))
    return one, two


def asked(attention: Any, dense: Any, way: str) -> dict[str, Any]:
    """The verdict for one way of asking: raises, right or silently wrong, and how far the second order is off."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        truth = gradients(dense, torch.float64, way)
    try:
        found = gradients(attention, torch.float32, way)
    except (RuntimeError, NotImplementedError) as error:
        return {"verdict": "raises", "error": None, "detail": str(error).splitlines()[0]}
    first, second = (float((x - y).norm() / y.norm()) for x, y in zip(found, truth, strict=True))
    if first > TOLERANCE:
        raise SystemExit(f"the first gradient is off by {first:.1e}: not fit for this question")
    return {"verdict": "right" if second < TOLERANCE else "silently wrong", "error": second, "detail": ""}


def judged(number: int) -> dict[str, Any]:
    """The row of a subject: version, and a verdict for each way of asking."""
    import torch
    from second_order_subjects import SUBJECTS
    from torch.nn.functional import scaled_dot_product_attention

    subject = SUBJECTS[number]
    row: dict[str, Any] = {"name": subject.name, "how": subject.how}
    try:
        attention = subject.make()
    except ImportError as error:
        return row | {"missing": str(error)}
    row["version"] = subject.version
    try:
        q = torch.randn(SIZES, requires_grad=True)
        attention(q, q, q).sum().backward()
    except (RuntimeError, NotImplementedError) as error:  # no first order, no second
        return row | {"failed": str(error).splitlines()[0]}

    def dense(q: Any, k: Any, v: Any) -> Any:
        return scaled_dot_product_attention(q, k, v, is_causal=subject.causal)

    row["auditor"] = audited(attention, subject)
    return row | {way: asked(attention, dense, way) for way in WAYS}


def audited(attention: Any, subject: Any) -> str:
    """What ``attngrad.torch.audit`` says of the double backward; interpreted kernels take few sizes."""
    if subject.how == "interpreted":
        return "not asked"
    import attngrad.torch

    def equal_heads(q: Any, k: Any, v: Any) -> Any:  # how groups are laid out is another question
        if q.shape[1] != k.shape[1]:
            raise ValueError("one key head per query head")
        return attention(q, k, v)

    report = attngrad.torch.audit(equal_heads, effort="quick", dtype="float32", name=subject.name)
    if report.mistakes or report.status == "not audited":
        return ", ".join(report.mistakes) or report.verdict
    raises = any("does not offer double backward" in finding.text for finding in report.findings)
    return "raises" if raises else report.status


def holds(folder: Path, subject: Any) -> bool:
    """Whether the folder has the package of a subject: packages look for one another, and behave otherwise then."""
    return any((folder / f"{subject.module}{end}").exists() for end in ("", ".py"))


def table(paths: list[str]) -> list[dict[str, Any]]:
    """All subjects, each in a process of its own: stand-ins and interpreters leave traces in theirs."""
    from second_order_subjects import SUBJECTS

    usual = os.environ | {"TRITON_INTERPRET": "1", "TORCH_COMPILE_DISABLE": "1"}
    folders = [Path(p).resolve() for p in paths]
    rows = []
    for number, subject in enumerate(SUBJECTS):
        seen = [str(p) for p in folders if holds(p, subject) or not any(holds(p, other) for other in SUBJECTS)]
        environment = usual | {"PYTHONPATH": os.pathsep.join([*seen, str(HERE)]), **subject.environment}
        command = [sys.executable, "-W", "ignore", __file__, "--one", str(number)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it ended"])[-1]
            rows.append({"name": subject.name, "how": subject.how, "failed": last})
        else:
            rows.append(json.loads(done.stdout.splitlines()[-1]))
    return rows


def main() -> None:
    """The table, as Markdown or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--path", action="append", default=[], metavar="FOLDER", help="a folder to import packages from"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None:
        print(json.dumps(judged(given.one)))
        return
    sys.path.insert(0, str(HERE))
    rows = table(given.path)
    if given.json:
        print("\n".join(map(json.dumps, rows)))
        return
    print(
        "| implementation | version | its kernel |",
        " | ".join(WAYS.values()),
        "| the auditor |\n|---|---|---|---|---|---|---|",
    )
    for row in (row for row in rows if "linear" in row):
        told = " | ".join(text(row[way]) for way in WAYS)
        print(f"| {row['name']} | {row['version']} | {row['how']} | {told} | {row['auditor']} |")
    for key, words in (("failed", "Not judged"), ("missing", "Not here")):
        for row in (row for row in rows if key in row):
            print(f"\n{words}: {row['name']}: {row[key]}")


def text(found: dict[str, Any]) -> str:
    """A verdict, and how far the second order is off."""
    if found["error"] is None:
        return str(found["verdict"])
    return (
        f"{found['verdict']}, {found['error']:.0e}"
        if found["error"] < 1e-3
        else f"{found['verdict']}, {found['error']:.2f}"
    )


if __name__ == "__main__":
    main()
