"""The command ``python -m benchmarks``. Nothing but click is imported before it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from attngrad.core.command import CannotRun

if TYPE_CHECKING:
    from benchmarks.results import Results
    from benchmarks.runner import Settings

PEERS = "torch,jax,numpy"
DTYPES = ("float32", "float64", "bfloat16", "float16")


@click.command(name="bench")
@click.option("--quick", "level", flag_value=0, type=int, help="A selection, in two or three minutes.")
@click.option("--full", "level", flag_value=2, type=int, help="More shapes, and more samples of each.")
@click.option(
    "--only", multiple=True, metavar="PATTERN", help='Rows whose "group case pass" has this text, or matches *.'
)
@click.option("--dtype", "dtypes", multiple=True, type=click.Choice(DTYPES), help="Only rows of this dtype.")
@click.option("--threads", type=click.IntRange(1, 4096), help="Threads of every contender. [default: all processors]")
@click.option("--peers", default=PEERS, show_default=True, help="Whom to compare with.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, writable=True), help="Write the results here.")
@click.option("--plots", type=click.Path(file_okay=False), metavar="DIR", help="Draw PNG plots into this folder.")
@click.option("--markdown", type=click.Path(dir_okay=False, writable=True), help="Write the report as a Markdown page.")
@click.option("--load", type=click.Path(exists=True, dir_okay=False), help="Report on results of --json; run nothing.")
@click.option("--list", "list_rows", is_flag=True, help="List the rows that would run.")
@click.option("--check", is_flag=True, help="Exit with 1, and say which, where a bound that must hold is missed.")
def command(
    level: int | None,
    only: tuple[str, ...],
    dtypes: tuple[str, ...],
    threads: int | None,
    peers: str,
    json_file: str | None,
    plots: str | None,
    markdown: str | None,
    load: str | None,
    list_rows: bool,
    check: bool,
) -> None:
    """Time attngrad beside torch, jax and NumPy, in one process, call by call.

    Every row is verified against the reference first. The whole takes about a quarter of an hour on two cores; leave
    the machine alone meanwhile. Units and FLOP formulas: benchmarks/README.md.
    """
    names = tuple(name.strip() for name in peers.split(",") if name.strip())
    unknown = set(names) - set(PEERS.split(","))
    if unknown:
        raise click.BadParameter(f"must be of {PEERS}; got {', '.join(sorted(unknown))}.", param_hint="--peers")
    _set_environment(threads)
    if plots is not None:
        _require_matplotlib()

    import attngrad
    from benchmarks.runner import Settings
    from benchmarks.startup import NAME

    settings = Settings(1 if level is None else level, threads or attngrad.get_num_threads(), names, only, dtypes)
    if list_rows:
        for case, passes in settings.cases():
            for name in passes:
                click.echo(f"{case.group} {case.label} {name}")
        if settings.startup():
            click.echo(NAME)
        return
    if load is None and not (settings.cases() or settings.usages() or settings.startup()):
        raise CannotRun("bench: no row matches; `python -m benchmarks --full --list` lists them all.")
    results = _run(settings) if load is None else _load(load)
    _report(results, json_file, plots, markdown, check)


def _set_environment(threads: int | None) -> None:
    """What NumPy's BLAS and XLA (NPROC) read when they start: threads, and how long idle ones spin (2^20 cycles)."""
    import os

    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "20")
    if threads is not None:
        os.environ |= dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NPROC"), str(threads))


def _require_matplotlib() -> None:
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise CannotRun("bench: --plots needs matplotlib: make .venv/.group-bench.")


def _run(settings: Settings) -> Results:
    """Run with a progress bar on a terminal, with lines in a log; both say what is done now, and how long still."""
    import time

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    from benchmarks import runner

    console = Console(stderr=True)
    total, done, start = runner.steps(settings), 0, time.monotonic()

    def told(text: str, step: int) -> str:
        nonlocal done
        done += step
        return f"[{done}/{total}{remaining(done, total, time.monotonic() - start)}] {text}"

    if not console.is_terminal:
        return runner.run(settings, lambda text, step: click.echo(told(text, step), err=True))
    columns = (BarColumn(20), TextColumn("{task.description}", markup=False))
    # No automatic refresh: its thread would run while the clock does.
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task("", total=total)

        def show(text: str, step: int) -> None:
            progress.update(task, description=told(text, step), advance=step, refresh=True)

        return runner.run(settings, show)


def remaining(done: int, total: int, seconds: float) -> str:
    """How long still, in words, at the pace so far; empty before the first row and after the last.

    >>> remaining(1, 4, 20.0), remaining(10, 30, 300.0), remaining(0, 4, 20.0)
    (', about 60 s left', ', about 10 min left', '')
    """
    if not 0 < done < total:
        return ""
    left = seconds / done * (total - done)
    return f", about {left:.0f} s left" if left < 100 else f", about {left / 60:.0f} min left"


def _load(path: str) -> Results:
    import io
    import json
    from pathlib import Path

    from rich.console import Console

    from benchmarks import report
    from benchmarks.results import Results

    try:
        results = Results.from_json(json.loads(Path(path).read_text()))
        report.render(results, Console(file=io.StringIO()))  # whatever is wrong in it shows before anything is printed
        results.to_json()
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        told = f"bench: --load must name results written by --json; {path}: {type(error).__name__}: {error}"
        raise CannotRun(told) from error
    return results


def _report(results: Results, json_file: str | None, plots: str | None, markdown: str | None, check: bool) -> None:
    import json
    import os
    from pathlib import Path

    from rich.console import Console

    from attngrad.core import files
    from benchmarks import report
    from benchmarks.bounds import judge

    report.render(results, Console())
    if json_file is not None:
        text = json.dumps(results.to_json(), indent=1, allow_nan=False) + "\n"
        files.replace(json_file, text.encode())
    images: list[Path] = []
    if plots is not None:
        from benchmarks.plots import draw

        images = draw(results, Path(plots))
        click.echo(f"wrote {', '.join(map(str, images))}", err=True)
    if markdown is not None:
        from benchmarks.markdown import page

        text = page(results, [os.path.relpath(image, Path(markdown).parent) for image in images])
        files.replace(markdown, text.encode())
    missed = [v for v in judge(results) if v.holds is False]
    for verdict in missed if check else ():
        click.echo(f"missed: {verdict.sentence}", err=True)
    if check and results.disturbed:
        click.echo(f"not judged: {report.disturbance(results)}", err=True)
    if check and results.startup is not None and results.startup.disturbed:
        click.echo(f"not judged: {results.startup.sentence} Run again when it is quiet.", err=True)
    if any(row.failure for row in results.rows) or (check and (missed or results.unjudged)):
        raise SystemExit(1)
