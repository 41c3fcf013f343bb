"""Durable client state when disks misbehave: full, not writable, damaged. Each failure is real,
none is mocked.
"""

from __future__ import annotations

import json
import logging
import resource
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
import torch
from conftest import assert_same_bits
from town import Town

from bayflower.errors import BayflowerError
from bayflower.files import checkpoint, journal, status
from bayflower.files.atomic import load_tensors, save_tensors
from bayflower.files.records import RoundRecord
from bayflower.files.store import DiskStore, Saved

STATE = {"head.weight": torch.arange(5000.0), "count": torch.tensor(3)}


@contextmanager
def largest_file(size: int):
    """No file of this process can grow beyond `size` bytes: what a full disk does to a write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def saved(round: int, value: float = 0.0) -> Saved:
    state = {**STATE, "head.weight": STATE["head.weight"] + value}
    return Saved(
        round, f"cause-{round}", state, {"update": state["head.weight"]}, {}, {"train-loss": 0.5}
    )


def test_a_full_disk_leaves_the_last_state_whole(tmp_path):
    store = DiskStore(tmp_path)
    store.save("run", 1, saved(1))
    with (
        largest_file(10_000),
        pytest.raises(
            BayflowerError,
            match=r"round-2.safetensors cannot be written \(.*File too large.*\); free some",
        ),
    ):
        store.save("run", 1, saved(2))
    assert [path.name for path in (tmp_path / "run" / "client-1").iterdir()] == [
        "round-1.safetensors"
    ]
    (kept,) = store.load("run", 1)
    assert_same_bits(kept.state, saved(1).state)
    store.save("run", 1, saved(2))
    assert [one.round for one in store.load("run", 1)] == [2, 1]


@pytest.mark.parametrize("place", ["/proc/bayflower", "file/state"])
def test_a_place_that_cannot_be_written_is_named(tmp_path, place):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        BayflowerError, match=r"round-1.safetensors cannot be written .*make the folder writable"
    ):
        DiskStore(place if place.startswith("/") else tmp_path / place).save("run", 1, saved(1))


@pytest.mark.parametrize("run", ["../x", "/etc", "a/b", "a b", "", "x" * 65, "a\n", "ä"])
def test_a_runs_name_from_the_network_is_no_path(tmp_path, run):
    store = DiskStore(tmp_path / "state")
    for use in (lambda: store.load(run, 1), lambda: store.save(run, 1, saved(1))):
        with pytest.raises(BayflowerError, match="run must be 1 to 64 letters"):
            use()
    assert not list(tmp_path.rglob("*"))


def test_a_full_disk_of_a_client_is_a_fault_and_the_run_goes_on(tmp_path):
    """Client 1's disk is full in round 2: one line names client, round, file and reason; in round 3
    it goes on from round 1.
    """

    class Filling(DiskStore):
        def save(self, run, client, saved):
            with largest_file(5_000 if (client, saved.round) == (1, 2) else resource.RLIM_INFINITY):
                super().save(run, client, saved)

    town = Town(
        "fedper", {1: [0, 1, 2], 2: [0, 1, 2], 3: [0, 1, 2]}, store=Filling(tmp_path)
    ).start()
    (fault,) = town.strategy.faults
    assert fault.startswith(
        "round 2, client 1: reply not used: the client failed: client 1, round 2, train: "
        "BayflowerError: "
    )
    assert "round-2.safetensors cannot be written" in fault
    assert [town.trained(round) for round in (1, 2, 3)] == [3, 2, 3]
    assert [one.round for one in town.store.load(town.strategy.run, 1)] == [3, 1]


def damage(path) -> None:
    """Flip a bit in the last number of a file, where its format does not notice."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def test_a_damaged_state_is_set_aside_and_the_earlier_one_used(tmp_path, caplog):
    store = DiskStore(tmp_path)
    for round in (1, 2):
        store.save("run", 1, saved(round, float(round)))
    damage(tmp_path / "run" / "client-1" / "round-2.safetensors")
    with caplog.at_level(logging.WARNING):
        (kept,) = store.load("run", 1)
    assert kept.round == 1
    assert "is damaged (its checksum is wrong)" in caplog.text
    assert (tmp_path / "run" / "client-1" / "round-2.damaged").exists()


