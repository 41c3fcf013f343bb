"""Every method with a whole recipe: it trains, the same on every engine, or refuses in one line."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conftest import BOTH, assert_same_bits, small, small_prepared, some, worst_difference

from bayflower.config import describe, parse
from bayflower.contract import ClientHalf
from bayflower.engines import execute
from bayflower.errors import ConfigError
from bayflower.files.checkpoint import to_resume
from bayflower.fused import phases
from bayflower.fused.phases import StackedPhase
from bayflower.methods import METHODS
from bayflower.recipes.settings import RECIPE
from bayflower.recipes.step import Recipe
from bayflower.rounds import solo

RATES = {
    "optimizer": "sgd",
    "lr": 0.05,
    "momentum": 0.9,
    "nesterov": True,
    "clip_norm": 5.0,
    "schedule": "cosine",
    "warmup_rounds": 1,
    "local_schedule": "cosine",
    "lr_floor": 0.1,
}
LOSS = {"label_smoothing": 0.1, "class_weights": "federation"}
SAMPLES = {"resized_crop": 0.3, "crop_padding": 1, "flip": 0.5, "cutout": 2, "mixup": 0.4}
WHOLE = {**RATES, **LOSS, **SAMPLES}
LEFT_OUT = {  # what a method refuses
    "feddc": {"schedule": "constant", "warmup_rounds": 0, "local_schedule": "constant"},
    "fedpa": {"local_schedule": "constant"},
    "fedpa-ft": {"local_schedule": "constant"},
    "fedrod": {"label_smoothing": 0.0},
    "pfedgp": {"mixup": 0.0, "label_smoothing": 0.0, "class_weights": "none"},
}
NO_STEPS = {"qlsd", "qlsd-ft"}  # a client takes no step: there is no rate
FEW = {"keep": 0.15, "new_client_epochs": 1}  # a few steps
FIVE = ("fedavg", "fedmap", "metavd", "pfedvmp", "scaffold")
FIRST = ("scaffold",)  # tests below have fedavg and fedmap


def recipe(method: str, **changes) -> dict:
    usual = {**FEW, **WHOLE, **LEFT_OUT.get(method, {}), "dtype": "float64", "rounds": 2}
    return {**usual, **changes}


@pytest.mark.parametrize("method", some(sorted(METHODS), FIRST))
def test_fused_agrees_with_loop_under_a_whole_recipe(method):
    found = [
        execute(small_prepared(method, engine=engine, **recipe(method)))
        for engine in ("fused", "loop")
    ]
    assert not found[0].remarks  # stacked
    assert worst_difference(found[0].server_state, found[1].server_state, zero=1e-9) < 1e-8


def test_finished_clients_in_a_stack_keep_their_models(monkeypatch):
    """Numbers of clients are rounded up to a recorded one: some have no more steps."""
    monkeypatch.setattr(phases, "MOST_SIZES", 2)
    given = recipe("fedavg", num_clients=6, keep=0.4)
    fused, loop = (
        execute(small_prepared("fedavg", engine=engine, **given)) for engine in ("fused", "loop")
    )
    assert worst_difference(fused.server_state, loop.server_state) < 1e-8


def test_one_by_one_has_the_bits_of_the_loop():
    given = recipe("fedavg", dtype="float32", stacking="no")
    fused, loop = (
        execute(small_prepared("fedavg", engine=engine, **given)) for engine in ("fused", "loop")
    )
    assert_same_bits(fused.server_state, loop.server_state)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("method", FIVE)
def test_a_gpu_agrees_with_the_loop_also_where_steps_are_recorded(method, cuda_graphs):
    """A rate or a random number that was recorded with a step would stay the same for ever."""
    given = recipe(method, rounds=3)
    loop = execute(small_prepared(method, **given))
    there = {**given, "device": "cuda", "cuda_graphs": cuda_graphs}
    fused = execute(small_prepared(method, engine="fused", **there))
    assert worst_difference(fused.server_state, loop.server_state, zero=1e-9) < 1e-7


@pytest.mark.parametrize("method", some(sorted(METHODS), {*BOTH, "fedla", "scaffold"}))
def test_every_method_honours_or_refuses_each_part(method):
    """One round of one client alone, with each part of the recipe, moves elsewhere than without."""

    def trained(**changes):
        given = {"keep": 0.25, "dtype": "float64", "optimizer": "sgd", "lr": 0.05}
        prepared = small_prepared(method, **given, **changes)
        server, half, _, initial = prepared.halves
        data = prepared.federation.clients[0]
        broadcast = server.broadcast(server.init(*initial, (data.client,)), data.client)
        samples = solo.samples(data, torch.device("cpu"), torch.float64)
        keys = {"seed": 0, "client": data.client, "round": 1}
        return solo.train(half, half.init(*initial), broadcast, samples.train, **keys)

    plain = trained()
    pixels = {name: value for name, value in SAMPLES.items() if name != "mixup"}
    # where they are changed, one method shows of each; each method shows that it sees them
    each = [{name: value} for name, value in pixels.items()] if method == "fedavg" else [pixels]
    parts = (
        *each,
        {"mixup": SAMPLES["mixup"]},
        *({name: value} for name, value in LOSS.items()),
        {"class_weights": "client"},
        {"momentum": 0.9, "nesterov": True},
        {"warmup_rounds": 5},
        {"local_schedule": "cosine"},
    )
    for part in parts[:-3] if method in NO_STEPS else parts:
        if set(part) & set(LEFT_OUT.get(method, {})):
            with pytest.raises(ConfigError, match=rf"^{method} [^\n]+$"):
                small(method, optimizer="sgd", **part)
        else:
            assert trained(**part).loss != plain.loss, part


def test_tests_see_no_recipe():
    """Views of one state are tested alike with and without a recipe."""
    known = []
    for changes in ({}, WHOLE):
        prepared = small_prepared("fedavg", **changes)
        server, half, _, initial = prepared.halves
        data = prepared.federation.clients[0]
        samples = solo.samples(data, torch.device("cpu"), torch.float32)
        broadcast = server.broadcast(server.init(*initial, (data.client,)), data.client)
        state, keys = half.init(*initial), {"seed": 0, "client": 0, "round": 1}
        known.append(solo.test(half, state, broadcast, samples.test, samples.train, **keys))
    for view in known[0]:
        assert_same_bits(known[0][view], known[1][view])


def test_surveys_see_no_recipe():
    """FedMAP's evidence and FedBPS's curvature are those of the plain likelihood."""
    for method in ("fedmap", "fedbps"):
        totals = []
        for changes in ({}, WHOLE):
            prepared = small_prepared(method, **changes)
            server, half, _, initial = prepared.halves
            data = prepared.federation.clients[0]
            samples = solo.samples(data, torch.device("cpu"), torch.float32)
            broadcast = server.broadcast(server.init(*initial, (data.client,)), data.client)
            work = half.begin(half.init(*initial), broadcast, samples.train)
            totals.append({"total": solo.surveyed(half, work, samples.train).survey.total})
        assert_same_bits(*totals)


@pytest.mark.parametrize("engine", some(["loop", "fused"], ["fused"]))
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path, engine):
    given = recipe("fedmap", dtype="float32", rounds=4, checkpoint_every=2)
    whole = execute(small_prepared("fedmap", engine=engine, **given))
    first = small_prepared("fedmap", engine=engine, **given)
    settings = dataclasses.replace(first.run.settings, rounds=2)
    execute(first._replace(run=dataclasses.replace(first.run, settings=settings)), out=tmp_path)
    rest = execute(first, out=tmp_path, resume=to_resume(tmp_path, first.run))
    assert_same_bits(whole.server_state, rest.server_state)


def test_a_client_alone_depends_on_nothing_but_its_keys():
    """torch's own generator plays no part."""
    prepared = small_prepared("fedavg", **WHOLE)
    server, half, _, initial = prepared.halves
    data = prepared.federation.clients[0]
    samples = solo.samples(data, torch.device("cpu"), torch.float32)
    broadcast = server.broadcast(server.init(*initial, (data.client,)), data.client)
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        keys = {"seed": 0, "client": data.client, "round": 1}
        found.append(solo.train(half, half.init(*initial), broadcast, samples.train, **keys).update)
    assert_same_bits(*found)


