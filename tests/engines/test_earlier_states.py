"""Client states on disk in the files of an earlier version: a run goes on from them."""

from __future__ import annotations

import json

import torch
from conftest import assert_same_bits, small_prepared

from bayflower.engines import execute
from bayflower.files.atomic import save_tensors
from bayflower.files.checkpoint import to_resume
from bayflower.fused import earlier
from bayflower.fused.disk import DiskBank
from bayflower.tree import flatten, map_tree

RUN = {"rounds": 5, "fraction_train": 0.8, "checkpoint_every": 2, "client_states": "disk"}


def test_a_run_goes_on_from_files_of_an_earlier_version(tmp_path):
    """Oracle: the run that was not stopped. Clients with an even number have their newest state in
    the second file, the others in the first; a third one is of a round after the checkpoint.
    """
    prepared = small_prepared("fedper", "fused", **RUN)
    whole = execute(prepared, out=tmp_path / "whole")
    out = tmp_path / "half"
    execute(small_prepared("fedper", "fused", **{**RUN, "rounds": 2}), out=out)
    saved, home = to_resume(out, prepared.run), out / "states"
    fresh = prepared.halves.client.init(*prepared.halves.initial)
    everyone = [one.client for one in prepared.federation.clients]
    bank = DiskBank(home, fresh, torch.device("cpu"), 2, max(everyone) + 1, saved.run)
    states = bank.take(everyone)
    bank.shut()
    for path in home.iterdir():
        path.unlink()
    even = [place for place, client in enumerate(everyone) if client % 2 == 0]
    wrong = map_tree(lambda leaf: leaf.index_fill(0, torch.tensor(even), 7), states)
    for round, places, kept in (
        (1, range(len(everyone)), wrong),
        (2, even, states),
        (3, [0], wrong),
    ):
        some = map_tree(lambda leaf, chosen=tuple(places): leaf[list(chosen)], kept)
        head = {"format": earlier.FORMAT, "clients": json.dumps([everyone[n] for n in places])}
        save_tensors(home / f"round-{round:08d}-0000.safetensors", flatten(some), head)
    went_on = execute(prepared, None, out, saved)
    assert_same_bits(went_on.server_state, whole.server_state)
    assert not list(home.glob("round-*"))
    assert not (out / "states-renewed").exists()