@pytest.mark.parametrize("method", ["fednp", "fedper"])
def test_a_run_goes_on_with_a_damaged_state(tmp_path, method):
    """After round 2 client 1's file is damaged: FedNP refuses what it makes of its older factor
    once, then replaces the factor.
    """
    town = Town(method, {round: [0, 1] for round in range(1, 6)}, store=DiskStore(tmp_path))
    after = town.strategy.after_round

    def hurt(strategy, round, forced):
        after(strategy, round, forced)
        if round == 2:
            damage(tmp_path / strategy.run / "client-1" / "round-2.safetensors")

    town.strategy.after_round = hurt
    town.start()
    if method == "fednp":
        assert [town.trained(round) for round in range(1, 6)] == [2, 2, 1, 2, 2]
        assert "that the ledger does not know" in town.strategy.faults[0]
        assert [int(town.states[round].ledger["1/turns"]) for round in (2, 3, 4, 5)] == [2, 2, 1, 2]
        assert int(town.states[5].epoch) == 0
    else:
        (fault,) = town.strategy.faults
        assert fault.startswith("round 3, client 1: its state is that of round 1, not of round 2")


def test_a_damaged_checkpoint_is_named(tmp_path):
    made = checkpoint.Checkpoint("run", 3, {"rounds": 5}, {"params/w": torch.ones(50)}, {}, [], [])
    checkpoint.write(tmp_path, made)
    assert checkpoint.read(tmp_path).round == 3
    damage(tmp_path / checkpoint.FILE)
    with pytest.raises(
        BayflowerError,
        match=r"checkpoint .* is damaged \(its checksum is wrong\); restore it from a back-up",
    ):
        checkpoint.read(tmp_path)


# -- what can be watched -------------------------------------------------------------------------
REPLACE = """
import itertools, os, shutil, sys, time
folder = sys.argv[1]
for number in itertools.cycle(range(7)):
    shutil.copyfile(f"{folder}/{number}", f"{folder}/part")
    os.replace(f"{folder}/part", f"{folder}/a.safetensors")
    time.sleep(0.0002)
"""


def test_a_checkpoint_can_be_read_while_a_run_replaces_it(tmp_path):
    """Every read is one file or another one, never the head of one with the numbers of the next."""
    for number in range(7):
        tensors = {
            "x": torch.full((3000 + number,), float(number)),
            "y": torch.tensor(float(number)),
        }
        save_tensors(tmp_path / str(number), tensors, {"format": "f"}, sealed=True)
    shutil.copyfile(tmp_path / "0", tmp_path / "a.safetensors")
    writer = subprocess.Popen([sys.executable, "-c", REPLACE, str(tmp_path)])
    try:
        seen, reads, end = set(), 0, time.monotonic() + 60
        while (len(seen) < 7 or reads < 400) and time.monotonic() < end:
            tensors, _ = load_tensors(tmp_path / "a.safetensors", "f", "file")
            assert bool((tensors["x"] == tensors["y"]).all())
            seen.add(int(tensors["y"]))
            reads += 1
    finally:
        writer.kill()
        writer.wait()
    assert seen == set(range(7))


def test_log_lines_have_run_round_and_client(monkeypatch, capsys):
    monkeypatch.setenv("BAYFLOWER_LOG", "json")
    logger = logging.getLogger("bayflower")
    before = list(logger.handlers), logger.propagate, logger.level
    try:
        journal.set_up()
        journal.set_up()
        voice = journal.Journal("abc", [])
        voice.begin(7)
        voice.fault("round 7, client 3: no\nreply \x1b[31m", 3)
        voice.event("client 4 has joined", 4)
        lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    finally:
        logger.handlers, logger.propagate, logger.level = before
    assert [(line["level"], line["run"], line["round"], line["client"]) for line in lines] == [
        ("warning", "abc", 7, 3),
        ("info", "abc", 7, 4),
    ]
    assert lines[0]["message"] == "round 7, client 3: no reply [31m"


def test_status_and_metrics_of_a_run(tmp_path):
    records = [RoundRecord.make(round, 2.0 * round, 10, 20, {0: (5, 0.25)}, {}) for round in (1, 2)]
    content = status.running(
        method="fedmap",
        run="abc",
        rounds=9,
        records=records,
        present=[0, 2],
        left=[1],
        excluded=[],
        faults=["x"] * 7,
        names={0: "Budapest", 1: "site 7", 2: "Zürich"},
    )
    status.write(tmp_path / "status.json", content)
    shown = json.loads((tmp_path / "status.json").read_text())
    assert (
        shown["completed"],
        shown["rounds"],
        shown["seconds_per_round"],
        shown["num_faults"],
    ) == (2, 9, 3.0, 7)
    assert shown["clients"] == {"present": [0, 2], "left": [1], "excluded": []}
    assert shown["names"] == {"0": "Budapest", "1": "site 7", "2": "Zürich"}
    assert len(shown["faults"]) == 5
    lines = (tmp_path / "metrics.prom").read_text().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert values['bayflower_clients{state="present"}'] == "2"
    assert values["bayflower_round_seconds"] == "4"
    assert values["bayflower_faults_total"] == "7"
    assert all(
        line.startswith(("# HELP bayflower_", "# TYPE bayflower_", "bayflower_")) for line in lines
    )
