"""Published tables: what they say, the runs behind them, and what happens when a sweep is killed or
a file is broken.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from bayflower.config import parse
from bayflower.errors import ConfigError
from bayflower.methods import METHODS
from bayflower.personal.runs import open_run
from bayflower.reproduce import Cache, find, load_tables
from bayflower.reproduce.cache import engine_values, key_of, resolved
from bayflower.reproduce.page import MARKER, write_page
from bayflower.reproduce.show import content, look, markdown
from bayflower.reproduce.sweep import Plan, jobs, run_missing
from bayflower.reproduce.tables import Spec

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
ASKED = {
    "fedmap": ("1", "2", "3", "4", "figure-1"),
    "fednp": ("1", "2", "4", "5", "6", "figure-1", "figure-3", "figure-5"),
    "pfedvmp": ("1", "2", "3", "5", "6", "7", "figure-2", "figure-3", "figure-4"),
    "metavd": (
        "1",
        "2",
        "3",
        "4",
        "5",
        "6",
        "7",
        "8",
        "10",
        "11",
        "12",
        "13",
        "14",
        "15",
        "16",
        "17",
        "figure-2",
        "figure-3",
        "figure-4",
        "figure-5",
        "figure-drop",
    ),
    "fedbps": ("1", "2", "3", "figure-3"),
}
# copied by hand from the papers' numbers: (table, row, column, what is printed)
BY_HAND = [
    ("fedmap-1", "client 8", "FedMAP", "76.08"),
    ("fedmap-1", "Average", "Individual", "75.20"),
    ("fedmap-2", "Webcam", "FedProx", "40.22"),
    ("fedmap-3", "client 10", "FedAvg", "62.53"),
    ("fedmap-4", "client 7", "FedBN", "54.96"),
    ("fednp-1", "FedNP (ours)", "CIFAR-100", "65.03 ± 0.2"),
    ("fednp-1", "FedLA", "TinyImageNet", "50.23 ± 0.2"),
    ("fednp-4", "FedPA", "rate 0.01, 10 rounds", "97.85 ± 3.44"),
    ("fednp-5", "MOON", "100 clients", "52.88 ± 0.3"),
    ("fednp-6", "Quad-FedNP-10000", "time per update", "721"),
    ("pfedvmp-1", "pFedVMP", "Cifar100-20c Dir0.3", "56.75"),
    ("pfedvmp-1", "QLSD-FT", "EMNIST-50c Dir0.1", "91.56"),
    ("pfedvmp-2", "Dir(0.3)", "pFedVMP-avg", "76.97"),
    ("pfedvmp-3", "FedROD", "EMNIST-50c std", "3.21"),
    ("pfedvmp-5", "Test accuracy", "GPFL", "82.63"),
    ("pfedvmp-6", "Cifar100-20c-Dir0.3", "640", "57.19"),
    ("pfedvmp-7", "Cifar10-50c Dir(0.3)", "70", "80.25"),
    ("metavd-1", "Reptile+MetaVD (ours)", "C10 α̂=0.1 OOD", "82.07"),
    ("metavd-3", "MAML", "MCE %", "46.57"),
    ("metavd-8", "pFedGP", "α̂=0.1 Δ", "+4.99"),
    ("metavd-12", "PerFedAvg+MetaVD (ours)", "α̂=0.1 MCE", "3.63"),
    ("metavd-4", "FedAvg+FT", "s=0.1 OOD", "86.95"),
    ("metavd-5", "MAML+MetaVD (ours)", "(c) OOD", "85.02"),
    ("metavd-13", "Reptile", "α̂=0.5 Δ", "+0.01"),
    ("metavd-14", "PerFedAvg (HF-MAML)", "α̂=5.0 Δ", "-10.33"),
    ("metavd-15", "FedAvg", "α̂=0.1 OOD", "52.98"),
    ("metavd-17", "MAML+MetaVD+DP", "α̂=0.5 Spars.", "77.88"),
    ("fedbps-1", "FedAvg", "MNIST", "98.49"),
    ("fedbps-2", "p = 70 %", "FMNIST", "92.52"),
    ("fedbps-3", "p = 30 %", "ResNet56", "71.75"),
]


def test_a_file_says_once_what_is_usual(tmp_path):
    """A form under `usual` is that of every table but of one with its own."""
    lines = (ROOT / "experiments/tables/fedbps.toml").read_text().splitlines()
    usual = next(line for line in lines[lines.index("[usual]") :] if line.startswith("quick"))
    (tmp_path / "ours.toml").write_text(
        "\n".join("quick = { rounds = 7, seeds = 2 }" if line == usual else line for line in lines)
    )
    quick = {name: table.quick for name, table in load_tables(tmp_path).items()}
    assert quick.pop("fedbps-3") == find("fedbps-3").quick
    assert set(quick) == {"fedbps-1", "fedbps-2", "fedbps-figure-3"}
    assert all(form == {"rounds": 7, "seeds": 2} for form in quick.values())
    (tmp_path / "ours.toml").write_text("\n".join(line for line in lines if line != usual))
    with pytest.raises(ConfigError, match=r"ours\.toml is no file of tables"):
        load_tables.__wrapped__(tmp_path)


def test_every_table_and_figure_that_is_asked_for_is_there():
    wanted = {f"{paper}-{name}" for paper, names in ASKED.items() for name in names}
    assert set(load_tables()) == wanted
    assert (ROOT / "experiments/tables/fedmap.toml").exists()


@pytest.mark.parametrize(("table", "row", "column", "printed"), BY_HAND)
def test_published_numbers_are_the_papers(table, row, column, printed):
    (cell,) = [
        one for one in find(table).cells("full") if (one.row.name, one.column.name) == (row, column)
    ]
    assert cell.published == printed
    assert cell.mean == float(printed.split(" ")[0])


def test_no_cell_of_a_published_table_lacks_its_number():
    for table in load_tables().values():
        for cell in table.cells("full"):
            invented = (
                table.kind == "figure" or cell.column.extra or "(not in the paper)" in cell.row.name
            )
            assert bool(cell.published) != invented, (table.id, cell.row.name, cell.column.name)


def test_rows_are_complete():
    rows = {
        name: len(find(name).rows)
        for name in ("pfedvmp-1", "metavd-1", "metavd-16", "fednp-1", "fedbps-2", "fedmap-3")
    }
    assert rows == {
        "pfedvmp-1": 15,
        "metavd-1": 12,
        "metavd-16": 10,
        "fednp-1": 9,
        "fedbps-2": 4,
        "fedmap-3": 11,
    }
    cells = [cell for table in load_tables().values() for cell in table.cells("full")]
    absent = {cell.row.name for cell in cells if cell.spec is None} - {"Test accuracy"}
    assert absent == {
        "FedROD",
        "FedProto",
        "FedCP",
        "GPFL",
        "FedPAC",
        "FedPA-FT",
        "FedEP-FT",
        "QLSD-FT",
        "pFedGP",
        "pFedBreD",
        "FedBE",
    }


@pytest.mark.parametrize("form", ["quick", "full"])
def test_every_cell_can_be_parsed(form):
    for table in load_tables().values():
        for spec in {cell.spec for cell in table.cells(form) if cell.spec}:
            assert spec.method in METHODS
            if spec.runner == "engine":
                parse(spec.method, engine_values(spec, 0, "", "cpu"))


def test_every_setting_of_a_form_reaches_some_run():
    for table in load_tables().values():
        for form in ("quick", "full"):
            reached = {key for cell in table.cells(form) if cell.spec for key in cell.spec.values()}
            assert set(table.form(form)) - {"seeds"} <= reached, (table.id, form)


@pytest.mark.parametrize("form", ["full", "quick"])
def test_no_two_columns_show_the_same_number_of_the_same_run(form):
    for table in load_tables().values():
        shown = [
            (one.row, key_of(one.spec, 0), one.column.metric, one.column.at)
            for one in table.cells(form)
            if one.spec is not None
        ]
        assert len(shown) == len({repr(one) for one in shown}), table.id


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
    return Plan("quick", seeds, {"rounds": 1}, device="cpu", data_dir="nowhere")


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


def test_the_page_says_which_cells_are_only_of_the_quick_form_and_keeps_what_was_written_by_hand(
    finished, tmp_path
):
    table, page = find("fedmap-1"), tmp_path / "RESULTS.md"
    for file in finished.glob("*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    some = replace(plan(), form="full", where=(("method", "local"),))
    page.write_text(f"an older page{MARKER}\nread by a person\n")
    write_page(page, [table], plan(), Cache(tmp_path))
    assert "| quick | 55 of 55 |" in page.read_text()
    assert "quick: " not in page.read_text()  # all of it is
    assert run_missing([table], some, Cache(tmp_path), lambda line: None) == 0
    write_page(page, [table], plan(), Cache(tmp_path))
    text = page.read_text()
    assert "| full | 11 and 44 quick of 55 |" in text
    (line,) = (line for line in text.splitlines() if line.startswith("| client 8 |"))
    assert line.count("quick: ") == 4
    assert "; *76.08*" in line  # beside a quick number the paper's stands without a difference
    assert "* Form: full (rounds 1" in text
    assert "* Form: quick (rounds 1" in text
    assert text.endswith(f"{MARKER}\nread by a person\n")
    assert "an older page" not in text


def test_methods_that_do_not_exist_say_so(tmp_path):
    table = find("pfedvmp-1")
    found = look(table, plan(), Cache(tmp_path))
    text = markdown(table, plan(), found)
    assert "| FedROD | not yet; *96.68* |" in text
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
    assert sum("is broken; set aside as" in line for line in said) == 2
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
    import numpy as np

    spec, cache = (
        Spec("engine", "fedavg", (("dataset", "cifar10"), ("rounds", 1))),
        Cache(tmp_path / "runs"),
    )
    cache.put(spec, 0, {"curve": [], "which": "half"}, 30_000)
    # no data here: any run will do, the table says which data it used
    assert cache.get(spec, 0, "nowhere")["which"] == "half"
    np.savez(tmp_path / "cifar10.npz", x=np.zeros((60, 2)), y=np.zeros(60, int))
    assert cache.get(spec, 0, str(tmp_path)) is None


def test_parts_are_disjoint_and_the_same_seeds_give_the_same_numbers(finished, tmp_path):
    from dataclasses import replace

    done: list[str] = []
    # the second process starts when one of its runs and one of the first's are there
    late = tmp_path / "late"
    late.mkdir()
    for path in sorted(finished.glob("*.json"))[:2]:
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


def test_names_that_are_not_known_have_a_hint():
    assert find("FedMAP Table 1").id == "fedmap-1"
    with pytest.raises(ConfigError, match="did you mean"):
        find("pfedvmp-11")


def test_compare_has_every_column_that_decides_a_choice():
    import io

    from rich.console import Console

    from bayflower.report.text import comparison_table

    metrics = {
        "accuracy": 0.5,
        "balanced_accuracy_mean": 0.41,
        "worst_client_accuracy": 0.12,
        "nll": 1.234,
        "ece": 0.031,
        "ece_allclass": 0.0042,
        "fairness_cv": 0.077,
    }
    one = {
        "method": "pfedvmp-avg",
        "dataset": "digits",
        "num_clients": 3,
        "seed": 0,
        "final": {"personal": metrics},
        "rounds": [{"bytes_up": 123_400, "bytes_down": 234_500_000, "seconds": 1501.5}],
    }
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(comparison_table([one]))
    text = console.export_text()
    for shown in (
        "50.00",
        "41.00",
        "12.00",
        "1.234",
        "3.10",
        "0.42",
        "0.077",
        "123.4 kB",
        "234.5 MB",
        "1501.5",
        "pfedvmp-avg",
    ):
        assert shown in text, shown
