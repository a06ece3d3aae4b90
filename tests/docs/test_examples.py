"""The examples run, print what they promise, and learn."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def induction() -> ModuleType:
    return load("induction")


def test_the_documents_layer_prints_shapes_and_its_loss_falls(capsys):
    before, after = load("documents_layer").main()
    lines = capsys.readouterr().out.splitlines()
    assert after < before
    assert lines[0].split(":")[1].strip() == "(32, 10, 128)"
    assert [line.split()[-1] for line in lines[2:6]] == ["w_q", "w_k", "w_v", "w_o"]
    assert all("(128, 128)" in line for line in lines[2:6])
    assert f"{before:.6f} before" in lines[-1]


def trained(layers: int) -> tuple[list[float], list[float], float]:
    """The history of 300 steps, in a process of its own: one BLAS thread, which no other test can hold up."""
    code = f"import json, induction; print(json.dumps(induction.train(300, 0, layers={layers}, quiet=True)))"
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, cwd=EXAMPLES, env=environment, capture_output=True, text=True, check=True)  # noqa: S603
    loss, accuracy, fresh_accuracy = json.loads(found.stdout)
    return loss, accuracy, fresh_accuracy


def test_two_layers_learn_induction():
    loss, accuracy, fresh_accuracy = trained(layers=2)
    assert len(loss) == len(accuracy) == 300
    assert fresh_accuracy > 0.95
    assert np.mean(loss[:20]) > 3.0
    assert np.mean(loss[-20:]) < 0.2
    assert np.mean(accuracy[:20]) < 0.3
    assert np.mean(accuracy[-20:]) > 0.95


@pytest.mark.thorough
def test_one_layer_does_not_learn_induction():
    _, accuracy, fresh_accuracy = trained(layers=1)
    assert np.mean(accuracy[-20:]) < 0.4
    assert fresh_accuracy < 0.4


def test_the_gradient_of_the_induction_model_is_right(induction):
    rng = np.random.default_rng(1)
    model, batch = induction.Model(rng, layers=2), induction.sample(rng, 4)
    _, _, dlogits = induction.cross_entropy(model.forward(batch.tokens), batch)
    grads = model.backward(dlogits)
    for p, g in (
        (model.embed, grads["embed"]),
        (model.unembed, grads["unembed"]),
        (model.layers[0].params["w_k"], grads["layer0"]["w_k"]),
        (model.layers[1].params["w_v"], grads["layer1"]["w_v"]),
    ):
        direction = rng.standard_normal(p.shape, dtype=np.float32)
        expected, start, losses = float(np.sum(g * direction)), p.copy(), []
        for h in (1e-3, -1e-3):
            p[...] = start + np.float32(h) * direction
            losses.append(induction.cross_entropy(model.forward(batch.tokens), batch)[0])
        p[...] = start
        assert (losses[0] - losses[1]) / 2e-3 == pytest.approx(expected, rel=2e-2, abs=2e-3)


def test_only_what_follows_from_the_past_is_predictable(induction):
    batch = induction.sample(np.random.default_rng(0), 50)
    for tokens, successors, predictable in zip(*batch, strict=True):
        assert np.array_equal(tokens[1:], successors[:-1])
        for i in np.flatnonzero(predictable):
            earlier = np.flatnonzero(tokens[:i] == tokens[i])
            assert set(successors[earlier]) == {successors[i]}
        assert predictable.any()
        assert not predictable[: induction.BLOCK[0]].any()


def test_induction_runs_from_the_command_line():
    command = [sys.executable, EXAMPLES / "induction.py", "--steps", "3", "--seed", "1"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    assert "3/3" in found.stdout
    assert "accuracy on fresh sequences" in found.stdout


def test_the_triton_kernel_is_right_and_says_that_it_has_no_second_order():
    """In the interpreter, in a process of its own: it must be chosen before the import."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "attngrad", "audit", f"{EXAMPLES / 'triton_kernel.py'}:attention"]
    command += ["--framework", "torch", "--effort", "quick", "--time-limit", "300", "--json", "-"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
    report = json.loads(found.stdout)
    assert (found.returncode, report["status"]) == (0, "right"), found.stdout
    assert {stage["name"] for stage in report["stages"]} == {"out", "dq", "dk", "dv"}


def test_the_action_calls_what_the_command_and_the_plugin_have():
    yaml = pytest.importorskip("yaml")
    steps = yaml.safe_load((EXAMPLES / "audit.github.yml").read_text())["jobs"]["audit"]["steps"]
    commands = [step["run"] for step in steps if "run" in step]
    audit, tests = (next(c for c in commands if c.startswith(word)) for word in ("attngrad audit", "pytest"))
    from attngrad.auditor.cli import command

    known = {flag for parameter in command.params for flag in parameter.opts}
    assert {word for word in audit.split() if word.startswith("--")} <= known
    plugin = (EXAMPLES.parent / "src" / "attngrad" / "pytest_plugin.py").read_text()
    assert all(f'"{word}"' in plugin for word in tests.split() if word.startswith("--"))
