"""`bayflower try`: a Flower app in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError


def try_app(
    folder: Annotated[
        Path, typer.Argument(metavar="APP", help="folder of a Flower app, with its pyproject.toml")
    ],
    clients: Annotated[int, typer.Option(min=1, help="number of nodes")] = 3,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="a run-config key of the app"),
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(help="folder for client states [bayflower-runs/state in the home folder]"),
    ] = None,
) -> None:
    """Run any Flower app in this process, clients one after another, without SuperLink and Ray.

    Example: `bayflower try examples/fedavg_app --clients 3 --set num-server-rounds=1`
    """
    from ..flower.tryout import try_app as run

    changes = {}
    for text in sets or []:
        key, mark, value = text.partition("=")
        if not mark or not key:
            raise ConfigError(f"--set needs KEY=VALUE, got {text!r}; for example --set lr=0.01")
        changes[key] = value
    run(folder, clients, changes, {"state-dir": str(state_dir)} if state_dir else None)
