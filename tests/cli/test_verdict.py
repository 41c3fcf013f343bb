"""Verdicts and flat results: from result files to words, tables and files for programs."""

from __future__ import annotations

import copy
import csv
import json
import random
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from bayflower.cli import app
from bayflower.config import parse
from bayflower.engines import prepare, run_to_result
from bayflower.errors import ConfigError
from bayflower.report.collect import Found, group, read
from bayflower.report.verdict import verdict, verdicts

SITES = ("Basel", "Bern", "Chur", "Genf", "Lugano", "Zug", "Zürich")
DRAWN = {"rounds": 1, "num_clients": 3, "keep": 0.1, "local_epochs": 1, "calibration": "off"}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> dict[str, dict]:
    """A real result of three methods, from which those of a study are made."""
    found = {}
    for method in ("fedmap", "fedavg", "local"):
        run = parse(method, {**DRAWN, "device": "cpu"})
        folder = tmp_path_factory.mktemp("one")
        run_to_result(prepare(run, "fused"), folder)
        found[method] = json.loads((folder / "result.json").read_text())
    return found


def result(base: dict, seed: int, accuracies: dict[str, float], lasting: bool = True) -> dict:
    """Return a result whose clients have these accuracies; numbers are dealt out by the seed."""
    made = copy.deepcopy(base)
    made["seed"] = made["config"]["seed"] = seed
    names = random.Random(seed).sample(sorted(accuracies), len(accuracies))
    made["clients"] = [
        {
            "client": number,
            "name": name if lasting else f"client {number}",
            "id": f"site:{name}" if lasting else f"x/seed-{seed}/part-{name}",
            "new": False,
            "lasting": lasting,
        }
        for number, name in enumerate(names)
    ]
    row = made["final"]["personal"]["per_client"][0]
    made["final"]["personal"]["per_client"] = [
        {**row, "client": number, "name": name, "accuracy": accuracies[name]}
        for number, name in enumerate(names)
    ]
    return made


def study(model, gains: dict[str, dict[str, float]], seeds=5, noise=0.0, lasting=True):
    """Return the groups of a study: local training at 0.7 and something for each site, and the
    other methods better by `gains`.
    """
    rng, runs = np.random.default_rng(0), []
    for seed in range(seeds):
        base = {name: 0.7 + 0.02 * rng.normal() for name in SITES}
        runs.append(Found(Path("l"), result(model["local"], seed, base, lasting)))
        for method, gain in gains.items():
            shift = noise * rng.normal()
            values = {
                name: base[name]
                + gain.get(name, gain.get("all", 0.0))
                + shift
                + noise * rng.normal()
                for name in SITES
            }
            runs.append(Found(Path(method), result(model[method], seed, values, lasting)))
    return group(runs)


def test_a_clear_gain_is_said_with_its_interval_and_by_name(model):
    gains = {"fedmap": {"all": 0.03, "Chur": -0.04}, "fedavg": {"all": -0.1}}
    said = verdict(study(model, gains, noise=0.004))
    assert said.words[0] == "No method beats local training beyond noise."  # Chur differs too much
    gains["fedmap"]["Chur"] = 0.01
    said = verdict(study(model, gains, noise=0.004))
    assert said.words[0] == "FedMAP beats local training beyond noise."
    assert said.words[1].startswith("Best here: FedMAP, accuracy 7")
    assert "(mean over clients)" in said.words[1]  # a table beside it has that of all samples
    assert said.words[1].endswith("ahead of Local and FedAvg beyond noise.")
    (first, second) = said.against
    assert (first.title, first.base, first.beyond) == ("FedMAP", "Local", True)
    assert 0.015 < first.difference.low < first.difference.mean < first.difference.high < 0.04
    assert second.beyond
    assert second.difference.mean == pytest.approx(-0.1, abs=0.01)
    assert any(": worse; better at 0, worse at 7 of 7 clients" in line for line in said.words)
    who = next(line for line in said.words if line.startswith("With FedMAP gain: "))
    assert all(site in who for site in ("Basel", "Zürich"))
    assert who.endswith("lose: nobody.")
    assert any("5 seeds × 7 sites" in line for line in said.words)
    assert any("a difference of 1 point takes about" in line for line in said.words)


def test_clients_are_matched_by_identity_and_not_by_number(model):
    """Numbers differ between seeds; the differences of each site are what was put in."""
    gains = {"fedmap": {name: 0.01 * k for k, name in enumerate(SITES)}}
    said = verdict(study(model, gains, seeds=3))
    found = {said.names[site.id]: site for site in said.against[0].difference.sites}
    assert {name: site.seeds for name, site in found.items()} == dict.fromkeys(SITES, 3)
    for k, name in enumerate(SITES):
        assert found[name].mean == pytest.approx(0.01 * k)


def test_a_site_left_out_in_each_seed_is_matched_by_name(model):
    runs = []
    for seed, left in enumerate(("Bern", "Zug", "Chur")):
        base = {name: 0.5 + 0.1 * seed for name in SITES if name != left}
        better = {name: value + 0.02 for name, value in base.items()}
        runs += [
            Found(Path("l"), result(model["local"], seed, base)),
            Found(Path("m"), result(model["fedmap"], seed, better)),
        ]
    said = verdict(group(runs))
    (one,) = said.against
    assert one.difference.clients == 7
    assert {said.names[s.id]: s.seeds for s in one.difference.sites}["Bern"] == 2
    assert all(site.mean == pytest.approx(0.02) for site in one.difference.sites)


