"""`bayflower bench`: the file's structure, ratios that come from the rounds, and reasons where
something cannot be measured. No times.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import statistics
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from bayflower import bench
from bayflower.bench import cases, networks, races, stages, suites, zoo
from bayflower.bench.cases import data_bytes, pictures
from bayflower.bench.networks import NETWORKS
from bayflower.cli import app
from bayflower.engines import execute
from bayflower.errors import ConfigError

TINY = {"device": "cpu", "rounds": 1}
KEYS = {"format", "suite", "environment", "options", "rows"}


def measured(suite: str, file: Path | None = None, **options) -> dict:
    said: list[str] = []
    content = bench.run(suite, bench.Options(**{**TINY, **options}), file, said.append)
    assert said or all(row["failed"] for row in content["rows"])
    return content


def shown(content: dict) -> str:
    console = Console(width=250)
    with console.capture() as capture:
        console.print(bench.table(content))
    return capture.get()


@pytest.fixture(autouse=True, scope="module")
def little():
    """A tenth of the digits, a twentieth of the pictures: no test is about the time of a round."""

    def few(clients, train, test, seed):
        return pictures(clients, train // 20, test // 20, seed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cases.WORKLOADS, "digits", {**cases.WORKLOADS["digits"], "keep": 0.1})
        patch.setattr(suites, "pictures", few)
        yield


@pytest.fixture(scope="module")
def methods(tmp_path_factory) -> tuple[dict, Path]:
    file = tmp_path_factory.mktemp("bench") / "deep" / "methods.json"
    return measured("methods", file, methods=("local", "fedper"), tf32=True), file


@pytest.mark.slow
def test_races_run_the_workloads_of_other_simulators(monkeypatch, tmp_path):
    text = "To be, or not to be: that is the question.\n" * 40
    (tmp_path / "shakespeare.txt").write_text(text)
    for name, race in list(races.RACES.items()):
        few = dataclasses.replace(race, clients=4, sampled=2, samples=4)
        monkeypatch.setitem(races.RACES, name, few)
    content = measured(
        "races", workloads=("flute-mnist-lr", "shakespeare-lstm", "digits"), data_dir=str(tmp_path)
    )
    first, second, other = content["rows"]
    assert [first["failed"], second["failed"]] == [None, None]
    assert first["num_rounds"] == second["num_rounds"] == 1
    assert first["samples_per_second"] == round(8 / first["total"])
    assert "not a race" in other["failed"]
    assert "FLUTE" in shown(content)
    weights = {
        name: sum(p.numel() for p in race.network().parameters())
        for name, race in races.RACES.items()
    }
    assert weights["pfl-cifar10"] == 1_626_442
    assert weights["femnist-cnn"] == 1_206_590
    absent = measured("races", workloads=("shakespeare-lstm",), data_dir=str(tmp_path / "no"))
    assert "shakespeare.txt is not there" in absent["rows"][0]["failed"]


def test_networks_are_stacked_timed_and_compared():
    names = "table-masks", "digits"
    content = measured("networks", workloads=names, methods=("metavd",), clients=(2,))
    row, other = content["rows"]
    assert "not a network; those are logistic, " in other["failed"]
    assert row["case"] == "metavd on table-masks"
    assert row["failed"] is None
    assert row["trained"] == "stacked"
    assert 0 < row["apart"] < 1e-9
    assert row["beside"] == "the loop engine"
    assert row["one_by_one_ratio"] == row["one_by_one_ms"] / row["ms"]
    assert row["weights"] == 12202
    assert "e-1" in shown(content)
    (row,) = measured("networks", workloads=("squeezenet",), methods=("metavd",))["rows"]
    assert "no linear layer before its head" in row["failed"]


def test_steps_of_clients_one_by_one_are_timed():
    content = measured("single", rounds=2)
    (row,) = content["rows"]
    assert (row["failed"], row["way"]) == (None, "plain")  # on a CPU nothing is recorded
    run = cases.loaded("fedavg", cases.Options("cpu").values("digits", 1))
    batch = run.run.training.batch_size
    steps = sum(-(-len(data.y_train) // batch) for data in run.federation.clients)
    assert row["steps"] == steps
    assert row["ms_a_step"] == pytest.approx(row["ms"] / steps)
    assert "steps a round" in shown(content)


def test_numbers_that_differ_are_seen(monkeypatch):
    """Break it on purpose: the loop engine's clients train with another rate."""
    real = zoo.in_loop
    faster = {**zoo.COMPARED, "rounds": 1, **cases.QUIET, "device": "cpu", "lr": 0.006}
    run = networks.prepared("logistic", "fedavg", faster, "loop", zoo.UNEQUAL)
    monkeypatch.setattr(zoo, "in_loop", lambda prepared: real(run))
    options = {"workloads": ("logistic",), "methods": ("fedavg",), "one_by_one": False}
    (row,) = measured("networks", **options)["rows"]
    assert row["apart"] > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_of_the_suite_trains(name):
    """A tiny round of FedAvg, stacked, and the samples that the network is for."""
    run = networks.prepared(
        name,
        "fedavg",
        {"rounds": 1, "stacking": "yes", "local_steps": 1, **cases.QUIET},
        sizes=(4, 3),
    )
    done = execute(run)
    assert done.remarks == ()
    assert math.isfinite(done.rounds[0]["train_loss"])


