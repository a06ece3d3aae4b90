"""Bad inputs of attngrad.torch, attngrad.transformers and attngrad.jax: the right result or the error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import attngrad
from bad_inputs.calls import FUNCTIONS, Call, good
from bad_inputs.checks import assert_right, rows, unwritten
from bad_inputs.row import Row, judge


@rows("torch", "jax")
def test_bridges_are_right_or_name_what_is_wrong(row: Row):
    judge(row, row.do)


@pytest.mark.parametrize("bridge", ["torch", "jax"])
@rows("options", "arrays among the options")
def test_bridges_have_the_options_of_attention(bridge: str, row: Row):
    call = good()
    row.do(call)
    if bridge == "torch" and unknown_to_torch(call):
        return
    convert = torch.from_numpy if bridge == "torch" else lambda x: jnp.asarray(x) if x.dtype.isnative else x
    attention = getattr(attngrad, bridge).attention
    with jax.enable_x64(True), unwritten(call):
        given = {name: converted(x, convert) for name, x in call.given().items()}
        if bridge == "jax" and any(x is None for x in given.values()):
            return  # None is an option that was not given, there
        qkv = [convert(call[name]) for name in "qkv"]
        found = judge(row, lambda: attention(*qkv, **given))
    if found is not None:
        out = found[0] if isinstance(found, tuple) else found
        assert_right({"out": np.asarray(out)}, {"out": FUNCTIONS["attention"][0](call.plain())["out"]})


def unknown_to_torch(call: Call) -> bool:
    """Whether torch has no such array: byte orders, objects."""
    return any(x.dtype.kind == "O" or not x.dtype.isnative for x in call.arrays())


def converted(x: Any, convert: Callable[[Any], Any]) -> Any:
    if isinstance(x, tuple) and any(isinstance(a, np.ndarray) for a in x):
        return tuple(converted(a, convert) for a in x)
    return convert(x) if type(x) is np.ndarray and x.dtype.kind != "O" else x
