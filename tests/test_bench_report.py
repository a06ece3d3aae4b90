"""The report of the benchmark: terminal, page, plots."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from attngrad.bench import grid, report
from attngrad.bench.markdown import page
from attngrad.bench.peers import OURS
from bench_tools import results_of, spoil, timing_of


def rendered(results, width):
    stream = io.StringIO()
    report.render(results, Console(file=stream, width=width, force_terminal=False))
    return stream.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_the_report_fits_the_terminal(width):
    results = spoil(results_of(0.5), failure="torch, a case: dq is off by 1e+00 of the largest entry.", times={})
    results.rows[1] = replace(results.rows[1], others=1.0)
    text = rendered(results, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for wanted in ("VERIFICATION FAILED", "Losses: ", "fwd+bwd~", "missed", "n^1.00", "n^2.00", "bench: a remark."):
        assert wanted in text
    for group in grid.TITLES.values():
        assert group.split(",")[0].split(":")[0] in text
    for row in results.rows:
        assert row.case.label in text


def test_the_report_of_nothing_says_so():
    text = rendered(results_of(rows=[], memory=[], peak={}, bandwidth=0.0), 80)
    assert "Nothing was timed." in text
    assert "never on a quiet machine" in text


def test_losses_name_every_peer_that_is_faster():
    results = spoil(results_of(), times={OURS: timing_of(1.0), "torch": timing_of(0.5), "jax": timing_of(0.9)})
    assert [peer for _, peer in results.losses()] == ["torch", "jax"]
    assert "32,4,10,32 fwd: torch is faster, ratio 0.50" in rendered(results, 80)
    assert "No peer was faster in any row." in rendered(results_of(), 80)


def test_the_markdown_page_has_every_row_and_its_losses():
    text = page(results_of(0.5), ["plots/ratios.png"])
    assert text.count("\n| ") >= len(grid.select(grid.DEFAULT))
    assert "**0.50**" in text
    assert "![ratios](plots/ratios.png)" in text


def test_the_plots_are_drawn_of_whatever_there_is(tmp_path):
    pytest.importorskip("matplotlib")
    from attngrad.bench.plots import draw

    results = results_of(1.5)
    results.rows[3] = replace(results.rows[3], others=1.0)
    assert [path.name for path in draw(results, tmp_path)] == ["throughput.png", "ratios.png", "growth.png"]
    assert all(path.stat().st_size > 10_000 for path in tmp_path.iterdir())
    assert draw(results_of(rows=[], memory=[]), tmp_path) == []
