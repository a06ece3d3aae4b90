"""How the auditor stands candidates: what they do not support, how they misbehave, layers written as objects."""

import sys
import warnings

import numpy as np
import pytest
import torch

import attngrad
from attngrad.auditor import audit
from planted import right

# --- what is not supported -------------------------------------------------------------------------------------------


def plain_only(q, k, v, dout):
    if q.shape[1] != k.shape[1]:
        raise ValueError("heads must agree")
    if q.shape[2] != k.shape[2] or q.shape[3] != v.shape[3]:
        raise ValueError("square only")
    return right(q, k, v, dout)


def test_what_is_not_supported_is_a_note():
    report = audit(plain_only)
    assert report.ok, report
    assert {f.name for f in report.findings} == {"gqa", "cross", "widths"}
    assert not any(f.fault for f in report.findings)
    assert "does not support" in str(report)


def test_what_is_claimed_and_not_supported_is_a_fault():
    report = audit(plain_only, supports=("gqa",), effort="quick")
    assert not report.ok
    assert report.exit_code == 2
    assert "claims to support gqa" in str(report)


def test_shapes_that_broadcasting_lets_through_are_no_fault_where_groups_are_not_supported():
    def candidate(q, k, v, dout):
        t = lambda x: np.swapaxes(x, -1, -2)  # noqa: E731
        z = q @ t(k) / np.sqrt(q.shape[-1])
        e = np.exp(z - z.max(-1, keepdims=True))
        a = e / e.sum(-1, keepdims=True)
        da = dout @ t(v)
        ds = a * (da - np.sum(a * da, -1, keepdims=True)) / np.sqrt(q.shape[-1])
        return a @ v, ds @ k, t(ds) @ q, t(a) @ dout

    report = audit(candidate)
    assert report.ok, report
    assert [f.name for f in report.findings] == ["gqa"]


# --- candidates that misbehave ---------------------------------------------------------------------------------------


def crashes(q, k, v, dout):
    return undefined_name  # noqa: F821


def exits(q, k, v, dout):
    raise SystemExit(3)


def loops(q, k, v, dout):
    while True:
        pass


def nothing(q, k, v, dout):
    return None


def none_inside(q, k, v, dout):
    return {"dq": None, "dv": right(q, k, v, dout)[3]}


def wrong_shape(q, k, v, dout):
    out, dq, dk, dv = right(q, k, v, dout)
    return out, dq[..., 0], dk, dv


def not_numbers(q, k, v, dout):
    return "out", "dq", "dk", "dv"


def nan(q, k, v, dout):
    out, dq, dk, dv = right(q, k, v, dout)
    dq[0, 0, 0, 0] = np.nan
    return out, dq, dk, dv


def mutates(q, k, v, dout):
    results = right(q, k, v, dout)
    k += 1
    return results


def five(q, k, v, dout):
    return (q,) * 5


def generates(q, k, v, dout):
    yield from right(q, k, v, dout)


def masked(q, k, v, dout):
    results = [np.ma.masked_array(x) for x in right(q, k, v, dout)]
    results[1][0, 0, 0, 0] = np.ma.masked
    return results


def void(q, k, v, dout):
    return np.zeros(q.shape, "V8")


def recurses(q, k, v, dout):
    return recurses(q, k, v, dout)


def interrupts(q, k, v, dout):
    raise KeyboardInterrupt


class Mute(Exception):  # noqa: N818
    def __str__(self):
        raise ValueError


def mute(q, k, v, dout):
    raise Mute


class NoArray:
    def __array__(self, *args, **kwargs):
        raise RuntimeError("no array for you")

    @property
    def detach(self):
        raise ZeroDivisionError


def no_array(q, k, v, dout):
    return NoArray(), *right(q, k, v, dout)[1:]


class Lazy(NoArray):
    detach = property(lambda self: loops(0, 0, 0, 0))


def lazy(q, k, v, dout):
    return Lazy()


class BadMapping(dict):
    def items(self):
        raise OSError("no items")


def bad_mapping(q, k, v, dout):
    return BadMapping(out=q)


