"""The command ``attngrad explain``. Nothing but click is imported before it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from attngrad.core.command import CannotRun

if TYPE_CHECKING:
    from attngrad.explain.trace import Trace

FORMATS = ("terminal", "html", "latex", "json")


def _numbers(_: click.Context, __: click.Parameter, value: str | None) -> list[list[float]] | None:
    """Numbers between commas, rows between slashes: 0,-1,-2 or 1,1,0/1,1,1."""
    if value is None:
        return None
    try:
        rows = [[float(a) for a in row.split(",")] for row in value.split("/")]
    except ValueError:
        raise click.BadParameter(f"must be numbers, with rows between slashes: 1,1,0/1,1,1; got {value!r}.") from None
    if len({len(row) for row in rows}) != 1:
        raise click.BadParameter(f"must have rows of one length; got {value!r}.")
    return rows


def _sizes(_: click.Context, __: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Positive integers between commas or x: 2,4,3 or 2x4x3."""
    if value is None:
        return None
    parts = [_count(part) for part in value.replace("x", ",").split(",")]
    if not all(parts) or not 2 <= len(parts) <= 4:
        raise click.BadParameter(f"must be T,D or H,T,D or B,H,T,D, all positive, like 2,4,3; got {value!r}.")
    return tuple(n for n in parts if n is not None)


def _count(text: str) -> int | None:
    """A number of at most 18 digits; None where it is none."""
    digits = text.strip()
    return int(digits) if digits.isdecimal() and len(digits) <= 18 else None


def _sides(_: click.Context, __: click.Parameter, value: str | None) -> tuple[int | None, int | None] | None:
    """The two sides of a window: 2,0 or 2,none."""
    if value is None:
        return None
    parts = [part.strip().lower() for part in value.split(",")]
    if len(parts) != 2 or not all(part == "none" or _count(part) is not None for part in parts):
        raise click.BadParameter(f"must be two sides, each >= 0 or none, like 2,0 or 2,none; got {value!r}.")
    left, right = (None if part == "none" else _count(part) for part in parts)
    return left, right


_NPZ = """Arrays q, k, v; and, where there, dout, dlse, mask, bias, sinks, offset, q_segments, k_segments, scale,
softcap, q_dot, k_dot, v_dot, bias_dot, sinks_dot, dout_dot, dlse_dot."""
_SEED = click.IntRange(0, 2**64 - 1)
_PLACE = click.IntRange(0)


_WORDS = {
    "scale": ("X", "In place of 1/sqrt(D)."),
    "causal": (None, "No query sees a later key. [default: yes; no with --input]"),
    "window": ("LEFT,RIGHT", "Keys that a query sees to either side."),
    "offset": ("N", "The position of query 0 among the keys. [default: S - T]"),
    "mask": ("1,0/1,1", "1 may attend, 0 may not: one row for all, or T rows."),
    "bias": ("X,X/X,X", "Added to the scores: one row for all, or T rows."),
    "softcap": ("C", "Scores become C tanh(scores / C)."),
    "sinks": ("X,...", "One logit per query head."),
    "dropout": ("RATE", "Weights dropped, by --seed."),
    "segments": ("IDS", "Packed sequences: one id per token, 0,0,1,1."),
}
"""What the help says of options; of one that is not here, what its kind is."""


