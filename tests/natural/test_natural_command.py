"""`bayflower natural` on made-up files: it runs, goes on after a kill, and makes its page."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import madeup
import pytest
from typer.testing import CliRunner

from bayflower import methods
from bayflower.cli import app
from bayflower.errors import BayflowerError, ConfigError
from bayflower.natural import exact, runs, sets, summary
from bayflower.natural.page import made
from bayflower.natural.protocol import cases
from bayflower.natural.rivals import RIVALS
from bayflower.natural.words import answers

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared" / "data"
OUTSIDE = """
import bayflower
from bayflower.clients.fedavg import Client
from bayflower.strategies.fedavg import Config, Server

bayflower.register("fedown", Server, Client, Config, title="FedOwn")
"""


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    madeup.heart(folder)
    madeup.radon(folder)
    return folder


@pytest.fixture
def short(monkeypatch):
    """Runs of two rounds, and few draws."""
    monkeypatch.setattr(exact, "BURN", 5)
    monkeypatch.setattr(exact, "DRAWS", 20)
    for name in ("heart", "radon"):
        spec = sets.SETS[name]
        less = replace(spec, settings={**spec.settings, "rounds": 2, "local_epochs": 1})
        monkeypatch.setitem(sets.SETS, name, less)


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """A method that a module of the user's folder registers."""
    (tmp_path / "fedown_package.py").write_text(OUTSIDE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("BAYFLOWER_METHODS", "fedown_package")
    table = methods.METHODS
    rows, seen, faults = dict(table.rows), set(table.seen), dict(table.faults)
    yield "fedown"
    table.rows, table.seen, table.faults = rows, seen, faults
    sys.modules.pop("fedown_package", None)


def natural(*words, fails=False):
    found = CliRunner().invoke(app, ["natural", *map(str, words)])
    if not fails and found.exception is not None:
        raise found.exception
    return found


def without_seconds(path):
    return {key: {**line, "seconds": 0} for key, line in runs.read(path).items()}


@pytest.mark.slow  # CI runs the quick form on real data
def test_the_quick_form_runs_every_rival_on_two_data_sets(data, short, tmp_path):
    results = tmp_path / "out" / "quick.jsonl"
    said = natural(
        "--quick", "--seeds", 1, "--data-dir", data, "--results", results, "--jobs", 1
    ).output
    assert "about" in said.splitlines()[0]
    found = runs.read(results)
    for name in sets.QUICK:
        there = {key[4] for key in found if key[0] == name}
        assert there == {one.name for one in RIVALS.values() if one.fits(sets.SETS[name])}
    table = summary.table_of(found.values())
    assert {(group.dataset, group.n) for group in table} == {
        *(("heart", n) for n in (2, 50)),
        *(("radon", n) for n in (2, 10)),
    }
    for line in found.values():
        for place in summary.PLACES:
            assert line[place]["nll"] is not None
            assert 0 <= line[place]["coverage"] <= 1
            assert line[place]["width"] >= 0
    page = results.with_suffix(".html").read_text()
    assert page.count("<svg") >= 8
    words = results.with_suffix(".md").read_text()
    for one in answers(table):
        assert one.lines
        assert one.question in page
        assert f"## {one.question}\n\n* {one.lines[0]}" in words
    # everything is there: no run is done again, and the files are the same to the byte
    board = results.with_suffix(".csv").read_bytes()
    content = results.read_bytes()
    again = natural("--quick", "--seeds", 1, "--data-dir", data, "--results", results).output
    assert "runs are in" in again
    assert results.read_bytes() == content
    assert results.with_suffix(".csv").read_bytes() == board
    mixed = results.with_name("mixed.jsonl")
    mixed.write_text("".join(sorted(content.decode().splitlines(keepends=True), reverse=True)))
    natural("--no-run", "--results", mixed)
    assert mixed.with_suffix(".csv").read_bytes() == board
    assert mixed.with_suffix(".html").read_text() == page


@pytest.mark.slow
def test_a_killed_benchmark_goes_on_and_an_outside_method_takes_part(data, outside, tmp_path):
    results = tmp_path / "killed.jsonl"
    words = ["--dataset", "heart", "--seeds", "1", "--only", "--method", outside]
    words += ["--data-dir", str(data)]
    call = [sys.executable, "-m", "bayflower", "natural", *words, "--results", str(results)]
    known = os.pathsep.join([str(ROOT), str(tmp_path)])
    environment = {**os.environ, "PYTHONPATH": known, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*call, "--jobs", "1"], env=environment, cwd=tmp_path, stdout=subprocess.DEVNULL
    )
    until = time.monotonic() + 120
    while time.monotonic() < until and process.poll() is None:
        if results.exists() and results.read_text().count("\n") >= 1:
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = results.read_text()
    whole = before[: before.rfind("\n") + 1]
    assert 1 <= whole.count("\n") < 4
    with results.open("a") as file:  # a line that the kill cut off
        file.write(whole.splitlines()[0][:50])
    natural(*words, "--results", results, "--jobs", 1)
    assert results.read_text().startswith(whole)
    assert len(runs.read(results)) == results.read_text().count("\n") == 4
    fresh = tmp_path / "fresh.jsonl"
    natural(*words, "--results", fresh, "--jobs", 1)
    assert without_seconds(fresh) == without_seconds(results)
    assert {key[4] for key in runs.read(results)} == {outside}
    assert outside in results.with_suffix(".html").read_text()


