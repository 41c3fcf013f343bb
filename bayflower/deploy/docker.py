"""Control of containers: `docker compose` starts and stops them, the Python package `docker` does
the rest.
"""

from __future__ import annotations

import importlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import BayflowerError, ConfigError, in_one_line
from .layout import Deployment

SERVER = "serverapp"  # the container in which commands about runs are run


def client() -> Any:
    """Return a connection to the Docker engine."""
    try:
        docker: Any = importlib.import_module("docker")
    except ImportError:
        raise ConfigError(
            "the Docker package for Python is not installed; install it with: pip install "
            "'bayflower[deploy]'"
        ) from None
    try:
        found = docker.from_env(timeout=600)
        found.ping()
    except Exception as error:
        raise BayflowerError(
            f"the Docker engine does not answer ({in_one_line(error, 200)}); start it, "
            "or use: bayflower deploy up DIR --local"
        ) from None
    return found


def compose(deployment: Deployment, *words: str) -> None:
    """Run docker compose on the deployment's file; its output goes to the terminal."""
    file = deployment.folder / "compose.yaml"
    if not file.exists():
        raise ConfigError(
            f"{file} does not exist; each machine has its own folder: give that of this machine"
        )
    program = shutil.which("docker")
    if program is None:
        raise ConfigError(
            "docker is not installed; install it, or use: bayflower deploy up DIR --local"
        )
    done = subprocess.run(
        [program, "compose", "--file", str(file), *words], stdin=subprocess.DEVNULL
    )
    if done.returncode:
        raise BayflowerError(
            f"docker compose {words[0]} failed (code {done.returncode}); see: bayflower deploy "
            f"logs {deployment.folder}"
        )


def up(deployment: Deployment) -> None:
    """Start every container and return when all are healthy."""
    docker = client()
    if not docker.images.list(deployment.image):
        raise ConfigError(
            f"the image {deployment.image} was not found; build it with: docker build -f "
            f"docker/Dockerfile -t {deployment.image} ."
        )
    compose(deployment, "up", "--detach", "--wait")


def container(deployment: Deployment, service: str) -> Any:
    """Return the running container of a service."""
    labels = [
        f"com.docker.compose.project={deployment.name}",
        f"com.docker.compose.service={service}",
    ]
    found = client().containers.list(filters={"label": labels})
    if not found:
        raise BayflowerError(
            f"the container of {service} is not running; start it with: bayflower deploy up "
            f"{deployment.folder}"
        )
    return found[0]


def run_inside(deployment: Deployment, words: Sequence[str]) -> int:
    """Run `bayflower deploy …` in the SuperLink's container, with this terminal; return its exit
    code.
    """
    target = container(deployment, SERVER)
    api = target.client.api
    show = sys.stdout.isatty()
    size = (
        {
            "COLUMNS": str(shutil.get_terminal_size().columns),
            "TERM": os.environ.get("TERM", "xterm"),
        }
        if show
        else {}
    )
    command = api.exec_create(
        target.id, ["bayflower", "deploy", *words], tty=show, environment=size
    )["Id"]
    for out, err in (
        api.exec_start(command, stream=True, demux=True)
        if not show
        else pairs(api.exec_start(command, stream=True, tty=True))
    ):
        for part, stream in ((out, sys.stdout), (err, sys.stderr)):
            if part:
                stream.buffer.write(part)
                stream.flush()
    return int(api.exec_inspect(command)["ExitCode"] or 0)


def output_inside(deployment: Deployment, words: Sequence[str]) -> str:
    """Return what `bayflower deploy …` prints in the SuperLink's container."""
    code, said = container(deployment, SERVER).exec_run(["bayflower", "deploy", *words])
    if code:
        raise BayflowerError(
            " ".join(said.decode(errors="replace").split()).removeprefix("bayflower: ")
        )
    return str(said.decode().strip().splitlines()[-1])


def pairs(parts: Any) -> Any:
    """Yield the terminal's combined output in the form of (output, errors)."""
    for part in parts:
        yield part, None


def copy_out(deployment: Deployment, service: str, path: str, target: Path) -> None:
    """Copy a folder of a container to `target`, plain files and folders only."""
    try:
        stream, _ = container(deployment, service).get_archive(path)
    except BayflowerError:
        raise
    except Exception as error:
        raise BayflowerError(
            f"{path} cannot be read from {service} ({in_one_line(error, 200)})"
        ) from None
    with tarfile.open(fileobj=io.BytesIO(b"".join(stream))) as archive:
        target.mkdir(parents=True, exist_ok=True)
        for member in archive.getmembers():
            below = Path(*Path(member.name).parts[1:])
            if member.isfile() and ".." not in below.parts:
                file = archive.extractfile(member)
                assert file is not None
                (target / below).parent.mkdir(parents=True, exist_ok=True)
                (target / below).write_bytes(file.read())


def copy_in(deployment: Deployment, service: str, source: Path, path: str) -> None:
    """Copy a folder's files into that of a container, as the containers' user; files of other names
    stay.
    """
    uid, gid = (int(number) for number in deployment.user.split(":"))
    content = io.BytesIO()

    def owned(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid, member.gid = uid, gid
        return member

    with tarfile.open(fileobj=content, mode="w") as archive:
        for one in sorted(source.iterdir()):
            archive.add(one, arcname=one.name, filter=owned)
    if not container(deployment, service).put_archive(path, content.getvalue()):
        raise BayflowerError(f"{path} of {service} cannot be written; see its log")
