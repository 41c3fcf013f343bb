"""The front door for data: tables, several files, folders of images, sites by name, and what is
refused.
"""

from __future__ import annotations

import os
from collections import Counter

import numpy as np
import pytest
from wards import SITES, patients, write

from bayflower.config import parse
from bayflower.data import (
    DataSettings,
    client_scaling,
    load_client,
    load_federation,
    read,
    read_npz,
    resolve,
    save,
    source_of,
)
from bayflower.data import columns as rules
from bayflower.data.look import columns, sites, tells, wrong
from bayflower.data.tables import read_csv, read_table
from bayflower.errors import ConfigError


# -- tables --------------------------------------------------------------------------------------
def test_a_table_against_a_loop(tmp_path):
    rows = patients()
    source = read(write(tmp_path / "p.csv", rows))
    assert source.names.sites == SITES
    assert source.names.classes == ("sick", "well")
    inputs = ("age", "stage=I", "stage=II", "stage=III", "stage=other")
    assert source.names.columns == (*inputs, "cholesterol", "cholesterol missing")
    assert source.lines == (
        "column 'patient_id' left out: an id or free text",
        "column 'admitted' left out: dates",
    )
    for k, row in enumerate(rows):
        chol = row["cholesterol"]
        wanted = [
            row["age"],
            *(float(row["stage"] == one) for one in ("I", "II", "III")),
            0.0,
            np.nan if chol is None else chol,
            float(chol is None),
        ]
        assert np.array_equal(source.x[k], np.array(wanted, np.float32), equal_nan=True)
        assert source.y[k] == (row["outcome"] == "well")
        assert SITES[source.client[k]] == row["hospital"]


def test_the_encoding_follows_from_the_sum_of_each_sites_counts(tmp_path):
    """Sites that count their own rows and add the counts decide what all rows together would."""
    table = read_table(write(tmp_path / "p.csv", patients()))
    names = ["age", "stage", "cholesterol", "admitted", "patient_id"]
    owner = np.arange(90) % 3
    parts = {
        name: rules.add(
            rules.survey(table.columns[name].at(np.flatnonzero(owner == one)), False)
            for one in range(3)
        )
        for name in names
    }
    whole = {name: rules.survey(table.columns[name], False) for name in names}
    assert rules.plan(parts, [], "t") == rules.plan(whole, [], "t")
    assert parts["stage"].values == Counter(row["stage"] for row in patients())
    assert parts["cholesterol"].missing == sum(r["cholesterol"] is None for r in patients())
    assert not parts["age"].values  # no measurement leaves a site


def test_flags_stay_and_numbers_are_standardised_by_each_client(tmp_path):
    rows = patients()
    path = str(write(tmp_path / "p.csv", rows))
    settings = DataSettings(dataset=path, calibration="off")
    federation = load_federation(settings, 0)
    for data in federation.clients:
        assert np.allclose(data.x_train[:, 0].mean(), 0, atol=1e-5)
        assert np.allclose(data.x_train[:, 0].std(), 1, atol=1e-5)
        assert set(np.unique(data.x_train[:, [1, 2, 3, 4, 6]])) <= {0.0, 1.0}
        assert not np.isnan(data.x_test).any()
        known = client_scaling(settings, 0, data.client)
        assert known.std[1:5].tolist() == [1.0] * 4
        chol = [r["cholesterol"] for r in rows if r["hospital"] == SITES[data.client]]
        assert known.median[5] in {*chol, *np.arange(120, 300, 0.5)}


def test_categories_of_test_rows_and_of_new_sites_decide_nothing(tmp_path):
    rows = patients()
    for k, row in enumerate(rows):
        row["part"] = "test" if k % 5 == 0 else "train"
        if row["part"] == "test" and k % 2:
            row["stage"] = "IV"
        if row["hospital"] == "Cork":
            row["stage"] = "IX"
    path = str(write(tmp_path / "p.csv", rows))
    source = read(path, test="part")
    stage = next(one for one in source.encoder.inputs if one.name == "stage")
    assert stage.values == ("I", "II", "III", "IX")
    assert source.test.tolist() == [row["part"] == "test" for row in rows]
    other = source.names.columns.index("stage=other")
    assert source.x[:, other].tolist() == [float(row["stage"] == "IV") for row in rows]
    settings = DataSettings(dataset=path, test="part", new_sites="Cork", calibration="off")
    federation = load_federation(settings, 0)
    assert federation.names.sites == ("Aachen", "Bern", "Cork")
    assert [len(federation.clients), len(federation.new_clients)] == [2, 1]
    assert "stage=IX" not in federation.names.columns
    assert (federation.new_clients[0].x_train[:, other - 1] == 1).all()


