"""The ray and deployment engines: they start, watch and stop Flower's own programs for one run.

The programs run in a temporary folder, so that Flower's workers cannot load another app by
accident. They use free ports and install nothing at run time. All processes carry a mark in their
environment, by which a guard finds and ends those that outlive the run, even if the run is killed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from .. import methods
from ..errors import BayflowerError, ConfigError
from ..files.children import MARK, clear, end, end_with_parent, start_guard, terminable
from ..files.texts import read_json
from ..networks.own import home
from .app import folded
from .bundle import write_app
from .control import flwr_json, run_status, submit

START_SECONDS = 300.0  # on a busy machine; a program that has died is reported at once
SILENT_SECONDS = 120.0  # timeout for the start of the ServerApp
RESTARTS = 5  # cap on restarts of one SuperNode
ASK_SECONDS = 20.0  # interval of status queries: each starts a Python process that imports Flower


class Flower:
    """A SuperLink on loopback and, for deployment, one SuperNode a client; a context manager that
    leaves nothing behind.
    """

    def __init__(
        self,
        engine: str,
        clients: int,
        out: Path,
        port: int = 0,
        state_dir: Path | None = None,
        search: str | None = None,
    ) -> None:
        self.engine, self.clients, self.out = engine, clients, out
        self.state_dir = state_dir or out / "state"
        self.port = check_port(port) if port else free_port()
        self.mark = uuid.uuid4().hex
        self.folder = Path(tempfile.mkdtemp(prefix="bayflower-"))
        self.guard: subprocess.Popen[bytes] | None = None
        self.superlink: subprocess.Popen[bytes] | None = None
        self.supernodes: dict[int, subprocess.Popen[bytes]] = {}
        self.restarts: dict[int, int] = {}
        self.env = {
            **environment(self.mark, self.folder / "home", engine, search),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": str(self.folder),
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        }

    def __enter__(self) -> Flower:
        try:
            note = self.out / "logs" / "mark"
            # processes left by a killed run in this folder would still write to it
            if note.exists():
                end(note.read_text().strip())
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(self.mark)
            self.guard = start_guard(self.mark, self.folder)
            (self.folder / "home").mkdir()
            (self.folder / "home" / "config.toml").write_text(
                '[superlink]\ndefault = "bayflower"\n\n[superlink.bayflower]\naddress = '
                f'"127.0.0.1:{self.port}"\ninsecure = true\n'
            )
            extra = ["--simulation"] if self.engine == "ray" else []
            self.superlink = self.start(
                "superlink",
                [
                    "flower-superlink",
                    "--insecure",
                    "--host",
                    "127.0.0.1",
                    "--port",
                    str(self.port),
                    *extra,
                ],
            )
            self.wait_for_superlink()
            if self.engine == "deployment":
                for client in range(self.clients):
                    self.start_supernode(client)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self, name: str, words: list[str]) -> subprocess.Popen[bytes]:
        """Return the started program, which ends with this process; its output goes to a log in the
        run's folder.
        """
        return launch(
            words, self.env, self.folder, self.out / "logs" / f"{name}.log", end_with_parent
        )

    def start_supernode(self, client: int) -> None:
        """Start the SuperNode of a client."""
        node = f'partition-id={client} num-partitions={self.clients} state-dir="{self.state_dir}"'
        words = [
            "flower-supernode",
            "--insecure",
            "--superlink",
            f"127.0.0.1:{self.port}",
            "--node-config",
            node,
            "--host",
            "127.0.0.1",
            "--port",
            str(free_port()),
        ]
        self.supernodes[client] = self.start(f"supernode-{client}", words)

    def wait_for_superlink(self) -> None:
        """Return when the SuperLink answers."""
        assert self.superlink is not None
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.superlink.poll() is not None:
                raise BayflowerError(
                    f"the SuperLink failed to start (code {self.superlink.returncode}): "
                    f"{self.tail('superlink')}"
                )
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise BayflowerError(
            f"the SuperLink did not answer within {START_SECONDS:.0f} s: {self.tail('superlink')}"
        )

    def tail(self, name: str) -> str:
        """Return the last line of a log, and where the log is."""
        return last_line(self.out / "logs" / f"{name}.log")

    def watch(self) -> None:
        """Raise if the SuperLink is gone; start a SuperNode that is gone again."""
        if self.superlink is not None and self.superlink.poll() is not None:
            raise BayflowerError(
                f"the SuperLink ended (code {self.superlink.returncode}): {self.tail('superlink')}"
            )
        for client, process in list(self.supernodes.items()):
            if process.poll() is not None:
                self.restarts[client] = self.restarts.get(client, 0) + 1
                if self.restarts[client] > RESTARTS:
                    raise BayflowerError(
                        f"the SuperNode of client {client} failed {RESTARTS + 1} times: "
                        f"{self.tail(f'supernode-{client}')}"
                    )
                self.start_supernode(client)

    def flwr(self, *words: str) -> Any:
        """Return the JSON a flwr command prints."""
        return flwr_json(words, self.env, self.folder)

    def submit(self, app: Path, config: Mapping[str, Any]) -> str:
        """Start a run of `app` with `config`; return its id."""
        words = (
            ["--federation-config", f"num-supernodes={self.clients} client-resources-num-cpus=1"]
            if self.engine == "ray"
            else []
        )
        return submit(self.flwr, app, config, *words)

    def status(self, run: str) -> str:
        """Return e.g. "running", "finished:completed" or "finished:failed"."""
        return run_status(self.flwr, run)

    def stop(self) -> None:
        """End every process of this run: terminated first, then killed. Orphans are found by their
        mark.
        """
        started = [*self.supernodes.values(), *([self.superlink] if self.superlink else [])]
        for process in started:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + 10
        for process in started:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        clear(self.mark, self.folder)
        if self.guard is not None:  # all that it is for is done
            self.guard.kill()
            self.guard.communicate()


def run_app(
    engine: str,
    config: Mapping[str, Any],
    clients: int,
    out: Path,
    port: int,
    show: Callable[[dict[str, Any]], None],
    app: Path | None = None,
) -> None:
    """Run our app under Flower to its end; `show` receives its progress. Raises if the run failed,
    even if Flower's exit code is 0.
    """
    if engine == "ray" and importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "engine ray needs Ray, which is not installed; install it with: pip install "
            "'bayflower[simulation]'"
        )
    out = out.resolve()
    status_file = out / "status.json"
    status_file.unlink(missing_ok=True)
    search = home(str(config.get("model", "")))
    with terminable(), Flower(engine, clients, out, port, search=search) as flower:
        run = flower.submit(
            app or write_app(flower.folder / "app"), folded({**config, "out": str(out)})
        )
        follow(
            status_file,
            lambda: flower.status(run),
            show,
            flower.watch,
            lambda: flower.tail("superlink"),
        )


def follow(
    status_file: Path,
    state_of: Callable[[], str],
    show: Callable[[dict[str, Any]], None],
    watch: Callable[[], None],
    said: Callable[[], str],
) -> None:
    """Return when the run has finished; raise if `status_file` or Flower (`state_of`) reports a
    failure.
    """
    asked = begun = time.monotonic()
    while True:
        watch()
        known = read_json(status_file)
        if known.get("state") in ("finished", "failed"):
            break
        show(known)
        if time.monotonic() - asked > ASK_SECONDS:
            try:
                state = state_of()
            except BayflowerError as error:
                raise BayflowerError(f"Flower does not answer ({error}): {said()}") from None
            asked = time.monotonic()
            if not known and state != "running" and time.monotonic() - begun > SILENT_SECONDS:
                raise BayflowerError(
                    f"the ServerApp did not start within {SILENT_SECONDS:.0f} s: {said()}"
                )
            if state.startswith("finished") and read_json(status_file).get("state") not in (
                "finished",
                "failed",
            ):
                raise BayflowerError(f"the run ended as {state} without a result: {said()}")
        time.sleep(0.3)
    if known["state"] == "failed":
        raise (ConfigError if known.get("kind") == "ConfigError" else BayflowerError)(
            known["reason"]
        )
    show(known)


def environment(mark: str, home: Path, engine: str, search: str | None = None) -> dict[str, str]:
    """Return the environment of Flower's programs: this process's, with the mark, and without
    telemetry or installations. `search` has the folders of a user's network.
    """
    paths = [*os.environ.get("PYTHONPATH", "").split(os.pathsep), search or ""]
    return {
        **os.environ,
        **({"PYTHONPATH": os.pathsep.join(filter(None, paths))} if search else {}),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        MARK: mark,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "BAYFLOWER_ENGINE": engine,
        "OPENBLAS_NUM_THREADS": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "PYTHONWARNINGS": "ignore",
        **methods.handed_on(),
    }


def launch(
    words: list[str],
    env: Mapping[str, str],
    folder: Path,
    log_file: Path,
    before: Callable[[], None] | None = None,
) -> subprocess.Popen[bytes]:
    """Return a program started in its own session; its output is appended to `log_file`."""
    program = shutil.which(words[0], path=env["PATH"])
    if program is None:
        raise ConfigError(
            f"{words[0]} is not installed; install Flower with: pip install 'bayflower[simulation]'"
        )
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("ab") as log:
        return subprocess.Popen(
            [program, *words[1:]],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=before,
        )


def last_line(path: Path) -> str:
    """Return the last line of a log that is more than a request served, and where the log is."""
    written = path.read_text(errors="replace").splitlines() if path.exists() else []
    lines = [line for line in written if line.strip() and "[uvicorn.access]" not in line]
    return f"{lines[-1].strip() if lines else 'nothing was printed'} (see {path})"


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def check_port(port: int) -> int:
    """Return `port`; raise if it is no port or in use."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"port must be in [0, 65535], got {port}")
    with socket.socket() as sock:
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigError(
                f"port {port} cannot be used ({error.strerror}); choose another with --port, or 0 "
                "for any free one"
            ) from None
    return port
