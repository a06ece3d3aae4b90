"""The report of the benchmark: terminal, page, plots."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from bench_tools import results_of, spoil, timing_of
from benchmarks import grid, report
from benchmarks.markdown import page
from benchmarks.passes import PASSES
from benchmarks.peers import OURS
from benchmarks.results import Results


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
    for wanted in (
        "VERIFICATION FAILED",
        "Losses: ",
        "fwd+bwd~",
        "missed",
        "n^1.00",
        "n^2.00",
        "bench: a remark.",
        "Start: `attngrad",
    ):
        assert wanted in text
    for group in grid.TITLES.values():
        assert group.split(",")[0].split(":")[0] in text
    for row in results.rows:
        assert row.case.label in text


def test_the_report_of_nothing_says_so():
    text = rendered(results_of(rows=[], memory=[], bandwidth=0.0), 80)
    assert "Nothing was timed." in text
    assert "FMA rate beside the rows, at most: not measured. Reading memory: never on a quiet machine." in " ".join(
        text.split()
    )


def test_the_report_and_the_page_say_who_was_left_out_and_why():
    reason = "dq is off by 8.0e-03 of the largest entry; float16 may be off by 6e-03. Not timed."
    results = spoil(results_of(), notes={"jax": reason})
    line = f"32,4,10,32 fwd: without jax, {reason}"
    assert line in " ".join(rendered(results, 80).split())
    assert f"- {line}\n" in page(results)
    others = len(results.rows) - 1
    assert f"- {others} rows, the first 32,4,10,32 fwd+bwd: without numpy, too large\n" in page(results)
    assert "Left out" not in page(results_of(rows=[]))


def test_our_own_passes_stand_beside_and_are_no_losses():
    text = page(results_of())
    assert "| case | pass | ms | GF | of peak | torch | jax | own |" in text
    assert "| 1,8,1024,64 | jvp q | " in text
    assert "**" not in text
    (line,) = [line for line in text.splitlines() if line.startswith("| 1,8,1024,64 causal | jvp | ")]
    assert line.endswith("| 5.00 | 10.00 | 0.33 |")


def test_each_work_has_a_table_of_its_memory_with_dashes_for_what_is_not_measured():
    text = page(results_of())
    assert "float32, fwd+bwd\n" in text
    assert "float32, hvp\n" in text
    assert "\n| 32768 | 50.3 | 6.00 | 1.07 | - | - | - |\n" in text
    assert "- torch, hvp, grows: memory as n^1.00, time as n^2.00\n" in text


def test_there_is_no_table_of_means_where_every_row_is_disturbed():
    results = results_of()
    results.rows = [replace(row, others=1.0) for row in results.rows]
    assert "Geometric means" not in rendered(results, 80)
    assert "Geometric means" not in page(results)
    assert "Geometric means" in rendered(results_of(), 80)
    assert "Geometric means" in page(results_of())


def test_the_page_has_the_start_of_the_command():
    text = page(results_of())
    assert "\n## Start of the command\n\nStart: `attngrad --help` 60 ms, `python -c pass` 10 ms.\n" in text
    assert "| start of the command | <= 150 | 60.0 | holds | attngrad --help |" in text
    assert "## Start of" not in page(results_of(startup=None))


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
    from benchmarks.plots import draw

    results = results_of(1.5)
    results.rows[3] = replace(results.rows[3], others=1.0)
    drawn = draw(results, tmp_path)
    assert [path.name for path in drawn] == ["throughput.png", "ratios.png", "growth.png"]
    assert set(drawn) == set(tmp_path.iterdir())
    assert all(path.stat().st_size > 10_000 for path in drawn)
    assert draw(results_of(rows=[], memory=[]), tmp_path) == []


def test_no_two_bars_of_a_plot_stand_in_one_place_whether_run_or_loaded():
    from benchmarks.plots import _below, _places

    results = results_of()
    for found in (results, Results.from_json(json.loads(json.dumps(results.to_json())))):
        rows = [row for row in found.rows if PASSES[row.name].whole is None]
        places = _places(rows)
        at = [places[row.case.group, row.case.label] + 0.42 * _below(rows, row) for row in rows]
        assert len(set(at)) == len(at)


def test_the_line_of_a_plot_has_one_point_a_length_the_largest():
    from benchmarks.plots import _largest

    rows = [row for row in results_of().rows if row.name == "hvp" and row.case.label in ("1,1,10,32", "32,4,10,32")]
    assert [row.case.label for row in _largest(rows[::-1])] == ["32,4,10,32"]
