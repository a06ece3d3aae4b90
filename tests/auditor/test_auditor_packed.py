"""Sequences end to end, with cu_seqlens: what is wrong with causal and window within each of them is named."""

import numpy as np
import pytest

from attngrad.auditor import audit
from tiers import first


def seen_by(t, s, left=None, shift=0, corner=None):
    """Which keys the queries of one sequence see."""
    ahead = np.arange(s)[None, :] - np.arange(t)[:, None] - ((s - t) if corner is None else corner(t, s))
    return (ahead <= shift) & (ahead >= (-np.inf if left is None else -left))


def attend(q, k, v, dout, seen, seen_back):
    """One sequence, (T, H, D); the backward computes the weights again, from the log-sum-exp."""
    q, k, v, dout = (x.swapaxes(0, 1) for x in (q, k, v, dout))
    scale = 1 / np.sqrt(q.shape[-1])
    z = q @ k.swapaxes(-1, -2) * scale
    top = np.max(z, axis=-1, keepdims=True, where=seen, initial=-1e300)
    total = np.sum(np.exp(z - top, where=seen, out=np.zeros_like(z)), axis=-1, keepdims=True)
    lse = np.where(total > 0, top + np.log(np.where(total > 0, total, 1.0)), 0.0)
    with np.errstate(over="ignore"):  # of what is hidden
        e = np.exp(z - lse)
    out = np.where(seen, e, 0.0) @ v
    a = np.where(seen_back, e, 0.0)
    ds = a * (dout @ v.swapaxes(-1, -2) - np.sum(dout * out, axis=-1, keepdims=True))
    found = out, ds @ k * scale, ds.swapaxes(-1, -2) @ q * scale, a.swapaxes(-1, -2) @ dout
    return [x.swapaxes(0, 1) for x in found]


def packed(forward, backward=None):
    """A candidate in whose passes the queries of a sequence see what these say."""

    def candidate(q, k, v, dout, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window=None):
        results = [np.zeros_like(x) for x in (q, q, k, v)]
        for i in range(len(cu_seqlens_q) - 1):
            rows, keys = slice(*cu_seqlens_q[i : i + 2]), slice(*cu_seqlens_k[i : i + 2])
            t, s = rows.stop - rows.start, keys.stop - keys.start
            seen = forward(t, s)
            one = attend(q[rows], k[keys], v[keys], dout[rows], seen, backward(t, s) if backward else seen)
            for whole, part, place in zip(results, one, (rows, rows, keys, keys), strict=True):
                whole[place] = part
        return results

    return candidate


WRONG = {
    "one key too many": ("causal-off-by-one", packed(lambda t, s: seen_by(t, s, shift=1))),
    "one key too few": ("causal-off-by-one", packed(lambda t, s: seen_by(t, s, shift=-1))),
    "ignored in the backward": ("mask-ignored-in-backward", packed(seen_by, lambda t, s: np.ones((t, s), bool))),
    "one too many in the backward": ("causal-off-by-one", packed(seen_by, lambda t, s: seen_by(t, s, shift=1))),
    "sign of the offset": ("causal-offset-sign", packed(lambda t, s: seen_by(t, s, corner=lambda t, s: t - s))),
    "another corner in the backward": (
        "causal-alignment", packed(seen_by, lambda t, s: seen_by(t, s, corner=lambda t, s: 0))
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", first(2, list(WRONG)))
def test_a_causal_mistake_within_sequences_end_to_end_is_named(wrong):
    expected, candidate = WRONG[wrong]
    report = audit(candidate, options={"causal": True}, layout="packed", effort="quick")
    assert report.mistakes == (expected,), report


def test_a_window_that_is_off_by_one_within_sequences_is_named():
    candidate = packed(lambda t, s: seen_by(t, s, left=3))
    report = audit(candidate, options={"causal": True, "window": (2, None)}, layout="packed", effort="quick")
    assert report.mistakes == ("window-off-by-one",), report


@pytest.mark.parametrize("options", [{"causal": True}, {"causal": True, "window": (2, None)}], ids=str)
def test_causal_sequences_end_to_end_are_right(options):
    left = options.get("window", (None,))[0]
    report = audit(packed(lambda t, s: seen_by(t, s, left=left)), options=options, effort="quick")
    assert report.ok, report
    assert "convention" not in report.verdict


def test_causal_sequences_from_their_top_left_corner_are_right_by_convention():
    top_left = packed(lambda t, s: seen_by(t, s, corner=lambda t, s: 0))
    report = audit(top_left, options={"causal": True}, effort="quick")
    assert report.ok, report
    assert "top left corner" in report.verdict
