"""`bayflower doctor`: check this machine. It changes nothing and sends nothing."""

from __future__ import annotations

import datetime
import importlib
import importlib.util
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

import typer

from ..errors import in_one_line
from .findings import Finding
from .options import AsJson


def doctor(
    data_dir: Annotated[Path, typer.Option(help="folder of the data sets")] = Path("data"),
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="port for a SuperLink; checks that it is free")
    ] = 9092,
    deployment: Annotated[
        Path | None,
        typer.Option(help="folder of `bayflower deploy init`; checks when its certificates expire"),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            help="a network to try: a name of `bayflower models`, or package.module:Factory"
        ),
    ] = "",
    shape: Annotated[
        str, typer.Option("--input", help="with --model: shape of one sample, e.g. 3,32,32")
    ] = "",
    words: Annotated[
        int, typer.Option(min=0, help="with --model: inputs are whole numbers below this")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Check this machine: versions, devices, data, Docker engine, port, certificates. Exit code 1
    if something is wrong.

    Example: `bayflower doctor --data-dir data --deployment federation`
    """
    found = examine(data_dir, port, deployment)
    if model:
        from .network import network

        found += network(model, shape, words)
    wrong = any(one.state == "wrong" for one in found)
    if as_json:
        print(json.dumps({"ok": not wrong, "findings": [one._asdict() for one in found]}))
    else:
        from rich.console import Console
        from rich.table import Table

        grid = Table(box=None, pad_edge=False, show_header=False)
        colours = {"ok": "green", "missing": "yellow", "wrong": "red"}
        for one in found:
            grid.add_row(f"[{colours[one.state]}]{one.state}[/]", one.what, one.seen, one.remedy)
        console = Console()
        (console if console.is_terminal else Console(width=200)).print(grid)
    if wrong:
        raise typer.Exit(1)


NEEDED = ("flwr", "numpy", "safetensors", "scikit-learn", "torch", "torchvision", "typer")
MODULES = {"scikit-learn": "sklearn"}  # packages whose modules have another name
OPTIONAL = {
    "ray": "simulation",
    "docker": "deploy",
    "onnxruntime": "onnx",
    "onnxscript": "onnx",
    "tensorboard": "tensorboard",
    "matplotlib": "plots",
}
SOON = 30  # days before a certificate's end from which it is a warning


def examine(data_dir: Path, port: int, folder: Path | None = None) -> list[Finding]:
    """Return all findings; `folder` is one that `bayflower deploy init` made."""
    return [
        *versions(),
        *devices(),
        *data(data_dir),
        docker(),
        free_port(port),
        *certificates(folder),
    ]


def versions() -> list[Finding]:
    """Return Python and the packages."""
    good = sys.version_info >= (3, 11)
    found = [
        Finding(
            "python",
            "ok" if good else "wrong",
            platform.python_version(),
            "" if good else "use Python 3.11 or newer",
        )
    ]
    for name in ("bayflower", *NEEDED):
        try:
            found.append(imported(name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            found.append(Finding(name, "wrong", "not installed", "pip install bayflower"))
    for name, extra in OPTIONAL.items():
        try:
            found.append(Finding(name, "ok", metadata.version(name)))
        except metadata.PackageNotFoundError:
            found.append(
                Finding(name, "missing", "not installed", f"pip install 'bayflower[{extra}]'")
            )
    return found


def imported(name: str, version: str) -> Finding:
    """Return whether an installed package can be imported."""
    from ..data.vision import import_torchvision

    try:
        if name == "torchvision":  # as our data sets do it
            import_torchvision()
        else:
            importlib.import_module(MODULES.get(name, name))
    except Exception as error:  # whatever a broken installation raises
        reason = in_one_line(error, 160) or type(error).__name__
        remedy = f"pip install --force-reinstall {name}"
        return Finding(name, "wrong", f"{version}, but it cannot be imported: {reason}", remedy)
    return Finding(name, "ok", version)


def devices() -> list[Finding]:
    """Return cores and GPUs."""
    import torch

    found = [
        Finding("cpu", "ok", f"{os.cpu_count()} cores, {torch.get_num_threads()} torch threads")
    ]
    for number in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(number)
        found.append(
            Finding(f"cuda:{number}", "ok", f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB")
        )
    if not torch.cuda.device_count():
        built = (
            f"torch was built for CUDA {torch.version.cuda}"
            if torch.version.cuda
            else "torch was built without CUDA"
        )
        found.append(Finding("cuda", "missing", f"no GPU found; {built}", "runs use the CPU"))
    return found


def data(folder: Path) -> list[Finding]:
    """Return which data sets lie in `folder`."""
    from ..data.folders import FOLDERS
    from ..data.settings import KNOWN

    found = []
    for name, (_, kind, _) in KNOWN.items():
        npz, torchvisions = folder / f"{name}.npz", folder / (kind or "-")
        cifar = folder / {"CIFAR10": "cifar-10-batches-py", "CIFAR100": "cifar-100-python"}.get(
            kind, "-"
        )
        own = folder / FOLDERS.get(name, "-")
        there = next((path for path in (npz, torchvisions, cifar, own) if path.exists()), None)
        remedy = (
            "set download=true once"
            if kind
            else f"put its files into {own}"
            if name in FOLDERS
            else f"put {name}.npz there"
        )
        found.append(
            Finding(f"data: {name}", "ok", str(there))
            if there
            else Finding(f"data: {name}", "missing", f"not in {folder}", remedy)
        )
    return [
        Finding("data: digits", "ok", "comes with scikit-learn"),
        Finding("data: synthetic", "ok", "is made"),
        *found,
    ]


def docker() -> Finding:
    """Return whether a Docker engine answers."""
    program = shutil.which("docker")
    if program is None:
        return Finding(
            "docker",
            "missing",
            "no docker program",
            "install Docker for containers; bayflower deploy up --local needs none",
        )
    try:
        call = [program, "version", "--format", "{{.Server.Version}}"]
        done = subprocess.run(call, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(
            "docker",
            "missing",
            f"the engine does not answer ({type(error).__name__})",
            "start the Docker engine",
        )
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        return Finding(
            "docker",
            "missing",
            said[-1][:120] if said else "the engine does not answer",
            "start the Docker engine",
        )
    return Finding("docker", "ok", f"engine {done.stdout.strip()}")


def free_port(port: int) -> Finding:
    """Return whether a SuperLink could listen on `port`."""
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("127.0.0.1", port))
        except OSError as error:
            return Finding(
                f"port {port}",
                "missing",
                f"in use ({error.strerror})",
                "choose another port, or end what listens there",
            )
    return Finding(f"port {port}", "ok", "free")


def certificates(folder: Path | None) -> list[Finding]:
    """Return how long each certificate below `folder` is good."""
    if folder is None:
        return []
    if importlib.util.find_spec("cryptography") is None:
        return [
            Finding(
                "certificates",
                "missing",
                "the package cryptography is not installed",
                "pip install bayflower",
            )
        ]
    from cryptography import x509

    found = []
    now = datetime.datetime.now(datetime.UTC)
    for path in sorted(folder.glob("**/*.crt")):
        try:
            end = x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
        except (OSError, ValueError) as error:
            found.append(
                Finding(
                    str(path),
                    "wrong",
                    f"cannot be read ({type(error).__name__})",
                    "make it again with bayflower deploy init",
                )
            )
            continue
        left = (end - now).days
        seen = (
            f"good until {end:%Y-%m-%d}, {left} days" if left >= 0 else f"ended on {end:%Y-%m-%d}"
        )
        state: Literal["ok", "missing", "wrong"] = (
            "wrong" if left < 0 else "missing" if left < SOON else "ok"
        )
        found.append(
            Finding(str(path), state, seen, "" if state == "ok" else "bayflower deploy renew DIR")
        )
    for path in sorted(folder.glob("**/*.key")):
        mode = path.stat().st_mode & 0o777
        if mode & 0o077:
            found.append(
                Finding(
                    str(path),
                    "wrong",
                    f"others can read this key (mode {mode:o})",
                    f"chmod 600 {path}",
                )
            )
    return found or [
        Finding(
            "certificates",
            "missing",
            f"none below {folder}",
            "make them with bayflower deploy init",
        )
    ]
