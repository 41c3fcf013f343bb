"""Seconds of a whole round with secure sums next to a plain one, training included.

    python benchmarks/secure_rounds.py loop --data-dir DIR        50 clients, one after the other
    python benchmarks/secure_rounds.py processes --data-dir DIR   3 clients as processes over TLS
    python benchmarks/secure_rounds.py containers --data-dir DIR  3 clients in containers

writes benchmarks/results/secure_rounds_ENGINE.json. FedAvg trains the CNN of 0.58 M parameters on
Fashion-MNIST. Runs are made one after the other, each with its own settings alone; the first round,
in which clients show their cards and nodes fetch the app, is given apart. CPU seconds, which other
programs on the machine change little, are those of a whole run on `loop`, and of each round of all
programs on `processes`; containers are timed by the clock alone. With --repeats the ways take
turns, so that a busy hour hits all of them; the ratios are medians, each of runs that followed one
another.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from bayflower.config import parse
from bayflower.deploy import folders, runs
from bayflower.deploy.local import Local
from bayflower.engines import execute, prepare
from bayflower.files.children import marked
from bayflower.files.texts import write_json

RESULTS = Path(__file__).parent / "results"
SETTINGS = {
    "dataset": "fmnist",
    "model": "cnn",
    "partition": "iid",
    "batch_size": 32,
    "evaluate_every": 0,
    "calibration": "off",
    "robust": "off",
    "device": "cpu",
}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one limb": {"secure": "sum", "secure_limbs": 1},
    "two limbs": {"secure": "sum", "secure_limbs": 2},
}


def loop(settings: dict[str, Any]) -> dict[str, Any]:
    """Return wall seconds of each round, and CPU seconds of a whole run, in this process."""
    ready = prepare(parse("fedavg", settings), "loop")
    begin = time.process_time()
    done = execute(ready)
    found = [record["seconds"] for record in done.rounds]
    sent = {way: done.rounds[-1][way] for way in ("bytes_up", "bytes_down")}
    return {"seconds": found, "cpu": time.process_time() - begin, **sent, "faults": done.faults}


def spent(mark: str) -> float:
    """Return CPU seconds of a deployment's programs, with those of ended programs they started."""
    known, found = set(marked(mark)), 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended; its parent counts it
            continue
        ended = fields[0] == "Z" and int(fields[1]) in known  # its parent does not count it yet
        if ended or int(stat.parent.name) in known:
            found += sum(int(one) for one in fields[11:15])  # own seconds, and of ended children
    return found / os.sysconf("SC_CLK_TCK")


def processes(local: Local, settings: dict[str, Any], way: str) -> dict[str, Any]:
    """Return wall and CPU seconds of each round of a deployment."""
    name = f"{way.replace(' ', '-')}-{time.time():.0f}"
    mark = local.facts["mark"]
    seen = [spent(mark)]

    def look(status: dict[str, Any]) -> None:
        if status.get("completed", 0) >= len(seen):
            seen.append(spent(mark))

    result = runs.submit(local.server(), "fedavg", settings, name=name, show=look)
    return timed(result) | {
        "cpu_rounds": [after - before for before, after in itertools.pairwise(seen)]
    }


def timed(result: dict[str, Any]) -> dict[str, Any]:
    """Return wall seconds of each round of a deployment, bytes of the last, and faults."""
    return {
        "seconds": [record["seconds"] for record in result["rounds"]],
        **{key: result["rounds"][-1][key] for key in ("bytes_up", "bytes_down")},
        "faults": result["faults"],
    }


def deploy(*words: object) -> str:
    """Return what a command of `bayflower deploy` prints."""
    call = [sys.executable, "-m", "bayflower", "deploy", *map(str, words)]
    done = subprocess.run(call, capture_output=True, text=True, cwd="/")
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def contained(folder: Path, settings: dict[str, Any], way: str) -> dict[str, Any]:
    """Return wall seconds of each round of a deployment in containers."""
    name = f"{way.replace(' ', '-')}-{time.time():.0f}"
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    said = deploy("submit", folder, "fedavg", *sets, "--name", name, "--wait", 300, "--json")
    return timed(json.loads(said.strip().splitlines()[-1]))


