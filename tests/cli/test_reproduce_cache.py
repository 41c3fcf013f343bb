"""Finished runs: single files and collected ones, and what happens when a sweep is killed or a file
is broken.
"""

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

import numpy as np
import pytest
from prefork import bayflower

from bayflower.errors import ConfigError
from bayflower.personal.runs import open_run
from bayflower.reproduce import Cache, find
from bayflower.reproduce.cache import COLLECTIONS, key_of, resolved
from bayflower.reproduce.collect import collect
from bayflower.reproduce.page import MARKER, differing, write_page
from bayflower.reproduce.show import content, look, markdown
from bayflower.reproduce.sweep import Plan, jobs, run_missing
from bayflower.reproduce.tables import Spec

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def test_the_hash_is_of_what_decides_the_numbers():
    spec = Spec("engine", "pfedvmp", (("dataset", "cifar10"), ("images", 15000), ("rounds", 3)))
    same = Spec(
        "engine",
        "pfedvmp",
        (
            ("dataset", "cifar10"),
            ("evaluate_every", 7),
            ("images", 15000),
            ("rounds", 3),
            ("xi", 50),
        ),
    )
    assert key_of(spec, 0) == key_of(same, 0)  # xi at its default, a curve that changes nothing
    others = [
        Spec("engine", "pfedvmp", (*spec.settings, extra))
        for extra in (("xi", 20.0), ("tf32", True))
    ]
    assert len({key_of(spec, 0), key_of(spec, 1), *(key_of(other, 0) for other in others)}) == 4
    whole, stated = resolved(spec, 0)
    assert whole["xi"] == 50
    assert "xi" not in stated
    assert not {"device", "data_dir", "checkpoint_every"} & set(whole)


def test_a_run_with_another_default_is_not_used(tmp_path, monkeypatch):
    said: list[str] = []
    cache, spec = (
        Cache(tmp_path, said.append),
        Spec("engine", "fedmap", (("dataset", "synthetic"), ("rounds", 1))),
    )
    cache.put(spec, 0, {"curve": []}, 0)
    assert cache.get(spec, 0) == {"curve": []}
    changed = dict(resolved(spec, 0)[0], sigma2=7.0)
    monkeypatch.setattr("bayflower.reproduce.cache.resolved", lambda *_: (changed, {}))
    assert cache.get(spec, 0) is None
    assert "sigma2 was 100.0, now it is 7.0" in said[0]


def plan(seeds: int = 1) -> Plan:
    return Plan("quick", seeds, {"rounds": 1, "batch_size": 256}, device="cpu", data_dir="nowhere")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with the runs of FedMAP's Table 1, one round each."""
    folder = tmp_path_factory.mktemp("runs")
    assert run_missing([find("fedmap-1")], plan(), Cache(folder), lambda line: None) == 0
    return folder


def test_a_table_shows_ours_the_papers_and_the_difference(finished):
    table = find("fedmap-1")
    found = look(table, plan(), Cache(finished))
    assert all(len(one.values) == 1 for one in found)
    by_place = {(one.cell.row.name, one.cell.column.name): one for one in found}
    clients = [by_place[f"client {k}", "FedMAP"].mean for k in range(1, 11)]
    average = by_place["Average", "FedMAP"]
    assert average.mean == pytest.approx(sum(clients) / 10)
    assert average.difference == pytest.approx(average.mean - 80.39)
    text = markdown(table, plan(), found)
    assert f"{average.mean:.2f} (1); *80.39*; {average.difference:+.2f}" in text
    assert "rounds 1" in text  # a changed form is said


