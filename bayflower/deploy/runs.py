"""Runs of a deployment: submit them, follow them to their true outcome, resume them after a
failure.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import BayflowerError, ConfigError
from ..files.texts import read_json, write_json
from ..flower import control, processes
from ..flower.bundle import write_app
from .layout import UPPER
from .server import Server

RECORD = "submission.json"
POLL_SECONDS = 2.0
ENDS_SECONDS = 90.0  # timeout for a stopped run to end


def run_folder(server: Server, name: str) -> Path:
    """Return the folder of a run's results; without a name, that of the newest run."""
    if name:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}", name):
            raise ConfigError(f"name must consist of letters, digits, '.', - and _, got {name!r}")
        return server.results / name
    found = sorted(server.results.glob(f"*/{RECORD}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ConfigError(
            "no run was submitted yet; start one with: bayflower deploy submit DIR METHOD"
        )
    return found[-1].parent


def config_of(
    server: Server, method: str, given: Mapping[str, Any]
) -> tuple[dict[str, Any], str, int]:
    """Return the run-config, the run's name, and the number of clients it needs; raise if a setting
    is invalid.
    """
    from .. import methods
    from ..config import parse
    from ..files.place import usual_folder
    from ..flower.bundle import APP_KEYS
    from ..flower.regions.joining import refuse

    ours = {key: value for key, value in given.items() if key in APP_KEYS}
    settings = {
        "num_clients": server.deployment.everyone(),
        "device": "cpu",
        **{key: given[key] for key in given if key not in APP_KEYS},
    }
    run = parse(method, settings)
    needed = int(ours.get("min_nodes") or run.data.total_clients)
    if needed > (there := server.deployment.everyone()):
        raise ConfigError(
            f"the run needs {needed} clients, but the deployment has {there}; lower num_clients, "
            "or add clients"
        )
    if server.deployment.kind == UPPER:
        refuse(methods.get(method), run.limits, run.privacy, run.aggregation.buffered)
        ours["tree"] = True
    return {**settings, **ours, "method": method}, usual_folder(run).name, needed


def wait_for_clients(
    server: Server, needed: int, wait: float, note: Callable[[str], None], watch: Callable[[], None]
) -> None:
    """Return when enough clients are online; report which are missing."""
    deadline, what = time.monotonic() + wait, "clients"
    if server.deployment.kind == UPPER:  # which of their clients are there, regions say in the run
        needed, what = server.deployment.clients, "regions"
    said: list[str] = []
    while True:
        missing = [server.deployment.called(name) for name in server.missing()]
        present = server.deployment.clients - len(missing)
        if present >= needed:
            return
        text = f"{present} of {needed} {what} are online; missing: {', '.join(missing)}"
        if time.monotonic() > deadline:
            raise BayflowerError(
                f"{text}; start them on their machines (bayflower deploy up), or ask for fewer "
                f"with --set num_clients={present}"
            )
        if said != missing:
            note(f"{text}; waiting {deadline - time.monotonic():.0f} s for them")
            said = missing
        watch()
        time.sleep(POLL_SECONDS)


def submit(
    server: Server,
    method: str,
    given: Mapping[str, Any],
    *,
    name: str = "",
    resume: bool = False,
    overwrite: bool = False,
    wait: float = 120.0,
    detach: bool = False,
    show: Callable[[dict[str, Any]], None] = lambda status: None,
    note: Callable[[str], None] = lambda text: None,
    watch: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Run a method on the deployment's clients and return result.json's content; raise if the run
    failed, even if Flower reports success.
    """
    from ..files import place  # which imports torch

    usual = "" if resume or name else config_of(server, method, given)[1]
    folder = run_folder(server, name or usual)
    calls: dict[str, Any] = {"wait": wait, "detach": detach}
    calls |= {"show": show, "note": note, "watch": watch}
    with place.making(folder):  # one command a run: a second one is told who has it
        return submitted(server, folder, method, given, resume, overwrite, **calls)


def submitted(
    server: Server,
    folder: Path,
    method: str,
    given: Mapping[str, Any],
    resume: bool,
    overwrite: bool,
    *,
    wait: float,
    detach: bool,
    show: Callable[[dict[str, Any]], None],
    note: Callable[[str], None],
    watch: Callable[[], None],
) -> dict[str, Any]:
    """Return the result of a run in `folder`, which this process holds."""
    if resume:
        record = read_json(folder / RECORD)
        if not record:
            raise ConfigError(
                f"there is nothing to resume in {folder.name}; start without --resume"
            )
        config, needed = {**record["config"], **given}, int(record["needed"])
        finish(server, str(record["run"]))
        result = read_json(folder / "result.json")
        if result and len(result["rounds"]) >= int(config.get("rounds") or 0):
            return result
        keep_result(folder, note)
    else:
        config, _, needed = config_of(server, method, given)
        free_folder(folder, overwrite, note)
    wait_for_clients(server, needed, wait, note, watch)
    (folder / "status.json").unlink(missing_ok=True)
    work = Path(tempfile.mkdtemp(prefix="bayflower-app-"))
    try:
        app = write_app(work / "app")
        from ..flower.app import folded  # which imports torch

        whole = folded({**config, "resume": resume, "out": str(folder)})
        run = control.submit(server.flwr, app, whole)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    write_json(
        folder / RECORD, {"run": run, "name": folder.name, "needed": needed, "config": config}
    )
    note(f"run {run} of {config['method']} started as {folder.name}")
    if detach:
        return {}
    follow(server, folder, run, show, watch)
    return json.loads((folder / "result.json").read_text())


def keep_result(folder: Path, note: Callable[[str], None]) -> None:
    """Copy the result of a finished run, which another one may replace."""
    result = folder / "result.json"
    if not result.exists():
        return
    copies = (folder / f"result-before-{number}.json" for number in range(1, 10**6))
    kept = next(path for path in copies if not path.exists())
    shutil.copy2(result, kept)
    note(f"the result that is there is kept as {kept.name}")


def free_folder(folder: Path, overwrite: bool, note: Callable[[str], None]) -> None:
    """Raise if a folder holds a run, finished or not, that nobody asked to replace; keep its result
    if somebody did.
    """
    from ..files import place

    if overwrite:
        keep_result(folder, note)
        place.clear(folder)
    elif (there := place.held(folder)) is not None:
        what = (
            "a finished run"
            if there.finished
            else f"a run that stopped after round {there.round} of {there.config['rounds']}"
        )
        new = place.next_free(folder).name
        raise ConfigError(
            f"{folder.name} holds {what}; go on from it with --resume --name {folder.name}, make a "
            f"new one with --name {new}, or add --overwrite to replace it"
        )


def follow(
    server: Server,
    folder: Path,
    run: str,
    show: Callable[[dict[str, Any]], None],
    watch: Callable[[], None],
) -> None:
    """Return when a run has finished; raise if it failed."""
    processes.follow(
        folder / "status.json",
        lambda: control.run_status(server.flwr, run),
        show,
        watch,
        lambda: "see: bayflower deploy logs DIR; go on with: bayflower deploy submit DIR --resume",
    )


def finish(server: Server, run: str) -> None:
    """Stop a run that is still active, so that two runs never write to one folder."""
    deadline = time.monotonic() + ENDS_SECONDS
    asked = False
    while time.monotonic() < deadline:
        try:
            if control.run_status(server.flwr, run).startswith("finished"):
                return
        except (BayflowerError, KeyError, IndexError):
            return  # the SuperLink has lost the run
        if not asked:
            server.flwr("stop", run, "bayflower")
            asked = True
        time.sleep(POLL_SECONDS)
    raise BayflowerError(
        f"run {run} did not stop; restart the SuperLink with: bayflower deploy down DIR, then up"
    )


def rounds_of(server: Server, method: str, name: str, resume: bool) -> int:
    """Return how many rounds a run will have, for the progress bar."""
    from ..config import parse

    if not resume:
        return parse(method, {}).settings.rounds
    record = read_json(run_folder(server, name) / RECORD)
    return (
        int(record["config"].get("rounds") or parse(record["config"]["method"], {}).settings.rounds)
        if record
        else 0
    )


def overview(server: Server) -> dict[str, Any]:
    """Return the status of a deployment: which clients are online, and the state of the newest
    run.
    """
    nodes = {server.deployment.called(name): state for name, state in server.nodes().items()}
    facts: dict[str, Any] = {"name": server.deployment.name, "clients": nodes, "run": None}
    try:
        folder = run_folder(server, "")
    except ConfigError:
        return facts
    record, status = read_json(folder / RECORD), read_json(folder / "status.json")
    try:
        state = control.run_status(server.flwr, str(record["run"]))
    except (BayflowerError, KeyError, IndexError):
        state = "unknown to the SuperLink"
    if status.get("state") in ("finished", "failed"):
        state = f"finished:{'completed' if status['state'] == 'finished' else 'failed'}"
    facts["run"] = {
        "id": record["run"],
        "name": folder.name,
        "method": record["config"]["method"],
        "state": state,
        "round": status.get("completed") or last_round(folder),
        "rounds": record["config"].get("rounds"),
        "reason": status.get("reason"),
        "names": status.get("names") or last_names(folder),
    }
    return facts


def last_names(folder: Path) -> dict[str, str]:
    """Return the names of clients by number in result.json, if there is one."""
    known = read_json(folder / "result.json").get("clients") or []
    return {str(one["client"]): str(one["name"]) for one in known}


def last_round(folder: Path) -> int | None:
    """Return the number of rounds in result.json, if there is one."""
    result = read_json(folder / "result.json")
    return len(result["rounds"]) if result else None


def failed(facts: Mapping[str, Any]) -> bool:
    """Return whether the newest run ended without a result."""
    run = facts["run"]
    return run is not None and (
        run["state"] not in ("finished:completed", "pending", "starting", "running")
    )
