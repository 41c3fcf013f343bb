"""Label smoothing, class weights and mixed labels, against torch's cross-entropy."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import assert_same_bits, small, small_prepared, some, worst_difference
from sklearn.utils.class_weight import compute_class_weight
from torch.func import grad, vmap
from torch.nn import functional

from bayflower.config import parse
from bayflower.engines import execute
from bayflower.errors import ConfigError, WireError
from bayflower.files.checkpoint import to_resume
from bayflower.fused.recipe import StackedRecipe
from bayflower.networks.model import Anatomy, Batch
from bayflower.networks.papers import build
from bayflower.recipes import Training
from bayflower.recipes.check import checked, resolved
from bayflower.recipes.labels import balanced, counted, together
from bayflower.recipes.step import of
from bayflower.stacked.shaped import PLAIN, Shape, shape, shaped_mean, shaping
from bayflower.wire.hello import ClientInfo, from_header, to_header

SHAPES = [
    (0.0, None),
    (0.1, None),
    (0.0, (0.5, 2.0, 0.02, 1.0)),
    (0.2, (0.5, 2.0, 0.02, 1.0)),
]


def samples(classes: int = 4, number: int = 9, seed: int = 0):
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(number, classes, generator=draw, dtype=torch.float64)
    y = torch.randint(classes, (number,), generator=draw)
    mask = torch.ones(number, dtype=torch.float64)
    mask[number - 3 :] = 0
    return logits, y, mask


@pytest.mark.parametrize(("smoothing", "listed"), SHAPES)
def test_the_loss_is_torchs_and_padding_counts_nothing(smoothing, listed):
    logits, y, mask = samples()
    weights = None if listed is None else torch.tensor(listed, dtype=torch.float64)
    real = mask > 0

    def ours(logits):
        return shaped_mean(logits, y, mask, Shape(smoothing, weights))

    def theirs(logits):
        return functional.cross_entropy(
            logits[real], y[real], weight=weights, label_smoothing=smoothing
        )

    torch.testing.assert_close(ours(logits), theirs(logits), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad(ours)(logits), grad(theirs)(logits), rtol=1e-12, atol=1e-12)
    assert float(grad(ours)(logits)[~real].abs().max()) == 0


@pytest.mark.parametrize(("smoothing", "listed"), SHAPES)
def test_mixed_labels_are_the_mean_of_two_losses(smoothing, listed):
    logits, y, mask = samples()
    weights = None if listed is None else torch.tensor(listed, dtype=torch.float64)
    other, lam = y.flip(0), 0.3
    one, two = (functional.one_hot(labels, 4).double() for labels in (y, other))
    mixed = lam * one + (1 - lam) * two
    found = shaped_mean(logits, mixed, mask, Shape(smoothing, weights))
    real = mask > 0
    sums = [
        functional.cross_entropy(
            logits[real], labels[real], weight=weights, label_smoothing=smoothing, reduction="sum"
        )
        for labels in (y, other)
    ]
    w = torch.ones(4, dtype=torch.float64) if weights is None else weights
    total = (lam * w[y] + (1 - lam) * w[other])[real].sum()
    torch.testing.assert_close(
        found, (lam * sums[0] + (1 - lam) * sums[1]) / total, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize(("smoothing", "listed"), SHAPES)
def test_one_logit_is_two_classes(smoothing, listed):
    logits, y, mask = samples(classes=2)
    weights = None if listed is None else torch.tensor(listed[:2], dtype=torch.float64)
    form = Shape(smoothing, weights)
    two = shaped_mean(logits, y, mask, form)
    one = shaped_mean(logits[:, 1:] - logits[:, :1], y, mask, form)
    torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


def test_an_empty_batch_has_loss_0():
    logits, y, mask = samples()
    assert float(shaped_mean(logits, y, 0 * mask, Shape(0.1, torch.ones(4)))) == 0


def test_the_model_follows_the_shape_in_training_only():
    model = build("mlp", (8,), 4, 16)
    logits, y, mask = samples()
    plain, each = model.mean_nll(logits, y, mask), model.nll(logits, y)
    with shaping(0.3, torch.tensor([1.0, 2.0, 3.0, 4.0])):
        assert abs(float(model.mean_nll(logits, y, mask) - plain)) > 1e-3
        assert torch.equal(model.nll(logits, y), each)  # tests and curvature
    assert shape() is PLAIN
    assert torch.equal(model.mean_nll(logits, y, mask), plain)


def test_stacks_have_each_their_own_weights():
    logits, y, mask = (torch.stack(part) for part in zip(samples(), samples(seed=1), strict=True))
    weights = torch.rand(2, 4, dtype=torch.float64) + 0.1

    def one(weights, logits, y, mask):
        with shaping(0.1, weights):
            return shaped_mean(logits, y, mask, shape())

    found = vmap(one)(weights, logits, y, mask)
    for client in range(2):
        alone = one(weights[client], logits[client], y[client], mask[client])
        torch.testing.assert_close(found[client], alone, rtol=1e-12, atol=1e-12)


def test_a_mixed_sample_is_pulled_to_both_centroids_by_their_shares():
    prepared = small_prepared("pfedvmp", dtype="float64")
    half, draw = prepared.halves.client, torch.Generator().manual_seed(0)
    features = torch.randn(6, 5, generator=draw, dtype=torch.float64)
    memo = SimpleNamespace(
        centroids=torch.randn(10, 5, generator=draw, dtype=torch.float64),
        known=torch.arange(10) % 3 > 0,
    )
    mask = torch.tensor([1.0, 1, 1, 1, 0, 0], dtype=torch.float64)
    one, two, lam = torch.arange(6), torch.arange(6).flip(0), 0.3
    hot = [functional.one_hot(y, 10).double() for y in (one, two)]

    def pulled(y):
        return half.pull(features, SimpleNamespace(memo=memo), Batch(features, y, mask))

    wanted = lam * pulled(one) + (1 - lam) * pulled(two)
    found = pulled(lam * hot[0] + (1 - lam) * hot[1])
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_balanced_weights_are_scikit_learns():
    y = np.array([0, 0, 0, 0, 0, 2, 2, 3])
    wanted = compute_class_weight("balanced", classes=np.array([0, 2, 3]), y=y)
    found = balanced(counted(torch.as_tensor(y), 4))
    assert found[[0, 2, 3]].tolist() == pytest.approx(wanted.tolist())
    assert float(found[1]) == 1
    assert float(found[y].mean()) == pytest.approx(1)


def test_a_stack_knows_every_clients_weights():
    half = small_prepared("fedavg", class_weights="client").halves.client
    y = torch.tensor([0, 0, 1, 2, 2, 2, 5, 9])
    for starts, sizes in (([0, 3], [3, 5]), ([3, 0], [5, 3])):  # in any order
        parts = (torch.tensor(starts), torch.tensor(sizes))
        recipe = StackedRecipe(half, "train", (3, 2), torch.float64, y, *parts)
        recipe.load(torch.tensor([1, 0]), 1, np.array([3, 2]), list)
        assert recipe.weights is not None
        for row, own in enumerate((1, 0)):
            labels = y[starts[own] : starts[own] + sizes[own]]
            assert torch.equal(recipe.weights[row], balanced(counted(labels, 10)))


@pytest.mark.parametrize("text", ["1,x", "-1,2", "0,0", "nan,1", "", "balanced"])
def test_weights_that_are_none_are_refused(text):
    with pytest.raises(ConfigError, match="class_weights must be none, client, federation"):
        parse("fedavg", {"class_weights": text})


def test_weights_must_fit_the_classes_before_anything_starts():
    with pytest.raises(ConfigError, match="class_weights lists 2 numbers, but there are 10"):
        small_prepared("fedavg", class_weights="1,2")
    with pytest.raises(ConfigError, match=r"label_smoothing must be in \[0, 1\)"):
        parse("fedavg", {"label_smoothing": 1})
    assert checked(Training(class_weights="1,2"), (8,), 2).class_weights == "1,2"


def test_the_federations_weights_come_from_sums_of_counts():
    training = Training(class_weights="federation")
    told = resolved(training, together([[3, 0, 1], [1, 2, 1]]))
    wanted = balanced(torch.tensor([4, 2, 2]))
    assert of(told, 3).weights(torch.zeros(3)).tolist() == wanted.tolist()  # to the bit
    with pytest.raises(ConfigError, match="no client reported them"):
        resolved(training, [])


def facts(**changes):
    known = ClientInfo(Anatomy(("w",), (), frozenset(), frozenset()), (8,), 3, 6, 1, {}, (1, 2, 3))
    return known._replace(**changes)


def test_a_client_reports_counts_only_where_it_is_asked_and_they_are_checked():
    assert from_header(to_header(facts())) == facts()
    assert "label_counts" not in to_header(facts(label_counts=()))
    for wrong in ((1, 2), (1, 2, 4), (-1, 4, 3), (6.0, 0, 0)):
        with pytest.raises(WireError, match="label_counts must be 3 whole numbers"):
            from_header({**to_header(facts()), "label_counts": str(list(wrong))})


SHAPED = {
    "optimizer": "sgd",
    "lr": 0.1,
    "dtype": "float64",
    "label_smoothing": 0.1,
    "rounds": 2,
    "keep": 0.15,
    "new_client_epochs": 1,
}


WEIGHTS = ("none", "client", "federation", "1,2,3,4,5,1,1,1,1,0.1")
PAIRS = [(m, w) for m in ("fedavg", "fedmap", "pfedvmp", "scaffold", "maml") for w in WEIGHTS]
QUICK = {*zip(("fedmap", "pfedvmp"), WEIGHTS, strict=False)}


@pytest.mark.parametrize("pair", some(PAIRS, QUICK), ids=str)
def test_fused_agrees_with_loop(pair):
    method, weights = pair
    given = {**SHAPED, "class_weights": weights}
    states = [
        execute(small_prepared(method, engine=engine, **given)).server_state
        for engine in ("fused", "loop")
    ]
    assert worst_difference(*states) < 1e-9
    other = {**given, "label_smoothing": 0.0} if weights == "none" else {**given}
    other["class_weights"] = "none"
    plain = execute(small_prepared(method, engine="fused", **other)).server_state
    assert worst_difference(states[0], plain) > 1e-6


def test_a_resumed_run_keeps_the_federations_weights(tmp_path):
    given = {**SHAPED, "class_weights": "federation", "rounds": 4, "checkpoint_every": 2}
    whole = execute(small_prepared("fedavg", **given))
    first = small_prepared("fedavg", **given)
    stopped = dataclasses.replace(
        first.run, settings=dataclasses.replace(first.run.settings, rounds=2)
    )
    execute(first._replace(run=stopped), out=tmp_path)
    resume = to_resume(tmp_path, first.run)
    assert sum(resume.roster["label_counts"]) == sum(
        len(data.y_train) for data in first.federation.clients
    )
    assert_same_bits(whole.server_state, execute(first, resume=resume).server_state)


def test_the_setting_keeps_its_name():
    assert small("fedavg", class_weights="federation").flat()["class_weights"] == "federation"