@pytest.mark.parametrize(
    ("candidate", "kind", "code", "words"),
    [
        (crashes, "crash", 2, "NameError: name 'undefined_name'"),
        (exits, "exit", 2, "sys.exit"),
        (loops, "timeout", 2, "did not return within 0.3 s"),
        (nothing, "strange", 2, "returned None"),
        (none_inside, "strange", 1, "dq is None"),
        (wrong_shape, "wrong", 1, "should be (1, 1, 1, 3)"),
        (not_numbers, "strange", 2, "no array of real numbers"),
        (nan, "wrong", 1, "nan at [0, 0, 0, 0]"),
        (mutates, "mutates", 1, "changes its input k in place"),
        (five, "strange", 2, "returned 5 arrays"),
        (generates, "strange", 2, "out is no array of real numbers (generator"),
        (masked, "strange", 1, "dq is a masked array"),
        (void, "strange", 2, "no array of real numbers"),
        (recurses, "crash", 2, "RecursionError"),
        (interrupts, "crash", 2, "KeyboardInterrupt"),
        (mute, "crash", 2, "Mute, whose message cannot be printed"),
        (no_array, "strange", 1, "out cannot be read as an array (ZeroDivisionError)"),
        (lazy, "timeout", 2, "did not return within 0.3 s"),
        (bad_mapping, "crash", 2, "OSError: no items"),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_a_candidate_that_misbehaves_is_a_clear_finding(candidate, kind, code, words):
    report = audit(candidate, effort="quick", time_limit=0.3 if candidate in (loops, lazy) else 10.0)
    assert not report.ok
    assert report.exit_code == code
    assert kind in {f.kind for f in report.findings if f.fault}
    assert words in str(report), report


class Subclass(np.ndarray):
    pass


@pytest.mark.parametrize(
    "kind",
    [
        lambda x: x.tolist(),
        lambda x: x.view(Subclass),
        np.ma.masked_array,
        torch.from_numpy,
        lambda x: torch.from_numpy(x).requires_grad_(),
        np.asfortranarray,
        lambda x: x.astype(np.longdouble),
    ],
    ids=[
        "list",
        "subclass",
        "masked array, nothing masked",
        "tensor",
        "tensor with a gradient",
        "Fortran",
        "longdouble",
    ],
)
@pytest.mark.parametrize("outer", [tuple, list])
def test_whatever_holds_numbers_is_read(kind, outer):
    report = audit(lambda q, k, v, dout: outer(kind(x) for x in right(q, k, v, dout)), effort="quick")
    assert report.ok, report
    assert [s.name for s in report.stages] == ["out", "dq", "dk", "dv"]


def test_what_a_candidate_sets_for_the_whole_process_is_set_back():
    def candidate(q, k, v, dout):
        results = right(q, k, v, dout)
        sys.setrecursionlimit(120)
        warnings.simplefilter("ignore")
        np.seterr(all="raise")
        return results

    before = sys.getrecursionlimit(), list(warnings.filters), np.geterr()
    assert audit(candidate, effort="quick").ok
    assert (sys.getrecursionlimit(), list(warnings.filters), np.geterr()) == before


def test_ids_that_a_candidate_overwrites_are_its_own_and_told():
    def overwrites(q, k, v, dout, segments):
        segments[0][...] = segments[1][...] = 0
        return right(q, k, v, dout)

    report = audit(overwrites, options={"segments": True}, effort="quick")
    assert report.status == "wrong"
    assert any(f.kind == "mutates" and "segments[0]" in f.text for f in report.findings)


def test_a_crash_with_two_features_together_excuses_neither_alone():
    def unsummed(q, k, v, dout):
        if q.shape[1] != k.shape[1] and q.shape[2] != k.shape[2]:
            raise NotImplementedError("groups and T != S")
        group = q.shape[1] // k.shape[1]
        return right(q, np.repeat(k, group, 1), np.repeat(v, group, 1), dout)

    report = audit(unsummed, effort="default")
    assert report.status == "wrong"
    assert {s.name for s in report.stages if not s.ok} == {"dk", "dv"}


@pytest.mark.thorough
def test_an_error_beyond_a_tile_of_128_is_seen_by_default():
    def truncated(q, k, v, dout):
        out, dq, dk, dv = right(q, k, v, dout)
        if min(q.shape[2], k.shape[2]) > 128:
            dk[..., 128:, :] = 0
        return out, dq, dk, dv

    assert audit(truncated, effort="default").status == "wrong"


def key_by_key(q, k, v, dout):
    """lse as a running sum: less accurate than at once, and right."""
    group, scale = q.shape[1] // k.shape[1], q.dtype.type(1 / np.sqrt(q.shape[-1]))
    keys, values = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scores = q @ keys.swapaxes(-1, -2) * scale
    lse = np.full(q.shape[:-1], -np.inf, q.dtype)
    for j in range(k.shape[2]):
        lse = np.logaddexp(lse, scores[..., j])
    weights = np.exp(scores - lse[..., None])
    out = weights @ values
    ds = weights * (dout @ values.swapaxes(-1, -2) - np.sum(dout * out, -1, keepdims=True)) * scale
    dk, dv = (
        x.reshape(*k.shape[:2], group, *x.shape[2:]).sum(2)
        for x in (ds.swapaxes(-1, -2) @ q, weights.swapaxes(-1, -2) @ dout)
    )
    return out, ds @ keys, dk, dv


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_running_log_sum_exp_is_right(dtype):
    for seed in range(8):
        report = audit(key_by_key, dtype=dtype, seed=seed, effort="quick")
        assert report.ok, report


def test_noise_far_below_a_lower_precision_is_not_named_one():
    def noisy(q, k, v, dout):
        out, dq, dk, dv = right(q, k, v, dout)
        return out, dq, dk * (1 + 1e-12 * np.random.default_rng(0).standard_normal(dk.shape)), dv

    report = audit(noisy, effort="quick")
    assert report.status == "wrong"
    assert report.mistakes == (), report


def test_an_option_that_it_cannot_be_told_is_noted():
    report = audit(lambda q, k, v, dout: attngrad.vjp(q, k, v, causal=True)[1](dout), options={"causal": True},
                   effort="quick")  # fmt: skip
    assert report.ok
    assert any(f.kind == "option" and "no parameter causal" in f.text and not f.fault for f in report.findings)


def test_an_endless_recursion_and_a_list_in_itself_are_told_in_time():
    def deep(q, k, v, dout):
        return deep(q, k, v, dout)

    def ring(q, k, v, dout):
        found = []
        found.append(found)
        return found

    report = audit(deep, effort="quick")
    assert "RecursionError" in str(report)
    assert len(report.traceback.splitlines()) < 500
    assert audit(ring, effort="quick").status == "not audited"


def test_a_class_that_exits_when_it_is_made_is_told():
    class Exits:
        def __init__(self, *sizes):
            sys.exit(3)

        def forward(self, query, key, value):
            return query

        def backward(self, dout, query, key, value, learning_rate):
            return query

    assert audit(Exits, level="layer", effort="quick").status == "not audited"


def test_a_traceback_is_the_candidates_own():
    report = audit(crashes, effort="quick")
    assert "undefined_name" in report.traceback
    assert "attngrad/auditor" not in report.traceback.replace("\\", "/")


def test_printing_is_caught_and_noted(capsys):
    def candidate(q, k, v, dout):
        print("hello")
        return right(q, k, v, dout)

    report = audit(candidate, effort="quick")
    assert capsys.readouterr().out == ""
    assert report.ok
    assert [f.kind for f in report.findings] == ["printed"]


def test_an_unknown_result_is_noted():
    report = audit(lambda q, k, v, dout: {"dv": right(q, k, v, dout)[3], "attn": q}, effort="quick")
    assert report.ok
    assert "'attn'" in report.findings[0].text


@pytest.mark.parametrize(
    ("error", "words", "keywords"),
    [
        (TypeError, "candidate must be callable; got 3", {"candidate": 3}),
        (ValueError, "level must be", {"level": "head"}),
        (ValueError, "effort must be one of quick", {"effort": "huge"}),
        (ValueError, "supports must have only gqa", {"supports": ("everything",)}),
        (ValueError, "dtype must be float64", {"dtype": np.int32}),
        (ValueError, "options must have only the names scale", {"options": {"is_causal": True}}),
        (TypeError, "options must be a mapping", {"options": True}),
        (ValueError, "seed must be", {"seed": -1}),
    ],
)
def test_wrong_arguments_are_told(error, words, keywords):
    with pytest.raises(error, match=words):
        audit(**{"candidate": right, **keywords})


def test_a_candidate_that_cannot_be_called_is_told():
    report = audit(lambda a, b: a, effort="quick")
    assert report.exit_code == 2
    assert "must take (q, k, v, dout)" in str(report)


# --- layers as objects -----------------------------------------------------------------------------------------------


class Tutorial:
    """In the style of many tutorials, with three mistakes, and a fourth that stops it."""

    def __init__(self, d_model, num_heads):
        self.d_model, self.num_heads, self.depth = d_model, num_heads, d_model // num_heads
        self.WQ, self.WK, self.WV = np.random.default_rng(0).standard_normal((3, d_model, d_model))
        self.dWQ = self.dWK = self.dWV = self.A = None

    def _heads(self, x):
        return x.reshape(len(x), -1, self.num_heads, self.depth).transpose(0, 2, 1, 3)

    def _flat(self, x):
        return x.transpose(0, 2, 1, 3).reshape(len(x), -1, self.d_model)

    def forward(self, query, key, value):
        self.Q, self.K, self.V = (self._heads(x @ w) for x, w in ((query, self.WQ), (key, self.WK), (value, self.WV)))
        s = self.Q @ self.K.transpose(0, 1, 3, 2) / np.sqrt(self.depth)
        e = np.exp(s - s.max(axis=-1, keepdims=True))
        self.A = e / e.sum(axis=-1, keepdims=True)
        return self._flat(self.A @ self.V)

    def weight_gradient(self, x, dx):
        return np.dot(x.T, dx)

    def backward(self, dO, query, key, value, learning_rate):
        dout = self._heads(dO)
        dv = self._flat(self.A.transpose(0, 1, 2, 3) @ dout)
        ds = (dout @ self.V.transpose(0, 1, 3, 2)) * self.A
        ds = ds - np.mean(ds, axis=-1, keepdims=True)
        dq = self._flat(ds @ self.K / np.sqrt(self.depth))
        dk = self._flat(ds.transpose(0, 1, 3, 2) @ self.Q / np.sqrt(self.depth))
        self.dWQ, self.dWK, self.dWV = (self.weight_gradient(*p) for p in ((query, dq), (key, dk), (value, dv)))
        self.WQ -= learning_rate * self.dWQ
        self.WK -= learning_rate * self.dWK
        self.WV -= learning_rate * self.dWV
        return dq @ self.WQ.T, dk @ self.WK.T, dv @ self.WV.T


class Mended(Tutorial):
    """The one mistake mended that stops it."""

    def weight_gradient(self, x, dx):
        return np.einsum("bti,btj->ij", x, dx)


class Misspelt(Tutorial):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.dWQ = np.zeros_like(self.Wq)


def test_a_class_with_forward_and_backward_is_audited():
    report = audit(Mended, level="layer")
    assert set(report.mistakes) == {"mean-for-row-sum", "dv-not-transposed", "weights-updated-first"}, report
    assert [s.name for s in report.stages if s.ok] == ["q", "k", "v", "weights", "y"]


def test_the_smallest_case_of_a_class_is_small_and_runs():
    report = audit(Mended, level="layer", effort="quick")
    names = {"Mended": Mended}
    exec(report.smallest, names)  # noqa: S102
    assert names["query"].size <= 4, report.smallest
    assert names["w_q"].shape[0] == names["query"].shape[-1]
    assert f"{report.first} should be" in report.smallest
    assert len(names["back"]) == 3


def test_an_object_is_audited_at_its_own_sizes():
    report = audit(Mended(12, 3), level="layer", effort="quick")
    assert {"mean-for-row-sum", "dv-not-transposed"} <= set(report.mistakes), report
    names = {"candidate": Mended(12, 3)}
    exec(report.smallest, names)  # noqa: S102
    assert names["query"].shape[-1] == 12


def test_a_class_that_crashes_is_told_where_and_what_ran_is_audited():
    report = audit(Tutorial, level="layer", effort="quick")
    assert report.exit_code == 2
    assert "np.dot(x.T, dx)" in report.traceback
    assert [s.name for s in report.stages] == ["q", "k", "v", "weights", "y"]
    assert all(s.ok for s in report.stages)
    report = audit(Misspelt, level="layer", effort="quick")
    assert report.exit_code == 2
    assert "'Misspelt' object has no attribute 'Wq'" in report.verdict
