"""Commands of the command line that have a file of their own; each imports what it needs when it is called."""

from __future__ import annotations

import typer

from .evidence import reproduce, tune
from .reporting import report
from .take_home import export, personalise
from .trying import try_app


def add_commands(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for command in (export, personalise, report, reproduce, tune):
        app.command()(command)
    app.command("try")(try_app)
