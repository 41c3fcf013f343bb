"""A federation of containers to break things in: start it, wait for a moment of a round, kill, cut,
slow down, fill.

Needs root on the machine of the Docker engine: processes are killed as a crash would, not asked,
and links are slowed in a container's network namespace.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from bayflower.deploy import docker, folders, layout
from bayflower.errors import BayflowerError
from bayflower.files import checkpoint

POSITIONS = ("before", "during", "after")  # local training of the victim in the round
IMPORTS = """
import time
import flwr.supernode.runtime.run_clientapp, bayflower.client_app
print(time.process_time())
"""
WAIT_SECONDS = 360.0
# where ip and tc are, for whoever calls
TOOLS = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}


def lacking() -> list[str]:
    """Return which programs for slowing links are not on this machine."""
    return [
        tool for tool in ("nsenter", "ip", "tc") if shutil.which(tool, path=TOOLS["PATH"]) is None
    ]


class Lab:
    """A deployment in containers; `small` clients keep their states on
    a disk of that many bytes.
    """

    def __init__(
        self,
        folder: Path,
        clients: int,
        settings: dict[str, Any],
        small: dict[int, int] | None = None,
    ) -> None:
        self.folder, self.settings = folder, {"num_clients": clients, "device": "cpu", **settings}
        if not folder.exists():
            folders.init(folder, clients=clients)
            self.change(small or {})
        self.deployment = layout.read(folder)
        self.docker = docker.client()
        self.name = ""  # of the run that is being broken

    def change(self, small: dict[int, int]) -> None:
        """Give some clients a small disk."""
        file = self.folder / "compose.yaml"
        content = yaml.safe_load(file.read_text())
        for client, size in small.items():
            content["volumes"][f"state-{client}"] = {
                "driver": "local",
                "driver_opts": {"type": "tmpfs", "device": "tmpfs", "o": f"size={size},mode=1777"},
            }
        file.write_text(yaml.safe_dump(content, sort_keys=False))

    def __enter__(self) -> Lab:
        docker.up(self.deployment)
        return self

    def __exit__(self, *_: object) -> None:
        docker.compose(self.deployment, "down", "--volumes", "--timeout", "5")

    # -- runs -------------------------------------------------------------------------------------
    def submit(self, name: str, *more: str) -> subprocess.Popen[str]:
        """Start `bayflower deploy submit`."""
        sets = (
            []
            if "--resume" in more
            else ["fedmap", *(w for k, v in self.settings.items() for w in ("--set", f"{k}={v}"))]
        )
        words = [
            sys.executable,
            "-m",
            "bayflower",
            "deploy",
            "submit",
            str(self.folder),
            *sets,
            "--name",
            name,
            "--json",
            *more,
        ]
        return subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            stdin=subprocess.DEVNULL,
        )

    def finish(self, process: subprocess.Popen[str], seconds: float = 600.0) -> tuple[int, str]:
        """Return the exit code of a submission and the last line it said."""
        try:
            _, said = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return 124, f"no end within {seconds:.0f} s"
        lines = said.strip().splitlines()
        return process.returncode, lines[-1] if lines else ""

    def results(self, name: str) -> Path:
        """Return where a run's results lie on this machine."""
        return self.volume("results") / name

    def result(self, name: str) -> dict[str, Any]:
        """Return a run's result.json."""
        return dict(json.loads((self.results(name) / "result.json").read_text()))

    def round(self, name: str) -> int:
        """Return the last round a run has completed."""
        try:
            known = checkpoint.read(self.results(name))
        except BayflowerError:
            return 0
        return known.round if known else 0

    # -- looking in -------------------------------------------------------------------------------
    def volume(self, name: str) -> Path:
        """Return the folder of a volume on this machine."""
        return Path(self.docker.volumes.get(f"{self.deployment.name}_{name}").attrs["Mountpoint"])

    def container(self, service: str) -> Any:
        """Return the container of a service, running or not."""
        labels = [
            f"com.docker.compose.project={self.deployment.name}",
            f"com.docker.compose.service={service}",
        ]
        return self.docker.containers.list(all=True, filters={"label": labels})[0]

    def pids(self, service: str, word: str = "") -> list[int]:
        """Return the processes of a container whose command line has `word`, as this machine
        numbers them.
        """
        try:
            rows = self.container(service).top(ps_args="-eo pid,args")["Processes"] or []
        except Exception:  # it is just being restarted
            return []
        return [int(row[0]) for row in rows if word in row[-1]]

    def states(self, client: int, name: str) -> dict[int, Path]:
        """Return the state files of a client for a run, by round."""
        known = (
            checkpoint.read(self.results(name))
            if (self.results(name) / checkpoint.FILE).exists()
            else None
        )
        if known is None:
            return {}
        files = (self.volume(f"state-{client}") / known.run / f"client-{client}").glob(
            "round-*.safetensors"
        )
        return {int(file.stem.split("-")[1]): file for file in files}

    def wait_for(
        self,
        what: Callable[[], Any],
        process: subprocess.Popen[str] | None = None,
        seconds: float = WAIT_SECONDS,
    ) -> Any:
        """Return what `what()` returns once it is true."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := what():
                return found
            if process is not None and process.poll() is not None:
                raise RuntimeError(
                    f"the run ended before its time: {process.communicate()[1][-500:]}"
                )
            time.sleep(0.05)
        raise RuntimeError("the moment did not come")

    def wait_for_position(
        self, position: str, name: str, client: int, round: int, process: subprocess.Popen[str]
    ) -> None:
        """Return when `client` is about to train, trains, or has just trained in `round`."""
        self.wait_for(lambda: self.round(name) >= round - 1, process)
        if position == "during":
            self.wait_for(
                lambda: any(
                    cpu(pid) > import_seconds()
                    for pid in self.pids(f"clientapp-{client}", "flwr-clientapp")
                ),
                process,
            )
        if position == "after":
            self.wait_for(lambda: round in self.states(client, name), process)

    def healthy(self) -> None:
        """Return when every container works and every client is online."""
        docker.up(self.deployment)
        words = [sys.executable, "-m", "bayflower", "deploy", "status", str(self.folder), "--json"]

        def all_online() -> bool:
            said = subprocess.run(words, capture_output=True, text=True).stdout
            with contextlib.suppress(ValueError):
                states = json.loads(said)["clients"]
                return [states.get(f"client-{k}") for k in range(self.deployment.clients)] == [
                    "online"
                ] * self.deployment.clients
            return False

        self.wait_for(all_online)

    # -- breaking ---------------------------------------------------------------------------------
    def crash(self, service: str) -> None:
        """Kill a container's first process, as the kernel would; its
        restart policy brings it back.
        """
        os.kill(int(self.container(service).attrs["State"]["Pid"]), signal.SIGKILL)

    def crash_app(
        self, service: str, word: str, process: subprocess.Popen[str], seconds: float = 30.0
    ) -> str:
        """Kill an app's process; wait for one if there is none yet."""
        with contextlib.suppress(RuntimeError):
            for pid in self.wait_for(lambda: self.pids(service, word), process, seconds):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return ""
        return "no such process was left"

    @contextlib.contextmanager
    def cut(self, client: int) -> Iterator[None]:
        """Take a client's SuperNode off the network to the server."""
        network = self.docker.networks.get(f"{self.deployment.name}_federation")
        container = self.container(f"supernode-{client}")
        network.disconnect(container)
        try:
            yield
        finally:
            network.connect(container, aliases=[f"supernode-{client}"])

    def slow(self, client: int, rate: str) -> None:
        """Limit what a SuperNode sends to the server to `rate`."""
        container = self.container(f"supernode-{client}")
        address = container.attrs["NetworkSettings"]["Networks"][
            f"{self.deployment.name}_federation"
        ]["IPAddress"]
        enter = ["nsenter", "-t", str(container.attrs["State"]["Pid"]), "-n"]
        links = json.loads(
            subprocess.run(
                [*enter, "ip", "-j", "addr"], capture_output=True, text=True, check=True, env=TOOLS
            ).stdout
        )
        device = next(
            link["ifname"]
            for link in links
            if any(one.get("local") == address for one in link["addr_info"])
        )
        subprocess.run(
            [
                *enter,
                "tc",
                "qdisc",
                "replace",
                "dev",
                device,
                "root",
                "tbf",
                "rate",
                rate,
                "burst",
                "4kb",
                "latency",
                "2s",
            ],
            check=True,
            env=TOOLS,
        )

    def fast(self, client: int) -> None:
        """Take the limit off again."""
        enter = [
            "nsenter",
            "-t",
            str(self.container(f"supernode-{client}").attrs["State"]["Pid"]),
            "-n",
        ]
        for device in ("eth0", "eth1"):
            subprocess.run(
                [*enter, "tc", "qdisc", "del", "dev", device, "root"],
                capture_output=True,
                env=TOOLS,
            )

    def fill(self, client: int) -> Path:
        """Fill a client's disk; return the file to remove."""
        filler = self.volume(f"state-{client}") / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(b"\0" * 4096)
        return filler


@functools.cache
def import_seconds() -> float:
    """Return the CPU time after which a ClientApp is training: its imports on this machine, and a
    bit more.
    """
    said = subprocess.run([sys.executable, "-c", IMPORTS], check=True, capture_output=True).stdout
    return 0.3 + 1.1 * float(said)


def cpu(pid: int) -> float:
    """Return the seconds a process has computed."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
