"""Every method with its default settings on six data sets, beside training alone.

    python benchmarks/defaults.py --data-dir DATA --jobs 16 --device cuda

DATA has heart.npz, wisdm.npz, brca.npz (y = days and event), fmnist.npz and officecaltech.npz;
digits come with scikit-learn. Nothing is downloaded. A finished run is one line of `--results`; a
second call does what is missing and writes `--page`, and uncertainty.md beside it. A line whose
settings are not today's defaults is ignored. The sets of images run on `--device`, the others on a
CPU core each. Half of `--jobs` are on the device while there is work for both; images train with
TF32 there.

The difference to training alone is paired by seed. ± is half a 95 % interval of Student's t over
seeds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bayflower.config import parse
from bayflower.errors import BayflowerError
from bayflower.methods import METHODS
from bayflower.reproduce.cache import HOW, commit

sys.path.insert(0, str(Path(__file__).resolve().parent))
import uncertainty
from intervals import spread

HERE = Path(__file__).parent / "results"
ALONE = "local"  # what all others are compared with
GAP = 2.0  # points below it that need an explanation
SILENT = HOW | {"dataset"}  # its name is a path, which differs between machines
LATER = {"fraction_evaluate": 1.0}  # settings younger than the lines, and what the lines had


class Data(NamedTuple):
    """A data set: its title, its settings, whether it consists of images, and its rounds."""

    title: str
    settings: dict[str, Any]
    images: bool = False
    rounds: int = 30


DATASETS = {
    "fmnist": Data(
        "Fashion-MNIST, a quarter of it, 10 clients, Dir(0.3)",
        {"num_clients": 10, "keep": 0.25},
        True,
        10,
    ),
    "officecaltech": Data(
        "Office-Caltech, 4 domains", {"num_clients": 4, "partition": "natural"}, True, 15
    ),
    "digits": Data("digits, 10 clients, Dir(0.3)", {"num_clients": 10}),
    "wisdm": Data("WISDM, 36 people", {"num_clients": 36, "partition": "natural"}),
    "brca": Data("TCGA-BRCA, event or not, 6 regions", {"num_clients": 6, "partition": "natural"}),
    "heart": Data("heart disease, 4 hospitals", {"num_clients": 4, "partition": "natural"}),
}


class Job(NamedTuple):
    """One run."""

    dataset: str
    method: str
    seed: int
    rounds: int


def settings_of(job: Job, data_dir: Path, device: str) -> dict[str, Any]:
    """Return what is not a default: the data, the seed, the rounds, and that only the last round is
    tested.
    """
    data = DATASETS[job.dataset]
    named = {"wisdm": "wisdm.npz", "brca": "brca-event.npz"}.get(job.dataset)
    return {
        **data.settings,
        "dataset": str(data_dir / named) if named else job.dataset,
        "data_dir": str(data_dir),
        "device": device if data.images else "cpu",
        "tf32": data.images,  # as fast as a GPU can, up to rounding
        "rounds": job.rounds,
        "seed": job.seed,
        "evaluate_every": 0,
        "checkpoint_every": 0,
    }


def about(job: Job) -> str:
    """Return a hash of all settings of a run that decide its numbers."""
    return hashed(job.method, settings_of(job, Path(), "cpu"))


def hashed(method: str, given: dict[str, Any]) -> str:
    """Return a hash of all settings that decide a run's numbers."""
    flat = parse(method, given).flat()
    kept = {
        key: value
        for key, value in flat.items()
        if key not in SILENT and value != LATER.get(key, object)
    }
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def events(data_dir: Path) -> None:
    """Write brca-event.npz: the classes are whether an event was seen."""
    source, made = data_dir / "brca.npz", data_dir / "brca-event.npz"
    if source.exists() and not made.exists():
        with np.load(source) as found:
            y = found["y"][:, 1].astype(np.int64)
            part = made.with_suffix(".part.npz")
            np.savez(part, x=found["x"], y=y, test=found["test"], client=found["client"])
        part.replace(made)


