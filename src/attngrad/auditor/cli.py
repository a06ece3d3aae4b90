"""The command ``attngrad audit``: the candidate runs in a child process. Only click is imported before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click
from click.core import ParameterSource

_DEFAULT = ParameterSource.DEFAULT
_LAYOUTS = ("BHTD", "BTHD", "BTD", "HTD", "TD", "packed")
_DTYPES = ("float64", "float32", "float16", "bfloat16")


def _finite(_: click.Context, __: click.Parameter, value: float) -> float:
    """No nan and no inf, which pass for numbers in any range."""
    if not abs(value) < float("inf"):
        raise click.BadParameter(f"must be finite; got {value}.")
    return value


def _amount(flag: str, least: float, default: float, words: str) -> Callable[[Any], Any]:
    kind = click.FloatRange(least, 1e6)
    return click.option(flag, type=kind, callback=_finite, default=default, show_default=True, help=words)


@click.command(name="audit")
@click.argument("target", required=False, metavar="FILE.py:FUNCTION")
@click.option(
    "--formula",
    metavar="TEXT",
    help="Judge this formula instead, in text or LaTeX: dS = A * dA. Goes with --json - only.",
)
@click.option("--level", type=click.Choice(["attention", "layer"]), help="What it is. [default: by the object]")
@click.option("--option", "options", multiple=True, metavar="NAME=VALUE", help="causal=true, window=4,0, mask=true ...")
@click.option("--supports", multiple=True, metavar="FEATURE", help="gqa, cross or widths: raising there is a fault.")
@click.option("--layout", type=click.Choice(_LAYOUTS), help="The axes of its arrays. [default: found out by a call]")
@click.option("--sizes", multiple=True, metavar="NAME=RULE", help="tokens='multiple of 16', features=32,64,128 ...")
@click.option("--dtype", type=click.Choice(_DTYPES), help="[default: float64, or the widest that it takes]")
@click.option("--device", metavar="NAME", help="Where the tensors of a PyTorch candidate live: cuda, cpu, mps.")
@click.option("--inputs", type=click.Path(exists=True, dir_okay=False), metavar="FILE.safetensors",
              help="Recorded q, k, v and dout to audit it with.")  # fmt: skip
@click.option("--effort", type=click.Choice(["quick", "default", "full"]), default="default", show_default=True)
@click.option("--framework", type=click.Choice(["numpy", "torch", "jax"]),
              help="The arrays that it takes. [default: by what it uses]")  # fmt: skip
@click.option("--root", type=click.Path(exists=True, file_okay=False), help="Where its imports begin.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Seed of the values.")
@_amount("--time-limit", 0.01, 10.0, "Seconds for one call.")
@_amount("--memory", 0.1, 4.0, "Gigabytes it may take.")
@click.option("--html", "html_file", type=click.Path(dir_okay=False, writable=True), help="Write the report here.")
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, writable=True), help="Write the report here; - prints."
)
def command(
    target: str | None,
    formula: str | None,
    root: str | None,
    memory: float,
    html_file: str | None,
    json_file: str | None,
    **keywords: Any,
) -> None:
    """Say whether an attention gradient is right; name the mistake.

    FILE.py:FUNCTION or package.module:FUNCTION takes (q, k, v, dout), in any layout, and returns (out, dq, dk, dv) or a
    mapping of results; FILE.py:FORWARD,BACKWARD is a pair; a class is a layer. Exit status: 0 right, 1 wrong, 2 could
    not be audited.
    """
    if (target is None) == (formula is None):
        raise click.UsageError("audit: give FILE.py:FUNCTION, or --formula TEXT.")
    if formula is not None:
        _audit_formula(click.get_current_context(), formula, json_file)
    for option, file in (("--html", html_file), ("--json", json_file)):  # before the candidate runs, not after it
        if file not in (None, "-") and not Path(str(file)).resolve().parent.is_dir():
            rule = f"audit: {option} must be in a folder that exists; got {file!r}. Make the folder first."
            raise click.UsageError(rule)
    keywords["options"] = parse_options(keywords["options"]) or None
    keywords["sizes"] = parse_sizes(keywords["sizes"]) or None
    from attngrad.auditor.process import run_in_child

    report = run_in_child({"target": target, "root": root, "memory": memory, "keywords": keywords})
    from rich.console import Console

    from attngrad.auditor.terminal import render
    from attngrad.core import files

    if json_file == "-":
        click.echo(report.to_json())
    else:
        render(report, Console(highlight=False))
    try:
        if json_file not in (None, "-"):
            files.replace(str(json_file), (report.to_json() + "\n").encode())
        if html_file is not None:
            files.replace(html_file, report.to_html().encode())
    except OSError as error:
        click.echo(f"Error: audit: {error.filename}: {error.strerror}.", err=True)
        raise SystemExit(2) from error
    raise SystemExit(report.exit_code)


def _audit_formula(context: click.Context, formula: str, json_file: str | None) -> NoReturn:
    """Judge a formula; of the other options only ``--json -`` has a meaning."""
    from attngrad.formulas import cli

    given = [
        p.opts[0]
        for p in context.command.params
        if p.name not in ("formula", "json_file") and context.get_parameter_source(p.name or "") is not _DEFAULT
    ]
    if json_file not in (None, "-"):
        given.append("--json FILE")
    if given:
        raise click.UsageError(f"audit: --formula goes with --json - alone; got {', '.join(given)}.")
    raise SystemExit(cli.run(formula, as_json=json_file == "-"))


def parse_options(given: tuple[str, ...]) -> dict[str, Any]:
    """``("causal=true", "window=4,none")`` as a dict.

    >>> parse_options(("causal=true", "window=4,none", "scale=0.5"))
    {'causal': True, 'window': (4, None), 'scale': 0.5}
    """
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise click.BadParameter(f"must be NAME=VALUE; got {text!r}.", param_hint="--option")
        parts = [_value(name, part) for part in value.split(",")]
        found[name.strip()] = parts[0] if len(parts) == 1 else tuple(parts)
    return found


def parse_sizes(given: tuple[str, ...]) -> dict[str, Any]:
    """``("tokens=multiple of 16", "features=32,64")`` as a dict.

    >>> parse_sizes(("tokens=multiple of 16", "features=32,64"))
    {'tokens': 'multiple of 16', 'features': [32, 64]}
    """
    found: dict[str, Any] = {}
    for text in given:
        name, equals, rule = text.partition("=")
        if not equals:
            raise click.BadParameter(f"must be NAME=RULE; got {text!r}.", param_hint="--sizes")
        parts = [part.strip() for part in rule.split(",")]
        found[name.strip()] = [int(part) for part in parts] if all(map(str.isdigit, parts)) else rule.strip()
    return found


def _value(name: str, text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    word = text.strip().lower()
    if word in words:
        return words[word]
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    raise click.BadParameter(f"{name} must be true, false, none or numbers; got {text!r}.", param_hint="--option")
