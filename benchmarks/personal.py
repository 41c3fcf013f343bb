"""Exported personal models on each client's own test data: the network itself, its posterior as it
was fitted, and the calibrated model that a client takes home.

    python benchmarks/personal.py --data-dir DATA

Runs are those of the table with which work on uncertainty began. A run is written to a folder, all
its personal models are exported from there (`bayflower export --all`), loaded (`load_personal`) and
tested. DATA has brca.npz; digits come with scikit-learn. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bayflower import load_personal, metrics
from bayflower.config import parse
from bayflower.data import client_scaling, load_client
from bayflower.engines import prepare, run_to_result
from bayflower.personal.runs import export_all
from bayflower.reproduce.cache import commit

sys.path.insert(0, str(Path(__file__).resolve().parent))
from defaults import events

HERE = Path(__file__).parent / "results"


class Case(NamedTuple):
    """One row: its title, its run, and what exported models said before calibration (accuracy in
    %, NLL, ECE in %): the network, and the mean of its posterior then.
    """

    title: str
    method: str
    settings: dict[str, Any]
    network: str
    mean: str


CASES = (
    Case(
        "fedmap, digits, 20 rounds",
        "fedmap",
        {"dataset": "digits", "rounds": 20},
        "95.8 / 0.20 / 3.6",
        "90.3 / 1.22 / 57.9",
    ),
    Case(
        "fedbps, digits, 10 rounds",
        "fedbps",
        {"dataset": "digits", "rounds": 10},
        "84.2 / 0.67 / 19.2",
        "69.3 / 1.64 / 46.2",
    ),
    Case(
        "fedmap, TCGA-BRCA as two classes, 30 rounds",
        "fedmap",
        {"dataset": "brca-event.npz", "rounds": 30, "num_clients": 6, "partition": "natural"},
        "88.8 / 0.41 / 6.5",
        "88.8 / 0.40 / 16.5",
    ),
)


class Tested(NamedTuple):
    """One run's exported models on their clients' test samples."""

    network: dict[str, Any]  # a summary of metrics.py
    calibrated: dict[str, Any]
    fitted: dict[str, Any]  # from result.json: exported models have only the posterior in use
    covered: float
    set_size: float
    posteriors: int  # models that use one
    clients: int


def measure(case: Case, seed: int, data_dir: Path) -> Tested:
    """Do a run, export its models and test them."""
    settings = {**case.settings, "seed": seed, "data_dir": str(data_dir), "device": "cpu"}
    if str(settings["dataset"]).endswith(".npz"):
        settings["dataset"] = str(data_dir / settings["dataset"])
    settings |= {"evaluate_every": 0, "robust": "off"}  # clients are trusted
    run = parse(case.method, settings)
    point, shown, covered, size, used, clients = {}, {}, 0, 0, 0, 0
    with tempfile.TemporaryDirectory() as made:
        folder, into = Path(made) / "run", Path(made) / "models"
        folder.mkdir()
        result = run_to_result(prepare(run, "fused"), folder)
        for card, _ in export_all(folder, into, ("safetensors",)):
            client = card["client"]
            data = load_client(run.data, seed, client)
            x, y = torch.as_tensor(data.x_test), torch.as_tensor(data.y_test).long()
            scaling = client_scaling(run.data, seed, client)
            if scaling is not None:  # a model takes rows as they were before standardising
                x = x.double() * torch.as_tensor(scaling.std) + torch.as_tensor(scaling.mean)
            said = load_personal(into / f"client-{client}").uncertainty(x)
            for found, probs in ((point, said.point), (shown, said.probabilities)):
                found[client] = metrics.tally(torch.as_tensor(probs), y, torch.ones(len(y)))
            assert said.sets is not None
            covered += int(said.sets[np.arange(len(y)), y.numpy()].sum())
            size += int(said.sets.sum())
            used += card["uncertainty"]["used"] == "posterior"
            clients += 1
    network, calibrated = metrics.summarise(point), metrics.summarise(shown)
    number = network["num_examples"]
    fitted = result["uncertainty"]["clients"]["forms"]["fitted"]
    return Tested(network, calibrated, fitted, covered / number, size / number, used, clients)


def three(runs: list[dict[str, Any]]) -> str:
    """Return accuracy / NLL / ECE, means over seeds."""
    accuracy, nll, ece = (
        statistics.fmean(run[key] for run in runs) for key in ("accuracy", "nll", "ece")
    )
    return f"{100 * accuracy:.1f} / {nll:.2f} / {100 * ece:.1f}"


def page(found: list[tuple[Case, list[Tested]]], seeds: int) -> str:
    """Return the page."""
    listed = ", ".join(map(str, range(seeds)))
    text = [
        "# Exported personal models",
        "",
        f"Written by `benchmarks/personal.py`: default settings, seeds {listed}, commit "
        f"{commit()}, cpu ({platform.machine()}). Cells are accuracy in % / NLL / ECE in %, pooled "
        "over clients, means over seeds, each model on its own client's test samples. *Before* are "
        "exported models without calibration, one seed, with a diagonal Laplace approximation of "
        "all weights; *mean* was the mean of its predictions. *Fitted* is the Laplace "
        "approximation of the last layer as it was fitted. A model now takes home what is "
        "*calibrated*; its posterior is used only where it helps on held-out samples. A fifth of "
        "the training samples is held out for that, so the network has fewer to train on than "
        "before. By chance: the ECE of a perfect model with the same confidences and as many "
        "samples.",
        "",
        "| run | before: network | before: mean | network | fitted | calibrated | by chance "
        "| sets cover (90 %) | classes a set | posterior used |",
        "|---|" + "---|" * 9,
    ]
    for case, runs in found:
        chance = statistics.fmean(
            metrics.by_chance(run.calibrated["reliability"]["top_label"]) or 0.0 for run in runs
        )
        cells = [
            case.network,
            case.mean,
            three([run.network for run in runs]),
            three([run.fitted for run in runs]),
            f"**{three([run.calibrated for run in runs])}**",
            f"{100 * chance:.1f}",
            f"{100 * statistics.fmean(run.covered for run in runs):.1f} %",
            f"{statistics.fmean(run.set_size for run in runs):.2f}",
            f"{sum(run.posteriors for run in runs)} of {sum(run.clients for run in runs)}",
        ]
        text.append(f"| {case.title} | " + " | ".join(cells) + " |")
    return "\n".join(text) + "\n"


def main() -> int:
    """Do the runs and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--page", type=Path, default=HERE / "personal_models.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data_dir = options.data_dir.resolve()
    events(data_dir)
    if not (data_dir / "brca-event.npz").exists():
        raise SystemExit(f"{data_dir} has no brca.npz; name the folder by --data-dir")
    found = []
    for case in CASES:
        runs = [measure(case, seed, data_dir) for seed in range(options.seeds)]
        found.append((case, runs))
        print(f"{case.title}: {three([run.calibrated for run in runs])}", flush=True)
    options.page.write_text(page(found, options.seeds))
    print(f"written: {options.page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