def test_the_same_table_in_every_kind_of_file(tmp_path):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    rows = patients()
    frame = pandas.DataFrame(rows)
    frame["admitted"] = pandas.to_datetime(frame["admitted"])
    frame.to_parquet(tmp_path / "p.parquet")
    frame.set_index(frame.index + 7).to_parquet(tmp_path / "indexed.parquet", index=True)
    write(tmp_path / "semi.csv", rows, ";")
    want = read(write(tmp_path / "p.csv", rows))
    files = [tmp_path / name for name in ("p.parquet", "indexed.parquet", "semi.csv")]
    for given in (frame, *files):
        got = read(given)
        assert np.array_equal(got.x, want.x, equal_nan=True)
        assert (got.names, got.encoder) == (want.names, want.encoder)
        assert np.array_equal(got.client, want.client)


def test_parquet_without_pyarrow_is_one_clear_line(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "p.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match=r"pip install 'bayflower\[parquet\]', or save the table"):
        read(tmp_path / "p.parquet")


def test_several_files_are_sites_and_a_file_of_test_rows(tmp_path):
    rows = [{k: v for k, v in row.items() if k != "hospital"} for row in patients()]
    for place, name in enumerate(("north", "south")):
        write(tmp_path / f"{name}.csv", rows[45 * place : 45 * place + 45])
    for given in (str(tmp_path / "*.csv"), [tmp_path / "north.csv", tmp_path / "south.csv"]):
        source = read(given)
        assert source.names.sites == ("north", "south")
        assert source.client.tolist() == [0] * 45 + [1] * 45
    settings = resolve(DataSettings(dataset=str(tmp_path / "*.csv")))
    assert (settings.partition, settings.num_clients) == ("natural", 2)
    (tmp_path / "parts").mkdir()
    for name in ("east", "west", "later"):
        write(tmp_path / "parts" / f"{name}.csv", patients(30))
    inside = str(tmp_path / "parts" / "*.csv")
    later = str(tmp_path / "parts" / "later.csv")
    source = read(inside, site="hospital", test=later)  # the file of test rows comes once
    assert source.test.tolist() == [False] * 60 + [True] * 30
    with pytest.raises(ConfigError, match=r"the rows of .*later.csv belong to no site"):
        read(inside, test=later)
    whole = write(tmp_path / "all.csv", patients(60))
    later = write(tmp_path / "later.csv", patients(30, seed=1))
    source = read(whole, test=str(later))
    assert source.test.tolist() == [False] * 60 + [True] * 30
    settings = DataSettings(dataset=str(whole), test=str(later), calibration="off")
    assert [len(c.y_test) for c in load_federation(settings, 0).clients] == [10, 10, 10]
    rows[50]["extra"] = 1
    write(tmp_path / "south.csv", [{**row, "extra": 1} for row in rows])
    with pytest.raises(ConfigError, match=r"south.csv also has column 'extra', unlike .*north.csv"):
        read([tmp_path / "north.csv", tmp_path / "south.csv"])


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        (
            "a,y\n1,0\n2,1\nhigh,0\n",
            {},
            "column 'a' .* has 2 numbers and 1 other values, such as 'h",
        ),
        ("a,y\n1,0\ninf,1\n2,0\n", {}, "column 'a' of .* has 1 infinite values"),
        ('a,y\n"1,200",0\n"3,400",1\n', {}, "numbers with thousands separators, such as '1,200'"),
        ("a,y\n1,0.5\n2,1\n", {}, "column 'y' of .* must hold classes, got numbers such as 0.5"),
        ("a,y\n1,0\n2,0\n", {}, "has one class only"),
        ("a,y\n1\n2,0\n", {}, "row 1 of .* has 1 values, the header 2"),
        ("a,a\n1,0\n2,1\n", {}, "must name the columns, each once, got 'a' twice"),
        ("1,2\n1,0\n2,1\n", {}, "must name the columns"),
        ("a,b\n1,0\n2,1\n", {}, "name the column of the labels with --target, one of a, b"),
        ("a,y,label\n1,0,1\n2,1,0\n", {}, "has columns 'y', 'label'; say which one with --target"),
        ("a,y\n1,0\n2,1\n", {"target": "z"}, "has no column 'z' for --target; it has a, y"),
        ("a,y\n1,0\n2,1\n", {"site": "z"}, "has no column 'z' for --site"),
        ("a,y\n1,0\n2,1\n", {"drop": "q"}, "has no column 'q' for drop; it has a, y"),
        ("a,y\n1,0\n2,1\n", {"drop": "a"}, "no column to learn from"),
        ("a,y\n1,0\n2,1\n", {"test": "part"}, "no column 'part' to mark test samples"),
        ("a,y,t\n1,0,x\n2,1,y\n", {"test": "t"}, "must mark test rows by test and train"),
        ("a,y\n1e300,0\n2,1\n", {}, "too large for float32"),
        ("a,y\n1,2020-01-01\n2,2020-01-02\n", {}, "must hold classes, got dates"),
        ('a,y\n"1,0\n2,1\n', {}, "cannot be read as a table"),
        ("", {}, "has no samples"),
    ],
)
def test_what_is_unclear_is_refused_in_one_line(tmp_path, text, options, said):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        read(tmp_path / "t.csv", **options)
    assert "\n" not in str(caught.value)


