"""Client states on disk: the bits of states in memory, after crashes at any moment too, never an
old state, and a damaged one is noticed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import assert_same_bits, small_prepared

from bayflower.config import parse
from bayflower.engines import execute, prepare
from bayflower.errors import BayflowerError, ConfigError
from bayflower.files import shards
from bayflower.files.checkpoint import read, to_resume
from bayflower.files.shards import Shards, check_space, index_name
from bayflower.fused import states
from bayflower.fused.disk import DiskBank, Form
from bayflower.testing.runs import same_outcome
from bayflower.tree import flatten, map_tree, stack, take

SGD = {"optimizer": "sgd", "lr": 0.05, "momentum": 0.9, "dtype": "float64"}
FEW = {"rounds": 5, "fraction_train": 0.4, "checkpoint_every": 2, **SGD}
CROWD = {
    "dataset": "crowd",
    "keep": 1,
    "num_clients": 300,
    "fraction_train": 0.1,
    "fraction_evaluate": 0.2,
    "model": "mlp",
    "rounds": 6,
    "checkpoint_every": 2,
    "evaluate_every": 2,
    "calibration": "off",
    "device": "cpu",
}
CPU = torch.device("cpu")
SLOW = pytest.mark.slow


# -- records --------------------------------------------------------------------------------------
def content(clients, round, words):
    """Return records whose words tell client and round."""
    rows = np.zeros((len(clients), words + shards.TAIL), np.uint64)
    rows[:, :words] = (np.array(clients, np.uint64) * np.uint64(1000) + np.uint64(round))[:, None]
    return rows


def held(store, clients):
    """Return (the first word of each client's record, −1 where there is none)."""
    rows = np.zeros((len(clients), store.width), np.uint64)
    known = store.read(np.array(clients), rows)
    return [int(row[0]) if have else -1 for row, have in zip(rows, known, strict=True)]


@pytest.mark.parametrize("seed", range(3))
def test_records_are_those_of_a_dictionary_whenever_the_process_dies(tmp_path, monkeypatch, seed):
    """Against a dictionary: random writes, checkpoints and crashes (the object is forgotten, as a
    killed process forgets it); files of several shards; slots are used again.
    """
    words, clients = 5, 40
    monkeypatch.setattr(shards, "SHARD", 7 * (words + shards.TAIL) * 8)
    rng, store = random.Random(seed), Shards(tmp_path, words, clients, "r")
    now: dict[int, int] = {}
    saved: tuple[int | None, dict[int, int]] = (None, {})
    for round in range(1, 120):
        chosen = rng.sample(range(clients), rng.randint(1, 9))
        store.write(np.array(chosen), content(chosen, round, words), round)
        now |= {client: client * 1000 + round for client in chosen}
        if rng.random() < 0.3:
            store.save(round)
            if rng.random() < 0.3:  # killed before the checkpoint was written
                store.close()
                store, now = Shards(tmp_path, words, clients, "r", saved[0]), dict(saved[1])
                continue
            saved = round, dict(now)
            if rng.random() < 0.7:  # else killed before old records were released, see below
                store.release(round)
                continue
            store.close()
            store = Shards(tmp_path, words, clients, "r", round)
        if rng.random() < 0.2:
            store.close()
            store, now = Shards(tmp_path, words, clients, "r", saved[0]), dict(saved[1])
        assert held(store, range(clients)) == [now.get(client, -1) for client in range(clients)]
    assert len(list(tmp_path.glob("shard-*.bin"))) > 1
    assert store.top <= 2 * clients  # at most one more slot a client than there are clients


def test_a_damaged_record_is_noticed_in_one_line(tmp_path):
    store = Shards(tmp_path, 4, 3)
    store.write(np.arange(3), content(range(3), 1, 4), 1)
    path = tmp_path / "shard-00000.bin"
    whole = path.read_bytes()
    for place in (0, 31, 32, 40, 55):  # content, client, round, checksum
        bad = bytearray(whole)
        bad[store.record_bytes + place] ^= 4
        path.write_bytes(bytes(bad))
        assert held(store, [0, 2]) == [1, 2001]
        with pytest.raises(
            BayflowerError, match=r"state of client 1 in .*shard-00000.bin"
        ) as error:
            held(store, [0, 1])
        assert "\n" not in str(error.value)
    path.write_bytes(whole[: store.record_bytes + 9])  # cut off
    with pytest.raises(BayflowerError, match="damaged"):
        held(store, [1])
    path.write_bytes(whole)
    store.slot[1] = store.slot[0]  # somebody else's record
    with pytest.raises(BayflowerError, match="damaged"):
        held(store, [1])
    store.slot[1] = 1
    store.round[1] = 2  # an older one than the index says
    with pytest.raises(BayflowerError, match="damaged"):
        held(store, [1])


def test_zeros_are_no_record(tmp_path):
    """A file with a hole, as after a power failure, has records of zeros."""
    store = Shards(tmp_path, 4, 1)
    store.slot[0] = 0
    os.truncate(store._file(0), store.record_bytes)
    with pytest.raises(BayflowerError, match="damaged"):
        held(store, [0])


def test_an_index_of_other_states_is_refused(tmp_path):
    store = Shards(tmp_path, 4, 3, "one")
    store.save(2)
    with pytest.raises(ConfigError, match="round 3 are not in"):
        Shards(tmp_path, 4, 3, "one", 3)
    with pytest.raises(ConfigError, match="of another run"):
        Shards(tmp_path, 4, 3, "two", 2)
    with pytest.raises(ConfigError, match="states of 32 bytes, the method's have 40"):
        Shards(tmp_path, 5, 3, "one", 2)
    path = tmp_path / index_name(2)
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    with pytest.raises(BayflowerError, match="damaged"):
        Shards(tmp_path, 4, 3, "one", 2)


def test_a_disk_that_is_too_small_is_told_before_the_run(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"about 3.0 GB in .*there, where 2.0 GB are free"):
        check_space(tmp_path / "not" / "there", 3e9, lambda path: 2_000_000_000)
    monkeypatch.setattr(states, "check_space", lambda folder, need: check_space(folder, 1e18))
    with pytest.raises(ConfigError, match="GB are free"):
        execute(small_prepared("fedper", "fused", **FEW, client_states="disk"), out=tmp_path)
    assert not (tmp_path / "states").exists()


def test_a_full_disk_is_told_in_one_line(tmp_path, monkeypatch):
    store = Shards(tmp_path, 4, 3)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(BayflowerError, match="the disk is full"):
        store.write(np.arange(3), content(range(3), 1, 4), 1)


# -- the bank ------------------------------------------------------------------------------------
def made(fresh, values):
    """Return stacked states, each leaf full of a client's number."""
    return stack([map_tree(lambda leaf, v=v: torch.full_like(leaf, v), fresh) for v in values])


def test_any_state_survives_the_record():
    class_of = type(small_prepared("ditto").halves.client.init({"w": torch.zeros(2)}, {}))
    generator = torch.Generator().manual_seed(0)
    whole = class_of(
        {"w": torch.randn(3, 2, 5, generator=generator), "none": torch.zeros(3, 0, 4)},
        {"count": torch.arange(3), "half": torch.randn(3, 7, generator=generator).half()},
        torch.tensor([True, False, True]),
    )
    form = Form(take(whole, 0))
    assert_same_bits(form.unpack(form.pack(whole)), whole)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_read_ahead_is_never_old(tmp_path, seed):
    """Against a dictionary: rounds in chunks with overlapping clients, the next one mostly read
    ahead while the last chunk trains; some replies are lost; tests in between; a slow disk.
    """
    rng = random.Random(seed)
    fresh = small_prepared("fedper").halves.client.init({"head.weight": torch.zeros(2, 3)}, {})
    bank, now = DiskBank(tmp_path, fresh, CPU, None, 30, "r"), dict.fromkeys(range(30), 0.0)
    write = bank.shards.write

    def slow(*args):
        time.sleep(0.003)
        write(*args)

    bank.shards.write = slow

    def check(chosen):
        got = flatten(bank.take(chosen))["params/head.weight"]
        assert got.shape == (len(chosen), 2, 3)
        assert got[:, 0, 0].tolist() == [now[client] for client in chosen]
        assert (got == got[:, :1, :1]).all()

    def cohort():
        return sorted(rng.sample(range(30), rng.choice([1, 5, 12, 30])))

    coming = cohort()
    for round in range(1, 40):
        chosen, coming = coming, cohort()
        size = rng.choice([3, 7, 30])
        chunks = [chosen[at : at + size] for at in range(0, len(chosen), size)]
        if rng.random() < 0.3:
            check(chosen)  # a test of the round's clients
        for chunk in chunks:
            check(chunk)
            if chunk is chunks[-1] and rng.random() < 0.8:
                bank.ahead(coming, chunk if rng.random() < 0.8 else ())
            kept = [client for client in chunk if rng.random() < 0.9]
            if kept:
                values = [100.0 * round + client for client in kept]
                bank.put(kept, made(fresh, values), round)
                now.update(zip(kept, values, strict=True))
        if rng.random() < 0.3:
            check(chosen)
        if rng.random() < 0.3:
            check(rng.sample(range(30), 4))  # in any order
        if rng.random() < 0.3:
            bank.save(round)
            bank.tidy(round)
    bank.shut()


def test_an_error_while_writing_reaches_the_run(tmp_path):
    fresh = small_prepared("fedper").halves.client.init({"head.weight": torch.zeros(2, 3)}, {})
    bank = DiskBank(tmp_path, fresh, CPU, None, 3, "r")

    def broken(*_):
        raise BayflowerError("the disk is gone")

    bank.shards.write = broken
    bank.put([0, 1], made(fresh, [1.0, 2.0]), 1)
    with pytest.raises(BayflowerError, match="the disk is gone"):
        bank.save(1)
    bank.shut()


# -- runs ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "method",
    [*(pytest.param(m, marks=SLOW) for m in ("fedper", "fedmap", "scaffold", "fedavg")), "ditto"],
)
def test_states_on_disk_give_the_bits_of_states_in_memory(tmp_path, method):
    """FedAvg's clients have no state; SCAFFOLD's is not personal; chunks of two clients."""
    settings = {**FEW, "max_fused": 2}
    memory = execute(small_prepared(method, "fused", **settings, client_states="device"))
    disk = execute(small_prepared(method, "fused", **settings, client_states="disk"), out=tmp_path)
    same_outcome(disk, memory)
    assert disk.client_states == {}
    saved = read(tmp_path)
    assert saved.clients == {}
    assert saved.config["client_states"] == "disk"
    half = small_prepared(method, "fused", **settings).halves
    bank = DiskBank(tmp_path / "states", half.client.init(*half.initial), CPU, saved.round)
    for client, state in memory.client_states.items():
        assert_same_bits(take(bank.take([client]), 0), state)
    bank.shut()