def compared(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the measurements with their ratios to the plain run; rounds but the first."""
    later = {way: sum(one["seconds"][1:]) for way, one in found.items()}
    ratios = {way: value / later["plain"] for way, value in later.items()}
    cpu = {
        way: sum(one["cpu_rounds"][1:]) if "cpu_rounds" in one else one["cpu"]
        for way, one in found.items()
        if "cpu_rounds" in one or "cpu" in one
    }
    cpu_ratios = {way: value / cpu["plain"] for way, value in cpu.items()}
    return {"ways": found, "ratio": ratios, **({"cpu_ratio": cpu_ratios} if cpu else {})}


def in_turn(
    repeats: int, ways: dict[str, Any], measure: Callable[[str, dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """Return the measurements of runs that take turns, and medians of their ratios."""
    turns = []
    for _ in range(repeats):
        found: dict[str, dict[str, Any]] = {}
        for way, more in ways.items():
            found[way] = measure(way, more)
            print(way, json.dumps(found[way]), flush=True)
        turns.append(compared(found))
    keys: list[str] = [key for key in ("ratio", "cpu_ratio") if key in turns[0]]
    every = {key: {way: [one[key][way] for one in turns] for way in ways} for key in keys}
    medians = {key: {way: median(one) for way, one in every[key].items()} for key in keys}
    plain = turns[0]["ways"]["plain"]
    up = {way: one["bytes_up"] / plain["bytes_up"] for way, one in turns[0]["ways"].items()}
    return {"turns": turns, "all_ratios": every, **medians, "bytes_up_ratio": up}


def main() -> None:
    """Measure on one engine and write its file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", choices=["loop", "processes", "containers"])
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--clients", type=int, default=0)
    parser.add_argument("--samples", type=int, default=0, help="of one client")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=1, help="of all ways, in turn")
    parser.add_argument("--name", default="", help="of the file, after secure_rounds_")
    parser.add_argument("--ways", default=",".join(WAYS), help="of " + ", ".join(WAYS))
    given = parser.parse_args()
    clients = given.clients or (50 if given.engine == "loop" else 3)
    samples = given.samples or (150 if given.engine == "loop" else 1500)
    settings = {
        **SETTINGS,
        "data_dir": given.data_dir,
        "num_clients": clients,
        "keep": samples * clients / 70_000,
        "local_epochs": given.epochs,
        "rounds": given.rounds,
    }
    ways = {way: WAYS[way] for way in given.ways.split(",")}
    if given.engine == "loop":
        measured = in_turn(given.repeats, ways, lambda way, more: loop({**settings, **more}))
    elif given.engine == "containers":
        del settings["data_dir"]  # a container has its own
        with tempfile.TemporaryDirectory(prefix="bayflower-secure-") as name:
            Path(name).chmod(0o755)  # the containers' user reads its keys there
            folder = Path(name) / "fed"
            deploy("init", folder, "--clients", clients)
            for client in range(clients):
                place = folder / f"client-{client}" / "data"
                shutil.copy(Path(given.data_dir) / "fmnist.npz", place)
            try:
                print(deploy("up", folder), flush=True)
                measured = in_turn(
                    given.repeats, ways, lambda way, more: contained(folder, settings | more, way)
                )
            finally:
                deploy("down", folder, "--volumes")
    else:
        with tempfile.TemporaryDirectory(prefix="bayflower-secure-") as name:
            made = folders.init(Path(name) / "fed", clients=clients)
            for client in range(clients):  # a node reads the data of its own folder
                place = Path(name) / "fed" / f"client-{client}" / "data"
                place.mkdir(exist_ok=True)
                for one in Path(given.data_dir).resolve().iterdir():
                    (place / one.name).symlink_to(one)
            local = Local(made)
            try:
                local.up(print)
                measured = in_turn(
                    given.repeats,
                    ways,
                    lambda way, more: processes(local, {**settings, **more}, way),
                )
            finally:
                local.down()
    content = {
        "clients": clients,
        "samples": samples,
        "epochs": given.epochs,
        "cores": os.cpu_count(),
        "rounds": given.rounds,
        **measured,
    }
    print(json.dumps({key: content[key] for key in content if "ratio" in key}))
    write_json(RESULTS / f"secure_rounds_{given.name or given.engine}.json", content)


if __name__ == "__main__":
    main()