def test_the_file_is_what_was_returned(methods):
    content, file = methods
    assert set(content) == KEYS
    written = json.loads(file.read_text())
    assert written["rows"] == content["rows"]
    assert {"device", "torch", "cuda", "python", "commit", "cores"} <= set(written["environment"])
    assert [(row["method"], row["precision"]) for row in written["rows"]] == [
        ("local", "float32"),
        ("local", "tf32"),
        ("fedper", "float32"),
        ("fedper", "tf32"),
    ]
    for row in written["rows"]:
        assert row["failed"] is None
        assert len(row["round_ms"]) == row["warm_up"] + row["num_rounds"] == 4
        assert row["peak_memory"] > 0
        assert {"training", "aggregation", "evaluation"} <= set(row["seconds"])
        assert "digits" in row["data"]


def test_ratios_come_from_the_rounds(methods):
    rows = methods[0]["rows"]
    for row in rows:
        mine = statistics.median(row["round_ms"][row["warm_up"] :])
        assert row["ms"] == pytest.approx(mine, abs=1e-3)
        same = next(
            one
            for one in rows
            if one["method"] == "fedper" and one["precision"] == row["precision"]
        )
        assert row["fedper_ratio"] == pytest.approx(row["ms"] / same["ms"])
        if row["precision"] == "float32":
            alone = statistics.median(row["one_by_one_round_ms"][1:])
            assert row["one_by_one_ms"] == pytest.approx(alone, abs=1e-3)
            assert row["one_by_one_ratio"] == pytest.approx(row["one_by_one_ms"] / row["ms"])
        else:
            assert row["one_by_one_ratio"] is None


def test_the_table_shows_every_row(methods):
    text = shown(methods[0])
    assert text.count("fedper") == 2
    assert "seed 0" in text


def test_what_cannot_run_is_a_row_with_the_reason(tmp_path):
    content = measured(
        "methods", data_dir=str(tmp_path), workloads=("fmnist-50",), methods=("fedper",)
    )
    assert "fmnist" in content["rows"][0]["failed"]
    assert "not measured: fedper on fmnist-50" in " ".join(shown(content).split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "suite", ["methods", "scaling", "cross-device", "profile", "single", "steps"]
)
def test_without_a_gpu_every_row_says_so(suite):
    content = measured(
        suite, device="cuda", workloads=("digits",), clients=(2,), methods=("fedper",)
    )
    assert content["rows"]
    assert all("was not found" in row["failed"] for row in content["rows"])
    assert "not measured" in shown(content)


def test_without_flower_clients_are_trained_one_by_one(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name in ("flwr", "ray") else real(name, *more),
    )
    (row,) = measured("methods", methods=("local",))["rows"]
    assert row["one_by_one"] == "fused, stacking=no"
    assert "flwr is not installed" in row["how"]
    assert row["one_by_one_ratio"] == pytest.approx(row["one_by_one_ms"] / row["ms"])


def test_cpu_engines_beside_loop_and_no_ray(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == "ray" else real(name, *more),
    )
    content = measured("cpu", methods=("local",))
    rows = {row["engine"]: row for row in content["rows"]}
    assert list(rows) == ["loop", "fused", "fused, stacking=yes", "ray"]
    assert "Ray" in rows["ray"]["failed"]
    assert rows["loop"]["loop_ratio"] == 1
    assert rows["fused"]["loop_ratio"] == pytest.approx(rows["fused"]["ms"] / rows["loop"]["ms"])
    assert rows["fused, stacking=yes"]["chosen"] == "stacked"
    assert rows["fused"]["chosen"] in ("stacked", "one by one")
    assert "not measured: ray" in shown(content)


