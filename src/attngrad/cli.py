"""The command ``attngrad``. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import click

from attngrad.auditor.cli import command as audit
from attngrad.core.command import CannotRun
from attngrad.explain.cli import command as explain


class _Commands(click.Group):
    """Errors that a user can fix are printed on one line, without a traceback."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except ImportError as error:
            raise CannotRun(str(error)) from error


_seed = click.option(
    "--seed",
    type=click.IntRange(0, 2**64 - 1),
    metavar="N",
    default=0,
    show_default=True,
    help="Seed of the random inputs.",
)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="attngrad")
def main() -> None:
    """Every derivative of attention, exact, fast, and explained.

    Start with `attngrad demo`, then `attngrad explain --format html --open`.

    Exit status: 0 all is well, 1 what was checked is wrong, 2 wrong usage, or it could not run.

    Completion in bash: eval "$(_ATTNGRAD_COMPLETE=bash_source attngrad)"; likewise zsh_source, fish_source.
    """


@main.command()
@_seed
def demo(seed: int) -> None:
    """Show a backward pass, a check, errata, an audit and the speed."""
    from rich.console import Console

    from attngrad.explain.demo import show

    show(Console(highlight=False), seed)


class _Document(click.Choice[str]):
    """A document by its name; the number that it had in earlier versions is taken too."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        names = {f"{i:03}": name for i, name in enumerate(self.choices)}
        return super().convert(names.get(value, value), param, ctx)


_DOCUMENTS = _Document(["equation-z", "back-pass", "transformer", "explicit-formula"])


@main.command()
@click.option("--document", type=_DOCUMENTS, help="Only this document.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_seed
def errata(document: str | None, as_json: bool, seed: int) -> None:
    """Judge every claim of four texts on the gradient of attention.

    Every verdict is computed when the command runs, in float64, against the complex step. The texts:

    
    equation-z        The equation Z = QK^T
    back-pass         Self-Attention Gradients Calculation for Back Pass
    transformer       Transformer Attention Derivative
    explicit-formula  An explicit formula for the gradient of standard attention
    """
    from attngrad import errata as errata_module

    results = errata_module.run(document, seed)
    if as_json:
        click.echo(errata_module.to_json(results))
        return
    from rich.console import Console

    errata_module.render(results, Console())


@main.command()
@_seed
@click.option("--device", metavar="DEVICE", help="Every pass and option on this device of PyTorch instead: cuda, mps.")
@click.option("--backend", metavar="NAME", help="With --device: that of use_backend. [default: by device]")
def check(seed: int, device: str | None, backend: str | None) -> None:
    """Check VJP, JVP and HVP against the complex step, options on."""
    from rich.console import Console

    if backend is not None and device is None:
        raise click.UsageError("--backend goes with --device.")
    if device is not None:
        from attngrad.torch import check as on_device

        try:
            raise SystemExit(on_device.report(device, Console(highlight=False), backend))
        except on_device.NoDeviceError as error:
            raise CannotRun(str(error)) from error
    from attngrad.explain import check as found

    report = found.run(seed)
    found.render(report, Console(highlight=False))
    raise SystemExit(not report.ok)


@main.command()
def info() -> None:
    """Print the instruction set, the threads and the versions."""
    import platform
    from importlib import metadata

    import ml_dtypes
    import numpy as np

    import attngrad
    from attngrad import _native
    from attngrad.backends.cpu import workers  # which chooses the kernels

    rows = {
        "attngrad": attngrad.__version__,
        "kernels": f"{_native.isa()} (of {', '.join(_native.isa_names())})",
        "threads": attngrad.get_num_threads(),
        "workers": workers.describe(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "ml_dtypes": ml_dtypes.__version__,
        "machine": platform.machine(),
        "compiler": _native.compiler,
    }
    for name in ("torch", "jax", "transformers", "diffusers", "triton"):  # read, not imported
        try:
            rows[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            rows[name] = "not installed"
    for name, value in rows.items():
        click.echo(f"{name:<12} {value}")


main.add_command(audit)
main.add_command(explain)


if __name__ == "__main__":
    main()
