"""An installed attngrad works: every pass against the reference, the layer, files, the auditor, every command.

Needs the package and what it depends on, nothing else. ``make dist`` runs it on the wheel in an empty environment
without a compiler, cibuildwheel on every wheel it builds.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import attngrad
from attngrad import reference, testing

ROOT = Path(__file__).parents[2]
CANDIDATE = """
import attngrad

def mine(q, k, v, dout):
    out, pullback = attngrad.vjp(q, k, v)
    dq, dk, dv, _, _ = pullback(dout)
    return out, dk, dq, dv
"""


def close(found: object, expected: object, eps: float) -> None:
    """Both are arrays or tuples of them."""
    for a, b in zip(found, expected, strict=True) if isinstance(found, tuple) else ((found, expected),):
        if a is not None:
            error = testing.relative_error(np.asarray(a, np.float64), np.asarray(b, np.float64))
            assert error < 200 * eps, error


def passes(dtype: type) -> None:
    """All four, with many options, beside the reference."""
    rng = np.random.default_rng(0)
    q, dout, q_dot = rng.standard_normal((3, 2, 4, 9, 12)).astype(dtype)
    k, v, k_dot, v_dot = rng.standard_normal((4, 2, 2, 11, 12)).astype(dtype)
    options = {
        "causal": True,
        "softcap": 3.0,
        "bias": rng.standard_normal((4, 9, 11)).astype(dtype),
        "sinks": rng.standard_normal(4).astype(dtype),
        "dropout": 0.2,
        "seed": 5,
    }
    t, eps = (q_dot, k_dot, v_dot), float(np.finfo(dtype).eps)
    close(attngrad.attention(q, k, v, **options), reference.attention(q, k, v, **options), eps)
    close(tuple(attngrad.vjp(q, k, v, **options)[1](dout)), tuple(reference.vjp(q, k, v, **options)[1](dout)), eps)
    close(attngrad.jvp((q, k, v), t, **options), reference.jvp((q, k, v), t, **options), eps)
    ours, theirs = (module.hvp((q, k, v), t, dout, **options) for module in (attngrad, reference))
    close(tuple(ours[1]), tuple(theirs[1]), eps)


def layer(folder: Path) -> None:
    """Forward, backward, and a file and back."""
    one = attngrad.MultiHeadAttention(16, 4, num_kv_heads=2, rope=10000.0)
    x = np.random.default_rng(0).standard_normal((2, 5, 16)).astype(np.float32)
    y = one(x, causal=True)
    assert one.backward(np.ones_like(y)).shape == x.shape
    one.save(folder / "layer.safetensors")
    assert np.array_equal(attngrad.MultiHeadAttention.load(folder / "layer.safetensors")(x, causal=True), y)


def command(*arguments: str, status: int = 0) -> str:
    """What ``python -m attngrad`` prints."""
    # from the folder of the package's environment: the sources must not be what is imported
    done = subprocess.run([sys.executable, "-m", "attngrad", *arguments], capture_output=True, text=True, check=False)  # noqa: S603
    assert done.returncode == status, (arguments, done.returncode, done.stdout, done.stderr)
    return done.stdout


def commands(folder: Path) -> None:
    """Each once."""
    assert attngrad.__version__ in command("--version")
    assert "audit" in command("--help")
    assert attngrad.__version__ in command("info")
    command("check")
    command("explain", "--output", str(folder / "page.html"))
    assert "Content-Security-Policy" in (folder / "page.html").read_text(encoding="utf-8")
    (folder / "mine.py").write_text(CANDIDATE)
    told = command("audit", f"{folder / 'mine.py'}:mine", "--effort", "quick", "--json", "-", status=1)
    assert json.loads(told)["mistakes"] == ["dq-dk-exchanged"]
    assert json.loads(command("errata", "--json", "--document", "back-pass"))["claims"]


def main() -> None:
    """Everything."""
    assert not Path(attngrad.__file__).is_relative_to(ROOT / "src"), "the sources were imported, not what is installed"
    assert importlib.metadata.version("attngrad") == attngrad.__version__
    for dtype in (np.float64, np.float32):
        passes(dtype)
    with tempfile.TemporaryDirectory() as name:
        layer(Path(name))
        commands(Path(name))
    heavy = {"torch", "jax", "matplotlib"} & set(sys.modules)
    assert not heavy, heavy
    print(f"attngrad {attngrad.__version__} works, on {sys.version.split()[0]}")


if __name__ == "__main__":
    main()
