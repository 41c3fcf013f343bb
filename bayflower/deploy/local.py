"""A deployment's programs as processes of this machine: TLS and node keys as in containers, without
Docker.

They write to DIR/local (database, results, logs); a client writes to its own folder (`state`). They
keep running after the command that started them. Each carries a mark in its environment, by which
`down` finds it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import ssl
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import BayflowerError
from ..files.audit import VARIABLE
from ..files.children import end, marked
from ..files.texts import read_json, write_json
from ..files.vault import VARIABLE as KEY_VARIABLE
from ..flower import processes
from . import regional
from .layout import ABOVE, AUDIT, PEERS, POLICY, REGION, STATE_KEY, UPPER, Deployment
from .server import Server, register, write_connection

START_SECONDS = 300.0  # on a busy machine; a program that has died is reported at once
AGAIN_SECONDS = 5.0  # shortest time between two starts of the same program
WELCOME = "SuperNode ID"  # a SuperNode prints this once the SuperLink has accepted it
# after a restart the SuperLink refuses a node's key until its last heartbeat is 60 s old
JOIN_SECONDS = 150.0


class Local:
    """The processes of one deployment on this machine."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.folder = deployment.folder / "local"
        self.facts: dict[str, Any] = {
            "mark": uuid.uuid4().hex,
            "superlink": 0,
            "gate": 0,
            "pids": {},
        }
        self.facts.update(read_json(self.folder / "local.json"))
        self.env = {
            **processes.environment(self.facts["mark"], self.folder / "home", "deployment"),
            VARIABLE: str(self.folder / "results" / AUDIT),
        }
        self.started: dict[str, float] = {}

    # -- what is there ----------------------------------------------------------------------------
    def names(self) -> list[str]:
        """Return the programs this machine should run, in the order of their start."""
        server = ["superlink", "gate"] if self.deployment.has_server() else []
        region = [ABOVE, "keeper"] if self.deployment.kind == REGION and server else []
        return [
            *server,
            *region,
            *(f"supernode-{client}" for client in self.deployment.client_folders()),
        ]

    def alive(self, name: str) -> bool:
        """Return whether a program runs; an unrelated process that reuses its id does not count."""
        pid = self.facts["pids"].get(name)
        with contextlib.suppress(ChildProcessError):
            # reaps a child process that has ended, which would stay a zombie otherwise
            os.waitpid(pid or -1, os.WNOHANG)
        return pid in marked(self.facts["mark"])

    def any_alive(self) -> bool:
        """Return whether anything of the deployment runs here."""
        return bool(marked(self.facts["mark"]))

    def server(self) -> Server:
        """Return the connection to the SuperLink."""
        return Server(self.deployment, self.folder / "results", self.folder, self.env)

    def said(self, name: str) -> str:
        """Return the last line a program printed."""
        return processes.last_line(self.folder / "logs" / f"{name}.log")

    # -- up and down ------------------------------------------------------------------------------
    def up(self, note: Callable[[str], None]) -> None:
        """Start the programs that are not running; return when all are healthy."""
        self.folder.mkdir(exist_ok=True)
        if self.deployment.has_server():
            self.start_server(note)
        for name in (ABOVE, "keeper"):
            if name in self.names() and not self.alive(name):
                note(f"starting the {'SuperNode' if name == ABOVE else 'keeper'} of this region")
                self.start(name)
        for client in self.deployment.client_folders():
            if not self.alive(f"supernode-{client}"):
                note(f"starting the SuperNode of client {client}")
                self.start(f"supernode-{client}")
        if self.deployment.role == "all" and self.deployment.kind != UPPER:
            self.wait_for_nodes(note)
        elif self.deployment.role == "client":
            self.wait_for_welcome(note)

    def start_server(self, note: Callable[[str], None]) -> None:
        """Start SuperLink and gate and register the clients' keys."""
        for port, inner in (("superlink", True), ("gate", self.deployment.role == "all")):
            if not self.alive(port) and not self.facts[port]:
                self.facts[port] = processes.free_port() if inner else self.deployment.port
        self.save()
        write_connection(
            self.folder / "home",
            f"127.0.0.1:{self.facts['superlink']}",
            self.deployment.server / "ca.crt",
        )
        for name in ("superlink", "gate"):
            if not self.alive(name):
                note(
                    f"starting the {'SuperLink' if name == 'superlink' else 'gate'} on port "
                    f"{self.facts[name]}"
                )
                self.start(name)
                self.wait_for_health(name)
        register(self.server(), note)

    def start(self, name: str) -> None:
        """Start one program."""
        words, env = self.words(name), self.env
        if self.deployment.encrypt and name.startswith("supernode-"):
            own = self.deployment.client_folders()[int(name.split("-")[1])]
            env = {**env, KEY_VARIABLE: str(own / STATE_KEY)}
        process = processes.launch(words, env, self.folder, self.folder / "logs" / f"{name}.log")
        self.facts["pids"][name] = process.pid
        self.started[name] = time.monotonic()
        self.save()

    def words(self, name: str) -> list[str]:
        """Return a program's command line."""
        if name == "superlink":
            own = self.deployment.server
            return [
                sys.executable,
                "-m",
                "bayflower.deploy.superlink",
                "--host",
                "127.0.0.1",
                "--port",
                str(self.facts["superlink"]),
                "--database",
                str(self.folder / "superlink.db"),
                "--enable-supernode-auth",
                "--ssl-ca-certfile",
                str(own / "ca.crt"),
                "--ssl-certfile",
                str(own / "server.crt"),
                "--ssl-keyfile",
                str(own / "server.key"),
            ]
        if name == "gate":
            own = self.deployment.server
            return [
                sys.executable,
                "-m",
                "bayflower.deploy.gate",
                "--host",
                "127.0.0.1" if self.deployment.role == "all" else "0.0.0.0",
                "--port",
                str(self.facts["gate"]),
                "--superlink",
                f"127.0.0.1:{self.facts['superlink']}",
                "--nodes",
                str(own / "nodes"),
                "--certificate",
                str(own / f"{self.deployment.gate_stem()}.crt"),
                "--key",
                str(own / f"{self.deployment.gate_stem()}.key"),
                "--authority",
                str(own / "ca.crt"),
            ]
        if name == "keeper":
            words = ["deploy", "keep", str(self.deployment.folder), "--spool", str(self.spool)]
            return [sys.executable, "-m", "bayflower", *words]
        if name == ABOVE:
            own, audit = self.deployment.server / ABOVE, self.folder / "audit"
            node = regional.node_config(self.deployment, str(self.spool), str(audit))
            return self.supernode(own, audit, self.above(), node)
        client = int(name.split("-")[1])
        own = self.deployment.client_folders()[client]
        address = (
            f"127.0.0.1:{self.facts['gate']}"
            if self.deployment.role == "all"
            else self.deployment.address()
        )
        node = (
            f"partition-id={client} num-partitions={self.deployment.everyone()} "
            f'state-dir="{own / "state"}" data-dir="{own / "data"}" '
            f'audit-dir="{own / "audit"}" policy="{own / POLICY}"'
        )
        if (own / PEERS).exists():  # keys of the other sites, for secure sums
            node += f' peers="{own / PEERS}"'
        return self.supernode(own, own / "audit", address, node)

    @property
    def spool(self) -> Path:
        """The folder of a region's requests."""
        return self.folder / "spool"

    def above(self) -> str:
        """Return the address of the server above: on the same machine it has a free port."""
        beside = self.deployment.folder.parent / UPPER / "local" / "local.json"
        port = read_json(beside).get("gate") if self.deployment.network else 0
        return f"127.0.0.1:{port}" if port else self.deployment.above

    def supernode(self, own: Path, audit: Path, address: str, node: str) -> list[str]:
        """Return the command line of a SuperNode whose files are in `own`."""
        return [
            sys.executable,
            "-m",
            "bayflower.deploy.supernode",
            "--policy",
            str(own / POLICY),
            "--audit-dir",
            str(audit),
            "--superlink",
            address,
            "--root-certificates",
            str(own / "ca.crt"),
            "--auth-supernode-private-key",
            str(own / "node.key"),
            "--node-config",
            node,
            "--host",
            "127.0.0.1",
            "--port",
            str(processes.free_port()),
        ]

    def save(self) -> None:
        """Save the list of started programs."""
        write_json(self.folder / "local.json", self.facts)

    def wait_for_health(self, name: str) -> None:
        """Return when a server answers over TLS with a certificate of ours."""
        context = ssl.create_default_context(cafile=str(self.deployment.server / "ca.crt"))
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if not self.alive(name):
                raise BayflowerError(f"the {name} failed to start: {self.said(name)}")
            try:
                with urllib.request.urlopen(
                    f"https://127.0.0.1:{self.facts[name]}/health", timeout=2, context=context
                ):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise BayflowerError(
            f"the {name} did not answer within {START_SECONDS:.0f} s: {self.said(name)}"
        )

    def wait_for_nodes(self, note: Callable[[str], None]) -> None:
        """Return when every SuperNode is online."""
        deadline = time.monotonic() + JOIN_SECONDS
        missing = self.server().missing()
        told = False
        while missing and time.monotonic() < deadline:
            self.keep_nodes()
            if not told and time.monotonic() - deadline > AGAIN_SECONDS * 2 - JOIN_SECONDS:
                note(f"waiting for {', '.join(missing)}")
                told = True
            time.sleep(1)
            missing = self.server().missing()
        if missing:
            raise BayflowerError(
                f"{missing[0]} did not come online within {JOIN_SECONDS:.0f} s: "
                f"{self.said(missing[0].replace('client', 'supernode'))}"
            )

    def wait_for_welcome(self, note: Callable[[str], None]) -> None:
        """Return when the server has accepted this machine's SuperNode."""
        name = f"supernode-{self.deployment.client}"
        log = self.folder / "logs" / f"{name}.log"
        deadline = time.monotonic() + JOIN_SECONDS
        while self.started.get(name) and WELCOME not in log.read_text(errors="replace"):
            if time.monotonic() > deadline:
                raise BayflowerError(
                    f"the server at {self.deployment.address()} did not accept the SuperNode: "
                    f"{self.said(name)}"
                )
            self.keep_nodes()
            time.sleep(0.5)

    def keep_nodes(self) -> None:
        """Restart SuperNodes and the gate if they have ended, at most every few seconds."""
        for name in self.names():
            if (
                name != "superlink"
                and not self.alive(name)
                and time.monotonic() - self.started.get(name, -AGAIN_SECONDS) >= AGAIN_SECONDS
            ):
                self.start(name)

    def watch(self) -> None:
        """Raise if the SuperLink has ended; restart other programs that have ended."""
        if not self.alive("superlink"):
            raise BayflowerError(
                f"the SuperLink ended: {self.said('superlink')}; continue the run with: bayflower "
                "deploy submit DIR --resume"
            )
        self.keep_nodes()

    def down(self) -> int:
        """End every process; return how many there were."""
        count = len([name for name in self.names() if self.alive(name)])
        for name in reversed(self.names()):
            if self.alive(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.facts["pids"][name], signal.SIGTERM)
        deadline = time.monotonic() + 10
        while any(self.alive(name) for name in self.names()) and time.monotonic() < deadline:
            time.sleep(0.1)
        end(self.facts["mark"])
        self.facts["pids"] = {}
        if self.folder.exists():
            self.save()
        return count


def local_of(deployment: Deployment) -> Local | None:
    """Return the deployment's processes if `up --local` was used here."""
    return Local(deployment) if (deployment.folder / "local" / "local.json").exists() else None
