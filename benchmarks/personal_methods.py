"""All methods on Fashion-MNIST with 50 clients, beside FedAvg with fine-tuning: accuracy,
calibration on training and new clients, and seconds a round.

    python benchmarks/personal_methods.py --data-dir DATA --device cuda --jobs 4 --together
    python benchmarks/personal_methods.py --data-dir DATA --device cuda --clock
    python benchmarks/personal_methods.py --no-run

DATA has fmnist.npz; nothing is downloaded. A finished run is one line of `--results`; a second call
does what is missing and writes `--page`. `--clock` measures seconds a round: one method after
another in one process, without anything beside it. Settings are the defaults; a line of other
settings is ignored. Every client holds a fifth of its training samples out for calibration, with
every method, so that all train on the same samples.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from bayflower.config import parse
from bayflower.errors import BayflowerError
from bayflower.methods import METHODS
from bayflower.reproduce.cache import commit

sys.path.insert(0, str(Path(__file__).resolve().parent))
import defaults
from defaults import HERE
from intervals import half_interval, spread

RIVAL, PACE = "fedavg-ft", "fedper"  # of accuracy, of time
SLOW = 3.0  # rounds of PACE that need a reason
FORMS = ("point", "posterior", "calibrated")
KEPT = ("accuracy", "nll", "ece", "ece_allclass", "worst_client_accuracy", "coverage")
KEEP = 0.1  # of the samples: 7,000 for 60 clients
# why a round is longer than SLOW rounds of PACE
REASONS = {
    "fedpa": "draws five samples of its posterior, ten steps each, after the epochs of the others",
    "fedpa-ft": "as fedpa",
    "fedpac": "the server mixes the heads: a quadratic problem for each client, solved on the CPU",
    "metavd": "a sampled layer and its penalty in each step, and a hypernetwork at the server",
    "pfedbayes": "draws every weight in each step, and its penalty",
    "pfedgp": "Gaussian processes over the samples of each client, one for each node of a tree",
    "pfedme": "five gradients for each step: the personal model is found anew in each",
}
CLOCKED = 12  # rounds, of which the first four are not counted
Line = dict[str, Any]


class Job(NamedTuple):
    """One run."""

    method: str
    seed: int
    rounds: int


def settings_of(job: Job, data_dir: Path, device: str) -> dict[str, Any]:
    """Return what is not a default."""
    return {
        **{"dataset": "fmnist", "num_clients": 50, "new_clients": 10, "rounds": job.rounds},
        **{"data_dir": str(data_dir), "device": device, "tf32": True, "seed": job.seed},
        "keep": KEEP,
        **{"evaluate_every": 0, "checkpoint_every": 0},
    }


def about(job: Job) -> str:
    """Return a hash of all settings of a run that decide its numbers."""
    return defaults.hashed(job.method, settings_of(job, Path(), "cpu"))


def measure(job: Job, data_dir: Path, device: str, seat: Any = None) -> Line:
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
    final, said = result["final"], result["uncertainty"]
    line = {
        **job._asdict(),
        "settings": about(job),
        "personal": {key: final["personal"].get(key) for key in KEPT},
        "seconds": round(time.monotonic() - started, 2),
        "device": result["device"],
        "commit": commit(),
    }
    for who in ("clients", "new_clients"):
        forms = (said.get(who) or {}).get("forms", {})
        line[who] = {form: {k: forms[form].get(k) for k in KEPT} for form in FORMS if form in forms}
    return line


def clock(methods: list[str], data_dir: Path, device: str, results: Path) -> None:
    """Write the seconds of a round of each method, one after another."""
    from bayflower.engines import execute, prepare

    for method in methods:
        job = Job(method, 0, CLOCKED)
        more = {"calibration": "off", "new_clients": 0}
        run = parse(method, {**settings_of(job, data_dir, device), **more})
        try:
            outcome = execute(prepare(run, "fused"))
        except BayflowerError as error:  # the other methods still have their turn
            print(f"{method}: failed: {error}", flush=True)
            continue
        seconds = [one["seconds"] for one in outcome.rounds[4:]]
        line = {"clock": method, "median": statistics.median(seconds), "most": max(seconds)}
        line |= {"rounds": len(seconds), "device": str(run.settings.torch_device())}
        with results.open("a") as file:
            file.write(json.dumps({**line, "commit": commit()}) + "\n")
        print(f"{method}: {1000 * line['median']:.1f} ms a round", flush=True)


def read(path: Path) -> tuple[dict[Job, Line], dict[str, Line]]:
    """Return the runs of today's settings, and the last clock line of each method."""
    runs: dict[Job, Line] = {}
    clocks: dict[str, Line] = {}
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:  # a line that was cut off
            continue
        if "clock" in line:
            clocks[line["clock"]] = line
            continue
        job = Job(*(line[name] for name in Job._fields))
        if job.method in METHODS and line["settings"] == about(job):
            runs[job] = line
    return runs, clocks


def picked(line: Line, who: str, form: str, key: str) -> float | None:
    """Return a number of a run; None if it has none."""
    value = line[who].get(form, {}).get(key)
    return None if value is None else float(value)


def over(lines: dict[int, Line], who: str, form: str, key: str) -> list[float]:
    """Return a number of every seed that has it."""
    found = [picked(line, who, form, key) for _, line in sorted(lines.items())]
    return [value for value in found if value is not None]


def less(
    mine: dict[int, Line], other: dict[int, Line], who: str, form: str, key: str
) -> list[float]:
    """Return the differences to the rival in the same form, seed by seed; accuracy in points."""
    pairs = [
        (picked(mine[seed], who, form, key), picked(other[seed], who, form, key))
        for seed in sorted(set(mine) & set(other))
    ]
    factor = 100 if key == "accuracy" else 1
    return [factor * (a - b) for a, b in pairs if a is not None and b is not None]


