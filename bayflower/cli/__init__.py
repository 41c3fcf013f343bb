"""The command line: one file a command, named after it. Each imports what it needs when it is
called.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Annotated

import click
import typer
from rich.console import Console

from ..errors import BayflowerError, ConfigError
from . import (
    audit,
    bench,
    cite,
    compare,
    data,
    deploykeep,
    doctor,
    lists,
    natural,
    personal,
    policy,
    predict,
    report,
    reproduce,
    results,
    run,
    tryout,
    tune,
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Bayesian personalised federated learning on Flower.",
    epilog="Example: `bayflower run fedmap --dataset synthetic --rounds 50`",
)
COMMANDS: tuple[Callable[..., None], ...] = (
    *(data.data, run.run, compare.compare, compare.study, results.results, report.report),
    *(personal.export, personal.personalise, predict.predict),
    *(lists.methods, lists.settings, lists.models, tryout.try_app, reproduce.reproduce, tune.tune),
    *(bench.bench, natural.natural, doctor.doctor, cite.cite, lists.version),
)


def print_version(wanted: bool) -> None:
    """Print the version and end, if it was asked for."""
    if wanted:
        lists.version()
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=print_version, help="print the version and end"
        ),
    ] = False,
) -> None:
    """Bayesian personalised federated learning on Flower."""


for command in COMMANDS:
    app.command("try" if command is tryout.try_app else None)(command)
app.add_typer(deploykeep.app, name="deploy")  # those of `deploy` and its own
app.add_typer(policy.app, name="policy")
app.add_typer(audit.app, name="audit")


def main() -> None:
    """Run the command line; an error that a person can act on is one line and exit code 2
    (configuration) or 1.
    """
    try:
        sys.exit(app(prog_name="bayflower", standalone_mode=False))
    except click.exceptions.NoArgsIsHelpError as error:  # `bayflower` alone
        print(error.format_message(), file=sys.stderr)
        sys.exit(2)
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "bayflower"
        # the libraries below may each make the same suggestion
        said = " ".join(dict.fromkeys(re.split(r"(?<=[.?])\s+", error.format_message())))
        show(f"{said} See {path} --help")
        sys.exit(2)
    except click.Abort:
        show("stopped")
        sys.exit(1)
    except BayflowerError as error:
        show(str(error))
        sys.exit(2 if isinstance(error, ConfigError) else 1)


def show(error: str) -> None:
    """Print an error in one line."""
    console = Console(stderr=True)
    console.print(f"bayflower: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
