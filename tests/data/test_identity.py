"""Clients are known by identity, never by number: sites by name, drawn clients by seed and part."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from bayflower.cli import app
from bayflower.config import parse
from bayflower.data import DataSettings, identities, load_federation, reported
from bayflower.engines import prepare, run_to_result
from bayflower.report.collect import Found, group, load, read
from bayflower.report.figures import mean_by_client
from bayflower.rounds.result import clients_of

QUICK = {"rounds": 1, "local_epochs": 1, "new_client_epochs": 1, "device": "cpu"}


@pytest.fixture
def sites(tmp_path: Path) -> Path:
    """Seven sites numbered 3, 5, …, 15, each with a mean of its own."""
    draw = np.random.default_rng(0)
    owner = np.repeat(np.arange(3, 17, 2), 30)
    x = draw.normal(size=(210, 4)) + 100 * owner[:, None]
    np.savez(tmp_path / "seven.npz", x=x, y=(draw.random(210) > 0.5).astype(int), client=owner)
    return tmp_path / "seven.npz"


def settings(path: Path, **more: object) -> DataSettings:
    return DataSettings(
        dataset=str(path), partition="natural", num_clients=6, new_clients=1, **more
    )


def test_a_site_is_the_same_in_every_seed_whatever_its_number(sites):
    """The left-out site of each seed is found by its samples."""
    left_out = set()
    for seed in range(12):
        federation = load_federation(settings(sites), seed)
        known = clients_of(federation, seed)
        assert [one.client for one in known] == list(range(7))
        assert [one.new for one in known] == [False] * 6 + [True]
        from bayflower.data import client_scaling

        for one in known:
            scaling = client_scaling(settings(sites), seed, one.client)
            number = round(float(scaling.mean.mean()) / 100)  # whose samples these are
            assert (one.name, one.id, one.lasting) == (f"site {number}", f"site:{number}", True)
        left_out.add(known[-1].name)
    assert len(left_out) > 2  # another one is left out by other seeds


def test_drawn_clients_of_different_seeds_are_different():
    data = {"dataset": "digits", "num_clients": 3, "new_clients": 1, "keep": 0.2}
    known = {
        (kind, seed): clients_of(load_federation(DataSettings(**data, partition=kind), seed), seed)
        for kind in ("iid", "dirichlet")
        for seed in (0, 1)
    }
    everyone = [one.id for some in known.values() for one in some]
    assert len(set(everyone)) == len(everyone) == 16
    assert not any(one.lasting for some in known.values() for one in some)
    again = clients_of(load_federation(DataSettings(**data, partition="iid"), 1), 1)
    assert [one.id for one in again] == [one.id for one in known["iid", 1]]
    # the same part of the same partition under another number is the same client
    parts = known["iid", 0]
    assert sorted(one.id.rsplit("-", 1)[1] for one in parts) == ["0", "1", "2", "3"]


def test_names_go_through_result_card_and_table(sites, tmp_path, monkeypatch):
    given = {**QUICK, "dataset": str(sites), "partition": "natural", "num_clients": 6}
    run = parse("fedavg", {**given, "new_clients": 1, "seed": 3})
    result = run_to_result(prepare(run, "loop"), tmp_path / "run")
    names = {one["client"]: one["name"] for one in result["clients"]}
    assert sorted(names.values(), key=lambda name: int(name[5:])) == [
        f"site {k}" for k in range(3, 17, 2)
    ]
    assert result["classes"] == ["0", "1"]
    for block in ("personal", "global", "new_clients"):
        for row in result["final"][block]["per_client"]:
            assert row["name"] == names[row["client"]]
    for row in result["uncertainty"]["clients"]["per_client"]:
        assert row["name"] == names[row["client"]]
    out = tmp_path / "model"
    formats = ("safetensors",)  # names are not in a program
    monkeypatch.setattr("bayflower.cli.personal.wanted", lambda into, onnx: (into, formats))
    done = CliRunner().invoke(app, ["export", str(tmp_path / "run"), str(out), "--client", "6"])
    assert done.exit_code == 0, done.output
    assert f"client 6 ({names[6]})" in done.output
    card = json.loads((out / "card.json").read_text())
    assert (card["site"], card["data"]["classes"]) == (names[6], ["0", "1"])


def test_the_report_averages_a_site_over_seeds_by_name_and_not_by_number(sites, tmp_path):
    given = {**QUICK, "dataset": str(sites), "partition": "natural", "num_clients": 6}
    want: dict[str, list[float]] = {}
    for seed in (0, 1, 2):
        run = parse("local", {**given, "new_clients": 1, "seed": seed, "calibration": "off"})
        result = run_to_result(prepare(run, "loop"), tmp_path / "runs" / str(seed))
        site = {one["client"]: one["id"] for one in result["clients"]}
        for row in result["final"]["personal"]["per_client"]:
            want.setdefault(site[row["client"]], []).append(row["accuracy"])
    (one,) = group(read([tmp_path / "runs"]))
    got = mean_by_client(one)
    assert got == {site: pytest.approx(np.mean(values)) for site, values in want.items()}
    assert len(got) == 7  # by number there would be six
    assert one.named["site:5"] == "site 5"
    # an older file, without names, says the same
    for path in (tmp_path / "runs").rglob("result.json"):
        old = json.loads(path.read_text())
        for key in ("clients", "classes", "columns"):
            del old[key]
        path.write_text(json.dumps(old))
    (old_one,) = group(read([tmp_path / "runs"]))
    assert mean_by_client(old_one) == got


def test_without_a_partition_a_client_is_known_by_seed_and_number(tmp_path):
    some = identities({"train_sizes": [3, 4]}, 5, (), [0, 1], [])
    assert [one.id for one in some] == ["seed-5/client-0", "seed-5/client-1"]
    assert reported({"sites": ["a", 3], "classes": ["no", "yes"], "columns": "x"}) == (
        (),
        ("no", "yes"),
        (),
    )
    assert reported(None) == ((), (), ())


def test_a_file_of_an_earlier_version_loads(tmp_path):
    run = parse("local", {**QUICK, "num_clients": 3, "keep": 0.1, "calibration": "off"})
    run_to_result(prepare(run, "fused"), tmp_path)
    old = json.loads((tmp_path / "result.json").read_text())
    before = Found(tmp_path, load(tmp_path / "result.json")).clients
    del old["clients"]
    (tmp_path / "result.json").write_text(json.dumps(old))
    assert Found(tmp_path, load(tmp_path / "result.json")).clients == before