@pytest.mark.slow
def test_scaling_in_chunks_and_at_once():
    rows = measured("scaling", clients=(1, 2), methods=("local",))["rows"]
    assert [(row["clients"], row["max_fused"]) for row in rows] == [(1, 0), (2, 0), (2, 1)]
    assert all(row["rounds_per_second"] == pytest.approx(1000 / row["ms"]) for row in rows)
    assert rows[1]["data_bytes"] == 2 * rows[0]["data_bytes"]


def test_cross_device_keeps_on_disk_what_was_sampled():
    disk, device = measured("cross-device", clients=(100,))["rows"]
    assert disk["client_states"] == "disk"
    assert disk["sampled"] == 1
    assert disk["all_states_bytes"] == 100 * disk["sampled_states_bytes"]
    sampled = 4 * disk["sampled_states_bytes"]  # one client in each of four rounds
    assert disk["sampled_states_bytes"] <= disk["disk_bytes"] < 1.5 * sampled
    assert device["disk_bytes"] == 0


def test_profile_accounts_for_the_round():
    content = measured("profile", methods=("pfedvmp",))
    rows = {row["stage"]: row for row in content["rows"]}
    assert all(row["failed"] is None for row in rows.values())
    whole = rows["a round"]["ms"]
    assert sum(
        rows[name]["ms"] for name in stages.STAGES.values() if name in rows
    ) == pytest.approx(whole)
    for name in ("gather", "gradient", "optimiser", "messages", "aggregation"):
        assert stages.STAGES[name] in rows
    assert any(name.startswith("evaluation") for name in rows)
    assert "the differences taken" in rows["a round"]["how"]


def test_steps_over_the_number_of_clients():
    rows = measured("steps", clients=(3, 1, 5000))["rows"]
    assert [row["clients"] for row in rows] == [3, 1]
    assert all(
        row["us_per_client"] == pytest.approx(1000 * row["ms"] / row["clients"]) for row in rows
    )


def test_stages_are_those_of_one_process():
    """Workers are refused, not left out."""
    prepared = cases.loaded("fedavg", cases.Options().values("digits", 1, workers="2"))
    with pytest.raises(ConfigError, match="in one process, got workers=2; leave workers out"):
        stages.Rounds(prepared)


def test_an_interruption_loses_no_finished_row(tmp_path, monkeypatch):
    def broken(options, say):
        yield {"case": "first", "ms": 1.0}
        raise KeyboardInterrupt

    monkeypatch.setitem(bench.SUITES, "scaling", (broken, ""))
    with pytest.raises(KeyboardInterrupt):
        measured("scaling", tmp_path / "b.json")
    assert [row["case"] for row in json.loads((tmp_path / "b.json").read_text())["rows"]] == [
        "first"
    ]


def test_a_limit_of_time_leaves_one_round_that_counts():
    (row,) = measured("methods", methods=("local",), rounds=50, seconds=0.0, one_by_one=False)[
        "rows"
    ]
    assert row["num_rounds"] == 1
    assert row["one_by_one_ratio"] is None


def test_ratios_without_anything_to_compare_with():
    rows = [
        {"workload": "a", "method": "fedavg", "ms": 2.0},
        {"workload": "b", "method": "fedper", "ms": 1.0},
    ]
    assert [row["fedper_ratio"] for row in suites.with_ratios("methods", rows)] == [None, 1.0]


def test_made_pictures_are_the_same_for_the_same_seed():
    one, two = pictures(3, 4, 2, seed=1), pictures(3, 4, 2, seed=1)
    assert (one.clients[2].x_train == two.clients[2].x_train).all()
    assert data_bytes(one) == 3 * 6 * (28 * 28 * 4 + 8)


def test_wrong_words_are_refused():
    for options in ({"workloads": ("imagenet",)}, {"methods": ("fedfoo",)}, {"clients": (0,)}):
        with pytest.raises(ConfigError):
            bench.Options(**options)
    with pytest.raises(ConfigError, match="suite must be one of"):
        measured("speed")


def test_the_command_writes_its_file(tmp_path):
    done = CliRunner().invoke(
        app,
        [
            "bench",
            "steps",
            "--clients",
            "2",
            "--device",
            "cpu",
            "--json",
            str(tmp_path / "steps.json"),
        ],
    )
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "steps.json").read_text())["rows"][0]["clients"] == 2
