"""What every command shares: an error that its user can mend is one line, and exit status 2."""

from __future__ import annotations

import click


class CannotRun(click.ClickException):
    """Wrong usage, a bad file or a missing package. Status 1 is for what was checked and is wrong."""

    exit_code = 2
