"""Access to a deployment's SuperLink through `flwr`: status of the clients, and registration of
node keys.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import BayflowerError, ConfigError
from ..files.texts import read_json, write_json
from ..flower import control, processes
from .layout import Deployment

INSIDE = "BAYFLOWER_INSIDE"  # set in the SuperLink's container: the folder of results
IN_USE = "already in use"
LOST = (
    "{} lacks the nodes of {}, whose keys the SuperLink knows: the file was lost, and these "
    "clients can neither be named nor refused; register all keys anew with: bayflower deploy "
    "register DIR --anew"
)


class Server(NamedTuple):
    """A SuperLink as `flwr` reaches it."""

    deployment: Deployment
    results: Path  # one folder a run
    work: Path  # working folder of flwr
    env: Mapping[str, str]

    def flwr(self, *words: str) -> Any:
        """Return the JSON a flwr command prints."""
        return control.flwr_json(words, self.env, self.work)

    def nodes(self) -> dict[str, str]:
        """Return the status of every registered client by name: "online", "offline", …"""
        known = {
            str(number): name for name, number in read_json(self.results / "nodes.json").items()
        }
        listed = self.flwr("supernode", "list")
        if not listed.get("success"):
            raise BayflowerError(
                f"the SuperLink does not answer: {listed.get('error-message') or listed}"
            )
        online = {
            str(node["node-id"]): str(node["status"])
            for node in listed["nodes"]
            if node["status"] != "unregistered"
        }
        return {known.get(number, f"node {number}"): status for number, status in online.items()}

    def missing(self) -> list[str]:
        """Return the clients that are not online."""
        states = self.nodes()
        if lost := self.lost(states):
            raise BayflowerError(lost)
        # a trial without TLS registers no keys, so nodes have no names
        if not (self.deployment.server / "nodes").exists():
            return [
                f"client-{k}"
                for k in range(
                    sum(state == "online" for state in states.values()), self.deployment.clients
                )
            ]
        return [
            f"client-{k}"
            for k in self.deployment.numbers()
            if states.get(f"client-{k}") != "online"
        ]

    def lost(self, states: Mapping[str, str]) -> str:
        """Return what to do if nodes.json lacks clients that the SuperLink knows; '' if not."""
        path, known = self.results / "nodes.json", read_json(self.results / "nodes.json")
        keys = sorted(file.stem for file in (self.deployment.server / "nodes").glob("client-*.pub"))
        gone = [name for name in keys if name not in known]
        unnamed = any(name.startswith("node ") for name in states)
        return LOST.format(path, ", ".join(gone)) if gone and unnamed else ""


def inside() -> bool:
    """Return whether this process runs in the container beside the SuperLink."""
    return INSIDE in os.environ


def server_inside(deployment: Deployment) -> Server:
    """Return the SuperLink of the container this process runs in."""
    home = Path(os.environ.get("FLWR_HOME", "/tmp/flwr"))
    secure = (deployment.folder / "server.crt").exists()
    write_connection(home, "superlink:9091", deployment.folder / "ca.crt" if secure else None)
    return Server(
        deployment,
        Path(os.environ[INSIDE]),
        Path("/tmp"),
        processes.environment("", home, "deployment"),
    )


def write_connection(home: Path, address: str, authority: Path | None) -> None:
    """Write Flower's configuration with one connection, named bayflower."""
    home.mkdir(parents=True, exist_ok=True)
    how = f'root-certificates = "{authority}"' if authority else "insecure = true"
    (home / "config.toml").write_text(
        '[superlink]\ndefault = "bayflower"\n\n[superlink.bayflower]\naddress = '
        f'"{address}"\n{how}\n'
    )


def register(server: Server, note: Callable[[str], None], anew: bool = False) -> None:
    """Register every client's public key with the SuperLink, once; nodes.json records the node of
    each client. With `anew`, nodes that nodes.json does not name are refused first: if it was lost,
    all keys are then registered again.
    """
    path = server.results / "nodes.json"
    known: dict[str, Any] = read_json(path)
    if anew:
        for name in [one for one in server.nodes() if one.startswith("node ")]:
            answer = server.flwr("supernode", "unregister", name.split()[1], "bayflower")
            if not answer.get("success"):
                why = answer.get("error-message") or answer
                raise BayflowerError(f"{name} cannot be unregistered: {why}")
            note(f"{name}, which nodes.json did not name, is refused from now on")
    listed = server.flwr("supernode", "list")
    present = {
        str(node["node-id"]) for node in listed.get("nodes", []) if node["status"] != "unregistered"
    }
    for key in sorted(
        (server.deployment.server / "nodes").glob("client-*.pub"),
        key=lambda file: int(file.stem.split("-")[1]),
    ):
        if str(known.get(key.stem)) in present:
            continue
        answer = server.flwr(
            "supernode", "register", str(key), "bayflower", "--name", f"{key.stem}"
        )
        if answer.get("success"):
            known[key.stem] = str(answer["node-id"])
            write_json(path, known)
            note(f"registered the key of {key.stem}")
        elif IN_USE not in str(answer):
            raise BayflowerError(
                f"{key.name} cannot be registered: {answer.get('error-message') or answer}"
            )
    if lost := server.lost(server.nodes()):
        note(lost)


def unregister(server: Server, client: int) -> None:
    """Refuse a client's key from now on; the client can then get a new one."""
    path = server.results / "nodes.json"
    known: dict[str, Any] = read_json(path)
    number = known.pop(f"client-{client}", None)
    if number is None and (lost := server.lost(server.nodes())):
        raise ConfigError(lost)
    if number is None:
        raise ConfigError(f"client {client} is not registered; see: bayflower deploy status")
    answer = server.flwr("supernode", "unregister", str(number), "bayflower")
    if not answer.get("success"):
        raise BayflowerError(
            f"client {client} cannot be unregistered: {answer.get('error-message') or answer}"
        )
    write_json(path, known)
