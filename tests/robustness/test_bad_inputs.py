"""Every row of the table of bad inputs, in every public function that it concerns: the right result or its error.

Nothing is written to but results: the memory of every array of a call is compared before and after. Files and the
command are in test_bad_files.py, the frameworks in test_bad_bridges.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

import attngrad
from attngrad import MultiHeadAttention, optim, reference
from bad_inputs import TABLE
from bad_inputs.arrays import CONVERSIONS, DTYPES, INTEGERS, KINDS, LISTS, MEMORY, NARROW
from bad_inputs.calls import (
    FUNCTIONS,
    INPUTS,
    LAYER_FUNCTIONS,
    LAYER_INPUTS,
    OPTIONAL,
    OTHERS,
    Call,
    Results,
    good,
    good_layer,
)
from bad_inputs.checks import assert_right, rows, rows_with, unwritten
from bad_inputs.row import Row, judge

functions = pytest.mark.parametrize("function", FUNCTIONS)


def label(function: str, argument: str) -> str:
    """The function that an error names: what takes the cotangents of vjp is its pullback."""
    return "pullback" if function == "vjp" and argument in ("dout", "dlse") else function


def run_quietly(function: Callable[..., Results], *arguments: Any) -> Results:
    with np.errstate(all="ignore"):
        return function(*arguments)


# --- the table -------------------------------------------------------------------------------------------------------


def test_the_table_has_at_least_200_inputs_each_of_its_own_name():
    names = [(section, row.name) for section, found in TABLE.items() for row in found]
    assert len(names) >= 200
    assert len(set(names)) == len(names)


def test_every_error_of_the_table_has_words():
    assert all(row.words for found in TABLE.values() for row in found if row.error is not None)


# --- functions on arrays ---------------------------------------------------------------------------------------------


@functions
@rows("memory")
def test_arrays_may_lie_anywhere(function: str, row: Row):
    run, names = FUNCTIONS[function]
    for name in (*names, *OTHERS):
        call = good(full=True)
        call[name] = row.do(call[name])
        with unwritten(call):
            found = run(call)
        assert_right(found, run_quietly(run, call.plain(), reference))


@functions
@rows("kinds", "lists")
def test_what_is_no_array_is_named(function: str, row: Row):
    run, names = FUNCTIONS[function]
    for name in (*names, "mask", "q_segments"):
        call = good(full=True)
        call[name] = row.do(call[name])
        if call[name] is None and name in OPTIONAL:
            continue
        shown = "segments[0]" if name == "q_segments" else name
        with unwritten(call):
            judge(row, partial(run, call), label(function, name), shown)


@functions
@rows("dtypes")
def test_dtypes_are_named(function: str, row: Row):
    run, names = FUNCTIONS[function]
    for name in names:
        call = good(full=True)
        call[name] = row.do(call[name])
        with unwritten(call):
            judge(row, partial(run, call), label(function, name), name)


def assert_converted(function: str, row: Row, names: Iterable[str]) -> None:
    run, _ = FUNCTIONS[function]
    for name in names:
        call = good(full=True)
        x = call[name]
        call[name] = row.do(x)
        arrays = call.plain()
        arrays[name] = np.asarray(call[name]).astype(x.dtype)
        with unwritten(call):
            found = run(call)
        assert_right(found, run_quietly(run, arrays, reference))


@functions
@rows("conversions")
def test_lists_and_tuples_are_read_as_numpy_reads_them(function: str, row: Row):
    assert_converted(function, row, (*FUNCTIONS[function][1], *OTHERS))


@functions
@rows("integers")
def test_integers_are_read_as_floats(function: str, row: Row):
    assert_converted(function, row, FUNCTIONS[function][1])


@functions
@rows("narrow dtypes")
def test_cotangents_and_tangents_are_widened_and_inputs_are_not(function: str, row: Row):
    run, names = FUNCTIONS[function]
    inputs = [name for name in names if name in INPUTS]
    for name in inputs:
        call = good(full=True)
        call[name] = row.do(call[name])
        judge(row, partial(run, call), function)
    assert_converted(function, row, [name for name in names if name not in inputs])


def takes(function: str, row: Row) -> bool:
    """Whether ``function`` takes what the row spoils: attention_weights has no v, and ``attention`` sets return_lse."""
    if function == "attention_weights":
        return not row.name.startswith("v:")
    return function != "attention" or not row.name.startswith("return_lse:")


@rows_with("function", FUNCTIONS, "options", "arrays among the options", "shapes", concerns=takes)
def test_options_and_shapes_are_right_or_named(function: str, row: Row):
    run, _ = FUNCTIONS[function]
    call = good()
    row.do(call)
    with unwritten(call):
        found = judge(row, partial(run, call), function)
    if row.error is None:
        assert_right(found, run_quietly(run, widened(call), reference))


@rows_with("module", ["kernels", "reference"], "options", concerns=lambda _, row: not takes("attention", row))
def test_attention_names_a_return_lse_that_is_neither_true_nor_false(module: str, row: Row):
    attention = {"kernels": attngrad, "reference": reference}[module].attention
    call = good()
    row.do(call)
    with unwritten(call):
        judge(row, lambda: attention(call["q"], call["k"], call["v"], **call.given()), "attention")


ANY_PRECISION = ("scale: so large", "softcap: subnormal", "softcap: nearly", "scale over softcap")
"""The reference computes in wider dtypes, too, and leaves their range to the caller."""


def refused_by_the_reference(function: str, row: Row) -> bool:
    return takes(function, row) and row.error is not None and not row.name.startswith(ANY_PRECISION)


@rows_with(
    "function",
    ["attention", "vjp", "jvp", "hvp", "jacobian"],
    "options",
    "arrays among the options",
    "shapes",
    concerns=refused_by_the_reference,
)
def test_the_reference_makes_the_same_checks(function: str, row: Row):
    call = good()
    row.do(call)
    with unwritten(call):
        judge(row, lambda: FUNCTIONS[function][0](call, reference), function)


ARRAYS_BY_THEIR_WORD = (
    "a tensor of torch",
    "an __array_namespace__ without an array",
    "an object that claims to be an ndarray",
)
"""The reference takes arrays of any library, and what says that it is one for one."""


def no_array_to_the_reference(name: str, row: Row) -> bool:
    not_given = row.name == "None" and name in OPTIONAL
    return not not_given and row.name not in ARRAYS_BY_THEIR_WORD


@rows_with("name", ["q", "v", "bias", "mask"], "kinds", concerns=no_array_to_the_reference)
def test_the_reference_takes_arrays_alone(name: str, row: Row):
    call = good(full=True)
    call[name] = row.do(call[name])
    words = row.words.replace(r"numpy\.ndarray", r"(numpy\.nd)?array").replace("(a plain |a )?", "(a plain |an? )")
    words = words.partition(".*")[0].partition(r"\. ")[0]  # without the remedy
    judge(replace(row, words=words), partial(FUNCTIONS["vjp"][0], call, reference), "vjp", name)


@rows_with("name", ["q", "v", "bias", "mask"], "lists", "conversions", concerns=lambda _, row: True)
def test_the_reference_takes_no_lists(name: str, row: Row):
    call = good(full=True)
    call[name] = row.do(call[name])
    refused = Row(row.name, row.do, TypeError, "{name} must be an array; got (list|tuple)")
    judge(refused, partial(FUNCTIONS["vjp"][0], call, reference), "vjp", name)


def widened(call: Call) -> Call:
    """The call with window, offset and causal drawn as a mask, in Python's integers."""
    plain = call.plain()
    options = plain.options
    offset = options.pop("offset", plain.arguments.pop("offset", None))
    t, s = call["q"].shape[-2], call["k"].shape[-2]
    window, causal = options.pop("window", None), bool(options.pop("causal", False))
    left, right = window or (None, None)
    starts = np.broadcast_to(np.array(s - t if offset is None else offset, object), call["q"].shape[:-3]).reshape(-1)
    see = np.ones((*call["q"].shape[:-3], 1, t, s), bool)
    for b, start in enumerate(starts):
        for i in range(t):
            for j in range(s):
                at = i + int(start)
                hidden = (causal and j > at) or (left is not None and j < at - int(left))
                hidden = hidden or (right is not None and j > at + int(right))
                see.reshape(-1, t, s)[b, i, j] = not hidden
    mask = plain["mask"]
    plain["mask"] = see if mask is None else see & (mask.view(np.uint8) != 0)
    return plain


