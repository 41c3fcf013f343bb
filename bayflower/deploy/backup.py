"""Backups of a deployment whose parts belong together: the server's checkpoint and the clients'
states of the same round.

OUT/manifest.json    what was saved: for each run its round and its clients, and a SHA-256 of each
                     file
OUT/server/results   the runs with their checkpoints, and nodes.json
OUT/client-K/state   the client's states, as they are: encrypted if the client encrypts them

Keys, certificates and data are not in a backup. On several machines each saves its own part.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import BayflowerError, ConfigError
from ..files import checkpoint, lease, store, vault
from ..files.texts import read_json, write_json
from ..wire import continuity
from .layout import STATE_KEY, Deployment

MANIFEST = "manifest.json"
TRIES = 3  # a run that is under way may go on while it is copied
LEFT_OUT = shutil.ignore_patterns("*.part", lease.LOCK, lease.SERVING)


class Part(NamedTuple):
    """One folder of a deployment, and its place in a backup."""

    service: str  # the container that has it
    inside: str  # where the container has it
    here: Path | None  # where it is if the programs are processes; None in containers
    saved: str


def parts_of(deployment: Deployment, local: bool) -> list[Part]:
    """Return the folders of this machine that a backup has."""
    here = deployment.folder / "local" / "results" if local else None
    found = []
    if deployment.has_server():
        found.append(Part("serverapp", "/results", here, "server/results"))
    for client, folder in deployment.client_folders().items():
        own = folder / "state" if local else None
        found.append(Part(f"clientapp-{client}", "/state", own, f"client-{client}/state"))
    return found


def fetch(deployment: Deployment, part: Part, target: Path) -> None:
    """Copy one folder to `target`."""
    if part.here is None:
        from . import docker

        docker.copy_out(deployment, part.service, part.inside, target)
    elif part.here.exists():
        shutil.copytree(part.here, target, dirs_exist_ok=True, ignore=LEFT_OUT)
    target.mkdir(parents=True, exist_ok=True)


def backup(
    deployment: Deployment, out: Path, local: bool, note: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Save this machine's part of a deployment to `out`; return the manifest. Raise if the states
    of the server and of the clients on this machine do not belong together.
    """
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty; choose another folder")
    problems: list[str] = []
    for attempt in range(TRIES):
        if attempt:
            shutil.rmtree(out)
            time.sleep(1)
        for part in parts_of(deployment, local):  # the server first: clients keep two rounds
            fetch(deployment, part, out / part.saved)
        runs, problems = compared(deployment, out, note)
        if not problems:
            break
    else:
        shutil.rmtree(out)
        raise BayflowerError(
            f"{problems[0]}; if a run is under way, its rounds are shorter than a copy takes: stop "
            "it first"
        )
    content = {"name": deployment.name, "made": time.time(), "runs": runs, "files": sums(out)}
    write_json(out / MANIFEST, content)
    for name, facts in runs.items():
        note(
            f"{name}: round {facts['round']}, clients {', '.join(facts['clients']) or 'elsewhere'}"
        )
    return content


def compared(
    deployment: Deployment, saved: Path, note: Callable[[str], None]
) -> tuple[dict[str, Any], list[str]]:
    """Return the runs in a backup, each with its round and its clients' rounds, and what does not
    belong together. Encrypted states are compared if their key is on this machine.
    """
    runs: dict[str, Any] = {}
    problems: list[str] = []
    for file in sorted(saved.glob(f"server/results/**/{checkpoint.FILE}")):
        found = checkpoint.read(file.parent)
        assert found is not None
        links = found.roster.get("continuity", {}).get("links", {})
        rounds = {}
        for folder in sorted(saved.glob(f"client-*/state/{found.run}/client-*")):
            client = folder.name.removeprefix("client-")
            own = deployment.client_folders().get(int(client), Path()) / STATE_KEY
            try:
                with vault.using(own) if own.exists() else nullcontext():
                    held = marks(folder)
            except ConfigError as error:
                note(f"client {client} was not compared with the server: {error}")
                continue
            rounds[client] = sorted(held)
            last = links[client][-1] if links.get(client) else None
            if last is not None and held.get(int(last[0])) != last[2]:
                problems.append(
                    f"client {client} has no state of round {last[0]} as the server's checkpoint "
                    f"of {file.parent.name} knows it"
                )
        name = str(file.parent.relative_to(saved / "server" / "results"))
        runs[name] = {"run": found.run, "round": found.round, "clients": rounds}
    return runs, problems


def marks(folder: Path) -> dict[int, str]:
    """Return the digest that each saved state of a client had in its reply, by round."""
    found = {}
    for path in store.rounds(folder):
        one = store.read(path)
        found[one.round] = continuity.read(one.thread).ended if one.thread else ""
    return found


def sums(saved: Path) -> dict[str, str]:
    """Return the SHA-256 of each file in a backup."""
    files = sorted(path for path in saved.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {
        str(path.relative_to(saved)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def verified(deployment: Deployment, saved: Path, note: Callable[[str], None]) -> Mapping[str, Any]:
    """Return the manifest of a backup; raise if a file is missing, changed or one too many, or if
    its parts do not belong together.
    """
    content = read_json(saved / MANIFEST)
    if "files" not in content:
        raise ConfigError(f"{saved} is no backup: {MANIFEST} is missing or cannot be read")
    now = sums(saved)
    for name in sorted({*now, *content["files"]}):
        if now.get(name) != content["files"].get(name):
            raise BayflowerError(f"{saved / name} is not as it was saved; use another backup")
    if problems := compared(deployment, saved, note)[1]:
        raise BayflowerError(f"{problems[0]}; use another backup")
    return content


def restore(
    deployment: Deployment,
    saved: Path,
    local: bool,
    running: bool = False,
    note: Callable[[str], None] = lambda text: None,
) -> Mapping[str, Any]:
    """Bring back this machine's part of a backup; return the manifest. What is there is moved
    aside.
    """
    if running:
        raise ConfigError(
            f"the programs of {deployment.name} are running; stop them first: bayflower deploy down"
        )
    content = verified(deployment, saved, note)
    for part in parts_of(deployment, local):
        source = saved / part.saved
        if not source.exists():
            note(f"the backup has no {part.saved}; what is there stays")
            continue
        if part.here is None:
            from . import docker

            docker.copy_in(deployment, part.service, source, part.inside)
            continue
        if part.here.exists():
            aside = next(
                path
                for number in range(1, 10**6)
                if not (path := part.here.with_name(f"{part.here.name}-before-{number}")).exists()
            )
            part.here.rename(aside)
            note(f"what was there is now {aside}")
        shutil.copytree(source, part.here)
    return content
