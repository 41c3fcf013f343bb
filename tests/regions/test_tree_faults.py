"""Faults in a tree of aggregators: clients and regions that fail, regions that are restarted in the
middle of a round, and regions that lie.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from conftest import some
from flwr.app import ConfigRecord, Message, RecordDict
from groves import Grove
from test_regions import assert_equal, kind, ran, ready

from bayflower.flower import records
from bayflower.flower.loop import InProcessGrid
from bayflower.flower.regions.region import Region
from bayflower.tree import flatten


class Restarted(Grove):
    """Every region is made anew before each request: it remembers nothing."""

    def answered(self, region: Region, content: RecordDict) -> RecordDict:
        place = self.regions.index(region)
        self.regions[place] = Region(self.grids[place], region.expects)
        return self.regions[place].answer(content)


def test_a_region_that_is_restarted_before_every_request_gives_the_same_bits():
    prepared = ready("fedmap", rounds=2)
    assert_equal(prepared, ran(prepared), ran(prepared, made=Restarted()))


def failing(clients: set[int], how: Any, first: int = 1) -> Any:
    """Return what changes a grid: the replies of some clients to requests to train, from the round
    `first` on, are changed by `how`.
    """

    def fail(grid: InProcessGrid, message: Message) -> Message | None:
        reply = grid.ask(message)
        there = message.metadata.dst_node_id - 1000 in clients
        if message.metadata.message_type != "train" or not there:
            return reply
        if message.content["bayflower"]["round"] < first:
            return reply
        return how(reply)

    def with_faults(grid: InProcessGrid) -> InProcessGrid:
        grid.fail = lambda message: fail(grid, message)
        return grid

    return with_faults


class Faulty(Grove):
    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def __call__(self, app: Any, contexts: Any) -> Any:
        tree = super().__call__(app, contexts)
        for grid in self.grids:
            self.change(grid)
        return tree


def too_many(reply: Message) -> Message:
    """Claim a billion samples."""
    update = reply.content["update"]
    update["num_examples"] = records.to_array(torch.tensor(10**9))
    return reply


def far(reply: Message) -> Message:
    """Send a model a hundred times as far away as it is."""
    update = reply.content["update"]
    for name in update:
        if name.startswith("params/"):
            moved = torch.from_numpy(update[name].numpy().copy()) * 100 + 3
            update[name] = records.to_array(moved)
    return reply


def other_round(reply: Message) -> Message:
    head = dict(reply.content["bayflower"])
    reply.content["bayflower"] = ConfigRecord({**head, "round": 17})
    return reply


@pytest.mark.parametrize("how", some([too_many, far, other_round], {far}))
def test_a_client_that_sends_nonsense_is_named_and_left_out_as_in_a_flat_federation(how):
    prepared = ready("fedavg", fraction_train=1.0, max_faults=2)
    change = failing({4}, how)
    flat = ran(prepared, made=lambda app, nodes: change(InProcessGrid(app, nodes)))
    tree = ran(prepared, made=Faulty(change))
    assert "client 4" in str(flat.faults)
    assert list(flat.faults) == list(tree.faults)
    assert_equal(prepared, flat, tree)


def test_what_a_majority_does_is_cut_and_used_as_in_a_flat_federation():
    """Sums of suspects travel apart; whether they count is known when all regions have answered."""
    prepared = ready("fedavg", fraction_train=1.0)
    change = failing({0, 1, 3, 5}, far, 2)
    flat = ran(prepared, made=lambda app, nodes: change(InProcessGrid(app, nodes)))
    tree = ran(prepared, made=Faulty(change))
    assert "a majority is never left out" in str(flat.faults)
    assert list(flat.faults) == list(tree.faults)
    assert_equal(prepared, flat, tree)


class Broken(Grove):
    """The second region fails at its requests to train in the second round."""

    def answered(self, region: Region, content: RecordDict) -> RecordDict:
        head = content["bayflower"]
        if region is self.regions[1] and kind(content) == "add" and head["round"] == 2:
            raise RuntimeError("no space left")
        return region.answer(content)


@pytest.mark.slow
def test_a_region_that_fails_costs_its_clients_one_round():
    prepared = ready("fedavg", fraction_train=1.0)
    outcome = ran(prepared, made=Broken())
    lost = [1, 3, 5]  # of the clients that train, those of the second region
    assert sorted(outcome.faults) == [
        f"round 2, client {client}: reply not used: the client failed: its region failed: no space "
        "left"
        for client in lost
    ]
    whole = ran(prepared)
    assert flatten(outcome.server_state).keys() == flatten(whole.server_state).keys()
    assert outcome.rounds[0]["train_loss"] == whole.rounds[0]["train_loss"]
    assert outcome.rounds[1]["train_loss"] != whole.rounds[1]["train_loss"]


def edited(said: RecordDict, change: Any) -> RecordDict:
    """Return an answer whose order was changed."""
    head = dict(said["bayflower"])
    order = json.loads(head["order"])
    change(order, said)
    said["bayflower"] = ConfigRecord({**head, "order": json.dumps(order)})
    return said


def not_finite(order: Any, said: RecordDict) -> None:
    name = next(name for name in said["sum"] if name.startswith("total/limb"))
    said["sum"][name] = records.to_array(torch.full(said["sum"][name].shape, float("nan")).double())


def another_shape(order: Any, said: RecordDict) -> None:
    name = next(iter(order["total"]["shapes"]))
    order["total"]["shapes"][name] = [1, *order["total"]["shapes"][name]]


def another_name(order: Any, said: RecordDict) -> None:
    total = order["total"]
    name = next(iter(total["places"]))
    total["places"]["x"], total["shapes"]["x"] = (
        total["places"].pop(name),
        total["shapes"].pop(name),
    )


def overlapping(order: Any, said: RecordDict) -> None:
    spans = [span for some in order["total"]["places"].values() for span in some]
    spans[-1][1] = 0


def huge(order: Any, said: RecordDict) -> None:
    name = next(name for name in said["sum"] if name.startswith("total/limb"))
    said["sum"][name] = records.to_array(torch.full(said["sum"][name].shape, 1e308).double())
    order["total"]["chunks"][0][1] = [22]
    said["sum"]["total/limb/0/22"] = said["sum"][name]


def counts_others(order: Any, said: RecordDict) -> None:
    order["counted"]["0"] = 12


def sees_others(order: Any, said: RecordDict) -> None:
    order["seen"]["clients"].append(0)


def negative(order: Any, said: RecordDict) -> None:
    order["counted"] = dict.fromkeys(order["counted"], -5)


LIES = [not_finite, another_shape, another_name, overlapping, huge]
LIES += [counts_others, sees_others, negative]


@pytest.mark.parametrize("lie", some(LIES, {another_shape, counts_others}))
def test_a_region_that_lies_is_left_out_whole_and_the_run_goes_on(lie):
    class Lying(Grove):
        def answered(self, region: Region, content: RecordDict) -> RecordDict:
            said, head = region.answer(content), content["bayflower"]
            if region is self.regions[1] and kind(content) == "add" and head["round"] == 2:
                return edited(said, lie)
            return said

    prepared = ready("fedavg", rounds=2, fraction_train=1.0, evaluate_every=0)
    outcome = ran(prepared, made=Lying())
    named = [text for text in outcome.faults if "region" in text]
    assert [text.split(":")[0] for text in named] == [f"round 2, client {k}" for k in (1, 3, 5)]
    for leaf in flatten(outcome.server_state).values():
        assert np.isfinite(leaf.numpy()).all()
        assert float(leaf.abs().max()) < 100