def test_left_out_sites_of_different_seeds_are_compared_by_name(model):
    """Every seed leaves out one site, always under the same number."""
    runs = []
    for seed, left in enumerate(("Bern", "Zug", "Bern", "Chur")):
        for method, gain in (("local", 0.0), ("fedmap", 0.05 if left == "Bern" else 0.01)):
            made = result(model[method], seed, dict.fromkeys(SITES, 0.7))
            row = next(one for one in made["clients"] if one["name"] == left)
            row["new"] = True
            block = copy.deepcopy(made["final"]["personal"])
            block["per_client"] = [{**block["per_client"][0], "client": row["client"]}]
            block["per_client"][0]["accuracy"] = 0.6 + gain
            made["final"]["new_clients"] = block
            runs.append(Found(Path(method), made))
    (one,) = verdict(group(runs), view="new_clients").against
    found = {site.id: (site.seeds, site.mean) for site in one.difference.sites}
    assert found == {
        "site:Bern": (2, pytest.approx(0.05)),
        "site:Zug": (1, pytest.approx(0.01)),
        "site:Chur": (1, pytest.approx(0.01)),
    }


def test_drawn_clients_are_not_averaged_over_seeds(model):
    gains = {"fedmap": {"all": 0.02}}
    said = verdict(study(model, gains, seeds=3, noise=0.02, lasting=False))
    (one,) = said.against
    assert (one.difference.clients, one.difference.parts) == (21, None)
    assert any("drawn clients have no names" in line for line in said.words)
    assert any("each with clients of its own (21 in all)" in line for line in said.words)


def test_one_seed_says_what_it_cannot_show(model):
    said = verdict(study(model, {"fedmap": {"all": 0.02}}, seeds=1, noise=0.02))
    assert "on this seed" in said.words[0]
    assert any("They do not show what another seed would change" in line for line in said.words)
    assert not any("takes about" in line for line in said.words)


def test_without_local_training_the_verdict_says_so(model):
    groups = [g for g in study(model, {"fedmap": {}, "fedavg": {}}) if g.method != "local"]
    said = verdict(groups)
    assert said.alone is None
    assert "Local training was not run" in said.words[0]
    assert len(said.rivals) == 1


def test_less_is_better_for_losses(model):
    groups = study(model, {"fedmap": {"all": 0.05}}, noise=0.002)
    for one in groups:
        for run in one.runs:
            for row in run.result["final"]["personal"]["per_client"]:
                row["nll"] = 1 - row["accuracy"]
    (said,) = verdicts(groups, "nll")
    assert next(iter(said.means)) == "FedMAP"
    assert said.words[0] == "FedMAP beats local training beyond noise."
    assert "better at 7, worse at 0" in " ".join(said.words)
    with pytest.raises(ConfigError, match="metric must be one of accuracy"):
        verdicts(groups, "speed")


# -- the command ---------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def folder(model, tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("study")
    for one in study(model, {"fedmap": {"all": 0.03}}, seeds=3, noise=0.004):
        for run in one.runs:
            path = made / one.method / f"seed-{run.seed}" / "result.json"
            path.parent.mkdir(parents=True)
            path.write_text(json.dumps(run.result))
    return made


def call(*words: str):
    done = CliRunner().invoke(app, ["results", *words])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def test_results_at_the_terminal_and_for_programs(folder):
    shown = call(str(folder)).output
    assert "FedMAP beats local training beyond noise" in shown
    assert "7 sites" in shown or "3 sites" in shown
    said = json.loads(call(str(folder), "--json").output)
    (one,) = said["verdicts"]
    (row,) = one["against_local_training"]
    assert row["beyond_noise"] is True
    assert {site["name"] for site in row["clients_of"]} == set(SITES)
    assert len([row for row in said["runs"] if row["model"] == "personal"]) == 6
    assert one["words"] == list(verdict(group(read([folder]))).words)


def test_results_as_files(folder, tmp_path):
    assert "rows" in call(str(folder), "--out", str(tmp_path / "t.csv")).output
    with (tmp_path / "t.csv").open() as file:
        rows = list(csv.DictReader(file))
    personal = [row for row in rows if row["model"] == "personal"]
    assert len(personal) == 2 * 3 * 7
    want = {
        (run.result["method"], run.seed, run.clients[row["client"]].name): row["accuracy"]
        for run in read([folder])
        for row in run.result["final"]["personal"]["per_client"]
    }
    got = {(r["method"], int(r["seed"]), r["name"]): float(r["accuracy"]) for r in personal}
    assert got == want
    call(str(folder), "--rows", "runs", "--out", str(tmp_path / "t.json"))
    runs = json.loads((tmp_path / "t.json").read_text())
    assert {row["method"] for row in runs} == {"fedmap", "local"}
    assert all(row["seconds"] > 0 for row in runs)
    for words, text in (
        (["--out", str(tmp_path / "t.xlsx")], "must end in .csv"),
        (["--out", str(tmp_path / "none" / "t.csv")], "cannot be written"),
        (["--rows", "cells"], "--rows must be clients or runs"),
    ):
        with pytest.raises(ConfigError, match=text):
            call(str(folder), *words)


def test_parquet_is_written_by_pyarrow_or_refused(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match="pip install pyarrow"):
        call(str(folder), "--out", str(tmp_path / "t.parquet"))
    seen: list = []
    arrow, parquet = types.ModuleType("pyarrow"), types.ModuleType("pyarrow.parquet")
    arrow.Table = types.SimpleNamespace(from_pylist=lambda rows: rows)
    parquet.write_table = lambda rows, path: (seen.extend(rows), path.write_text("PAR1"))
    arrow.parquet = parquet
    monkeypatch.setitem(sys.modules, "pyarrow", arrow)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", parquet)
    call(str(folder), "--out", str(tmp_path / "t.parquet"))
    assert (tmp_path / "t.parquet").read_text() == "PAR1"
    assert {row["name"] for row in seen if row["model"] == "personal"} == set(SITES)