def has_the_argument(function: str, row: Row) -> bool:
    return row.name.partition(":")[0].split()[0] in FUNCTIONS[function][1]


@rows_with("function", FUNCTIONS, "cotangents and tangents", concerns=has_the_argument)
def test_cotangents_and_tangents_are_named(function: str, row: Row):
    run, _ = FUNCTIONS[function]
    call = good()
    row.do(call)
    with unwritten(call):
        judge(row, partial(run, call), "pullback" if function == "vjp" else function)


def assert_as_the_reference(function: str, row: Row) -> None:
    run, _ = FUNCTIONS[function]
    call = good()
    row.do(call)
    with unwritten(call):
        found = run(call)
    assert_right(found, run_quietly(run, call.plain(), reference))


@functions
@rows("values", "empty axes")
def test_awkward_values_and_empty_axes_are_right(function: str, row: Row):
    assert_as_the_reference(function, row)


@pytest.mark.parametrize("function", ["attention", "attention_weights"])
@rows("values of scores")
def test_scores_that_overflow_are_those_of_the_reference(function: str, row: Row):
    assert_as_the_reference(function, row)


def test_a_query_whose_scores_are_all_minus_infinity_is_as_one_that_sees_nothing():
    call = good()
    for name in ("q", "k"):
        call[name] = np.abs(call[name]) * 1e200
    call["q"] *= -1
    for function in ("vjp", "hvp"):
        found = FUNCTIONS[function][0](call)
        assert not any(found[name].any() for name in ("dq", "dk", "dv"))


