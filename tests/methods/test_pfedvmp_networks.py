"""pFedVMP on networks of several shapes, and what a run's result says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import small_prepared
from torch import nn

from bayflower.clients.pfedvmp import Client
from bayflower.config import Training, parse
from bayflower.contract import Work
from bayflower.engines import prepare, run_to_result
from bayflower.errors import ConfigError
from bayflower.networks.model import Batch, Model
from bayflower.networks.papers import build
from bayflower.strategies.pfedvmp import Config, Server


# -- networks ------------------------------------------------------------------------------------
def test_the_networks_of_table_4():
    """Base and head of the paper's CNN; the features are after the LeakyReLU (E-P10)."""
    for shape, classes, base, head in [
        ((1, 28, 28), 10, 576_896, 5_130),
        ((1, 28, 28), 47, 576_896, 24_111),
        ((3, 32, 32), 10, 873_408, 5_130),
        ((3, 32, 32), 100, 873_408, 51_300),
    ]:
        model = build("cnn", shape, classes)
        params, buffers = model.initial(0)
        sizes = [
            sum(v.numel() for n, v in params.items() if (n in model.head_names) == own)
            for own in (False, True)
        ]
        assert sizes == [base, head]
    logits, features, _ = model.forward_features(
        params, buffers, torch.randn(2, 3, 32, 32), train=False
    )
    torch.testing.assert_close(logits, features @ params["head.weight"].T + params["head.bias"])
    assert features.shape == (2, 512)
    assert build("cnn", (1, 28, 28), 10, features=128).initial(0)[0]["head.weight"].shape == (
        10,
        128,
    )


def test_heads_of_other_shapes():
    """A head of two layers has its own input as features; one logit means two classes; a head
    without a matrix is refused.
    """
    deep = Model(
        lambda: nn.Sequential(
            nn.Linear(4, 6), nn.ReLU(), nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
        ),
        3,
        head="2",
    )
    state = Server(Config(), deep.anatomy).init(*deep.initial(0), ())
    assert state.centroids.shape == (3, 6)
    binary = build("mlp", (4,), 2)
    assert Server(Config(), binary.anatomy).init(*binary.initial(0), ()).centroids.shape == (2, 16)
    flat = Model(lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6)), 6, head="1")
    with pytest.raises(ConfigError, match="need a head with a linear layer"):
        Server(Config(), flat.anatomy).init(*flat.initial(0), ())
    strange = Model(
        lambda: nn.Sequential(
            nn.Linear(4, 6), nn.Unflatten(1, (2, 3)), nn.Linear(3, 1), nn.Flatten()
        ),
        2,
        head="2",
    )
    half = Client(Config(), Training(), strange)
    params, buffers = strange.initial(0)
    memo = Server(Config(), strange.anatomy).init(params, buffers, ())
    with pytest.raises(ConfigError, match=r"gets \(2, 2, 3\) for 2 samples, several rows"):
        half.survey(
            Work(params, buffers, memo),
            Batch(torch.zeros(2, 4), torch.zeros(2).long(), torch.ones(2)),
        )


def test_the_result_names_both_models_and_fairness():
    """Before and after local training are in result.json and on the curve, each with its fairness
    over clients.
    """
    result = run_to_result(small_prepared("pfedvmp", "loop", model="mlp", rounds=3, xi=5.0))
    final = result["final"]
    assert final["after"] == final["personal"]
    assert final["before"]["nll"] != final["after"]["nll"]
    assert "before local training" in final["before"]["model"]
    for view in ("before", "after"):
        accuracies = [one["accuracy"] for one in final[view]["per_client"]]
        assert final[view]["fairness_std"] == pytest.approx(np.std(accuracies))
        assert final[view]["fairness_cv"] == pytest.approx(np.std(accuracies) / np.mean(accuracies))
    assert final["new_clients"]["num_clients"] == 2
    for record in result["rounds"]:
        assert record["before"]["accuracy"] >= 0
        assert record["personal"]["num_clients"] == record["before"]["num_clients"]
    assert [record["known_classes"] for record in result["rounds"]] == sorted(
        record["known_classes"] for record in result["rounds"]
    )


@pytest.mark.slow
def test_a_short_run_on_real_fashion_mnist(request):
    """Six clients with skewed classes and the paper's network, batches and rate: every class gets a
    centroid, and the models learn.
    """
    folder = request.getfixturevalue("unpacked")
    settings = {
        "dataset": "fmnist",
        "data_dir": str(folder),
        "keep": 0.02,
        "num_clients": 6,
        "beta": 0.3,
        "device": "cpu",
        "rounds": 4,
    }
    settings |= {
        "batch_size": 10,
        "optimizer": "sgd",
        "lr": 0.01,
        "local_epochs": 1,
        "evaluate_every": 0,
    }
    result = run_to_result(prepare(parse("pfedvmp", settings), "loop"))
    rounds, final = result["rounds"], result["final"]
    assert result["model"]["name"] == "cnn"
    assert rounds[0]["known_classes"] == 10
    # the first round has no penalty
    assert rounds[3]["train_loss"] < rounds[2]["train_loss"] < rounds[1]["train_loss"]
    assert final["after"]["accuracy"] > 0.55
    assert final["before"]["accuracy"] != final["after"]["accuracy"]
    base = 4 * 576_896 * 6
    # dense messages would be several times the base
    assert base < rounds[0]["bytes_up"] < 1.5 * base
