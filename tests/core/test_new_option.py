"""An option that is in the table and nowhere else: every entry point takes its name, and none drops it in silence."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import attngrad
from attngrad import _native

ROWS = {
    "number": "tilt: Annotated[float | None, Option(Kind.NUMBER, check.scale)]",
    "flag": "tilt: Annotated[bool, Option(Kind.FLAG, check.causal, False)]",
    "pair": "tilt: Annotated[tuple[int, int] | None, Option(Kind.PAIR, check.window)]",
    "plane": "tilt: Annotated[Array | None, Option(Kind.PLANE, check.bias, differentiable=True)]",
    "plane without gradient": "tilt: Annotated[Array | None, Option(Kind.PLANE, check.mask)]",
    "per head": "tilt: Annotated[Array | None, Option(Kind.PER_HEAD, check.sinks, differentiable=True)]",
    "ids": "tilt: Annotated[tuple[Array, Array] | None, Option(Kind.IDS, check.segments)]",
    "function": "tilt: Annotated[Any, Option(Kind.FUNCTION, lambda function, value, x: value)]",
    "parameters": "tilt: Annotated[Any, Option(Kind.PARAMETERS, lambda f, value, x: value, differentiable=True)]",
}
"""One of each kind, as it would stand in the table. Checks are those of other options, where these have the kind."""

CALLS = r"""
import sys

sys.meta_path[:] = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]  # an editable install
sys.path.insert(0, sys.argv[1])
import numpy as np
import torch
import jax

import attngrad, attngrad.torch, attngrad.jax, attngrad.distributed
from attngrad import reference
from attngrad.core.options import OPTIONS, Kind
from attngrad.core.operands import DIFFERENTIABLE, Gradients, INPUT_NAMES, Operands

assert attngrad.__file__.startswith(sys.argv[1]), attngrad.__file__
row = OPTIONS["tilt"]
x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
ids = np.array([0, 0, 1])
value = {
    Kind.NUMBER: 0.5,
    Kind.FLAG: True,
    Kind.PAIR: (1, 2),
    Kind.PLANE: np.ones((3, 3), np.float32 if row.differentiable else bool),
    Kind.PER_HEAD: np.ones(2, np.float32),
    Kind.IDS: (ids, ids),
    Kind.FUNCTION: abs,
    Kind.PARAMETERS: {"slope": np.ones(2, np.float32)},
}[row.kind]


def convert(to):
    if isinstance(value, tuple):
        return tuple(to(y) if isinstance(y, np.ndarray) else y for y in value)
    if isinstance(value, dict):
        return {name: to(y) for name, y in value.items()}
    return to(value) if isinstance(value, np.ndarray) else value


t, j = torch.from_numpy(x), jax.numpy.asarray(x)
tensor, array = convert(torch.from_numpy), convert(jax.numpy.asarray)
leaf = t.clone().requires_grad_()
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
layer = attngrad.MultiHeadAttention(8, 2)
at, aj = attngrad.torch.attention, attngrad.jax.attention


def blocked(call):
    def run():
        with attngrad.torch.use_backend("blocked"):
            call()

    return run