def measure(job: Job, data_dir: Path, device: str, seat: Any = None) -> dict[str, Any]:
    """Do a run and return its line."""
    import torch

    torch.set_num_threads(1)
    from bayflower.engines import execute, prepare
    from bayflower.rounds.result import result as result_of

    started = time.monotonic()
    run = parse(job.method, settings_of(job, data_dir, device))
    prepared = prepare(run, "fused")
    outcome = execute(prepared, seat=seat)
    result = result_of(run, "fused", prepared.federation, prepared.halves, outcome)
    final = result["final"]["personal"]
    elsewhere = len(prepared.federation.input_shape) == 1  # tables
    return {
        **job._asdict(),
        "settings": about(job),
        "accuracy": 100 * final["accuracy"],
        "balanced": 100 * final["balanced_accuracy"],
        "worst": 100 * final["worst_client_accuracy"],
        "nll": final["nll"],
        "ece": 100 * final["ece"],
        "model": result["model"]["name"],
        "uncertainty": uncertainty.slim(result["uncertainty"]),
        "other_site": uncertainty.other_site(prepared, outcome) if elsewhere else None,
        "seconds": round(time.monotonic() - started, 2),
        "device": result["device"],
        "commit": commit(),
    }


def finished(path: Path) -> dict[Job, dict[str, Any]]:
    """Return the lines of today's settings; a line that was cut off is left out."""
    found = {}
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
            job = Job(*(line[name] for name in Job._fields))
        except (ValueError, KeyError):
            continue
        if job.method in METHODS and job.dataset in DATASETS and line["settings"] == about(job):
            found[job] = line
    return found


def run_missing(todo: list[Any], options: argparse.Namespace, do: Any = measure) -> int:
    """Do the runs, several at a time, each written when it is done; return how many failed."""
    failed = 0
    options.results.parent.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that are started below
    groups: dict[Any, list[Any]] = {}
    for job in todo:
        groups.setdefault(job._replace(seed=0) if options.together else job, []).append(job)
    number = 0
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        given = (do, options.data_dir, options.device)
        waiting = {pool.submit(measured, some, *given): some for some in groups.values()}
        for future in as_completed(waiting):
            some = waiting[future]
            try:
                found: list[Any] = future.result()
            except Exception as error:  # a process that was killed: the other runs may still go
                found = [error] * len(some)
            for job, line in zip(some, found, strict=True):
                number += 1
                words = f"{number}/{len(todo)} {' '.join(map(str, job))}"
                if isinstance(line, Exception):
                    failed += 1
                    kind = "" if isinstance(line, BayflowerError) else f"{type(line).__name__}: "
                    print(f"{words}: failed: {kind}{line}", flush=True)
                    continue
                with options.results.open("a") as file:
                    file.write(json.dumps(short(line)) + "\n")
                print(f"{words}: done in {line['seconds']:.0f} s", flush=True)
    return failed


def measured(jobs: list[Any], do: Any, data_dir: Path, device: str) -> list[Any]:
    """Return the lines of runs that go side by side in this process, or why they failed. Each
    counts an equal part of the time.
    """
    from bayflower.fused.beside import side_by_side

    calls = [lambda seat, job=job: do(job, data_dir, device, seat) for job in jobs]
    found = side_by_side(calls)
    for line in found:
        if isinstance(line, dict):
            line["seconds"] = round(line["seconds"] / len(jobs), 2)
    return found


