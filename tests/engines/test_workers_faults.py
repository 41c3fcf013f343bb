"""A worker, a machine or the whole run dies in the middle; the run goes on to the same bits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import SMALL, assert_same_bits
from test_herd import assert_same, ready
from test_workers import collect, connected, on

from bayflower.files import checkpoint
from bayflower.flower.processes import free_port
from bayflower.fused.run import run_fused
from bayflower.fused.workers.crew import Crew
from bayflower.fused.workers.crew import ray as module
from bayflower.fused.workers.run import run_workers

os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # a busy machine starts slowly
ray = pytest.importorskip("ray", reason="the extra `simulation` is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # Ray's own
]
ROUNDS = 6


class Killing:
    """A progress function that ends a worker once a round is done, at once or a moment later."""

    def __init__(self, crew: Crew, worker: int, after: int, seconds: float = 0.0) -> None:
        self.process = crew.get([(worker, crew.call(worker, "process"))])[0]
        self.after, self.seconds, self.done = after, seconds, False

    def __call__(self, records: list[Any]) -> None:
        if len(records) == self.after and not self.done:
            self.done = True
            threading.Timer(self.seconds, os.kill, (self.process, signal.SIGKILL)).start()


def timeless(outcome: Any) -> Any:
    """Return an outcome without the lines on what died."""
    return outcome._replace(faults=(), usage=None)


@pytest.fixture(scope="module", autouse=True)
def tidied():
    yield
    collect()


@pytest.fixture(scope="module")
def local():
    """Ray, for crews that lose workers."""
    with connected():
        yield


@pytest.mark.parametrize("stacking", ["no", "yes"])
@pytest.mark.parametrize("method", ["fedmap", "fednp", "scaffold"])
def test_a_killed_worker_changes_nothing(local, method, stacking):
    prepared = ready(method, rounds=ROUNDS, stacking=stacking)
    crew = Crew("3", "cpu", 3)
    try:
        peace = on(crew, 1, prepared)
        killing = Killing(crew, 1, after=2)
        hurt = run_workers(*prepared[:1], *prepared[2:], progress=killing, crew=crew)
    finally:
        crew.close()
    assert killing.done
    assert hurt.usage["lost_workers"] == 1
    assert hurt.usage["workers"] == 2
    assert sum("a worker died" in line for line in hurt.faults) == 1
    assert_same(prepared, timeless(hurt), timeless(peace))


def test_a_worker_killed_while_it_trains_changes_nothing(local):
    prepared = ready("fedmap", rounds=4, stacking="no", local_epochs=40, calibration="shrunk")
    crew = Crew("2", "cpu", 2)
    try:
        peace = on(crew, 2, prepared)
        seconds = peace.rounds[-1]["seconds"]
        killing = Killing(crew, 0, after=2, seconds=seconds / 2)
        hurt = run_workers(*prepared[:1], *prepared[2:], progress=killing, crew=crew)
    finally:
        crew.close()
    assert any("a worker died" in line for line in hurt.faults), hurt.faults
    assert_same(prepared, timeless(hurt), timeless(peace))


@pytest.fixture
def cluster():
    """Two Ray nodes on this machine, with one core each."""
    from ray.cluster_utils import Cluster

    module()  # sets what silences Ray's advice
    if ray.is_initialized():
        ray.shutdown()
    names = ("dashboard_agent_listen", "metrics_agent", "metrics_export", "runtime_env_agent")
    # ports that are given need no waiting for helpers, which a busy machine starts slowly
    least = {"num_cpus": 1, "include_dashboard": False, "include_log_monitor": False}
    head, other = ({f"{one}_port": free_port() for one in names} for _ in range(2))
    made = Cluster(initialize_head=True, head_node_args={**least, **head})
    node = made.add_node(**least, **other)
    ray.init(address=made.address, log_to_driver=False)
    yield made, node
    ray.shutdown()
    made.shutdown()


@pytest.mark.parametrize("folder", [True, False])
def test_a_dead_machine_takes_the_run_back_to_its_checkpoint(cluster, tmp_path, folder):
    """Without a folder there is no checkpoint: then back to the start."""
    made, node = cluster
    prepared = ready("fednp", rounds=ROUNDS, stacking="no", checkpoint_every=2)
    alone = run_fused(prepared.run, prepared.federation, prepared.halves)
    killed = []

    def progress(records: list[Any]) -> None:
        if len(records) == 3 and not killed:
            killed.append(node)
            made.remove_node(node, allow_graceful=False)

    crew = Crew("2", "cpu", 4)
    out = tmp_path if folder else None
    known = (prepared.run, prepared.federation, prepared.halves)
    hurt = run_workers(*known, progress=progress, out=out, crew=crew)
    crew.close()
    assert hurt.usage["lost_workers"] == 1
    assert [one["round"] for one in hurt.rounds] == list(range(1, ROUNDS + 1))
    assert any("a worker died" in line for line in hurt.faults), hurt.faults
    assert_same(prepared, timeless(hurt), timeless(alone))


def words(out: Path, rounds: int, workers: str, *more: str) -> list[str]:
    settings = {**SMALL, "checkpoint_every": 1, "device": "cpu", "stacking": "yes"}
    for name in ("rounds", "dataset", "num_clients"):
        settings.pop(name)
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    head = ["run", "fedmap", "--dataset", "digits", "--clients", "5", "--rounds", str(rounds)]
    head += ["--workers", workers, "--set", "worker_block=2", "--out", str(out)]
    return [sys.executable, "-m", "bayflower", *head, *sets, *more]


def test_a_killed_run_goes_on_with_another_number_of_workers(tmp_path):
    """SIGKILL to the process of the run; its workers end with it; --resume, to the same bits."""
    victim = subprocess.Popen(
        words(tmp_path / "killed", 900, "2"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 200
    known = None
    while time.monotonic() < deadline and (known is None or known.round < 3):
        known = checkpoint.read(tmp_path / "killed") if (tmp_path / "killed").exists() else None
        time.sleep(0.02)
    victim.send_signal(signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL
    end = checkpoint.read(tmp_path / "killed").round + 2
    for out, workers, more in (("killed", "1", ["--resume"]), ("peace", "2", [])):
        done = subprocess.run(
            words(tmp_path / out, end, workers, *more), capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
    peace, killed = (checkpoint.read(tmp_path / name) for name in ("peace", "killed"))
    assert_same_bits(killed.server, peace.server)
    assert killed.clients.keys() == peace.clients.keys()
    for client in peace.clients:
        assert_same_bits(killed.clients[client], peace.clients[client])
    results = [json.loads((tmp_path / n / "result.json").read_text()) for n in ("peace", "killed")]
    assert results[0]["final"] == results[1]["final"]
