"""Presets: the papers' values by one word, on every way into a run; and the defaults that the cache
of published runs was made with.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bayflower.cli import app
from bayflower.config import describe, parse
from bayflower.errors import ConfigError
from bayflower.flower.app import folded, run_of
from bayflower.methods import METHODS
from bayflower.reproduce import load_tables
from bayflower.reproduce.cache import COLLECTIONS, defaults, digest, whole
from bayflower.reproduce.tables import all_pinned, pinned
from bayflower.strategies import PFedVMP

RESULTS = Path(__file__).parents[2] / "experiments" / "results"
PAPERS = {
    "pfedvmp": {
        "optimizer": "sgd",
        "lr": 0.01,
        "batch_size": 10,
        "local_epochs": 1,
        "xi": 50.0,
        "xi_rule": "fixed",
        "alpha": 1.0,
    },
    "fednp": {
        "optimizer": "sgd",
        "lr": 0.01,
        "weight_decay": 1e-5,
        "batch_size": 128,
        "local_epochs": 10,
        "latent": 10,
        "np_weight": 0.01,
        "moments": "thm2",
        "site": "scalar",
        "npn_start": "zero",
    },
    "metavd": {
        "optimizer": "sgd",
        "lr": 0.02,
        "clip_norm": 5.0,
        "batch_size": 64,
        "local_epochs": 5,
        "kl_weight": 10.0,
        "server_lr": 0.9,
        "server_momentum": 0.9,
        "adapt_steps": 1,
        "inner_lr": 0.02,
    },
    "pfedbayes": {"bayes_zeta": 10.0, "bayes_start_rho": -2.5},
    "reptile": {"adapt_steps": 1},
    **{name: {"adapt_steps": 1, "inner_lr": 0.02} for name in ("maml", "perfedavg", "snip")},
    "fedmap": {
        "optimizer": "adam",
        "lr": 0.001,
        "batch_size": 64,
        "local_epochs": 5,
        "sigma2": 15.0,
    },
    "fedbps": {
        "optimizer": "sgd",
        "lr": 0.01,
        "momentum": 0.9,
        "weight_decay": 5e-4,
        "batch_size": 128,
        "local_epochs": 5,
        "personal_share": 0.7,
    },
}


@pytest.mark.parametrize("method", METHODS)
def test_the_preset_paper_changes_what_the_paper_states_and_nothing_else(method):
    row = METHODS[method]
    usual, found = parse(method).flat(), parse(method, {"preset": "paper"}).flat()
    want = {**PAPERS.get(row.stem, {}), **row.defaults}
    assert found == {**usual, **want}
    shown = {name: value for _, name, value, _ in describe(method, "paper")}
    assert all(shown[name] == value for name, value in want.items())


def test_what_is_set_comes_on_top_of_a_preset():
    found = parse("pfedvmp-avg", {"preset": "paper", "xi": "7", "lr": 0.5})
    assert (found.options.xi, found.training.lr, found.training.batch_size) == (7.0, 0.5, 10)
    assert found.options.centroid == "mean"  # what the row is


@pytest.mark.parametrize("method", ["pfedvmp", "fednp", "fedbps"])
def test_the_preset_is_what_the_papers_first_table_runs(method):
    """Settings that the table states are the preset's; so are the pinned ones."""
    cells = load_tables()[f"{method}-1"].cells("full")
    stated = next(cell.spec.values() for cell in cells if cell.spec and cell.spec.method == method)
    # a full run here has fewer local epochs than FedNP's paper
    both = PAPERS[method].keys() & stated.keys() - {"local_epochs"}
    assert len(both) >= 4
    assert {key: stated[key] for key in both} == {key: PAPERS[method][key] for key in both}
    assert pinned(method).items() <= PAPERS[method].items()


def test_a_run_config_and_a_strategy_take_a_preset():
    config = folded({"method": "pfedvmp,local", "preset": "paper", "sigma2": "3"})
    assert "preset=paper" in config["set"]
    run = run_of(config, "pfedvmp")
    assert (run.options.xi, run.training.batch_size) == (50.0, 10)
    assert run_of(config, "local").training.batch_size == 64
    assert PFedVMP(preset="paper").options.xi_rule == "fixed"


@pytest.mark.parametrize(
    "command",
    [["run", "fedmap"], ["compare", "fedmap", "local"], ["settings", "fedmap"], ["tune", "fedmap"]],
)
def test_a_wrong_preset_is_one_line(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(app, [*command, "--preset", "papr"])
    assert isinstance(found.exception, ConfigError)
    assert str(found.exception) == "preset 'papr' is not known for fedmap; known: paper"
    assert not list(tmp_path.iterdir())


# -- pinned --------------------------------------------------------------------------------------
def test_every_cached_run_keeps_its_name():
    """The name of a run is a hash of what differs from the defaults, or from what is pinned. From
    each run's whole configuration it comes out as it was, so no default has changed unpinned.
    """
    seen = 0
    for collection in COLLECTIONS:
        for line in (RESULTS / f"{collection}.jsonl").read_text().splitlines():
            record = json.loads(line)
            name = record.pop("name")
            assert whole(record)
            if record["runner"] != "engine":
                continue
            usual = defaults(record["method"])[0]
            stated = {
                key: value
                for key, value in record["config"].items()
                if value is not None and value != usual.get(key)
            }
            about = {"runner": "engine", "method": record["method"], "settings": stated}
            assert name.startswith(digest(about)[:20] + "-"), (name, record["method"], stated)
            seen += 1
    assert seen > 500


def test_what_is_pinned_is_a_setting_and_no_longer_a_default():
    for method, values in all_pinned().items():
        usual = parse(method).flat()
        for name, value in values.items():
            assert usual[name] != value, f"{method}, {name}: the default is {value!r} again"