@pytest.mark.parametrize("robust", ["gate", pytest.param("off", marks=SLOW)])
def test_a_crowd_on_disk_gives_the_bits_of_one_in_memory(tmp_path, robust):
    runs = {}
    for where in ("device", "disk"):
        run = parse("ditto", {**CROWD, "client_states": where, "robust": robust})
        runs[where] = execute(prepare(run), out=tmp_path / where)
    same_outcome(runs["disk"], runs["device"])
    assert [r["train_loss"] for r in runs["disk"].rounds] == [
        r["train_loss"] for r in runs["device"].rounds
    ]
    assert len(runs["disk"].views["personal"]) == 60


def test_a_run_goes_on_from_its_checkpoint_and_not_from_later_records(tmp_path):
    """The records of rounds after the checkpoint are there, as after a crash; a state that was kept
    in memory goes on to disk, and the other way round is refused.
    """
    settings = {**FEW, "rounds": 7, "checkpoint_every": 3}
    whole = execute(small_prepared("fedper", "fused", **settings), out=tmp_path / "whole")

    class StopError(Exception):
        pass

    def stop(records):
        if len(records) == 5:
            raise StopError

    for first, then in (("disk", "disk"), ("disk", "auto"), ("device", "disk")):
        out = tmp_path / f"{first}-{then}"
        with pytest.raises(StopError):
            execute(small_prepared("fedper", "fused", **settings, client_states=first), stop, out)
        assert read(out).round == 3
        prepared = small_prepared("fedper", "fused", **settings, client_states=then)
        again = execute(prepared, None, out, to_resume(out, prepared.run))
        same_outcome(again, whole)
    device = small_prepared("fedper", "fused", **settings, client_states="device")
    with pytest.raises(ConfigError, match="resume with client_states=auto or disk"):
        execute(device, None, out, to_resume(out, device.run))


