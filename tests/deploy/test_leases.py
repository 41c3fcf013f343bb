"""One process at a time in a run's folder, results that nothing deletes, and a lost nodes.json."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from bayflower.deploy import folders, runs, server
from bayflower.errors import BayflowerError, ConfigError
from bayflower.files import checkpoint, lease
from bayflower.flower import app, control

SLEEPER = "import time; time.sleep(600)"


def written(folder: Path, holder: lease.Holder) -> Path:
    (folder / lease.LOCK).write_text(json.dumps(holder._asdict()))
    return folder / lease.LOCK


def test_the_lease_of_a_dead_process_is_taken_over(tmp_path, caplog):
    child = subprocess.Popen([sys.executable, "-c", SLEEPER])
    since = lease.started(child.pid)
    holder = lease.Holder(socket.gethostname(), child.pid, since, 7, "bayflower run fedmap")
    written(tmp_path, holder)
    with (
        pytest.raises(
            lease.BusyError,
            match=rf"\(process {child.pid} on .*: bayflower run fedmap\); wait for it, or choose",
        ),
        lease.alone_in(tmp_path),
    ):
        pass
    child.kill()
    child.wait()
    with lease.alone_in(tmp_path):
        mine = lease.read(tmp_path / lease.LOCK)
        assert (mine.pid, mine.number) == (os.getpid(), 8)
    assert "the lease of a dead process is taken over" in caplog.text
    assert not (tmp_path / lease.LOCK).exists()


def test_the_holder_on_another_machine_is_known_by_its_beat(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "STALE_SECONDS", 0.5)
    path = written(tmp_path, lease.Holder("elsewhere", 1, 5.0, 1, "bayflower run fedmap"))
    ends = threading.Event()

    def beat():
        while not ends.wait(0.05):
            os.utime(path)

    beating = threading.Thread(target=beat)
    beating.start()
    try:
        with (
            pytest.raises(lease.BusyError, match="process 1 on elsewhere"),
            lease.alone_in(tmp_path),
        ):
            pass
    finally:
        ends.set()
        beating.join()
    with lease.alone_in(tmp_path):
        assert lease.read(path).number == 2


def test_a_holder_beats_and_one_that_slept_writes_nothing(tmp_path, monkeypatch):
    """Another process took the folder over meanwhile: the checkpoint stays the other's."""
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.02)
    made = checkpoint.Checkpoint("run", 3, {"rounds": 5}, {"w": torch.ones(5)}, {}, [], [])
    with lease.alone_in(tmp_path):
        path = tmp_path / lease.LOCK
        os.utime(path, (1, 1))
        deadline = time.monotonic() + 20
        while path.stat().st_mtime == 1 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert path.stat().st_mtime > 1
        checkpoint.write(tmp_path, made)
        written(tmp_path, lease.Holder("elsewhere", 12, 5.0, 2, "bayflower run --resume"))
        with pytest.raises(
            BayflowerError, match=r"lost its lease .* held by process 12 on elsewhere.*--resume"
        ):
            checkpoint.write(tmp_path, made._replace(round=4))
    assert checkpoint.read(tmp_path).round == 3
    assert path.exists()  # the other one's
    checkpoint.write(tmp_path, made._replace(round=5))  # without a lease nothing is asked


def test_a_second_serverapp_leaves_the_first_ones_folder_alone(tmp_path):
    config = {"method": "fedavg", "out": str(tmp_path), "resume": "true"}
    (tmp_path / "status.json").write_text('{"state": "running"}')
    with (
        lease.alone_in(tmp_path, lease.SERVING),
        pytest.raises(lease.BusyError, match=f"process {os.getpid()} on"),
    ):
        app.serve_all(None, config)  # asks nobody
    assert json.loads((tmp_path / "status.json").read_text()) == {"state": "running"}


# -- runs of a deployment --------------------------------------------------------------------------
class Answers(server.Server):
    """A SuperLink that answers from a list of nodes; `keys` are those it knows by their node."""

    listed: list[dict[str, str]]
    asked: list[tuple[str, ...]]

    def flwr(self, *words):
        self.asked.append(words)
        if words[:2] == ("supernode", "list"):
            return {"success": True, "nodes": list(self.listed)}
        if words[:2] == ("supernode", "unregister"):
            self.listed[:] = [node for node in self.listed if node["node-id"] != words[2]]
            return {"success": True}
        if len(self.listed) == self.deployment.clients:
            return {"success": False, "error-message": f"public key {server.IN_USE}"}
        number = str(100 + len(self.asked))
        self.listed.append({"node-id": number, "status": "online"})
        return {"success": True, "node-id": number}


@pytest.fixture
def known(tmp_path) -> Answers:
    made = folders.init(tmp_path / "fed", clients=2)
    found = Answers(made, tmp_path / "results", tmp_path, {})
    found.listed, found.asked = [], []
    found.results.mkdir()
    server.register(found, lambda text: None)
    return found


def test_a_lost_nodes_json_is_noticed_and_mended(known):
    said: list[str] = []
    file = known.results / "nodes.json"
    before = json.loads(file.read_text())
    assert sorted(before) == ["client-0", "client-1"]
    file.unlink()
    with pytest.raises(BayflowerError, match=r"lacks the nodes of client-0, client-1.*--anew"):
        known.missing()
    with pytest.raises(ConfigError, match="neither be named nor refused"):
        server.unregister(known, 1)
    server.register(known, said.append)
    assert "register all keys anew" in said[-1]
    server.register(known, said.append, anew=True)
    assert known.missing() == []
    assert set(json.loads(file.read_text()).values()).isdisjoint(before.values())
    server.unregister(known, 1)
    assert list(json.loads(file.read_text())) == ["client-0"]


RESULT = {"config": {"method": "fedavg", "seed": 0}, "rounds": [{}, {}], "engine": "deployment"}


@pytest.mark.parametrize("how", [{"resume": True}, {"overwrite": True}])
def test_no_submission_deletes_the_result_of_a_finished_run(known, monkeypatch, how):
    """The run is refused after it was submitted, for instance because a setting differs."""
    folder = known.results / "one"
    folder.mkdir()
    (folder / "result.json").write_text(json.dumps(RESULT))
    config = {"method": "fedavg", "rounds": 2}
    record = {"run": "1", "name": "one", "needed": 2, "config": config}
    (folder / runs.RECORD).write_text(json.dumps(record))

    def refuse(*words):
        raise BayflowerError("refused")

    monkeypatch.setattr(runs, "finish", lambda *some: None)
    monkeypatch.setattr(control, "submit", refuse)
    given = {"rounds": 4, "dataset": "synthetic"}
    with pytest.raises(BayflowerError, match="refused"):
        runs.submit(known, "fedavg", given, name="one", **how)
    kept = [json.loads(path.read_text()) for path in folder.glob("result*.json")]
    assert RESULT in kept
    with (
        pytest.raises(ConfigError, match="holds a finished run")
        if "resume" in how
        else (pytest.raises(BayflowerError, match="refused"))
    ):
        runs.submit(known, "fedavg", given, name="one")


def test_two_commands_do_not_resume_one_run(known):
    (known.results / "one").mkdir()
    with (
        lease.alone_in(known.results / "one"),
        pytest.raises(lease.BusyError, match=f"process {os.getpid()} on"),
    ):
        runs.submit(known, "", {}, name="one", resume=True)
