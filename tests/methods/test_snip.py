"""SNIP against plain autograd: sensitivities [eq. 5] over all data, the mask [eq. 6], and training
without the pruned weights.
"""

from __future__ import annotations

import pytest
import torch
from conftest import assert_same_bits, small, small_prepared, some, worst_difference
from metaplain import loss_of, slopes
from rig import VICTIM, Rig, rewrite

from bayflower.data import batches
from bayflower.engines import execute
from bayflower.errors import ConfigError
from bayflower.flower.loop import run_loop
from bayflower.fused.run import run_fused
from bayflower.maths.exact import Total
from bayflower.rounds import solo

LAYER, LR = "base.3.weight", 0.05


def test_two_rounds_equal_plain_torch():
    """Clients of unequal size; weight decay and momentum would move pruned weights if they were not
    held at 0.
    """
    prepared = small_prepared(
        "snip",
        base="reptile",
        prune_share=0.7,
        optimizer="sgd",
        lr=LR,
        dtype="float64",
        server_lr=0.8,
    )
    server, client, _, (params, buffers) = prepared.halves
    clients = prepared.federation.clients[:3]
    assert len({len(data.y_train) for data in clients}) == 3
    state = server.init(params, buffers, ())
    loss, phase = loss_of(prepared), client.phases("train")[0]
    theta, keep = (
        {name: value.clone() for name, value in params.items()},
        torch.ones_like(params[LAYER]),
    )
    for round in (1, 2):
        total, sums, scores, weight = Total(), {name: 0.0 for name in theta}, 0.0, 0
        broadcast = server.broadcast(state, 0)
        assert torch.equal(broadcast.params[LAYER], state.params[LAYER] * keep)
        for data in clients:
            own = solo.samples(data, torch.device("cpu"), torch.float64).train
            update = solo.train(
                client,
                client.init(params, buffers),
                broadcast,
                own,
                seed=0,
                client=data.client,
                round=round,
            ).update
            total.add(
                server.statistic(state, data.client, server.unpack(state, client.pack(update)))
            )
            mine = {**theta, LAYER: theta[LAYER] * keep}
            keys = {
                "seed": 0,
                "client": data.client,
                "round": round,
                "purpose": "train",
                "coupled": False,
            }
            for (rows,) in batches.plan(len(own.y), phase, **keys):
                mine = {name: value.detach().requires_grad_() for name, value in mine.items()}
                slope = slopes(
                    loss({**mine, LAYER: mine[LAYER] * keep}, own.x[rows], own.y[rows]), mine, False
                )
                mine = {name: (value - LR * slope[name]).detach() for name, value in mine.items()}
            number = len(own.y)
            weight += number
            sums = {name: sums[name] + number * value for name, value in mine.items()}
            leaves = {name: value.requires_grad_() for name, value in mine.items()}
            slope = slopes(loss(leaves, own.x, own.y), leaves, False)[LAYER]
            scores = scores + number * (slope * mine[LAYER].detach()).abs()
        state = server.finalise(state, total.value())
        theta = {
            name: (1 - 0.8) * theta[name] + 0.8 * sums[name].detach() / weight for name in theta
        }
        if round == 1:
            order = scores.reshape(-1).argsort()
            keep = torch.ones(scores.numel(), dtype=torch.float64).index_fill(
                0, order[: int(state.mask.sum())], 0
            )
            keep = keep.reshape(scores.shape)
        assert torch.equal(state.mask, keep == 0)
        for name, value in theta.items():
            got, want = (
                value * keep if name == LAYER else value for value in (state.params[name], value)
            )
            torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-11)
    assert server.report(state)["sparsity"] == pytest.approx(0.7, abs=1e-3)


@pytest.mark.parametrize("base", some(["fedavg", "maml", "perfedavg"], ["fedavg"]))
def test_loop_and_fused_agree_on_every_base(base):
    """Also bytes; with momentum and weight decay, pruned weights stay 0 from round 2 on, in every
    model that is tested.
    """
    settings = {
        "optimizer": "sgd",
        "lr": LR,
        "momentum": 0.5,
        "weight_decay": 0.01,
        "dtype": "float64",
        "rounds": 3,
        "keep": 0.15,
        "new_client_epochs": 1,
    }
    prepared = small_prepared("snip", base=base, **settings)
    loop, fused = (
        run(prepared.run, prepared.federation, prepared.halves) for run in (run_loop, run_fused)
    )
    assert not fused.remarks
    assert worst_difference(fused.server_state, loop.server_state) < 1e-9
    assert bool((loop.server_state.params[LAYER][loop.server_state.mask] == 0).all())
    for one, two in zip(loop.rounds, fused.rounds, strict=True):
        assert (one["bytes_up"], one["bytes_down"]) == (two["bytes_up"], two["bytes_down"])


def test_pruned_weights_do_not_travel():
    prepared = small_prepared("snip", new_clients=0, rounds=3, evaluate_every=0)
    rounds = execute(prepared).rounds
    size = prepared.halves.model.shapes[LAYER][0] * prepared.halves.model.shapes[LAYER][1]
    gone = round(0.7 * size)
    # up also the sensitivities of round 1
    for key, entries in (("bytes_down", gone), ("bytes_up", gone + size)):
        saved = rounds[0][key] - rounds[1][key]
        assert 5 * 4 * entries <= saved < 5 * (4 * entries + 600)
        assert rounds[1][key] == rounds[2][key]


@pytest.mark.slow
def test_nothing_pruned_is_the_base():
    few = {"keep": 0.15, "local_epochs": 1, "new_client_epochs": 1}
    mine, base = (execute(small_prepared(method, **few)) for method in ("snip", "reptile"))
    none = execute(small_prepared("snip", prune_share=0.0, **few))
    assert_same_bits(none.server_state.params, base.server_state.params)
    assert_same_bits(none.views, base.views)
    assert worst_difference(mine.server_state.params, base.server_state.params) > 1e-3


def test_replies_that_prune_otherwise_are_refused():
    def lie(flat):
        flat["mask"][0] = 255
        flat[f"params/{LAYER}"] = flat[f"params/{LAYER}"][8:]

    def negative(flat):
        flat["sensitivity"] -= 1

    for change, words in (
        (lie, "not those that were pruned"),
        (negative, "sensitivity must not be negative"),
    ):
        rig = Rig("snip", tamper=rewrite(change))
        rig.start(rounds=1)
        assert any(
            words in fault and f"client {VICTIM}" in fault for fault in rig.strategy.faults
        ), rig.strategy.faults


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("prune_share", 1, r"prune_share must be in \[0, 1\), got 1"),
        ("base", "x", "base must be one of fedavg, reptile, maml, perfedavg"),
    ],
)
def test_settings_are_checked(key, value, words):
    with pytest.raises(ConfigError, match=words):
        small("snip", **{key: value})