def test_only_some_runs_are_done_and_their_folders_kept(finished, tmp_path):
    said: list[str] = []
    some = replace(plan(), where=(("method", "local"), ("seed", "0")), keep=str(tmp_path / "kept"))
    assert run_missing([find("fedmap-1")], some, Cache(tmp_path / "runs"), said.append) == 0
    assert said[0] == "1 runs, 1 to do"
    (file,) = (tmp_path / "runs").glob("*.json")
    assert json.loads(file.read_text())["checksum"] != ""
    (folder,) = (tmp_path / "kept").iterdir()
    assert open_run(folder).run.method == "local"
    whole = json.loads((finished / file.name).read_text())["result"]["final"]
    assert json.loads(file.read_text())["result"]["final"] == whole  # keeping changes no number
    with pytest.raises(ConfigError, match="no run of these tables has method=fedavgg"):
        run_missing(
            [find("fedmap-1")],
            replace(plan(), where=(("method", "fedavgg"),)),
            Cache(tmp_path),
            said.append,
        )


def test_the_pages_keep_quick_cells_apart_and_what_was_written_by_hand(finished, tmp_path):
    table, page = find("fedmap-1"), tmp_path / "RESULTS.md"
    for file in finished.glob("*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    some = replace(plan(), form="full", where=(("method", "local"),))
    page.write_text(f"an older page{MARKER}\nread by a person\n")
    quick = tmp_path / "experiments" / "tables" / "quick.md"
    assert quick in write_page(page, [table], plan(), Cache(tmp_path))
    assert "| quick | 55 of 55 |" in page.read_text()
    assert not quick.with_name("fedmap.md").exists()  # all of it is quick
    assert run_missing([table], some, Cache(tmp_path), lambda line: None) == 0
    write_page(page, [table], plan(), Cache(tmp_path))
    text, tables = page.read_text(), quick.with_name("fedmap.md").read_text()
    assert "| full | 11 and 44 quick of 55 |" in text
    (line,) = (line for line in tables.splitlines() if line.startswith("| client 8 |"))
    assert line.count("| –") == 4
    assert "76.08" not in line  # the paper's number stands beside one of ours
    assert "76.08" in quick.read_text()
    assert "* Form: full (rounds 1" in tables
    assert "* Form: quick (rounds 1" in quick.read_text()
    assert text.endswith(f"{MARKER}\nread by a person\n")
    assert "an older page" not in text
    assert differing(page, [table], plan(), Cache(tmp_path)) == []
    quick.write_text(quick.read_text() + " ")
    assert differing(page, [table], plan(), Cache(tmp_path)) == [quick]


def test_methods_that_do_not_exist_say_so(tmp_path):
    table = find("pfedvmp-1")
    rows = [replace(row, method="") if row.name == "pFedGP" else row for row in table.rows]
    table = replace(table, rows=tuple(rows))
    found = look(table, plan(), Cache(tmp_path))
    text = markdown(table, plan(), found)
    assert "| pFedGP | not yet; *96.11* |" in text
    assert "| pFedVMP | not run; *97.23* |" in text
    assert all(cell["state"] != "done" for cell in content(table, plan(), found)["cells"])


def test_a_broken_file_is_set_aside_and_its_run_done_again(finished, tmp_path):
    for path in finished.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    half, wrong, *_ = sorted(tmp_path.glob("*.json"))
    before = content(find("fedmap-1"), plan(), look(find("fedmap-1"), plan(), Cache(finished)))
    half.write_text(half.read_text()[:200])
    record = json.loads(wrong.read_text())
    # whole, but not what was written
    record["result"]["final"]["personal"]["balanced_accuracy_mean"] = 0.99
    wrong.write_text(json.dumps(record))
    said: list[str] = []
    assert run_missing([find("fedmap-1")], plan(), Cache(tmp_path, said.append), said.append) == 0
    assert sum("is broken; renamed to" in line for line in said) == 2
    assert "5 runs, 2 to do" in said
    assert len(list(tmp_path.glob("*.broken-*"))) == 2
    # the same numbers again
    assert (
        content(find("fedmap-1"), plan(), look(find("fedmap-1"), plan(), Cache(tmp_path))) == before
    )


def test_data_that_are_not_here_are_one_line_with_the_remedy(tmp_path):
    said: list[str] = []
    assert run_missing([find("fedbps-1")], plan(), Cache(tmp_path), said.append) == 0
    assert said[0].startswith(
        "no data: cifar10 is not in nowhere; put cifar10.npz or torchvision's folders into nowhere"
    )
    assert said[-1] == "12 runs, 0 to do"


def test_a_part_of_a_data_set_is_not_the_whole(tmp_path):
    spec, cache = (
        Spec("engine", "fedavg", (("dataset", "cifar10"), ("rounds", 1))),
        Cache(tmp_path / "runs"),
    )
    cache.put(spec, 0, {"curve": [], "which": "half"}, 30_000)
    # no data here: any run will do, the table says which data it used
    assert cache.get(spec, 0, "nowhere")["which"] == "half"
    np.savez(tmp_path / "cifar10.npz", x=np.zeros((60, 2)), y=np.zeros(60, int))
    assert cache.get(spec, 0, str(tmp_path)) is None


@pytest.mark.slow
def test_parts_are_disjoint_and_the_same_seeds_give_the_same_numbers(finished, tmp_path):
    done: list[str] = []
    # both processes start when most runs are there
    late = tmp_path / "late"
    late.mkdir()
    for path in sorted(finished.glob("*.json"))[:-1]:
        (late / path.name).write_bytes(path.read_bytes())
    for part in ((1, 2), (2, 2)):
        run_missing([find("fedmap-1")], replace(plan(), part=part), Cache(late), lambda line: None)
    assert len(list(late.glob("*.json"))) == 5
    for part in ((1, 2), (2, 2)):
        folder = tmp_path / str(part[0])
        run_missing(
            [find("fedmap-1")], replace(plan(), part=part), Cache(folder), lambda line: None
        )
        done += [path.name for path in folder.glob("*.json")]
        for path in folder.glob("*.json"):
            path.rename(tmp_path / path.name)
    assert len(done) == len(set(done)) == len(jobs(find("fedmap-1"), plan()))
    again, before = (
        content(find("fedmap-1"), plan(), look(find("fedmap-1"), plan(), Cache(folder)))
        for folder in (tmp_path, finished)
    )
    assert again == before


def command(folder: Path, *words: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "bayflower",
        "reproduce",
        "fedmap-1",
        "--quick",
        "--rounds",
        "1",
        "--seeds",
        "2",
        "--device",
        "cpu",
        "--results",
        str(folder),
        "--out",
        str(folder / "tables"),
        *words,
    ]


@pytest.mark.slow
def test_a_killed_sweep_goes_on_and_repeats_no_finished_run(tmp_path):
    folder = tmp_path / "runs"
    process = subprocess.Popen(
        command(folder),
        env=ENVIRONMENT,
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 240
    while (
        len(list(folder.glob("*.json"))) < 3
        and process.poll() is None
        and time.monotonic() < deadline
    ):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finished = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.json")}
    assert 3 <= len(finished) < 10
    done = subprocess.run(
        command(folder, "--json"),
        env=ENVIRONMENT,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert f"10 runs, {10 - len(finished)} to do" in done.stderr
    after = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.json")}
    assert len(after) == 10
    assert {name: after[name] for name in finished} == finished
    assert all(cell["seeds"] == 2 for cell in json.loads(done.stdout)[0]["cells"])


def made(folder: Path, *methods: str) -> Cache:
    """Return a cache with a small run of each method, seeds 0 and 1, as single files."""
    cache = Cache(folder)
    for method in methods:
        for seed in (0, 1):
            spec = Spec("engine", method, (("dataset", "synthetic"), ("rounds", 1)))
            cache.put(spec, seed, {"curve": [], "note": f"{method} {seed}, ± σ²\u2028"}, 0)
    return cache


def test_collected_runs_are_those_that_were_there(finished, tmp_path):
    folder = tmp_path / "results" / "runs"
    shutil.copytree(finished, folder)
    before = made(folder, "fedavg", "pfedvmp-avg").everything()
    shown = content(find("fedmap-1"), plan(), look(find("fedmap-1"), plan(), Cache(folder)))
    said: list[str] = []
    cache = Cache(folder, said.append)
    assert collect(cache, said.append) == len(before) == 9
    assert not list(folder.glob("*.json"))
    for some in (cache, Cache(folder, said.append)):
        assert some.everything() == before
        assert content(find("fedmap-1"), plan(), look(find("fedmap-1"), plan(), some)) == shown
    files = {path.stem: path.read_text() for path in folder.parent.glob("*.jsonl")}
    assert set(files) <= set(COLLECTIONS)
    assert files["pfedvmp"].count("\n") == 2  # by the method: no table has its settings
    assert "fedavg 0" in files["ours"]
    for text in files.values():
        names = [json.loads(line)["name"] for line in text.split("\n") if line]
        assert names == sorted(names)
    assert collect(Cache(folder), said.append) == 0
    assert {path.stem: path.read_text() for path in folder.parent.glob("*.jsonl")} == files
    assert not any("broken" in line for line in said)


def test_the_papers_tables_decide_where_a_run_is_kept(tmp_path):
    folder, cell = tmp_path / "runs", next(iter(find("fedmap-1").cells("full")))
    sweep = [one for one in find("ours-fedmap-20x5").cells("full") if one.spec]
    for spec in (cell.spec, sweep[0].spec):
        Cache(folder).put(spec, 0, {"curve": []}, 0)
    assert cell.spec.method == sweep[0].spec.method == "local"
    collect(Cache(folder), lambda line: None)
    assert {path.name for path in tmp_path.glob("*.jsonl")} == {"fedmap.jsonl", "ours.jsonl"}


def test_a_run_done_again_replaces_its_line(tmp_path):
    cache = made(tmp_path / "runs", "fedmap")
    spec = Spec("engine", "fedmap", (("dataset", "synthetic"), ("rounds", 1)))
    collect(cache, lambda line: None)
    running = Cache(tmp_path / "runs")
    assert running.get(spec, 0)["note"].startswith("fedmap 0")
    again = Cache(tmp_path / "runs")
    again.put(spec, 0, {"curve": [], "note": "again"}, 0)
    assert running.get(spec, 0)["note"] == "again"  # the working folder comes first
    collect(again, lambda line: None)
    assert Cache(tmp_path / "runs").get(spec, 0)["note"] == "again"
    assert running.get(spec, 0)["note"] == "again"  # read before or after, the run is found
    assert len(running.everything()) == 2


def test_a_broken_line_is_named_and_left_out(tmp_path):
    folder, file = tmp_path / "runs", tmp_path / "fedmap.jsonl"
    collect(made(folder, "fedmap"), lambda line: None)
    first, second = file.read_text().split("\n")[:2]
    changed = second.replace("fedmap 0", "fedmap 7").replace("fedmap 1", "fedmap 7")
    for wrong in (second[:90], changed, "[]", "<<<<<<< ours"):
        text = f"{first}\n\n{wrong}\n"
        file.write_text(text)
        said: list[str] = []
        cache = Cache(folder, said.append)
        assert len(cache.everything()) == len(cache.everything()) == 1
        assert said == [f"{file}, line 3 is broken and ignored; its run is repeated"]
        made(folder, "fedavg")
        with pytest.raises(ConfigError, match="line 3 is broken; restore it or delete the line"):
            collect(cache, said.append)
        assert file.read_text() == text
        assert len(list(folder.glob("*.json"))) == 2
        shutil.rmtree(folder)


def test_every_committed_run_is_whole():
    said: list[str] = []
    cache = Cache(ROOT / "experiments" / "results" / "no-folder", said.append)
    records = cache.everything()
    assert len(records) >= 1023
    assert said == []
    assert not (ROOT / "experiments" / "results" / "no-folder").exists()


def test_runs_are_collected_by_a_command(tmp_path):
    made(tmp_path / "runs", "fedmap")
    words = ["reproduce", "--collect", "--results", str(tmp_path / "runs")]
    done = bayflower(*words, env=ENVIRONMENT, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path / 'fedmap.jsonl'}: 2 runs collected, 2 in all" in done.stderr
    assert done.stderr.endswith("2 runs collected\n")