def test_auto_keeps_states_on_disk_if_they_would_take_too_much_memory(tmp_path, monkeypatch):
    prepared = small_prepared("fedper", "fused", **FEW)
    assert prepared.run.settings.client_states == "auto"
    execute(prepared, out=tmp_path / "small")
    assert not (tmp_path / "small" / "states").exists()
    monkeypatch.setattr(states, "free_memory", lambda device: 1000.0)
    execute(prepared, out=tmp_path / "large")
    assert (tmp_path / "large" / "states").exists()
    execute(prepared)  # nowhere to write


KILLED = """
import json, sys
from pathlib import Path
from bayflower.config import parse
from bayflower.engines import prepare, run_to_result
from bayflower.files.checkpoint import FILE, to_resume
out, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
prepared = prepare(parse("ditto", settings))
resume = to_resume(out, prepared.run) if (out / FILE).exists() else None
print("begun", flush=True)
run_to_result(prepared, out, lambda records: print(len(records), flush=True), resume)
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_run_killed_at_random_moments_ends_with_the_same_bits(tmp_path, seed):
    """SIGKILL to the real process, several times, at moments that no round ends at."""
    settings = {**CROWD, "client_states": "disk", "rounds": 20, "evaluate_every": 0}
    whole, cut, rng = tmp_path / "whole", tmp_path / "cut", random.Random(seed)
    command = [sys.executable, "-c", KILLED]
    subprocess.run([*command, str(whole), json.dumps(settings)], check=True, capture_output=True)
    kills = 0
    for _ in range(60):
        with subprocess.Popen(
            [*command, str(cut), json.dumps(settings)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for _ in range(rng.randint(1, 8)):
                process.stdout.readline()
            time.sleep(rng.random() * 0.1)
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                kills += 1
            if process.wait() == 0:
                break
    assert kills >= 3
    assert states_of(cut) == states_of(whole)
    assert_same_bits(read(cut).server, read(whole).server)
    results = [json.loads((out / "result.json").read_text())["final"] for out in (cut, whole)]
    assert results[0] == results[1]


def states_of(out: Path) -> dict[int, bytes]:
    """Return all records that the last checkpoint of a run needs, without their checksums."""
    half = prepare(parse("ditto", CROWD)).halves.client
    form = Form(half.init(*prepare(parse("ditto", CROWD)).halves.initial))
    saved = read(out)
    store = Shards(out / "states", form.words, 0, saved.run, saved.round)
    have = np.flatnonzero(store.slot >= 0)
    rows = np.zeros((len(have), store.width), np.uint64)
    store.read(have, rows)
    store.close()
    return {int(client): row.tobytes() for client, row in zip(have, rows, strict=True)}