class _Command(click.Command):
    """A command that has, beside its own, a flag for each row of the table of options."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """All flags; those of the table come before --tangents. It is imported now, not with the command."""
        there = [flag.name for flag in self.params]
        at = there.index("tangents")
        self.params[at:at] = [flag for flag in _flags() if flag.name not in there]
        return super().get_params(ctx)


def _flags() -> list[click.Parameter]:
    from attngrad.core.options import OPTIONS, Kind

    how: dict[Kind, dict[str, Any]] = {
        Kind.NUMBER: {"type": float},
        Kind.FLAG: {},
        Kind.PAIR: {"callback": _sides},
        Kind.SEED: {"type": _SEED},
        Kind.OFFSET: {"type": int},
        **{kind: {"callback": _numbers} for kind in (Kind.PLANE, Kind.PER_HEAD, Kind.IDS)},
    }
    found: list[click.Parameter] = []
    for name, row in OPTIONS.items():
        if row.kind not in how:  # what a command line cannot say
            continue
        flag = f"--{name}/--no-{name}" if row.kind is Kind.FLAG else f"--{name}"
        metavar, words = _WORDS.get(name, (None, f"{row.kind.value}."))
        found.append(click.Option([flag], default=None, metavar=metavar, help=words, **how[row.kind]))
    return found


@click.command(name="explain", cls=_Command)
@click.option("--input", "input_file", type=click.Path(), metavar="FILE.npz", help=_NPZ)
@click.option("--tokens", metavar="TEXT", help="Words; each gets a seeded embedding. With --input: labels.")
@click.option("--shape", callback=_sizes, metavar="H,T,D", help="Random inputs of this shape; also T,D or B,H,T,D.")
@click.option("--kv-heads", type=click.IntRange(1), metavar="N", help="Key heads (grouped queries).")
@click.option("--seed", type=_SEED, metavar="N", default=0, show_default=True, help="Seed of the inputs.")
@click.option("--tangents", is_flag=True, help="Also the JVP and the HVP, along a seeded direction.")
@click.option("--entry", nargs=3, type=(str, int, int), metavar="NAME ROW COLUMN", help="The sum behind one number.")
@click.option("--head", type=_PLACE, default=0, show_default=True, metavar="N", help="The head to show.")
@click.option("--batch", type=_PLACE, default=0, show_default=True, metavar="N", help="The batch entry to show.")
@click.option("--format", "form", type=click.Choice(FORMATS), help="[default: by --output's suffix, else terminal]")
@click.option("--output", type=click.Path(), metavar="FILE", help="Write here: .html, .tex, .json or .txt.")
@click.option("--open", "open_page", is_flag=True, help="Open the page in the browser: BROWSER, or the system's.")
def command(**given: Any) -> None:
    """Work through a backward pass, number by number.

    Every matrix of attention and of its gradients, with the formula that makes it and what must hold. Without options:
    a small causal example. As a page that computes, and can be edited and broken:

    
        attngrad explain --format html --open
        attngrad explain --tokens "the cat sat on the mat" --output cat.html
        attngrad explain --shape 2,4,3 --kv-heads 1 --softcap 2 --tangents
        attngrad explain --input mine.npz --entry dK 2 1
    """
    try:
        _run(given)
    except (ValueError, TypeError, KeyError, OSError, MemoryError) as error:
        text = error.args[0] if isinstance(error, KeyError) and error.args else str(error)
        raise CannotRun(" ".join(str(text).split())) from error


def _run(given: dict[str, Any]) -> None:
    from pathlib import Path

    from attngrad.explain import examples, files

    output, form, place = given["output"], given["form"], {"head": given["head"], "batch": given["batch"]}
    if form is None:
        suffix = Path(output).suffix.lower() if output else ""
        form = files.SUFFIXES.get(suffix, "html" if given["open_page"] else "terminal")
    if given["entry"] and (output or given["form"] or given["open_page"]):
        raise ValueError("explain: --entry prints one sum: it goes without --output, --format and --open.")
    if output and given["form"] is None and Path(output).suffix.lower() not in ("", *files.SUFFIXES):
        known = ", ".join(files.SUFFIXES)
        raise ValueError(f"explain: --output must end in one of {known}; got {output!r}. Or say --format.")
    if given["open_page"] and form != "html":
        raise ValueError(f"explain: --open must come with --format html; got {form}. Pass --format html.")
    if output and Path(output).is_dir():
        raise ValueError(f"explain: --output must be a file; got the folder {output!r}. Name a file in it.")
    if output and not Path(output).resolve().parent.is_dir():
        raise ValueError(f"explain: --output must be in a folder that exists; got {output!r}. Make the folder first.")
    trace = examples.from_options(given)
    if given["entry"]:
        _entry(trace, given["entry"], place)
        return
    if output is None and given["open_page"]:
        import tempfile

        output = str(Path(tempfile.mkdtemp(prefix="attngrad-")) / "attngrad.html")
    if output is not None:
        from attngrad.core.files import replace

        replace(output, files.text(trace, form, **place).encode())
        click.echo(f"wrote {output}", err=True)
    elif form == "terminal":
        trace.print(**place)
    else:
        click.echo(files.text(trace, form, **place), nl=False)
    if given["open_page"]:
        import webbrowser  # the browser that BROWSER names, else the system's

        address = Path(output).resolve().as_uri()
        if not webbrowser.open(address):
            raise CannotRun(f"explain: --open found no browser; open {address} yourself, or set BROWSER.")


def _entry(trace: Trace, entry: tuple[str, int, int], place: dict[str, int]) -> None:
    """Print the sum behind one entry, with its finite difference where it is a derivative."""
    from rich.console import Console

    from attngrad.explain import terminal

    name, row, column = entry
    rule = trace.rules[trace[name].name]  # a name that is not there is told by trace
    at = (row, column)[: len(rule.letters)]
    told = trace.explain(name, *at, **place)
    try:
        difference = trace.finite_difference(name, *at, **place) if rule.entry else None
    except ValueError:  # no derivative: nothing to compare with
        difference = None
    terminal.explanation(Console(), told, difference)