def page(runs: dict[Job, Line], clocks: dict[str, Line], rounds: int) -> str:
    """Return the page."""
    mine: dict[str, dict[int, Line]] = {}
    for job, line in runs.items():
        if job.rounds == rounds:
            mine.setdefault(job.method, {})[job.seed] = line
    rival, pace = mine.get(RIVAL, {}), clocks.get(PACE, {}).get("median")
    seeds = sorted({seed for some in mine.values() for seed in some})
    devices = sorted({line["device"] for some in mine.values() for line in some.values()})
    commits = sorted({line["commit"] for some in mine.values() for line in some.values()})
    text = [
        "# All methods on Fashion-MNIST, 50 clients",
        "",
        f"Written by `benchmarks/personal_methods.py`: a tenth of the samples, Dir(0.3), {rounds} "
        "rounds, seeds "
        f"{', '.join(map(str, seeds))}, default settings, last round; {', '.join(devices)}; "
        f"commit {', '.join(commits)}. Ten more clients are new: they adapt after the last round. "
        "± is half a 95 % interval of Student's t over seeds; differences are paired by seed. "
        "Every client holds a fifth of its training samples out, to calibrate what it takes home.",
        "",
        "## Accuracy and time",
        "",
        f"Accuracy in percent, of personal models; the difference to {RIVAL}; milliseconds of a "
        f"round alone on the device (median of {CLOCKED - 4} rounds without calibration), and "
        f"their ratio to {PACE}, bold above {SLOW:g}.",
        "",
        f"| method | clients | less {RIVAL} | worst client | new clients | ms a round | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for method in (name for name in METHODS if name in mine):
        lines, timed = mine[method], clocks.get(method)
        ratio = timed["median"] / pace if timed and pace else None
        cells = [spread([100 * v for v in over(lines, "clients", "point", "accuracy")])]
        gaps = less(lines, rival, "clients", "point", "accuracy")
        cells.append(spread(gaps) if gaps else "")
        worst = over(lines, "clients", "point", "worst_client_accuracy")
        new = over(lines, "new_clients", "point", "accuracy")
        cells += [spread([100 * v for v in some]) if some else "" for some in (worst, new)]
        cells.append(f"{1000 * timed['median']:.1f}" if timed else "")
        shown = f"{ratio:.2f}" if ratio else ""
        cells.append(f"**{shown}**" if ratio and ratio > SLOW else shown)
        text.append(f"| {method} | {' | '.join(cells)} |")
    told = [f"{name}: {words}" for name, words in REASONS.items() if name in mine]
    text += ["", f"Why a round takes more than {SLOW:g} of {PACE}'s: {'; '.join(told)}.", ""]
    text += [f"Without runs: {', '.join(name for name in METHODS if name not in mine) or 'none'}."]
    for who, title in (("clients", "training clients"), ("new_clients", "new clients")):
        text += [
            "",
            f"## Uncertainty of {title}",
            "",
            "NLL of the point, of the posterior (where there is one) and of the calibrated model; "
            f"its difference to {RIVAL} with calibration (temperature), bold where it is worse "
            "beyond the interval; ECE of the largest probability and of all classes, calibrated, "
            "in percent; share that 90 % sets cover.",
            "",
            "| method | point | posterior | calibrated | less the rival | ECE | ECE all | sets |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for method in (name for name in METHODS if name in mine):
            lines = mine[method]
            nlls = [over(lines, who, form, "nll") for form in FORMS]
            cells = [spread(some, 3) if some else "" for some in nlls]
            gaps = less(lines, rival, who, "calibrated", "nll")
            shown = spread(gaps, 3) if gaps else ""
            cells.append(f"**{shown}**" if is_worse(gaps) else shown)
            for key in ("ece", "ece_allclass", "coverage"):
                some = [100 * v for v in over(lines, who, "calibrated", key)]
                cells.append(spread(some) if some else "")
            text.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(text) + "\n"


def is_worse(gaps: list[float]) -> bool:
    """Return whether the 95 % interval lies above 0 as a whole."""
    return len(gaps) > 1 and statistics.mean(gaps) > half_interval(gaps)


def main() -> int:
    """Do the missing runs and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--methods", default="", help="separated by commas [all]")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--together", action="store_true", help="seeds of a method side by side")
    parser.add_argument("--clock", action="store_true", help="measure seconds a round instead")
    parser.add_argument("--results", type=Path, default=HERE / "personal_methods.jsonl")
    parser.add_argument("--page", type=Path, default=HERE / "personal_methods.md")
    parser.add_argument("--no-run", action="store_true", help="only write the page")
    options = parser.parse_args()
    options.data_dir = options.data_dir.resolve()
    methods = defaults.chosen(options.methods, METHODS, "method")
    path = options.data_dir / "fmnist.npz"
    if not options.no_run and not path.exists():
        raise SystemExit(f"{path} is missing; name the folder by --data-dir")
    failed = 0
    if options.clock:
        clock(methods, options.data_dir, options.device, options.results)
    elif not options.no_run:
        done = read(options.results)[0]
        seeds = range(options.seeds)
        todo = [Job(method, seed, options.rounds) for seed in seeds for method in methods]
        todo = [job for job in todo if job not in done]
        print(f"{len(todo)} runs to do", flush=True)
        failed = defaults.run_missing(todo, options, measure) if todo else 0
    options.page.write_text(page(*read(options.results), options.rounds))
    print(f"written: {options.page}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
