"""The table of steps: complete, closed, and the one place of every formula."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from attngrad.core.binding import bind
from attngrad.core.operands import Tangents
from attngrad.explain.rules import RULES
from attngrad.reference import forward
from attngrad.reference.modifiers import IDENTITY, MODIFIERS, Chain, SoftCap, compose
from attngrad.reference.passes import GRADS, GRADS_DOT, directions, inputs
from attngrad.reference.table import GIVEN, STEPS, evaluate, plan, symbols
from attngrad.testing import relative_error
from cases import EVERYTHING, make

INPUTS = tuple(name for names in GIVEN.values() for name in names)


def test_steps_read_inputs_and_steps_and_nothing_else():
    made = [name for name, _ in plan(INPUTS, tuple(STEPS))]
    assert sorted(made) == sorted(STEPS)
    for name, step in STEPS.items():
        before = {*INPUTS, *made[: made.index(name)]}
        assert set(step.reads) <= before, name


def test_a_name_that_is_neither_given_nor_a_step_is_an_error():
    with pytest.raises(NameError, match="'q' is neither given nor a step"):
        evaluate({}, ("z",))
    with pytest.raises(NameError, match="'dscorse' is neither"):
        evaluate({}, ("dscorse",))


def test_every_formula_of_the_notation_is_a_step():
    page = (Path(__file__).parents[2] / "docs" / "notation.md").read_text()
    numbers = set(re.findall(r"\(([FRTH]\d)\)", page))
    assert {step.number for step in STEPS.values() if step.symbol} == numbers


def test_every_symbol_of_the_table_is_explained():
    found = list(symbols(tuple(GIVEN)).values())
    assert len(found) == len(set(found))
    assert sorted(found) == sorted(rule.name for rule in RULES)


def test_only_what_is_wanted_is_computed():
    c = make(())
    x, o, _ = bind("test", *c.qkv, {}, kernels=False)
    assert "out" not in evaluate(inputs(x, o), ("weights",))
    assert [name for name, _ in plan(tuple(inputs(x, o)), ("z",))] == ["k_heads", "z"]


# --- modifiers ------------------------------------------------------------------------------------------------------


def test_one_entry_of_the_list_is_a_modifier_of_every_pass(monkeypatch):
    """Two modifiers in a row: the gradient and its tangent equal the complex step of the forward pass."""
    with monkeypatch.context() as patched:
        patched.setitem(MODIFIERS, "second cap", SoftCap)
        modifier = compose(1.5, 2.0)
        assert isinstance(modifier, Chain)
        assert compose(None, None) is IDENTITY
    c = make(tuple(name for name in EVERYTHING if name != "dropout"))
    x, o, _ = bind("test", *c.qkv, {n: v for n, v in c.options.items() if n not in MODIFIERS}, kernels=False)
    given = {**inputs(x, o), "modifier": modifier, **directions(x, c.t)}
    given |= {"dout": c.dout, "dlse": None, "dout_dot": c.dout_dot, "dlse_dot": None}
    found = evaluate(given, (*GRADS, *GRADS_DOT, "out_dot"))

    def along(name):
        value, tangent = given[name], given[f"{name}_dot"]
        return value if value is None or tangent is None else value + 1e-30j * tangent

    moved = {**given, **{name: along(name) for name in (*Tangents._fields, "dout")}}
    moved = evaluate(moved, (*GRADS, "out"))
    assert relative_error(found["out_dot"], moved["out"].imag / 1e-30) < 1e-12
    for name in GRADS:
        if found[name] is not None:
            assert relative_error(found[f"{name}_dot"], moved[name].imag / 1e-30) < 1e-11
    inner = sum(np.sum(found[f"d{n}"] * t) for n, t in zip(c.t._fields, c.t, strict=True) if t is not None)
    assert inner == pytest.approx(np.sum(c.dout * found["out_dot"]), rel=1e-12)
    assert relative_error(forward(x, o).out, moved["out"].real) > 1e-3  # the modifiers do something
