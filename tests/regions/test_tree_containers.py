"""Two levels in real containers: six clients in two regions have the bits of the flat federation of
six containers, also if all containers of an aggregator are killed in the middle of a round.

`make containers` runs it; root and a Docker engine are needed. With `-s` it prints the seconds and
bytes of docs/deployment.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import assert_same_bits
from deployed import WORK, collected, deploy, submitted

from bayflower.config import parse
from bayflower.deploy import docker as engine
from bayflower.deploy import layout
from bayflower.engines import execute, prepare
from bayflower.errors import BayflowerError
from bayflower.files import checkpoint, store

pytestmark = pytest.mark.containers
ROUNDS = 3
SETTINGS = {**WORK, "num_clients": 6, "rounds": ROUNDS, "calibration": "off"}
SETS = [word for k, v in SETTINGS.items() for word in ("--set", f"{k}={v}")]
SETS += ["--set", "rejoin_seconds=900", "--set", "ask_again_seconds=60"]
# the aggregator: all of the region's containers but those of its clients
AGGREGATOR = ("superlink", "gate", "serverapp", "above", "aboveapp", "keeper")
AWAY = 20.0  # seconds until it is started again
TIMES = ("seconds", "bytes_up", "bytes_down")
STATISTICS = "cat $n/address $n/statistics/rx_bytes $n/statistics/tx_bytes"


class Ended(NamedTuple):
    """What a run has left: its result, its server's state, each client's last file."""

    result: dict[str, Any]
    server: dict[str, Any]
    clients: dict[str, store.Saved]


@pytest.fixture(scope="module")
def docker():
    """The engine, or a skip with the reason."""
    if os.getuid():
        pytest.skip("needs root, as the other tests of containers")
    try:
        return engine.client()
    except BayflowerError as error:
        pytest.skip(str(error))


@contextmanager
def started(folder: Path, *words: object) -> Iterator[None]:
    """A deployment of six clients in containers."""
    for parent in (folder.parent, *folder.parent.parents[:3]):
        parent.chmod(0o755)  # the containers' user reads its keys there
    begin = time.monotonic()
    done = deploy("init", folder, "--clients", 6, *words)
    assert done.returncode == 0, done.stderr
    try:
        done = deploy("up", folder, timeout=900)
        if done.returncode:  # a busy machine starts slowly: as a person would do
            done = deploy("up", folder, timeout=900)
        assert done.returncode == 0, done.stderr
        print(f"\n{folder.name}: {time.monotonic() - begin:.0f} s to make and start it")
        yield
    finally:
        deploy("down", folder, "--volumes")


def wait_for(what: Callable[[], Any], process: subprocess.Popen, seconds: float = 900.0) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := what():
            return found
        assert process.poll() is None, process.communicate()
        time.sleep(0.5)
    raise AssertionError("it did not happen in time")


def inside(made: layout.Deployment, service: str, command: str) -> str:
    return engine.container(made, service).exec_run(["sh", "-c", command]).output.decode()


def crossed(made: layout.Deployment) -> tuple[int, int]:
    """Return the bytes that a gate has received from the nodes and sent to them, by its network
    card: TLS, polls and heartbeats included.
    """
    networks = engine.container(made, "gate").attrs["NetworkSettings"]["Networks"]
    card = networks[f"{made.name}_federation"]["MacAddress"]
    said = inside(made, "gate", f"cd /sys/class/net; for n in *; do echo $({STATISTICS}); done")
    rows = {address: numbers for address, *numbers in map(str.split, said.splitlines())}
    up, down = rows[card]
    return int(up), int(down)


def states(docker, made: layout.Deployment, run: str, number: int) -> list[Path]:
    """Return the files of clients' states after a round, as far as they are there."""
    volumes = docker.volumes.list(filters={"name": f"{made.name}_state-"})
    file = f"{run}/client-*/round-{number}.safetensors"
    return [path for one in volumes for path in Path(one.attrs["Mountpoint"]).glob(file)]


def half_done(docker, region: layout.Deployment, upper: layout.Deployment) -> bool:
    """Return whether in a round after the first some clients of a region have trained, others not
    yet.
    """
    said = inside(upper, "serverapp", "cat /results/tree/status.json")
    if not said.startswith("{"):
        return False  # not there yet
    known = json.loads(said)["run"]
    return any(0 < len(states(docker, region, known, at)) < 3 for at in range(2, ROUNDS + 1))


def run(
    docker,
    folder: Path,
    parts: list[Path],
    fault: Callable[[subprocess.Popen], None] = lambda process: None,
) -> Ended:
    """Return what a run leaves in which every client takes part in every round; print its seconds
    and bytes. The clients are in `parts`; `fault` does something while it runs.
    """
    made, begin, home = layout.read(folder), time.monotonic(), folder.parent / "home"
    before = crossed(made)
    process = submitted(folder, "fedmap", *SETS)
    fault(process)
    result = collected(process, folder, home, SETTINGS, 1500)
    print(f"{len(parts)} aggregators: {time.monotonic() - begin:.0f} s", result["faults"])
    print("rounds", [[round(one[key], 1) for key in TIMES] for one in result["rounds"]], TIMES)
    there = [now - then for now, then in zip(crossed(made), before, strict=True)]
    print("bytes up and down at the server's network card", there)
    known = checkpoint.read(home)
    assert known.round == ROUNDS
    clients = {}
    for part in map(layout.read, parts):
        for path in states(docker, part, known.run, ROUNDS):
            clients[path.parent.name] = store.read(path)
    assert sorted(clients) == [f"client-{one}" for one in range(6)]
    return Ended(result, known.server, clients)


def assert_same(one: Ended, other: Ended) -> None:
    """Server, clients, every number of the result but times and bytes."""
    assert_same_bits(one.server, other.server)
    for client, saved in one.clients.items():
        assert_same_bits(saved.state, other.clients[client].state)
        assert_same_bits(saved.update, other.clients[client].update)
        assert saved.numbers == other.clients[client].numbers
    rounds = [
        [{k: v for k, v in each.items() if k not in TIMES} for each in found.result["rounds"]]
        for found in (one, other)
    ]
    assert rounds[0] == rounds[1]
    assert one.result["final"] == other.result["final"]


@pytest.fixture(scope="module")
def flat(docker, tmp_path_factory):
    """Six clients and one server; checked against the loop engine."""
    folder = tmp_path_factory.mktemp("flat") / "fed"
    with started(folder):
        found = run(docker, folder, [folder])
    wanted = execute(prepare(parse("fedmap", SETTINGS), "loop"))
    losses = [record["train_loss"] for record in wanted.rounds]
    assert [record["train_loss"] for record in found.result["rounds"]] == losses
    return found


def test_two_regions_have_the_bits_of_the_flat_containers_though_one_dies(docker, flat, tmp_path):
    folder = tmp_path / "fed"
    regions = [folder / "region-0", folder / "region-1"]
    with started(folder, "--regions", 2):
        victim = layout.read(regions[1])
        known = json.loads(deploy("status", folder, "--json").stdout)["clients"]
        assert known == {"region-0": "online", "region-1": "online"}

        def die(process: subprocess.Popen) -> None:
            wait_for(lambda: half_done(docker, victim, layout.read(folder)), process)
            killed = [engine.container(victim, service) for service in AGGREGATOR]
            for one in killed:
                one.kill("SIGKILL")
            time.sleep(AWAY)
            for one in killed:
                one.start()

        assert_same(run(docker, folder, regions, die), flat)
        said = engine.container(victim, "keeper").logs().decode()
        assert said.count("of this region answers") == 2, said  # a second run after the death