def short(value: Any) -> Any:
    """Return a line with seven significant digits a number: the file is read by people, too."""
    if isinstance(value, dict):
        return {key: short(one) for key, one in value.items()}
    if isinstance(value, list):
        return [short(one) for one in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


def mixed(todo: list[Job]) -> list[Job]:
    """Return runs on images and others in turn, so that a GPU and the cores are both busy."""
    images = [job for job in todo if DATASETS[job.dataset].images]
    others = [job for job in todo if not DATASETS[job.dataset].images]
    return [job for pair in zip_longest(images, others) for job in pair if job is not None]


class Row(NamedTuple):
    """A method on a data set: its lines by seed, and how far they are from training alone."""

    lines: list[dict[str, Any]]
    differences: list[float]


def rows_of(found: dict[Job, dict[str, Any]], dataset: str, rounds: int = 0) -> dict[str, Row]:
    """Return the methods on a data set that have runs of `rounds`, 0 = those of the data set."""
    rounds = rounds or DATASETS[dataset].rounds
    mine: dict[str, dict[int, dict[str, Any]]] = {}
    for job, line in found.items():
        if (job.dataset, job.rounds) == (dataset, rounds):
            mine.setdefault(job.method, {})[job.seed] = line
    alone = mine.get(ALONE, {})
    return {
        method: Row(
            [mine[method][seed] for seed in sorted(mine[method])],
            [
                line["accuracy"] - alone[seed]["accuracy"]
                for seed, line in sorted(mine[method].items())
                if seed in alone
            ],
        )
        for method in METHODS
        if method in mine
    }


def page(found: dict[Job, dict[str, Any]], rounds: int = 0) -> str:
    """Return the page: the differences at a glance, what is far below, and a table a data set."""
    wanted = {name: rounds or data.rounds for name, data in DATASETS.items()}
    tables = {name: rows_of(found, name, rounds) for name in DATASETS}
    tables = {name: rows for name, rows in tables.items() if rows}
    seeds = {job.seed for job in found if job.rounds == wanted[job.dataset]}
    listed = ", ".join(map(str, sorted(seeds)))
    lengths = ", ".join(f"{name} {wanted[name]}" for name in tables)
    text = [
        "# All methods with default settings",
        "",
        f"Written by `benchmarks/defaults.py`: rounds: {lengths}; seeds {listed}. "
        "Personal models of the last round on each client's test data, in percent. ± is half a "
        "95 % interval over seeds. [Which methods stay below training alone, and why]"
        "(../../docs/methods.md#default-settings).",
        "",
        "## Accuracy less that of training alone, paired by seed",
        "",
        "| method | " + " | ".join(tables) + " |",
        "|---|" + "---|" * len(tables),
    ]
    far = []
    for method in METHODS:
        cells = []
        for name, rows in tables.items():
            row = rows.get(method)
            if row is None or not row.differences:
                cells.append("")
                continue
            below = statistics.mean(row.differences) < -GAP
            cells.append(f"**{spread(row.differences)}**" if below else spread(row.differences))
            far += [f"{method} on {name}"] if below else []
        if any(cells):
            text.append(f"| {method} | " + " | ".join(cells) + " |")
    words = "; ".join(far) if far else "none"
    text += ["", f"More than {GAP:g} points below training alone (bold): {words}.", ""]
    for name, rows in tables.items():
        text += [
            f"## {DATASETS[name].title}",
            "",
            "| method | accuracy | balanced | worst client | NLL | less training alone | seeds |",
            "|---|---|---|---|---|---|---|",
        ]
        for method, row in rows.items():
            shown = [
                spread([line[key] for line in row.lines])
                for key in ("accuracy", "balanced", "worst")
            ]
            shown.append(spread([line["nll"] for line in row.lines], 3))
            shown.append(spread(row.differences) if row.differences else "")
            text.append(f"| {method} | {' | '.join(shown)} | {len(row.lines)} |")
        text.append("")
    return "\n".join(text)


def chosen(text: str, known: Any, what: str) -> list[str]:
    """Return names separated by commas, all if there are none."""
    names = [name for name in text.split(",") if name] or list(known)
    if wrong := [name for name in names if name not in known]:
        raise SystemExit(f"{what} {wrong[0]!r} is not known; known: {', '.join(known)}")
    return names


def main() -> int:
    """Do the missing runs and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--methods", default="", help="separated by commas [all]")
    parser.add_argument("--datasets", default="", help="separated by commas [all]")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--rounds", type=int, default=0, help="0 = those of each data set")
    parser.add_argument("--device", default="auto", help="of the sets of images")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--together", action="store_true", help="seeds of a method side by side")
    parser.add_argument("--results", type=Path, default=HERE / "defaults.jsonl")
    parser.add_argument("--page", type=Path, default=HERE / "defaults.md")
    parser.add_argument("--no-run", action="store_true", help="only write the page")
    options = parser.parse_args()
    options.data_dir = options.data_dir.resolve()
    methods = chosen(options.methods, METHODS, "method")
    datasets = chosen(options.datasets, DATASETS, "data set")
    events(options.data_dir)
    names = {"brca": "brca-event"}
    for name in [name for name in datasets if name != "digits" and not options.no_run]:
        path = options.data_dir / f"{names.get(name, name)}.npz"
        if not path.exists():
            raise SystemExit(
                f"{path} is missing; name the folder by --data-dir, or other --datasets"
            )
    wanted = [
        Job(name, method, seed, options.rounds or DATASETS[name].rounds)
        for name in DATASETS
        if name in datasets
        for seed in range(options.seeds)
        for method in methods
    ]
    found = finished(options.results)
    todo = [] if options.no_run else [job for job in wanted if job not in found]
    print(f"{len(wanted)} runs, {len(todo)} to do", flush=True)
    failed = run_missing(mixed(todo), options) if todo else 0
    options.page.parent.mkdir(parents=True, exist_ok=True)
    done = finished(options.results)
    options.page.write_text(page(done, options.rounds))
    titles = {name: data.title for name, data in DATASETS.items()}
    beside = options.page.with_name("uncertainty.md")
    lines = [
        line
        for job, line in done.items()
        if job.rounds == (options.rounds or DATASETS[job.dataset].rounds)
    ]
    beside.write_text(uncertainty.page(lines, titles))
    print(f"written: {options.page}, {beside}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
