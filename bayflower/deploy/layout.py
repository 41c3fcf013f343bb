"""What lies where in a deployment's folder, and `bayflower deploy init`, which makes it.

DIR/deployment.json  compose.yaml (everything on one machine)  ca/ (the authority; its key never leaves this folder)
DIR/server/          what the server's machine needs: certificate and key, the clients' public keys, compose.yaml
DIR/client-K/        what client K's machine needs: the authority's certificate, its own node key, compose.yaml, data/ (only read)
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import ConfigError
from . import keys

FILE = "deployment.json"
PORT = 9092
INNER_HOSTS = ("superlink", "gate", "localhost", "127.0.0.1", "::1")  # names inside one machine
CONTAINER_USER = 10001  # whom containers run as if the folder was made by root


@dataclasses.dataclass(frozen=True)
class Deployment:
    """One deployment as one of its folders sees it."""

    name: str
    role: str  # "all" (one machine), "server" or "client"
    clients: int
    hosts: tuple[str, ...]  # how clients reach the server, best first
    port: int
    image: str
    user: str  # "uid:gid" of the containers, to whom the private keys belong
    expires: str
    client: int | None = None
    cpus: float = 1.0
    memory: str = "2g"
    folder: Path = dataclasses.field(default=Path(), compare=False)

    @property
    def server(self) -> Path:
        """The folder of the server's machine."""
        if self.role == "client":
            raise ConfigError(f"{self.folder} is a client's folder; give the server's, which is on the server's machine")
        return self.folder if self.role == "server" else self.folder / "server"

    def client_folders(self) -> dict[int, Path]:
        """Return the folders of the clients on this machine."""
        if self.role == "client":
            assert self.client is not None
            return {self.client: self.folder}
        return {client: self.folder / f"client-{client}" for client in range(self.clients)} if self.role == "all" else {}

    def has_server(self) -> bool:
        """Return whether the server is on this machine."""
        return self.role != "client"

    def address(self) -> str:
        """Return host:port as clients dial it."""
        host = self.hosts[0]
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"


def read(folder: Path) -> Deployment:
    """Return the deployment a folder belongs to."""
    path = folder / FILE
    try:
        facts = json.loads(path.read_text())
        facts["hosts"] = tuple(facts["hosts"])
        return Deployment(**facts, folder=folder.resolve())
    except FileNotFoundError:
        raise ConfigError(f"{folder} is not a deployment: {path} is not there; make one with: bayflower deploy init {folder}") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); restore it, or make a new deployment") from None


def write(deployment: Deployment) -> None:
    """Write deployment.json into its folder."""
    facts = {name: value for name, value in dataclasses.asdict(deployment).items() if name != "folder"}
    keys.new_file(deployment.folder / FILE, (json.dumps(facts, indent=2) + "\n").encode(), 0o644)


def init(
    folder: Path, *, clients: int, hosts: Sequence[str] = (), port: int = PORT, days: int = 365, name: str = "", image: str = "",
    cpus: float = 1.0, memory: str = "2g",
) -> Deployment:  # fmt: skip
    """Make a deployment's folder with keys, certificates and compose files; return it. Nothing is overwritten."""
    from . import compose

    if clients < 1:
        raise ConfigError(f"clients must be at least 1, got {clients}")
    if days < 1:
        raise ConfigError(f"days must be at least 1, got {days}; it is how long the certificates are valid")
    if not 1 <= port <= 65535:
        raise ConfigError(f"port must be in 1 … 65535, got {port}")
    hosts = keys.check_hosts(hosts)
    name = name or f"bayflower-{re.sub('[^a-z0-9]+', '-', folder.resolve().name.lower()).strip('-') or 'federation'}"
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,50}", name):
        raise ConfigError(f"name must be at most 51 lower-case letters, digits, - and _, got {name!r}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already and is not overwritten; choose another folder, or remove it")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o755)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made ({error.strerror}); choose another folder") from None
    try:
        return fill(folder.resolve(), clients, hosts, port, days, name, image or f"bayflower:{__version__}", cpus, memory, compose.write)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # half a deployment is none
        raise


def fill(
    folder: Path, clients: int, hosts: list[str], port: int, days: int, name: str, image: str, cpus: float, memory: str, write_compose: Any
) -> Deployment:
    """Make everything below `folder`."""
    end = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)).strftime("%Y-%m-%d")
    uid, gid = (os.getuid(), os.getgid()) if os.getuid() else (CONTAINER_USER, CONTAINER_USER)
    whole = Deployment(
        name, "all", clients, tuple(hosts) or ("gate",), port, image, f"{uid}:{gid}", end, cpus=cpus, memory=memory, folder=folder
    )
    machines = [dataclasses.replace(whole, name=f"{name}-server", role="server", folder=folder / "server")]
    machines += [
        dataclasses.replace(whole, name=f"{name}-client-{k}", role="client", client=k, folder=folder / f"client-{k}")
        for k in range(clients)
    ]
    (folder / "ca").mkdir(mode=0o700)
    authority = keys.make_authority(folder / "ca", f"{name} authority", days)
    (folder / "server" / "nodes").mkdir(parents=True)
    keys.make_certificate(authority, folder / "server", "server", [*hosts, *INNER_HOSTS], days)
    for k in range(clients):
        own = folder / f"client-{k}"
        (own / "data").mkdir(parents=True)
        public = keys.make_node_key(own, f"{name} client-{k}")
        keys.new_file(folder / "server" / "nodes" / f"client-{k}.pub", public, 0o644)
        keys.make_certificate(authority, own, "runtime", [f"supernode-{k}", "supernode", "localhost", "127.0.0.1"], days)
    for machine in machines:
        keys.new_file(machine.folder / "ca.crt", (folder / "ca" / "ca.crt").read_bytes(), 0o644)
        keys.make_secret(machine.folder / "executor.secret")
        write(machine)
        if hosts:
            write_compose(machine)
    write(whole)
    if not hosts:
        write_compose(whole)
    if os.getuid() == 0:
        for path in (path for machine in machines for path in machine.folder.glob("*") if path.suffix in (".key", ".secret")):
            os.chown(path, uid, gid)
    return whole


def renew(deployment: Deployment, days: int) -> list[Path]:
    """Replace every certificate below the authority's folder by a new one of the same names; return what was written."""
    if deployment.role != "all" or not (deployment.folder / "ca" / "ca.key").exists():
        raise ConfigError(f"{deployment.folder} does not hold the authority's key; renew where the deployment was made")
    authority = keys.load_authority(deployment.folder / "ca")
    last = (keys.expiry(deployment.folder / "ca" / "ca.crt") - datetime.datetime.now(datetime.UTC)).days
    if days > last:
        raise ConfigError(f"the authority itself ends in {last} days; ask for at most that, or make a new deployment")
    done = []
    for folder, stem in [(deployment.server, "server"), *((own, "runtime") for own in deployment.client_folders().values())]:
        if not folder.exists():
            continue  # it was moved to its machine
        names = keys.names_of(folder / f"{stem}.crt")
        owner = (folder / f"{stem}.key").stat()
        fresh = folder / ".renewed"
        fresh.mkdir()
        keys.make_certificate(authority, fresh, stem, names, days)
        for suffix in (".key", ".crt"):
            os.chown(fresh / f"{stem}{suffix}", owner.st_uid, owner.st_gid) if suffix == ".key" else None
            (fresh / f"{stem}{suffix}").replace(folder / f"{stem}{suffix}")
        fresh.rmdir()
        done.append(folder / f"{stem}.crt")
    return done
