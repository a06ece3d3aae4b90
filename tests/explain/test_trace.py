"""trace: every intermediate is that of the reference, its sums are its numbers, and what must hold is checked."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attngrad
from attngrad import reference
from attngrad.core.dtypes import BFLOAT16
from attngrad.explain import files, invariants
from attngrad.explain.entries import parse
from attngrad.explain.rules import KEY_SIDE, RULES, is_flat
from cases import EVERYTHING, SHAPES, SINGLES, Case, label, make

COMBINATIONS = [*SINGLES, EVERYTHING]


def full(case: Case) -> attngrad.Trace:
    """The trace of every pass."""
    return attngrad.trace(
        *case.qkv,
        case.dout,
        tangents=case.t,
        dlse=case.dlse,
        dout_dot=case.dout_dot,
        dlse_dot=case.dlse_dot,
        **case.options,
    )


def places(t: attngrad.Trace, name: str, count: int, rng: Any) -> list[tuple[tuple[int, ...], dict[str, int]]]:
    """Random entries of a step, as the arguments of explain."""
    rule, step, x = t.rules[name], t[name], t.operands
    found = []
    for _ in range(count):
        at = tuple(int(rng.integers(n)) for n in step.shape[-len(rule.letters) :])
        heads = x.heads // (t.group if name in KEY_SIDE else 1)
        where = {
            "head": int(rng.integers(heads)),
            "batch": int(rng.integers(max(1, np.prod(x.q.shape[:-3], dtype=int)))),
        }
        found.append((at, {} if rule.letters == "h" else where))
    return found


def test_every_step_is_that_of_the_public_functions():
    case = make(EVERYTHING)
    t = full(case)
    (out, lse), pullback = attngrad.vjp(*case.qkv, return_lse=True, **case.options)
    grads = pullback(case.dout, case.dlse)
    _, (out_dot, lse_dot) = attngrad.jvp(case.qkv, case.t[:3], **case.tangents, return_lse=True, **case.options)
    _, grads_dot = attngrad.hvp(
        case.qkv,
        case.t[:3],
        case.dout,
        case.dout_dot,
        dlse=case.dlse,
        dlse_dot=case.dlse_dot,
        **case.tangents,
        **case.options,
    )
    expected = {"O": out, "L": lse, "O_dot": out_dot, "L_dot": lse_dot}
    expected |= {f"d{n}": g for n, g in zip(("Q", "K", "V", "bias", "sigma"), grads, strict=True)}
    expected |= {f"d{n}_dot": g for n, g in zip(("Q", "K", "V", "bias", "sigma"), grads_dot, strict=True)}
    for name, value in expected.items():
        np.testing.assert_allclose(t[name], value, rtol=1e-10, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("names", COMBINATIONS, ids=label)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_sum_behind_an_entry_is_the_entry_and_so_is_its_finite_difference(names, shape):
    t = full(make(names, SHAPES[shape]))
    rng = np.random.default_rng(0)
    assert t.holds, [i for i in t.invariants if not i.holds]
    for name in t:
        for at, where in places(t, name, 2, rng):
            found = t.explain(name, *at, **where)
            assert found.total == found.value or abs(found.total - found.value) <= 1e-12 * max(1.0, abs(found.value)), (
                name,
                str(found),
            )
            given = not t.rules[name].entry
            if not given and (name.endswith("_dot") or (name[0] == "d" and name != "delta")):
                by_difference = t.finite_difference(name, *at, **where)
                assert abs(by_difference - found.value) <= 1e-6 * max(1.0, abs(found.value)), name


def test_a_wrong_entry_is_told_by_its_sum_and_by_its_finite_difference():
    t = full(make())
    broken = t["dK"].value.copy()
    broken[0, 0, 1, 1] *= 1.001
    t._steps["dK"] = attngrad.explain.trace.make_step(t.rules["dK"], broken, t)
    found = t.explain("dK", 1, 1)
    assert abs(found.total - found.value) > 1e-6 * abs(found.value)
    assert abs(t.finite_difference("dK", 1, 1) - found.value) > 1e-6 * abs(found.value)


@pytest.mark.parametrize(
    ("name", "claim"),
    [
        ("A", "rows of A sum"),
        ("dS", "rows of dS sum"),
        ("delta", "delta ="),
        ("dQ", "<dO, JVP"),
        ("dK", "<dO, JVP"),
        ("A_dot", "rows of A_dot"),
        ("dS_dot", "rows of dS_dot"),
    ],
)
def test_an_invariant_fails_where_its_step_is_wrong(name, claim):
    t = full(make(("causal",)))
    wrong = t[name].value * (1 + 1e-9) + 1e-9
    t._steps[name] = attngrad.explain.trace.make_step(t.rules[name], wrong, t)
    [found] = [i for i in invariants.check(t) if i.claim.startswith(claim)]
    assert not found.holds
    assert found.error < 1e-6


def test_the_symmetry_of_the_hessian_is_checked(monkeypatch):
    right = reference.backward_tangent

    def wrong(*args: Any) -> Any:
        found = right(*args)
        return found._replace(grads_dot=found.grads_dot._replace(q=found.grads_dot.q * 1.001))

    monkeypatch.setattr(reference, "backward_tangent", wrong)
    assert not next(i for i in full(make()).invariants if "Hessian" in i.claim).holds


def test_nan_breaks_the_invariants_and_raises_nothing():
    case = make()
    case.q[0, 0, 0, 0] = np.nan
    t = full(case)
    assert not t.holds
    assert any(i.error == np.inf for i in t.invariants)


def test_passes_come_with_what_they_need():
    case = make()
    forward = attngrad.trace(*case.qkv)
    assert list(forward) == ["Q", "K", "V", "Z", "S", "L", "A", "O"]
    assert {"dO", "dA", "dS", "dQ", "dK", "dV", "delta"} <= set(attngrad.trace(*case.qkv, case.dout))
    assert "dS" in attngrad.trace(*case.qkv, dlse=case.dlse)
    tangent = attngrad.trace(*case.qkv, tangents=(case.t.q, None, None))
    assert "O_dot" in tangent
    assert not tangent["K_dot"].any()
    assert "dQ" not in tangent
    assert "dQ_dot" in full(case)


def test_a_step_knows_where_it_comes_from_and_is_an_array():
    case = make()
    t = attngrad.trace(*case.qkv, case.dout)
    ds = t["dS"]
    assert (ds.name, ds.formula, ds.number, ds.stage) == ("dS", "A o (dA - delta)", "R4", "backward")
    assert ds.inputs == ("A", "dA", "delta")
    assert ds.shape == case.shape.scores
    assert type(ds + 1) is np.ndarray
    assert type(ds[0]) is np.ndarray
    assert type(ds.value) is np.ndarray
    assert isinstance(ds.sum(), float)
    with pytest.raises(ValueError, match="read-only"):
        ds[0, 0, 0, 0] = 1.0


def test_formulas_follow_the_options():
    plain = attngrad.trace(*make().qkv)
    assert plain["S"].formula == "Z"
    t = full(make(("softcap", "bias", "causal", "dropout", "sinks")))
    assert t["S"].formula == "cap(Z) + bias, -inf where hidden"
    assert t["O"].formula == "(A o M) V"
    assert t["L"].formula == "log(rowsum(exp(S)) + exp(sigma))"
    assert t["dZ"].formula == "dS o cap'(Z)"
    assert t["dQ"].inputs == ("dZ", "K")


def test_numbers_and_formulas_are_those_of_the_notation_page():
    page = (Path(__file__).parents[2] / "docs" / "notation.md").read_text()
    for rule in RULES:
        assert not rule.number or f"({rule.number})" in page, rule.name
        assert bool(rule.number) == bool(rule.entry), rule.name
        if rule.entry:
            parse(attngrad.explain.rules.choose(rule.entry, set()))


def test_a_trace_is_of_its_inputs_at_the_time():
    case = make(("mask",))
    t = attngrad.trace(*case.qkv, **case.options)
    before = t["O"].value.copy()
    case.q[...] = 0.0
    case.options["mask"][...] = False
    assert np.array_equal(t["O"], before)
    assert np.array_equal(t["O"][0, 0, 0, 0], t.explain("O", 0, 0).value)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16])
def test_narrow_inputs_are_traced_in_float64(dtype):
    case = make(("bias",)).cast(dtype)
    t = attngrad.trace(*case.qkv, case.dout, **case.options)
    assert t["dQ"].dtype == np.float64
    assert t.holds


def test_strided_and_two_dimensional_inputs_are_taken():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 4, 10))[:, :, ::2]
    q.flags.writeable = False
    t = attngrad.trace(q, k, v, q, sinks=np.ones(1))
    assert t.holds
    assert t.explain("dK", 1, 2).total == pytest.approx(t["dK"][1, 2])
    assert t.explain("dsigma", 0).total == pytest.approx(t["dsigma"][0])


@pytest.mark.parametrize("shape", [(0, 2), (3, 0)])
def test_empty_inputs_give_empty_traces(shape):
    x = np.zeros(shape)
    t = attngrad.trace(x, x, x, x)
    assert t["dK"].shape == shape
    assert t.holds


def test_huge_scores_are_explained_without_overflow():
    x = 1e3 * np.eye(3)
    t = attngrad.trace(x, x, x, x)
    found = t.explain("L", 0)
    assert found.total == found.value == pytest.approx(1e6 / 3**0.5)
    assert [term.value for term in found.terms] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("shape", [(), (5,), (3, 1), (2, 1, 1, 5)])
def test_a_bias_of_any_axes_is_explained(shape):
    case = make()
    t = attngrad.trace(*case.qkv, case.dout, bias=np.full(shape, 0.3))
    rows, columns = (1, 1, *shape)[-2:]
    found = t.explain("dbias", rows - 1, columns - 1)
    assert found.total == pytest.approx(found.value, rel=1e-12)
    assert len(found.terms) == t["dS"].size // t["dbias"].size
    assert t.finite_difference("dbias", rows - 1, columns - 1) == pytest.approx(found.value, abs=1e-6)
    assert "dbias" in files.text(t, "terminal")
    assert t.to_latex()


def test_the_text_of_an_explanation_has_its_terms():
    t = attngrad.trace(*make().qkv, make().dout)
    text = str(t.explain("dK", 2, 1, head=1))
    assert text.startswith("dK[2, 1] = scale sum_i dS[i,2] Q[i,1] = ")
    assert text.count("dS[h2;") == text.count("dS[h3;") == 3


def test_hidden_entries_say_so():
    t = attngrad.trace(*make(("causal",)).qkv, make().dout, causal=True)
    assert "may not see" in t.explain("dS", 0, 4).note
    assert "left out" in t.explain("O", 0, 0).note
    assert t.explain("Q", 0, 0).note == "given"


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda t: t["dX"], KeyError, "there is no step 'dX'. Names are"),
        (lambda t: t["ds"], KeyError, "there is no step 'ds'. Did you mean 'dS'?"),
        (lambda t: t["dQ_dot"], KeyError, "Give dout and tangents to trace"),
        (lambda t: t.explain("nothing", 0, 0), KeyError, "there is no step"),
        (lambda t: t.explain("dK", 9, 0), ValueError, r"trace.explain: row must be in \[-5, 5\); got 9"),
        (lambda t: t.explain("dK", 0, 0, head=2), ValueError, r"head must be in \[-2, 2\); got 2"),
        (lambda t: t.explain("dK", 0, 0, batch=(0, 0)), ValueError, "batch must have 1 indices"),
        (lambda t: t.explain("dK", 0), TypeError, "column must be given"),
        (lambda t: t.explain("L", 0, 0), TypeError, "column must be None"),
        (lambda t: t.explain("dK", 0.5, 0), TypeError, "row must be an integer"),
        (lambda t: t.finite_difference("A", 0, 0), ValueError, "name must be a derivative: .*dQ"),
        (lambda t: t.save("trace.pdf"), ValueError, "path must end in .html, .tex, .json, .txt"),
        (lambda t: t.print(head=4), ValueError, r"trace.print: head must be in \[0, 4\)"),
    ],
)
def test_a_bad_question_is_told_what_is_wrong(call, error, message):
    t = attngrad.trace(*make().qkv, make().dout)
    with pytest.raises(error, match=message):
        call(t)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"caual": True}, TypeError, "trace: unknown option 'caual'. Did you mean 'causal'"),
        ({"return_lse": True}, ValueError, "trace: return_lse must be False"),
        ({"dout": np.zeros(3)}, ValueError, "trace: dout must have the shape of out"),
        ({"dout_dot": make().dout}, ValueError, "dout_dot was given without dout"),
        ({"tangents": 3}, TypeError, "trace: tangents must be"),
        ({"tangents": (None,)}, ValueError, "trace: tangents must be"),
        ({"tokens": "abc"}, TypeError, "tokens must be a pair of lists, 3 and 5 strings"),
        ({"tokens": ["a"]}, ValueError, "tokens must have 3 labels of queries and 5 of keys"),
        ({"tokens": ([1, 2, 3], ["a"] * 5)}, TypeError, "labels that are no strings"),
    ],
)
def test_bad_arguments_are_told_what_is_wrong(arguments, error, message):
    with pytest.raises(error, match=message):
        attngrad.trace(*make().qkv, **arguments)


def test_the_signature_is_the_one_of_the_contract():
    parameters = list(inspect.signature(attngrad.trace).parameters.values())
    assert [p.name for p in parameters[:5]] == ["q", "k", "v", "dout", "tangents"]
    assert parameters[4].kind is inspect.Parameter.KEYWORD_ONLY


# --- layers ----------------------------------------------------------------------------------------------------------

LAYERS = list(itertools.product([None, 100.0], [False, True], [None, 1], [0, 1, 2]))


@pytest.mark.parametrize(("rope", "bias", "key_heads", "others"), LAYERS)
def test_the_trace_of_a_layer_is_its_forward_and_backward(rope, bias, key_heads, others):
    rng = np.random.default_rng(0)
    layer = attngrad.MultiHeadAttention(6, 2, key_heads, d_head=4, bias=bias, rope=rope, dtype=np.float64, rng=1)
    for p in layer.params.values():
        p[...] = rng.standard_normal(p.shape)
    x, dy = rng.standard_normal((2, 2, 3, 6))
    given = tuple(rng.standard_normal((others, 2, 5, 6)))
    key, value = (*given, None, None)[:2]
    t = layer.trace(x, dy, key=key, value=value, causal=True)
    assert not any(g.any() for g in layer.grads.values())
    expected = {"Y": layer(x, *given, causal=True)}
    found = layer.backward(dy)
    inputs = found if isinstance(found, tuple) else (found,)
    expected |= dict(zip(("dX", "dX_k", "dX_v")[: len(inputs)], inputs, strict=True))
    expected |= {f"d{'W' if n[0] == 'w' else 'b'}{n[1:]}": g for n, g in layer.grads.items()}
    for name, array in expected.items():
        np.testing.assert_allclose(t[name], array, rtol=1e-12, atol=1e-12, err_msg=name)
    assert t.holds
    for name in t:
        flat = is_flat(name)
        for at, where in places(t, name, 2, rng):
            entry = t.explain(name, *at, **({} if flat else where))
            assert entry.total == entry.value or abs(entry.total - entry.value) < 1e-12, (name, str(entry))
            if name[0] == "d" and name != "delta":
                by_difference = t.finite_difference(name, *at, **({} if flat else where))
                assert abs(by_difference - entry.value) < 1e-6 * max(1.0, abs(entry.value)), name


def test_the_trace_of_a_layer_takes_options_and_checks_dy():
    layer = attngrad.MultiHeadAttention(4, 2, dtype=np.float32)
    x = np.ones((3, 4), np.float32)
    t = layer.trace(x, x, bias=np.ones((2, 3, 3), np.float32), softcap=2.0, tokens=["a", "b", "c"])
    assert t["dbias"].shape == (2, 3, 3)
    assert t.tokens == (("a", "b", "c"), ("a", "b", "c"))
    assert "dY" not in layer.trace(x)
    with pytest.raises(ValueError, match=r"MultiHeadAttention\.trace: dy must have the shape of the output"):
        layer.trace(x, x[:2])


def test_a_step_asked_for_as_an_attribute_is_told_how():
    x = np.eye(3)
    t, forward = attngrad.trace(x, x, x, x), attngrad.trace(x, x, x)
    for name in ("dS", "ds", "DELTA"):
        step = {"ds": "dS", "DELTA": "delta"}.get(name, name)
        with pytest.raises(AttributeError, match=rf"no attribute '{name}'\. Use trace\[\"{step}\"\]\.$"):
            getattr(t, name)
    with pytest.raises(
        AttributeError, match=r"no attribute 'dS'\. trace: dS is not in this trace\. Give dout to trace"
    ):
        _ = forward.dS
    with pytest.raises(AttributeError, match=r"no attribute 'sumary'$") as caught:
        _ = t.sumary
    assert caught.value.name == "sumary"  # from which Python suggests summary
    layer = attngrad.MultiHeadAttention(4, 2)
    with pytest.raises(AttributeError, match=r"Use trace\[\"dW_q\"\]"):
        _ = layer.trace(np.ones((3, 4), np.float32), np.ones((3, 4), np.float32)).dW_q


def test_a_trace_is_copied_and_pickled_and_lists_its_own_attributes():
    x = np.eye(3)
    t = attngrad.trace(x, x, x, x)
    assert not hasattr(t, "dS")
    assert "dS" not in dir(t)
    for other in (copy.copy(t), copy.deepcopy(t), pickle.loads(pickle.dumps(t))):  # noqa: S301
        assert [*other] == [*t]
        assert np.array_equal(other["dS"], t["dS"])
    with pytest.raises(AttributeError, match="no attribute '_steps'"):
        _ = attngrad.Trace.__new__(attngrad.Trace).dS  # not made yet: no endless recursion
