"""``python -m benchmarks``: see ``cli``."""

from benchmarks.cli import command

command(prog_name="python -m benchmarks")
