"""`bayflower audit`: check the hash chain of a log."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Tamper-evident logs of what was asked of a site, what left it, and what arrived.",
    epilog="Example: `bayflower audit verify client-3/audit/audit.jsonl`",
)


@app.command()
def verify(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="an audit log (audit.jsonl)")],
    last: Annotated[
        str,
        typer.Option(
            help="a hash that an earlier call printed: a log that was cut off before that line, or "
            "written anew, is then found too"
        ),
    ] = "",
) -> None:
    """Check that no line of a log was changed, removed, added or moved, and print the hash of its
    last line. Exit code 1: the chain is broken; the text names the first such line.
    """
    from ..files import audit

    found = audit.verify(file, last.strip())
    print(f"{file}: {found.lines} lines, the chain is whole")
    print(f"last hash: {found.last}")
    if not last:
        print(
            "keep it elsewhere; with --last HASH the next check also finds a log that was cut off"
        )