def test_without_a_recipe_nothing_is_computed(monkeypatch):
    """No function of a recipe is called in a step, and the stack has no tensor for it."""

    def never(*_):
        raise AssertionError("a recipe that is off was asked")

    for name in ("share", "groups", "augmented", "weights"):
        monkeypatch.setattr(Recipe, name, never)
    made = []
    real = StackedPhase._step

    def step(self, size):
        made.append(self)
        real(self, size)

    monkeypatch.setattr(StackedPhase, "_step", step)
    for engine in ("loop", "fused"):
        execute(small_prepared("fedavg", engine=engine))
    assert made
    for phase in made:
        own = phase.recipe
        assert (own.shares, own.keys, own.weights) == (None, None, None)
        assert phase.work.tree.opt.rate == {}
        gradient = ClientHalf.gradient
        assert own.shaped(gradient, 1) == (gradient, ())


def test_every_setting_of_a_recipe_is_off_by_default_and_has_a_meaning():
    shown = {name: (default, meaning) for _, name, default, meaning in describe("fedavg")}
    assert set(RECIPE) <= set(shown)
    assert all(shown[name][1] for name in RECIPE)
    plain = parse("fedavg").training
    assert not plain.scheduled
    assert not plain.augmentation.on
    assert plain.class_weights == "none"
    assert plain.label_smoothing == 0
