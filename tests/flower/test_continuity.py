"""State that cannot be lost silently: the server notices clients that were rolled back, wiped,
cloned or given other data, and a checkpoint that is older than its clients. Each is done to the
files of a real run.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from conftest import small_prepared
from town import FAST, Town

from bayflower.errors import WireError
from bayflower.files import checkpoint, store
from bayflower.files.atomic import load_tensors, save_tensors
from bayflower.files.store import DiskStore, Saved
from bayflower.flower import client, continuing, records
from bayflower.flower.client import Site
from bayflower.flower.loop import InProcessGrid, contexts, federation_app, make_strategy
from bayflower.rounds import solo
from bayflower.wire import continuity
from bayflower.wire.continuity import NONE, Continuity, Thread

EVERYONE = [0, 1, 2, 3, 4]


class Machines(DiskStore):
    """A store whose client 3 runs on one machine or another."""

    other: Path | None = None

    def folder(self, run: str, client: int) -> Path:
        mine = super().folder(run, client)
        return mine if self.other is None or client != 3 else self.other / f"client-{client}"


def harmed(tmp_path: Path, **settings):
    """Return the run of a federation in which one thing happens to each client but client 0."""
    disk = Machines(tmp_path / "state")
    town = Town("fedper", {round: EVERYONE for round in range(1, 7)}, store=disk, **settings)
    federation = town.prepared.federation
    data = {
        one.client: solo.samples(one, torch.device("cpu"), torch.float32)
        for one in federation.clients
    }

    def site_of(context):
        number = int(context.node_config["partition-id"])
        return Site(number, False, town.halves.model, data[number], disk)

    town.grid.app = client.client_app(site_of)
    after = town.strategy.after_round

    def happens(strategy, round, forced):
        after(strategy, round, forced)
        root = disk.root / strategy.run
        if round == 1:
            shutil.copytree(root / "client-1", tmp_path / "old")
        if round == 3:
            shutil.rmtree(root / "client-1")  # restored from a copy of round 1
            shutil.copytree(tmp_path / "old", root / "client-1")
            shutil.rmtree(root / "client-2")  # wiped
            shutil.copytree(root / "client-3", tmp_path / "twin" / "client-3")  # cloned
            train = data[4].train  # doubled and relabelled
            twice = [torch.cat([part, part]) for part in train]
            twice[1] = (twice[1] + 1) % 10
            data[4] = data[4]._replace(train=train._replace(x=twice[0], y=twice[1], mask=twice[2]))
        if round >= 3:  # the two machines of client 3 take turns
            disk.other = tmp_path / "twin" if round % 2 == 0 else None

    town.strategy.after_round = happens
    return town.start()


def test_each_loss_is_named_by_client(tmp_path):
    town = harmed(tmp_path)
    faults = town.strategy.faults
    assert [fault.split(":")[0] for fault in faults] == [
        "round 4, client 1",
        "round 4, client 2",
        "round 4, client 4",
        "round 5, client 3",
        "round 6, client 3",
        "round 6, client 3",  # in the final test
    ]
    back, gone, changed, behind, two, _ = faults
    assert "its state is that of round 1, not of round 3: it was rolled back" in back
    assert "bayflower deploy restore" in back
    assert "its state of round 3 is gone, and it starts from nothing" in gone
    assert "its data have changed since its last reply" in changed
    assert "its state is that of round 3, not of round 4: it was rolled back, or a second" in behind
    assert "two machines run with its key: both its state of round 4 and that of round 5" in two
    assert "give it a key of its own" in two
    assert town.strategy.outcome.faults == tuple(faults)  # and so in result.json
    assert [town.trained(round) for round in range(1, 7)] == [5] * 6


def test_breaks_can_be_refused(tmp_path):
    """The replies of all four are left out, in each round anew; the honest client goes on."""
    town = harmed(tmp_path, continuity="refuse", max_faults=9)
    assert [town.trained(round) for round in range(1, 7)] == [5, 5, 5, 2, 1, 2]
    assert all("reply not used: it" in fault for fault in town.strategy.faults)


def test_a_checkpoint_older_than_its_clients_is_noticed_and_their_states_are_kept(tmp_path):
    """The server goes back three rounds. Each client has only the states of the last two."""
    prepared = small_prepared("fedper", **{**FAST, "rounds": 5})
    run, federation, halves = prepared.run, prepared.federation, prepared.halves
    disk = DiskStore(tmp_path / "state")
    everyone = contexts(data.client for data in federation.clients)
    initial = records.to_arrays({**halves.initial[0], **halves.initial[1]})

    def save(s, round, forced):
        made = checkpoint.make(
            run, s.run, round, s.state, {}, s.records, s.faults, s.roster.memory()
        )
        checkpoint.write(tmp_path / str(round), made)

    def go(start=None):
        strategy = make_strategy(run, after_round=save, resume=start)
        grid = InProcessGrid(federation_app(run, federation, halves, disk), everyone)
        strategy.start(grid, initial, num_rounds=5)
        return strategy

    first = go()
    assert first.faults == []
    again = go(checkpoint.to_resume(tmp_path / "4", run))
    assert again.faults == []  # the round after the checkpoint is answered as before
    late = go(checkpoint.to_resume(tmp_path / "2", run))
    assert [fault.split(":")[0] for fault in late.faults] == [
        f"round 3, client {k}" for k in EVERYONE
    ]
    assert "it has no state of round 2, only of round 5, and starts from nothing" in late.faults[0]
    assert "the server's checkpoint was rolled back; resume from the newest" in late.faults[0]
    kept = sorted(path.name for path in disk.folder(late.run, 0).glob("*.replaced"))
    assert kept == ["round-4.replaced", "round-5.replaced"]


def test_files_of_other_formats_are_migrated_or_refused(tmp_path):
    """A file of the format before is read, and its state goes on. One of a later format is refused
    by its client, named to the server, and stays where it is.
    """
    town = Town("fedper", {round: EVERYONE[:3] for round in range(1, 5)}, store=DiskStore(tmp_path))

    def upgrade(strategy, round, forced):
        for number, kind in ((1, "bayflower-client-1"), (2, "bayflower-client-9")):
            path = town.store.folder(strategy.run, number) / f"round-{round}.safetensors"
            if round == 2:
                tensors, head = load_tensors(path, store.FORMAT, "state")
                keys = ("round", "cause", "numbers")
                old = {"format": kind, **{name: head[name] for name in keys}}
                save_tensors(path, tensors, old, sealed=True)

    town.strategy.after_round = upgrade
    town.start()
    assert [town.trained(round) for round in range(1, 5)] == [3, 3, 2, 2]
    first = town.strategy.faults[0]
    assert first.startswith("round 3, client 2: reply not used: the client failed: client 2")
    assert "has format 'bayflower-client-9', expected 'bayflower-client-2'" in first
    assert "install that version, or move the file away" in first
    assert all("client 2" in fault for fault in town.strategy.faults)
    folder = town.store.folder(town.strategy.run, 2)
    assert sorted(path.suffix for path in folder.glob("round-*")) == [".safetensors"] * 2


# -- what a reply reveals -------------------------------------------------------------------------
def site(disk, number=0, shift=0.0):
    prepared = small_prepared("fedper", **FAST)
    data = solo.samples(prepared.federation.clients[0], torch.device("cpu"), torch.float32)
    train = data.train._replace(x=data.train.x + shift)
    return Site(number, False, prepared.halves.model, data._replace(train=train), disk)


def test_a_fingerprint_tells_equality_and_nothing_else(tmp_path):
    """Equal data give equal texts in one run of one client. Another key, run or client gives
    another text, and the key is readable by its owner only.
    """
    disk, head = DiskStore(tmp_path / "a"), {"run": "one"}
    made = continuing.thread_of(site(disk), head, [], None)
    assert made == continuing.thread_of(site(disk), head, [], None)
    assert made == continuing.thread_of(site(DiskStore(tmp_path / "a")), head, [], None)
    assert made.data != continuing.thread_of(site(disk, shift=1e-6), head, [], None).data
    elsewhere = [
        continuing.thread_of(site(disk), {"run": "two"}, [], None),
        continuing.thread_of(site(disk, number=1), head, [], None),
        continuing.thread_of(site(DiskStore(tmp_path / "b")), head, [], None),
    ]
    assert len({made.data, *(one.data for one in elsewhere)}) == 4
    assert len({made.store, *(one.store for one in elsewhere)}) == 4
    assert (tmp_path / "a" / store.SECRET).stat().st_mode & 0o777 == 0o600
    plain = continuing.digest_of(site(disk).data)
    assert plain[:32] not in made.text()
    assert continuity.read(made.text()) == made


@pytest.mark.parametrize("text", [7, "", "x" * 137, "0" * 137, NONE])
def test_a_text_that_no_client_makes_is_refused(text):
    with pytest.raises(WireError, match="continuity must be a text made by Bayflower"):
        continuity.read(text)


def test_the_memory_of_a_server_is_bounded_and_survives_a_restart():
    known, marks = Continuity(), [f"{number:032x}" for number in range(100)]
    for round in range(1, 50):
        thread = Thread(round - 1, round - 1, marks[round - 1], marks[round], NONE, NONE[:16])
        assert known.breaks(0, thread) == []
        known.accept(0, round, thread)
    assert len(known.links[0]) == continuity.KEPT
    again = Continuity()
    again.remember(known.memory())
    assert again.memory() == known.memory()
    late = thread._replace(began=7, started=marks[7])
    assert (
        "its state is that of round 7, not of round 49: it was rolled" in again.breaks(0, late)[0]
    )
    odd = thread._replace(started=marks[99])
    assert "is not one with which it answered" in again.breaks(0, odd)[0]
    assert again.breaks(0, odd) == []  # once
    with pytest.raises(WireError, match="no longer says from which state it starts"):
        again.breaks(0, None)
    assert again.breaks(1, None) == []


def test_the_key_of_a_store_is_one_even_if_two_processes_make_it(tmp_path):
    first = DiskStore(tmp_path).secret()
    assert DiskStore(tmp_path).secret() == first
    assert len(first) == 32
    assert [path.name for path in tmp_path.iterdir()] == [store.SECRET]
    kept = Saved(1, "", {"w": torch.ones(2)}, {}, {}, {}, "thread")
    DiskStore(tmp_path).save("run", 0, kept)
    assert DiskStore(tmp_path).load("run", 0)[0].thread == "thread"
