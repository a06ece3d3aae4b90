"""What the bridge uses of PyTorch's inside: all there in the version it was read from, and none of it indispensable."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import attngrad
from attngrad.torch import _private
from cases import make
from torch_tools import SMALL, problem

CAUTIOUS = {
    "_functorch_active": lambda: True,
    "_saved_hooks": lambda _: True,
    "_dispatch_modes": lambda: 1,
    "_keeps_graph": lambda: True,
    "_is_zero_tensor": lambda _: True,
}


def test_nothing_is_missing_in_the_version_it_was_read_from():
    assert torch.__version__.startswith(_private.READ_FROM)
    assert _private.MISSING == []
    missing = object()
    assert _private._find("_C._no_such_thing", missing) is missing
    assert _private.MISSING.pop() == "torch._C._no_such_thing"


@pytest.mark.parametrize("name", CAUTIOUS)
@pytest.mark.parametrize("names", [(), ("mask", "bias")], ids=str)
def test_without_one_of_them_all_derivatives_are_right(name, names, monkeypatch):
    monkeypatch.setattr(_private, name, CAUTIOUS[name])
    function, inputs = problem(make(names, SMALL))
    assert gradcheck(function, inputs, check_forward_ad=True)
    assert gradgradcheck(function, inputs, check_fwd_over_rev=True)
    mapped = torch.func.vmap(lambda q: function(q, *inputs[1:])[0])(torch.stack([inputs[0]] * 2))
    torch.testing.assert_close(mapped[1], function(*inputs)[0], rtol=0, atol=1e-14)


PRIVATE = ("torch._C", "torch._functorch", "forward_ad._", "distributed_c10d._", "jax._src", "jax.interpreters")


def test_private_interfaces_stand_in_one_module_per_framework():
    root = Path(attngrad.__file__).parent
    found = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.unparse(node) if isinstance(node, (ast.Attribute, ast.ImportFrom, ast.Import)) else ""
            text = text.removeprefix("from ").removeprefix("import ")
            if text.startswith(PRIVATE):
                found.add(path.relative_to(root).as_posix())
    assert found == {"torch/_private.py", "jax/_private.py"}
