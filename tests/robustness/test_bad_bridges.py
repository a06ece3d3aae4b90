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
from bad_inputs import TABLE
from bad_inputs.calls import FUNCTIONS, Call, good
from bad_inputs.checks import assert_right, rows, rows_with, unwritten
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
BEYOND_INT64 = "segments: uint64 beside int64"
"""A row that is right, but for the ring."""


def spoiled(row: Row) -> Call:
    call = good()
    row.do(call)
    return call


def unknown_to_torch(row: Row) -> bool:
    """Whether torch has no such array: byte orders, objects."""
    return any(x.dtype.kind == "O" or not x.dtype.isnative for x in spoiled(row).arrays())


def none_given(row: Row) -> bool:
    """Whether an option other than return_lse is None: to the bridge of JAX, one that was not given."""
    return any(x is None for name, x in spoiled(row).given().items() if name != "return_lse")


def concerns(bridge: str, row: Row) -> bool:
    if bridge == "jax":
        return not none_given(row)
    return not unknown_to_torch(row) and (bridge, row.name) != ("ring", BEYOND_INT64)


def in_bridge(bridge: str, call: Call) -> Any:
    """The result of a bridge for the arrays of the call, as its own."""
    convert = (lambda x: jnp.asarray(x) if x.dtype.isnative else x) if bridge == "jax" else torch.from_numpy
    given = {name: converted(x, convert) for name, x in call.given().items()}
    return ATTENTION[bridge](*(convert(call[name]) for name in "qkv"), **given)


def converted(x: Any, convert: Callable[[Any], Any]) -> Any:
    if isinstance(x, tuple) and any(isinstance(a, np.ndarray) for a in x):
        return tuple(converted(a, convert) for a in x)
    return convert(x) if type(x) is np.ndarray and x.dtype.kind != "O" else x


@rows_with("bridge", ATTENTION, "options", "arrays among the options", concerns=concerns)
@pytest.mark.usefixtures("ring_of_one")
def test_bridges_have_the_options_of_attention(bridge: str, row: Row):
    call = spoiled(row)
    with jax.enable_x64(True), unwritten(call):
        found = judge(row, lambda: in_bridge(bridge, call))
    if row.error is None:
        out = found[0] if isinstance(found, tuple) else found
        assert_right({"out": np.asarray(out)}, {"out": FUNCTIONS["attention"][0](call.plain())["out"]})


@pytest.mark.usefixtures("ring_of_one")
def test_the_ring_names_segments_beyond_int64():
    (row,) = (row for row in TABLE["arrays among the options"] if row.name == BEYOND_INT64)
    call = spoiled(row)
    with (
        unwritten(call),
        pytest.raises(ValueError, match=r"q_segments must have ids below 2\*\*63; got 18446744073709551615"),
    ):
        in_bridge("ring", call)


@rows_with("bridge", ["jax"], "options", concerns=lambda _, row: none_given(row))
def test_an_option_that_is_none_is_one_that_was_not_given(bridge: str, row: Row):
    with jax.enable_x64(True):
        assert np.array_equal(in_bridge(bridge, spoiled(row)), in_bridge(bridge, good()))