@pytest.mark.slow
def test_several_processes_give_the_same_runs(data, outside, tmp_path):
    words = [
        "--dataset",
        "radon",
        "--seeds",
        1,
        "--only",
        "--method",
        "fedavg",
        "--method",
        outside,
    ]
    words += ["--data-dir", data]
    natural(*words, "--results", tmp_path / "one.jsonl", "--jobs", 1)
    natural(*words, "--results", tmp_path / "two.jsonl", "--jobs", 2)
    assert without_seconds(tmp_path / "one.jsonl") == without_seconds(tmp_path / "two.jsonl")


def test_a_method_that_cannot_take_part_is_named(data, short, tmp_path):
    said = natural(
        *("--dataset", "radon", "--seeds", 1, "--only", "--method", "local"),
        *("--method", "fedproto", "--data-dir", data, "--results", tmp_path / "a.jsonl"),
        *("--jobs", 1),
    ).output
    assert "fedproto does not take part on radon" in said
    assert {key[4] for key in runs.read(tmp_path / "a.jsonl")} == {"local"}


def test_workers_are_refused_in_one_line(data, short, outside, tmp_path):
    """A method of one's own may have them as a default; the benchmark has one process a run."""
    package = tmp_path / "fedown_package.py"
    package.write_text(OUTSIDE.replace("title=", 'defaults={"workers": "2"}, title='))
    given = ("--dataset", "radon", "--seeds", 1, "--only", "--data-dir", data, "--jobs", 1)
    given += ("--results", tmp_path / "a.jsonl", "--method", outside)
    found = natural(*given, fails=True)
    assert "in one process, got workers=2; leave workers out, and use --jobs N" in found.output
    assert "nobody can take part" in str(found.exception)
    assert not (tmp_path / "a.jsonl").exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--dataset", "hearts"], "dataset must be one of heart"),
        (["--method", "fedmapp"], "did you mean 'fedmap'"),
        (["--only"], "--only needs at least one --method"),
        (["--dataset", "wisdm"], "wisdm"),
        (["--no-run"], "there are no runs"),
        (["--results", "."], "is a folder"),
    ],
)
def test_bad_input_is_one_line_before_anything_starts(words, text, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = natural("--data-dir", data, *words, fails=True)
    assert isinstance(found.exception, BayflowerError)
    assert text in str(found.exception)
    assert "\n" not in str(found.exception)
    assert not (tmp_path / "natural.jsonl").exists()


def test_files_that_are_not_of_this_benchmark_are_refused(tmp_path):
    path = tmp_path / "other.jsonl"
    path.write_text('{"a": 1}\n')
    with pytest.raises(ConfigError, match="line 1 is not a run"):
        runs.read(path)
    line = {"dataset": "heart", "n": 2, "later": False, "seed": 0, "rival": "local"}
    path.write_text(json.dumps({**line, "protocol": 0}) + "\n")
    with pytest.raises(ConfigError, match="protocol 0"):
        runs.read(path)


def test_rivals_with_different_splits_are_not_compared():
    line = {"dataset": "heart", "n": 2, "later": False, "seed": 0, "rival": "local", "split": "a"}
    other = {**line, "rival": "pooled", "split": "b"}
    with pytest.raises(ConfigError, match="different splits"):
        summary.table_of([line, other])


def block(nll, coverage=0.9, cost=0.2, outside=()):
    return {
        **{"samples": 100, "clients": 2, "nll": nll, "crps": nll, "coverage": coverage},
        **{"width": 1.0, "ece": 0.05, "worst": nll, "cost": {"1": cost, "4": 2 * cost}},
        **{"nlls": [nll, nll], "outside": list(outside)},
    }


def line(rival, seed, nll, n=2, **more):
    return {
        **{"dataset": "heart", "n": n, "later": False, "seed": seed, "rival": rival},
        **{"split": f"{n}/{seed}", "seconds": 1.0, "bytes": 10, "commit": "", "torch": "2"},
        **{"device": "cpu", **{place: block(nll, **more) for place in summary.PLACES}},
    }


def test_paired_intervals_and_who_is_best():
    from scipy import stats

    apart = [0.1, 0.3, 0.2, 0.15]
    base = [1.0, 3.0, 2.0, 5.0]  # seeds differ much more than rivals
    lines = [line("local", s, base[s] + apart[s]) for s in range(4)]
    lines += [line("fedmap", s, base[s], coverage=0.86) for s in range(4)]
    lines += [line("fedavg", s, base[s] + [0.5, -0.4, 0.3, 0.1][s]) for s in range(4)]
    (rivals,) = summary.table_of(lines).values()
    found = summary.difference(rivals["local"], rivals["fedmap"], "here", "nll")
    low, high = stats.t.interval(0.95, 3, loc=0.1875, scale=stats.sem(apart))
    assert (found.mean, found.low, found.high) == pytest.approx((0.1875, low, high))
    first = summary.best(rivals, "here", "nll")
    assert (first.rival, first.level) == ("fedmap", ("fedavg",))
    assert summary.best(rivals, "here", "gap").rival in ("local", "fedavg")
    assert summary.value(lines[0], "here", "regret") == pytest.approx((0.2 / 2 + 0.4 / 5) / 2)
    told = {one.question: " ".join(one.lines) for one in answers(summary.table_of(lines))}
    assert "joining pays" in told["When does it pay to join?"]
    assert "not within these data" in told["How many samples until training alone is as good?"]
    assert "90 % statements cover 86.0 % (fedmap)" in told["Counter-examples"]


def test_a_seed_without_a_known_outcome_is_left_out_of_its_mean_alone():
    """Nobody in a region may be known at five years: then there is no cost, and no coverage."""
    lines = [line(name, s, 1.0 + s, cost=0.1 * s) for name in ("local", "fedmap") for s in range(3)]
    for one in lines:
        if one["seed"] == 1:
            none = {"coverage": None, "width": None, "ece": None, "cost": {"1": None, "4": None}}
            one["new"] |= none
    table = summary.table_of(lines)
    (rivals,) = table.values()
    want = (0.0 + (0.2 / 2 + 0.4 / 5) / 2) / 2
    assert summary.mean(rivals["local"], "new", "regret") == pytest.approx(want)
    assert summary.mean(rivals["local"], "new", "nll") == pytest.approx(2.0)
    assert summary.difference(rivals["local"], rivals["fedmap"], "new", "regret").seeds == 2
    row = summary.leaderboard(table).splitlines()[3].split(",")
    assert float(row[summary.HEAD.index("regret")]) >= 0
    assert "<html" in made(table)


def test_answers_turn_when_the_numbers_turn():
    lines = [line("fedmap", s, 1.0 + 0.01 * s, n=2) for s in range(3)]
    lines += [line("local", s, 2.0 + 0.011 * s, n=2) for s in range(3)]
    lines += [
        line("fedmap", s, 1.0 + 0.01 * s, n=50, outside=[[1, 30, 50, 38, 50]]) for s in (0, 1)
    ]
    lines += [line("local", s, 0.5 + 0.011 * s, n=50) for s in (0, 1)]
    table = summary.table_of(lines)
    told = {one.question: " ".join(one.lines) for one in answers(table)}
    assert (
        "with 50 samples training alone is better"
        in told["How many samples until training alone is as good?"]
    )
    assert "fedmap is worse than local" in told["Counter-examples"]
    joining = told["When does it pay to join?"]
    assert "joining pays in 1, costs in 1, is not shown to pay in 0" in joining
    assert "joining costs, NLL against alone with 50 samples +0.4" in joining
    assert "2 of 10 clients lie outside" in told["Which uncertainty can be acted on?"]
    assert "client 1: 30 of 50 (38–50)" in made(table)


@pytest.mark.slow
@pytest.mark.parametrize("name", sets.SETS)
def test_the_real_data_run(name, tmp_path):
    if not (SHARED / "unpack").is_file():
        pytest.skip("the real data sets (../shared/data) are not beside this repository")
    call = [sys.executable, str(SHARED / "unpack"), str(tmp_path), name]
    subprocess.run(call, check=True, capture_output=True)
    spec = sets.SETS[name]
    case = runs.cases(spec, 1)[0]
    for rival in ("pooled", "fedavg-ft-temperature", "fedmap"):
        found = runs.one_run(runs.Planned(case, RIVALS[rival]), tmp_path)
        assert found["here"]["nll"] < 8
        assert found["here"]["clients"] >= 3


def test_the_cards_name_every_data_set():
    text = (ROOT / "docs" / "natural.md").read_text()
    for name in sets.SETS:
        card = text[text.index(f"### {name}") :].split("###")[1]
        for word in ("Source", "Licence", "Size", "Clients", "Done to it"):
            assert f"**{word}**" in card


def test_the_published_files_are_those_of_the_published_runs(tmp_path):
    """Page, answers and leaderboard in the repository, made again to the same bytes."""
    there = ROOT / "benchmarks" / "results" / "natural.jsonl"
    shutil.copy(there, tmp_path)
    natural("--no-run", "--results", tmp_path / "natural.jsonl")
    for ending in (".csv", ".html", ".md"):
        made = (tmp_path / "natural").with_suffix(ending).read_bytes()
        assert made == there.with_suffix(ending).read_bytes(), ending
    found = summary.table_of(runs.read(there).values())
    wanted = {(one.dataset, one.n, one.later) for spec in sets.SETS.values() for one in cases(spec)}
    assert {tuple(group) for group in found} == wanted
