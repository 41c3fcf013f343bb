"""Tuning: what it searches, on which data, and that a search goes on where it stopped."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
from prefork import bayflower

from bayflower.config import parse
from bayflower.data import DataSettings, load_client, load_federation
from bayflower.errors import ConfigError
from bayflower.methods import METHODS
from bayflower.reproduce import find
from bayflower.reproduce.tables import PAPERS, load_tables
from bayflower.reproduce.tune import (
    RANGES,
    Search,
    point,
    ranges,
    read,
    rows_of,
    search,
    write,
    write_table,
)

ROOT = Path(__file__).parents[2]
SMALL = {"dataset": "synthetic", "num_clients": 2, "rounds": 1, "local_epochs": 1, "device": "cpu"}


def rows(x: np.ndarray) -> set[bytes]:
    return {row.tobytes() for row in x.reshape(len(x), -1)}


@pytest.mark.parametrize("dataset", ["digits", "synthetic"])
def test_validation_data_come_from_the_training_part_alone(dataset):
    usual = DataSettings(dataset=dataset, num_clients=3, new_clients=2, calibration="off")
    chosen = DataSettings(dataset=dataset, num_clients=3, new_clients=2, validation=0.25)
    plain, split = load_federation(usual, 1), load_federation(chosen, 1)
    assert split.new_clients == ()
    for before, after in zip(plain.clients, split.clients, strict=True):
        assert len(after.y_train) + len(after.y_test) == len(before.y_train)
        assert len(after.y_test) == round(0.25 * len(before.y_train))
        if dataset == "digits":  # images are not standardised, so samples can be recognised
            assert rows(after.x_train) | rows(after.x_test) == rows(before.x_train)
            assert not rows(after.x_test) & (rows(before.x_test) - rows(before.x_train))
        assert (load_client(chosen, 1, after.client).x_test == after.x_test).all()


def test_validation_is_checked():
    with pytest.raises(ConfigError, match=r"validation must be in \[0, 1\), got 1.5"):
        DataSettings(validation=1.5)
    with pytest.raises(ConfigError, match="validation must be in"):
        Search({}, validation=0.0)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_has_a_range_that_parses(method):
    space = ranges(method, {})
    assert "lr" in space
    for pick in (0, -1):
        chosen = {
            name: values[pick] if isinstance(values, list) else values[("low", "high")[pick]]
            for name, values in space.items()
        }
        parse(method, chosen)
    assert "lr" not in ranges(method, {"lr": 0.1})


def test_ranges_name_methods_and_their_settings():
    content = tomllib.loads(RANGES.read_text())
    for method, values in content.items():
        if method not in ("every", "when"):
            assert set(values) <= set(ranges(method, {})), method


def test_a_search_goes_on_and_is_equal_for_all(tmp_path):
    pytest.importorskip("optuna")
    seen: list[float] = []

    def run(prepared):
        """A score that only the searched setting decides; the data it would be measured on are the
        validation part.
        """
        assert prepared.run.data.validation == 0.2
        assert prepared.federation.new_clients == ()
        seen.append(prepared.run.options.sigma2)
        return {"final": {"personal": {"accuracy": -abs(prepared.run.options.sigma2 - 30)}}}

    say: list[str] = []
    three = search("fedmap", Search({**SMALL, "lr": 0.01}, 3), tmp_path, say.append, run)
    assert (len(seen), three["trials"]) == (3, 3)
    five = search("fedmap", Search({**SMALL, "lr": 0.01}, 5), tmp_path, say.append, run)
    assert (len(seen), five["trials"]) == (5, 5)
    assert "fedmap: 3 of 5 trials are there; searching sigma2" in say
    assert five["values"]["sigma2"] == min(seen, key=lambda value: abs(value - 30))
    search("fedmap", Search({**SMALL, "lr": 0.02}, 1), tmp_path, say.append, run)
    assert len(seen) == 6  # other settings are another search


def test_first_trials_cover_the_range_and_repeat_nothing(tmp_path):
    pytest.importorskip("optuna")
    rates = ranges("fedavg", {})["lr"]
    assert sorted(point("lr", rates, place) for place in range(6)) == sorted(rates)
    assert [point("lr", rates, place) for place in range(6)] != [
        point("lr", rates, place) for place in range(6, 12)
    ]
    for log in (False, True):
        places = [point("mu", {"low": 1.0, "high": 16.0, "log": log}, place) for place in range(8)]
        shares = [np.log2(place) / 4 if log else (place - 1) / 15 for place in places]
        gaps = np.diff(sorted([*shares, min(shares) + 1]))
        assert 0 <= min(shares) < max(shares) < 1
        assert max(gaps) <= 0.25 + 1e-9
    seen: list[float] = []

    def run(prepared):
        seen.append(prepared.run.training.lr)
        return {"final": {"personal": {"accuracy": 0.0}}}

    for trials in (2, 6):  # as a search that was killed
        search("fedavg", Search(SMALL, trials), tmp_path, lambda line: None, run)
    assert sorted(seen) == sorted(rates)


def test_the_file_of_chosen_values(tmp_path):
    path = tmp_path / "tuned.toml"
    write(
        path, "fedmap", {"dataset": "digits", "trials": 3, "score": 0.5, "values": {"sigma2": 12.5}}
    )
    write(path, "fedprox", {"dataset": "digits", "trials": 3, "score": 0.5, "values": {"mu": 0.1}})
    entries = read(path)
    assert entries["fedmap"]["values"] == {"sigma2": 12.5}
    tuned = {method: entry["values"] for method, entry in entries.items()}
    cells = {
        cell.spec.method: cell.spec.values() for cell in find("fedmap-1").cells("full", {}, tuned)
    }
    assert cells["fedmap"]["sigma2"] == 12.5
    assert cells["fedprox"]["mu"] == 0.1
    assert "mu" not in cells["fedavg"]
    path.write_text("[fedmap\n")
    with pytest.raises(ConfigError, match="is not a file written by `bayflower tune`"):
        read(path)


def test_the_command(tmp_path):
    pytest.importorskip("optuna")
    less = ("--rounds", "1", "--set", "num_clients=2", "--set", "local_epochs=1")
    where = ("--dataset", "synthetic", "--device", "cpu", "--json", "--out", str(tmp_path))
    done = bayflower("tune", "fedmap", "--trials", "2", *less, *where)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["fedmap"]
    assert found["trials"] == 2
    assert read(tmp_path / "tuned.toml")["fedmap"]["values"] == found["values"]


def test_every_row_of_a_table_is_searched_with_what_it_states(tmp_path):
    table = find("metavd-8")
    with pytest.raises(
        ConfigError,
        match=r"metavd-8's columns differ in beta, and a row gets one set of values; choose, "
        r"e\.g\. with --where",
    ):
        rows_of(table, lambda cell: True)
    rows = rows_of(table, lambda cell: cell.spec.values()["beta"] == 0.5)
    assert list(rows) == [row.name for row in table.rows if row.method]
    method, stay = rows["MAML+MetaVD (ours)"]
    assert (method, stay["base"], stay["beta"]) == ("metavd", "maml", 0.5)
    assert not {"kl_weight", "lr", "server_lr"} & set(stay)
    for base in ("maml", "perfedavg"):  # a method on a base searches what the base alone does
        assert {key: ranges("metavd", {"base": base})[key] for key in ("lr", "inner_lr")} == {
            key: ranges(base, {})[key] for key in ("lr", "inner_lr")
        }
    assert "inner_lr" not in ranges("metavd", {"base": "reptile"})
    assert ranges("metavd", {"base": "reptile"})["lr"] == ranges("reptile", {})["lr"]


def test_chosen_values_of_rows_are_taken_in_the_form_full_alone(tmp_path):
    for path in PAPERS.glob("*.toml"):
        (tmp_path / path.name).write_text(path.read_text())
    table, wanted = find("metavd-8"), Search({}, 6)
    entries = {
        "Reptile+MetaVD (ours)": {"trials": 6, "values": {"kl_weight": 3.5, "lr": 0.025}},
        "FedAvg": {"values": {"lr": 0.03}},
    }
    write_table(
        tmp_path / "tuned" / "metavd-8.toml", table, wanted, entries, {"beta": 0.5, "rounds": 60}
    )
    again = load_tables(tmp_path)["metavd-8"]
    assert (
        "Every row had 6 trials (beta = 0.5, rounds = 60), scored by accuracy on 20% of the "
        "training clients'" in again.tuning
    )
    for form, kl, rates in (("full", 3.5, (0.025, 0.03)), ("quick", 10.0, (0.1, 0.1))):
        cells = {cell.row.name: cell.spec.values() for cell in again.cells(form) if cell.spec}
        assert cells["Reptile+MetaVD (ours)"]["kl_weight"] == kl
        assert (cells["Reptile+MetaVD (ours)"]["lr"], cells["FedAvg"]["lr"]) == rates
    write_table(tmp_path / "tuned" / "metavd-8.toml", table, wanted, {"Nobody": {"values": {}}}, {})
    load_tables.cache_clear()
    with pytest.raises(ConfigError, match="has values for 'Nobody', which is no row of metavd-8"):
        load_tables(tmp_path)


SMALL_TABLE = """
paper = "ours"
source = "ours"
[metrics.accuracy]
view = "personal"
key = "accuracy"
unit = "%"
[[table]]
id = "ours-1"
title = "ours"
caption = "ours"
metric = "accuracy"
paper = {}
quick = { seeds = 1 }
full = { rounds = 1, seeds = 1 }
settings = { dataset = "synthetic", num_clients = 2, local_epochs = 1 }
columns = [{ name = "a", settings = { batch_size = 32 } },
           { name = "b", settings = { batch_size = 64 } }]