@functions
@rows("large axes")
def test_what_is_too_large_is_refused_before_it_is_made(function: str, row: Row):
    run, _ = FUNCTIONS[function]
    call = good()
    row.do(call)
    judge(row, partial(run, call), function if row.error is ValueError else "")


@pytest.mark.parametrize("function", ["attention", "vjp", "jvp", "hvp"])
@rows("large results")
def test_results_that_no_memory_holds_are_refused(function: str, row: Row):
    run, _ = FUNCTIONS[function]
    call = good()
    row.do(call)
    judge(row, partial(run, call))


# --- the layer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", LAYER_FUNCTIONS)
@pytest.mark.parametrize("row", [*MEMORY, *KINDS, *LISTS, *DTYPES], ids=lambda row: row.name)
def test_the_layer_takes_or_names_every_kind_of_array(function: str, row: Row):
    run = LAYER_FUNCTIONS[function]
    for name in LAYER_INPUTS if function == "hvp" else LAYER_INPUTS[:4]:
        call = good_layer()
        call[name] = row.do(call[name])
        if call[name] is None and name not in ("query", "dy"):
            continue
        with unwritten(call):
            found = judge(row, partial(run, call), name=name)
        if row.error is None:
            assert_right(found, run(call.plain()))


@pytest.mark.parametrize("function", LAYER_FUNCTIONS)
@pytest.mark.parametrize("row", [*CONVERSIONS, *INTEGERS, *NARROW], ids=lambda row: row.name)
def test_the_layer_converts_what_the_functions_convert(function: str, row: Row):
    run = LAYER_FUNCTIONS[function]
    for name in LAYER_INPUTS if function == "hvp" else LAYER_INPUTS[:4]:
        call = good_layer()
        x = call[name]
        call[name] = row.do(x)
        if row.error is not None and name in ("query", "key", "value"):
            judge(row, partial(run, call), name=name)
            continue
        arrays = call.plain()
        arrays[name] = np.asarray(call[name]).astype(x.dtype)
        with unwritten(call):
            found = run(call)
        assert_right(found, run(arrays))


@rows("conversions")
def test_the_layer_reads_lists_among_its_options(row: Row):
    for name in ("bias", "sinks", *OTHERS):
        call = good_layer(full=True)
        arrays = call.plain()
        call[name] = row.do(call[name])
        assert_right(LAYER_FUNCTIONS["backward"](call), LAYER_FUNCTIONS["backward"](arrays))


@rows("options", "arrays among the options")
def test_the_layer_has_the_options_of_attention(row: Row):
    call = good_layer()
    row.do(call)
    with unwritten(call):
        found = judge(row, lambda: LAYER_FUNCTIONS["backward"](call), "MultiHeadAttention")
    if row.error is None:
        assert_right(found, LAYER_FUNCTIONS["backward"](call.plain()))


@rows("layer", "small functions")
def test_constructors_and_small_functions_name_what_is_wrong(row: Row):
    threads = attngrad.get_num_threads()
    judge(row, row.do)
    assert attngrad.get_num_threads() == threads


@rows("layer in use")
def test_a_layer_in_use_names_what_is_wrong_and_keeps_its_gradients(row: Row):
    layer = MultiHeadAttention(8, 2)
    before = dict(layer.grads)
    judge(row, lambda: row.do(layer))
    assert all(not g.any() for g in before.values())  # none was added to before the error


def test_an_optimiser_that_refuses_has_changed_nothing():
    params = {"a": np.ones(3), "b": np.ones(3)}
    sgd = optim.SGD(params, lr=1.0, momentum=0.5)
    with pytest.raises(ValueError, match=r"grads\['b'\] must have the shape"):
        sgd.step({"a": np.ones(3), "b": np.ones(2)})
    assert all((p == 1).all() for p in params.values())
