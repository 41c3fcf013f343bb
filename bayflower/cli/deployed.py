"""Functions shared by the commands of `bayflower deploy`."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from ..deploy import layout
from ..errors import BayflowerError, ConfigError

console = Console(stderr=True)


SOON_DAYS = 30


def note(text: str) -> None:
    """Print a line of progress to standard error."""
    console.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)


def reach(folder: Path, again: bool = False) -> tuple[Any, Callable[[], None]]:
    """Return the connection to the SuperLink, None if it runs in containers, and a function that
    restarts programs that ended.
    """
    from ..deploy import server
    from ..deploy.local import local_of

    deployment = layout.read(folder)
    if server.inside():
        return server.server_inside(deployment), lambda: None
    local = local_of(deployment)
    if local is None:
        return None, lambda: None
    if again:
        local.up(note)
    # raises for a client's folder, which has no server
    elif deployment.server and not local.alive("superlink"):
        raise BayflowerError(
            f"the SuperLink is not running; start it with: bayflower deploy up {folder} --local"
        )
    return local.server(), local.watch


def hand_over(folder: Path, words: list[str]) -> None:
    """Run a command beside the SuperLink, in its container, and end with its exit code."""
    from ..deploy import docker

    code = docker.run_inside(layout.read(folder), words)
    if code:
        sys.exit(code)


def warn_of_expiry(deployment: layout.Deployment) -> None:
    """Warn if a certificate expires soon; raise if one has expired."""
    from ..deploy import keys

    for path in sorted(deployment.folder.glob("**/*.crt")):
        left = keys.expiry(path) - datetime.datetime.now(datetime.UTC)
        if left.total_seconds() <= 0:
            raise ConfigError(
                f"the certificate {path} expired {-left.days} days ago; renew it with: bayflower "
                "deploy renew DIR"
            )
        if left.days < SOON_DAYS:
            note(
                f"the certificate {path} expires in {left.days} days; renew it with: bayflower "
                "deploy renew DIR"
            )