entries = {
    "attention": lambda: attngrad.attention(x, x, x, tilt=value),
    "vjp": lambda: attngrad.vjp(x, x, x, tilt=value),
    "jvp": lambda: attngrad.jvp((x, x, x), (x, None, None), tilt=value),
    "hvp": lambda: attngrad.hvp((x, x, x), (x, None, None), x, tilt=value),
    "jacobian": lambda: attngrad.jacobian(x, x, x, tilt=value),
    "attention_weights": lambda: attngrad.attention_weights(x, x, tilt=value),
    "reference.attention": lambda: reference.attention(x, x, x, tilt=value),
    "reference.vjp": lambda: reference.vjp(x, x, x, tilt=value),
    "reference.hvp": lambda: reference.hvp((x, x, x), (x, None, None), x, tilt=value),
    "trace": lambda: attngrad.trace(x, x, x, dout=x, tilt=value),
    "layer": lambda: layer(np.ones((3, 8), np.float32), tilt=value),
    "torch": lambda: at(t, t, t, tilt=tensor),
    "torch with autograd": lambda: at(leaf, t, t, tilt=tensor),
    "torch with a mask": lambda: at(leaf, t, t, mask=torch.ones(3, 3, dtype=torch.bool), tilt=tensor),
    "torch.func.jvp": lambda: torch.func.jvp(lambda q: at(q, t, t, tilt=tensor), (t,), (t,)),
    "torch.func.vmap": lambda: torch.func.vmap(lambda q: at(q, t, t, tilt=tensor))(torch.stack([t, t])),
    "torch.compile": lambda: torch.compile(lambda q: at(q, t, t, tilt=tensor), backend="aot_eager")(t),
    "torch sdpa": lambda: attngrad.torch.scaled_dot_product_attention(t, t, t, tilt=tensor),
    "torch weights": lambda: attngrad.torch.attention_weights(t, t, tilt=tensor),
    "torch blocked": blocked(lambda: at(t, t, t, tilt=tensor)),
    "blocked with autograd": blocked(lambda: at(leaf, t, t, tilt=tensor)),
    "blocked torch.func.jvp": blocked(lambda: torch.func.jvp(lambda q: at(q, t, t, tilt=tensor), (t,), (t,))),
    "blocked torch.func.vmap": blocked(lambda: torch.func.vmap(lambda q: at(q, t, t, tilt=tensor))(t[None])),
    "blocked torch.compile": blocked(
        lambda: torch.compile(lambda q: at(q, t, t, tilt=tensor), backend="aot_eager")(t)
    ),
    "blocked ring": blocked(lambda: attngrad.distributed.ring_attention(t, t, t, tilt=tensor)),
    "jax": lambda: jax.block_until_ready(aj(j, j, j, tilt=array)),
    "jax.jit": lambda: jax.block_until_ready(jax.jit(lambda q: aj(q, j, j, tilt=array))(j)),
    "jax.grad": lambda: jax.block_until_ready(jax.grad(lambda q: aj(q, j, j, tilt=array).sum())(j)),
    "jax.vmap": lambda: jax.block_until_ready(jax.vmap(lambda q: aj(q, j, j, tilt=array))(j[None])),
    "jax.nn": lambda: jax.block_until_ready(attngrad.jax.dot_product_attention(*[j.swapaxes(0, 1)] * 3, tilt=array)),
    "ring": lambda: attngrad.distributed.ring_attention(t, t, t, tilt=tensor),
    "ring with autograd": lambda: attngrad.distributed.ring_attention(leaf, t, t, tilt=tensor),
}
if not row.is_array:  # whose shapes would have to fit the auditor's cases
    entries["audit"] = lambda: attngrad.audit(
        lambda q, k, v, dout, **o: (attngrad.attention(q, k, v), *attngrad.vjp(q, k, v)[1](dout)[:3]),
        options={"tilt": value},
        effort="quick",
    )
for name, call in entries.items():
    try:
        call()
    except Exception as error:
        print(f"{name}: {'told' if 'tilt' in str(error) else repr(error)}")
    else:
        print(f"{name}: DROPPED")

# What derives from the table has it.
derived = DIFFERENTIABLE if row.differentiable else INPUT_NAMES if row.is_array else ("tilt",)
print("derived:", any("tilt" in name for name in derived) and (not row.differentiable or "tilt" in Gradients._fields))
schema = str(torch.ops.attngrad.forward.default._schema)
print("schema:", "tilt" in schema or row.kind is Kind.FUNCTION)  # which has no type there: reject_not_flat
from attngrad.distributed._attention import _SAME
print("agreement:", any("tilt" in name for name, _ in _SAME))
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the package, for one row more."""
    root = tmp_path_factory.mktemp("copy")
    shutil.copytree(Path(attngrad.__file__).parent, root / "attngrad", ignore=shutil.ignore_patterns("__pycache__"))
    compiled = Path(_native.__file__)
    if not (root / "attngrad" / compiled.name).exists():
        (root / "attngrad" / compiled.name).symlink_to(compiled)
    return root


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[] if k == "number" else pytest.mark.thorough) for k in ROWS])
def test_no_entry_point_drops_an_option_that_it_does_not_know(copy, kind):
    table = copy / "attngrad" / "core" / "options.py"
    text = table.read_text()
    after = "\n\n\nclass OptionArguments"
    assert after in text
    try:
        table.write_text(text.replace(after, f"\n    {ROWS[kind]}{after}"))
        done = subprocess.run(  # noqa: S603
            [sys.executable, "-c", CALLS, str(copy)], capture_output=True, text=True, check=False, timeout=300
        )
    finally:
        table.write_text(text)
    assert done.returncode == 0, done.stderr[-3000:]
    found = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert len(found) >= 35
    assert {found.pop(name) for name in ("derived", "schema", "agreement")} == {"True"}
    assert {name: how for name, how in found.items() if how != "told"} == {}