rows = [{ name = "FedAvg, ours", method = "fedavg", published = ["", ""] },
        { name = "FedMAP", method = "fedmap", published = ["", ""] },
        { name = "not here", published = ["", ""] }]
"""


def test_the_command_for_a_table(tmp_path, capsys, monkeypatch):
    pytest.importorskip("optuna")
    from bayflower import reproduce
    from bayflower.cli.tune import tune

    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "ours.toml").write_text(SMALL_TABLE)
    monkeypatch.setattr(reproduce, "find", lambda name: load_tables(tmp_path / "papers")[name])
    options = {
        "table": "ours-1",
        "trials": 1,
        "device": "cpu",
        "out": tmp_path / "papers" / "tuned",
    }
    tune(None, part="2/2", where=["batch_size=32"], **options)
    assert "run the same command without --part to write the file" in capsys.readouterr().out
    tune(None, where=["batch_size=32"], **options)
    said = capsys.readouterr()
    assert "FedMAP: 1 of 1 trials are there" in said.err  # not done again
    assert "written:" in said.out
    load_tables.cache_clear()
    chosen = {row.name: row.tuned for row in load_tables(tmp_path / "papers")["ours-1"].rows}
    assert set(chosen["FedMAP"]) == {"lr", "sigma2"}
    assert set(chosen["FedAvg, ours"]) == {"lr"}
    assert chosen["not here"] == {}
    with pytest.raises(ConfigError, match="name methods or one --table, not both"):
        tune(["fedmap"], **options)
    with pytest.raises(
        ConfigError,
        match="no column of table ours-1 has beta=7; `bayflower reproduce ours-1 --no-run` shows",
    ):
        tune(None, where=["beta=7"], **options)
    monkeypatch.undo()
    with pytest.raises(
        ConfigError,
        match="the methods of fedmap-1 are its columns, not its rows; name methods instead",
    ):
        tune(None, **{**options, "table": "fedmap-1"})
    load_tables.cache_clear()
