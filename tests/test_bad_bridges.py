"""Bad inputs of attngrad.torch, .transformers, .jax and .distributed: the right result or the error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import distributed as dist

import attngrad
import attngrad.jax
import attngrad.torch
from attngrad.distributed import ring_attention
from bad_inputs.calls import FUNCTIONS, Call, good
from bad_inputs.checks import assert_right, rows, unwritten
from bad_inputs.row import Row, judge


@rows("torch", "jax")
def test_bridges_are_right_or_name_what_is_wrong(row: Row):
    judge(row, row.do)


@pytest.fixture(scope="module")
def ring_of_one(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("ring") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


ATTENTION = {"torch": attngrad.torch.attention, "jax": attngrad.jax.attention, "ring": ring_attention}


@pytest.mark.parametrize("bridge", ATTENTION)
@rows("options", "arrays among the options")
@pytest.mark.usefixtures("ring_of_one")
def test_bridges_have_the_options_of_attention(bridge: str, row: Row):
    call = good()
    row.do(call)
    if bridge != "jax" and unknown_to_torch(call):
        return
    convert = (lambda x: jnp.asarray(x) if x.dtype.isnative else x) if bridge == "jax" else torch.from_numpy
    attention = ATTENTION[bridge]
    with jax.enable_x64(True), unwritten(call):
        given = {name: converted(x, convert) for name, x in call.given().items()}
        if bridge == "jax" and any(x is None for x in given.values()):
            return  # None is an option that was not given, there
        qkv = [convert(call[name]) for name in "qkv"]
        if bridge == "ring" and row.name == "segments: uint64 beside int64":
            with pytest.raises(ValueError, match=r"q_segments must have ids below 2\*\*63; got 18446744073709551615"):
                attention(*qkv, **given)
            return
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
