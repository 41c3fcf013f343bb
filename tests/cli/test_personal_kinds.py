"""Personal models: how sure they are, and the commands that save and read them."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from personalruns import TRAINED, expected
from safetensors.torch import load_file

import bayflower
from bayflower import cli
from bayflower.data import load_client
from bayflower.errors import ConfigError
from bayflower.personal import export, load_personal
from bayflower.personal.runs import open_run
from bayflower.rounds import solo


# -- uncertainty ---------------------------------------------------------------------------------
def test_metavds_uncertainty_is_its_own_sampled_view(runs, tmp_path):
    """Weights drawn by hand, the slow way, from N(theta, alpha theta²)."""
    export(runs("metavd"), TRAINED, tmp_path, ("safetensors",))
    model = load_personal(tmp_path)
    x, _, _ = expected(runs("metavd"), TRAINED)
    opened = open_run(runs("metavd"))
    half, sent = opened.halves.client, opened.halves.server.broadcast(opened.server, TRAINED)
    (name,) = model.names
    assert name == half.weight
    theta = dict(model.network.named_parameters())[name].detach()
    assert torch.allclose(
        model._deviations()[name], sent.log_alpha.exp().sqrt() * theta.abs(), rtol=1e-5
    )
    draws = []
    generator = torch.Generator().manual_seed(7)
    for _ in range(400):
        weights = {key: value.detach().clone() for key, value in model.network.named_parameters()}
        weights[name] = theta * (
            1 + sent.log_alpha.exp().sqrt() * torch.randn(theta.shape, generator=generator)
        )
        draws.append(
            torch.softmax(torch.func.functional_call(model.network, weights, (x,)), 1).detach()
        )
    slow = torch.stack(draws)
    found = model.predict(x, samples=400)
    assert float((found.mean - slow.mean(0)).abs().max()) < 0.05
    assert float((found.std - slow.std(0)).abs().max()) < 0.05


def test_the_linear_posterior_is_that_of_a_linear_model_exactly(tmp_path):
    """A network that is linear in its weights: draws of the weights and draws of the logits have
    the same distribution.
    """
    from bayflower.personal.load import Personal
    from bayflower.personal.made import Ready

    torch.manual_seed(0)
    network = torch.nn.Linear(4, 3)
    std = {"weight": 0.5 * torch.rand(3, 4), "bias": 0.5 * torch.rand(3)}
    card = {"posterior": {"kind": "linear"}, "title": "test"}
    x = torch.randn(5, 4)
    found = Personal(Ready(network), card, std).predict(x, samples=20000)
    card["posterior"]["kind"] = "sampled"
    slow = Personal(Ready(network), card, std).predict(x, samples=20000)
    assert torch.allclose(found.mean, slow.mean, atol=0.01)
    assert torch.allclose(found.std, slow.std, atol=0.01)
    assert torch.allclose(found.information, slow.information, atol=0.01)


def test_more_data_make_fedmap_more_certain(runs, tmp_path):
    """The Laplace approximation by hand, from single gradients over the model's own labels, with
    the prior n/sigma².
    """
    export(runs("fedmap"), TRAINED, tmp_path, ("safetensors",))
    model, opened = load_personal(tmp_path), open_run(runs("fedmap"))
    data = solo.samples(
        load_client(opened.run.data, 0, TRAINED), torch.device("cpu"), torch.float32
    ).train
    name = "head.bias"
    prior = len(data.y) / opened.run.options.sigma2
    with torch.no_grad():
        p = model.predict_proba(data.x)
    slow = (p * (1 - p)).sum(0) + prior  # the Fisher information of a softmax's bias
    assert torch.allclose(model._deviations()[name], slow.rsqrt(), rtol=1e-4)


# -- files and the command line ------------------------------------------------------------------
def run_cli(*words: str) -> None:
    sys.argv = ["bayflower", *words]
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code in (0, None), words


def test_commands(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [])
    run_cli("export", str(runs("fedmap")), str(tmp_path / "a"), "--client", "1")
    said = capsys.readouterr().out
    assert "client 1, FedMAP: the client's own MAP model" in said
    assert "uncertainty: Laplace" in said
    assert (tmp_path / "a" / "model.pt2").exists()
    run_cli(
        "export", str(runs("fedmap")), str(tmp_path / "b.safetensors"), "--client", "1", "--json"
    )
    assert json.loads(capsys.readouterr().out)["client"] == 1
    one, other = (
        load_file(tmp_path / "b.safetensors"),
        load_file(tmp_path / "a" / "model.safetensors"),
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert bayflower.load_personal(tmp_path / "a" / "card.json").card["method"] == "fedmap"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["export", "RUN", "out", "--client", "99"], r"client must be in \[0, 6\], got 99"),
        (
            ["export", "nowhere", "out", "--client", "0"],
            "has no checkpoint.safetensors; give the --out of a run",
        ),
        (["personalise", "RUN", "out", "--data", "none.npz"], "no file none.npz"),
    ],
)
def test_what_cannot_be_exported_is_said_with_exit_code_2(
    words, text, runs, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys,
        "argv",
        ["bayflower", *(str(runs("fedmap")) if word == "RUN" else word for word in words)],
    )
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    import re

    assert re.search(text, " ".join(capsys.readouterr().err.split()))


def test_files_that_are_not_ours_are_refused(runs, tmp_path):
    with pytest.raises(ConfigError, match="json cannot be read"):
        load_personal(tmp_path)
    export(runs("fedmap"), TRAINED, tmp_path, ("safetensors",))
    with pytest.raises(ConfigError, match="the network does not fit"):
        load_personal(tmp_path, model=lambda: torch.nn.Linear(2, 2))
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_personal(tmp_path)
    (tmp_path / "card.json").write_text('{"format": "other"}')
    with pytest.raises(ConfigError, match="is not the card of a personal model"):
        load_personal(tmp_path)
