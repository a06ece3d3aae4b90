"""The mistakes that the page plants: each breaks what it should, by as much as NumPy says, and says what is right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import attngrad
from page_tools import example


def planted(t: attngrad.Trace) -> dict[str, dict[str, Any]]:
    """O, dQ, dK, dV with each mistake in them, in NumPy, as the documents have it; no options but scale."""
    q, k, v, dout, weights, da, ds = (t[n].value for n in ("Q", "K", "V", "dO", "A", "dA", "dS"))
    scale = t.options.scale

    def turned(x: Any) -> Any:
        return x.swapaxes(-1, -2)

    def with_ds(wrong: Any, factor: float = scale) -> dict[str, Any]:
        return {"dQ": factor * wrong @ k, "dK": factor * turned(wrong) @ q}

    first = weights[:, 0]
    jacobian = np.stack([np.diag(a) - np.outer(a, a) for a in first])
    scores = q @ turned(k)
    e = np.exp(scores - scores.max(-1, keepdims=True))
    a = e / e.sum(-1, keepdims=True)
    da_raw = dout @ turned(v)
    unscaled = a * (da_raw - (a * da_raw).sum(-1, keepdims=True))
    g = weights * da
    return {
        "mean": with_ds(g - g.mean(-1, keepdims=True)),
        "mix": with_ds(g - weights @ turned(da) @ weights),
        "columns": with_ds(weights * (da - g.sum(-2, keepdims=True))),
        "one-jacobian": with_ds(da @ jacobian),
        "skip-softmax": with_ds(da, 1.0),
        "forget-scale": with_ds(ds, 1.0),
        "transpose-dk": {"dK": scale * turned(q) @ ds},
        "unturned-dv": {"dV": weights @ dout},
        "unscaled-scores": {**with_ds(unscaled), "O": a @ v, "dV": turned(a) @ dout},
        "no-maximum": {},
    }


RED = {  # the rows of the mean's dS do sum to 0: only the adjoint and the differences tell
    "mix": {"rows of dS sum to 0"},
    "columns": {"rows of dS sum to 0"},
    "skip-softmax": {"rows of dS sum to 0"},
}


def test_each_mistake_breaks_what_it_should_and_by_how_much(opened):
    t = example()
    page = opened(t)
    ids = page.tab.locator("#mistakes button").evaluate_all("(b) => b.map((x) => x.dataset.id)")
    expected = planted(t)
    assert set(ids) == set(expected)
    for name in ids:
        page.tab.locator(f'#mistakes button[data-id="{name}"]').click()
        shown, damage = page.numbers(), {d["name"]: d["error"] for d in page.tab.evaluate("window.attngrad.damage()")}
        for step in ("O", "dQ", "dK", "dV"):
            right, wrong = t[step].value, expected[name].get(step, t[step].value)
            found = np.array(shown[step], float)
            np.testing.assert_allclose(found, wrong, rtol=1e-9, atol=1e-12, err_msg=f"{name} {step}")
            if wrong.shape != right.shape:
                assert damage[step] is None
                assert f"has shape {wrong.shape[1]} x {wrong.shape[2]}" in page.tab.locator("#damage").inner_text()
            else:
                error = np.abs(wrong - right).max() / np.abs(right).max()
                assert damage[step] == pytest.approx(error, rel=1e-6, abs=1e-12), (name, step)
                assert (page.tab.locator(f"#step-{step} td.wrong").count() > 0) == (
                    np.abs(wrong - right)[0].max() > 1e-8
                )
        broken = {claim for claim, holds in page.checks().items() if not holds}
        harmless = not expected[name]
        assert bool(broken) != harmless, name
        assert RED.get(name, set()) <= broken
        assert page.tab.locator("#checks li.broken").count() == len(broken)
        page.tab.locator(f'#mistakes button[data-id="{name}"]').click()
        assert page.tab.locator("#damage").is_hidden()
        assert page.tab.locator("td.wrong").count() == 0


def test_the_sum_of_a_wrong_number_says_what_is_right(opened):
    t = example()
    page = opened(t, "#break=forget-scale")
    page.cell("dK", 2, 1).hover()
    text = page.tab.locator("#sum").inner_text().replace("\u2212", "-")
    assert f"Planted: {t['dK'][0, 2, 1] / t.options.scale:.6f}. Right is {t['dK'][0, 2, 1]:.6f}:" in text


def test_exp_without_the_maximum_overflows_where_scores_are_large(opened):
    page = opened(example(), "#break=no-maximum")
    page.cell("Q", 0, 0).dblclick()
    page.tab.locator("td input").fill("9999")
    page.tab.keyboard.press("Enter")
    assert "nan" in str(page.numbers()["A"]).lower()
    assert np.isfinite(np.array(page.numbers("right")["A"], float)).all()
    assert "not a number" in page.tab.locator("#damage").inner_text()