def test_remedies_that_the_refusals_name_work(tmp_path):
    (tmp_path / "t.csv").write_text("a,b,y\n1,5,0\n2,6,1\nhigh,5,0\n1,6,1\n")
    source = read(tmp_path / "t.csv", categorical="a")
    assert source.names.columns == ("a=1", "a=2", "a=high", "a=other", "b")
    assert read(tmp_path / "t.csv", drop="a").names.columns == ("b",)
    one = read(tmp_path / "t.csv", categorical="a,b")
    assert one.names.columns[-3:] == ("b=5", "b=6", "b=other")


def test_odd_numbers_and_labels(tmp_path):
    (tmp_path / "t.csv").write_text(
        "big,code,y\n12345678901234567,007,1\n12345678901234568,08,2\n3,007,2\n"
    )
    source = read(tmp_path / "t.csv", categorical="big")
    assert source.names.columns[:3] == ("big=12345678901234567", "big=12345678901234568", "big=3")
    assert source.names.columns[4:] == ("code=007", "code=08", "code=other")
    assert source.names.classes == ("1", "2")
    assert source.num_classes == 2
    table = read_csv(tmp_path / "t.csv")
    assert table.columns["big"].texts.tolist()[0] == "12345678901234567"


# -- sites ---------------------------------------------------------------------------------------
def test_natural_takes_all_sites_and_others_are_chosen_by_name(tmp_path):
    path = str(write(tmp_path / "p.csv", patients()))
    run = parse("local", {"dataset": path})
    assert (run.data.partition, run.data.num_clients, run.data.new_clients) == ("natural", 3, 0)
    run = parse("local", {"dataset": path, "new_sites": "Bern", "leave_out": "Aachen"})
    assert (run.data.num_clients, run.data.new_clients) == (1, 1)
    federation = load_federation(run.data, 3)
    assert federation.names.sites == ("Cork", "Bern")
    for given, said in (
        ({"leave_out": "Berne"}, "leave_out names no site 'Berne'; did you mean 'Bern'?"),
        ({"leave_out": "Aachen,Bern,Cork"}, "so none is left to train"),
        ({"new_sites": "Bern", "leave_out": "Bern"}, "site 'Bern' is new and left out"),
        ({"new_sites": "Bern", "partition": "iid"}, "need partition=natural, got 'iid'"),
        ({"num_clients": 9}, "must be at most 3, the natural clients of 'p', got 9"),
        ({"sites": "off", "leave_out": "Bern"}, "'p' has no sites"),
        ({"test": "0.3", "test_fraction": 0.2}, "give test or test_fraction, not both"),
        ({"test": "1.5"}, r"test must be a share in \(0, 1\)"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_federation(parse("local", {"dataset": path, **given}).data, 0)
    plain = parse("local", {"dataset": path, "sites": "off", "drop": "hospital"})
    assert (plain.data.partition, plain.data.num_clients) == ("dirichlet", 10)
    with pytest.raises(ConfigError, match="target is for your own data, a file or a folder"):
        DataSettings(target="y")


def test_a_file_that_was_corrected_is_read_again(tmp_path):
    """In one process, as in a notebook, with the same settings."""
    file, x = tmp_path / "data.npz", np.random.default_rng(0).normal(size=(60, 2))
    given = DataSettings(dataset=str(file), num_clients=2, partition="iid")
    for label in (0, 1):
        np.savez(file, x=x, y=np.r_[np.zeros(30), np.ones(30 + label)][label:].astype(int))
        os.utime(file, ns=(label, label))
        found = load_federation(given, 0)
        assert load_federation(given, 0) is found
        ones = sum(int(one.y_train.sum() + one.y_test.sum()) for one in found.clients)
        ones += sum(0 if one.y_held is None else int(one.y_held.sum()) for one in found.clients)
        assert ones == source_of(given).y.sum() == 30 + label
        assert (load_client(given, 0, 1).y_train == found.clients[1].y_train).all()


def test_an_old_npz_file_is_read_as_before(tmp_path):
    draw = np.random.default_rng(0)
    x, y, client = draw.normal(size=(80, 3)), np.arange(80) % 2, np.arange(80) % 4
    np.savez(tmp_path / "old.npz", x=x, y=y, client=client)
    settings = resolve(DataSettings(dataset=str(tmp_path / "old.npz")))
    assert (settings.partition, settings.num_clients) == ("dirichlet", 10)
    source = read_npz(tmp_path / "old.npz")
    assert np.array_equal(source.x, x.astype(np.float32))
    assert source.num_classes == 2
    for shape in ((80, 1, 8, 8), (80, 3, 9, 7)):
        pictures = draw.normal(size=shape)
        np.savez(tmp_path / "old.npz", x=pictures, y=y)
        got = read_npz(tmp_path / "old.npz").samples(np.arange(80))
        assert np.array_equal(got, pictures.astype(np.float32))
    np.savez(tmp_path / "named.npz", x=x, y=y, hospital=np.array(list("abcd"))[client])
    parts = tmp_path / "parts"
    parts.mkdir()
    for name, rows in (("north", slice(0, 30)), ("south", slice(30, 80))):
        np.savez(parts / f"{name}.npz", x=x[rows], y=np.where(y, "ill", "well")[rows])
    several = read(str(parts / "*.npz"))  # one a site
    assert several.names.sites == ("north", "south")
    assert several.client.tolist() == [0] * 30 + [1] * 50
    assert [several.class_names()[k] for k in several.y] == ["ill" if k else "well" for k in y]
    assert np.array_equal(several.x, x.astype(np.float32))
    save(several, tmp_path / "one.npz")
    assert read(tmp_path / "one.npz").names == several.names
    run = parse("local", {"dataset": str(tmp_path / "named.npz"), "sites": "hospital"})
    assert run.data.num_clients == 4
    assert load_federation(run.data, 0).names.sites == ("a", "b", "c", "d")


# -- a look --------------------------------------------------------------------------------------
def test_what_looks_wrong_is_said(tmp_path):
    rows = patients(120)
    for k, row in enumerate(rows):
        row["visit"] = 1000 + k
        row["same"] = 4
        row["died"] = int(row["outcome"] == "sick")
        row["grade"] = k % 4
        if row["hospital"] == "Cork":
            row["outcome"], row["died"] = "well", 0
    rows += [{**rows[0], "hospital": "Delft"} for _ in range(4)]
    path = str(write(tmp_path / "p.csv", rows))
    settings = resolve(DataSettings(dataset=path))
    source = read(path)
    said = "\n".join(wrong(source, settings))
    for text in (
        "site 'Delft' has 4 rows, fewer than min_size 10: leave it out (leave_out=Delft)",
        "site 'Cork' has one class only, 'well'",
        "4 of 124 samples are copies of others",
        "'same' is constant",
        "'died' alone tells the class in at least 99% of the rows",
        "'grade' has 4 whole numbers; if they are codes, categorical=grade",
    ):
        assert text in said, said
    assert "'age' alone" not in said
    assert "like an id" not in said  # visits are repeated
    again = "\n".join(wrong(read(write(tmp_path / "q.csv", rows[:120])), settings))
    assert "'visit' has another whole number in every row, like an id" in again
    assert {row["site"]: row["rows"] for row in sites(source)}["Delft"] == 4
    assert {row["column"]: row["inputs"] for row in columns(source)}["stage"] == 4
    y = np.arange(200) % 2
    assert tells(y + np.random.default_rng(0).normal(size=200) * 0.01, y)
    assert not tells(np.random.default_rng(0).normal(size=200), y)
