"""Does a posterior of the whole network help, beside that of the last layer?

    python benchmarks/whole_network.py --data-dir DATA --json benchmarks/results/whole_network.json

DATA has heart.npz and wisdm.npz; digits come with scikit-learn. Runs have default settings, on one
CPU core. After the last round the gate chooses three times: from the Laplace approximation of the
last layer (as runs do), from that of the whole network (`kfac.py`), and from both. NLL and AUROC
are those of test samples, pooled over clients.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kfac
import torch
from torch import Tensor

from bayflower.config import parse
from bayflower.engines import execute, prepare
from bayflower.rounds import deciding, solo, uncertain
from bayflower.rounds.calibrated import One, forms, tests_of
from bayflower.rounds.uncertain import Fitted, Outputs, Uncertain, added, pieces
from bayflower.tree import to

METHODS = ("local", "fedavg-ft", "fedmap")
CHOICES = {"last": ("laplace",), "all": ("network",), "both": ("laplace", "network")}
SHOWN = ("nll", "error_auroc", "ece")


class Whole(Uncertain):
    """The uncertainty of a model with some of both posteriors."""

    names: tuple[str, ...] = ()
    factors: kfac.Factors | None = None

    def fit(self, params: Any, *given: Any) -> Fitted:
        """Return the model with the posteriors `names`."""
        found = super().fit(params, *given)
        known = {name: one for name, one in found.posteriors.items() if name in self.names}
        self.kinds = {name: self.kinds[name] for name in known}
        if self.factors is not None:
            known["network"] = kfac.fitted(self.factors, params)
            self.kinds["network"] = ("network", "Laplace approximation of the whole network")
        return found._replace(posteriors=known)

    def outputs(self, fitted: Fitted, x: Tensor) -> Outputs:
        """Return what the model says, with the offsets of the whole network."""
        rest = {name: one for name, one in fitted.posteriors.items() if name != "network"}
        out = super().outputs(fitted._replace(posteriors=rest), x)
        if "network" not in fitted.posteriors:
            return out
        found = kfac.offsets(
            self.model, fitted.params, fitted.buffers, x, fitted.posteriors["network"]
        )
        return out._replace(offsets={**out.offsets, "network": found})


def settings_of(dataset: str, data_dir: Path) -> dict[str, Any]:
    """Return the settings of a data set."""
    if dataset == "digits":
        return {"dataset": "digits", "num_clients": 10}
    number = {"heart": 4, "wisdm": 36}[dataset]
    path = str(data_dir / f"{dataset}.npz")
    return {"dataset": path, "num_clients": number, "partition": "natural"}


def measure(dataset: str, method: str, seed: int, rounds: int, data_dir: Path) -> dict[str, Any]:
    """Return the numbers of one run."""
    given = {"rounds": rounds, "seed": seed, "robust": "off"}  # clients are trusted
    run = parse(method, {**settings_of(dataset, data_dir), **given})
    prepared = prepare(run)
    outcome, (server, half) = execute(prepared), prepared.halves[:2]
    models = []
    for one in prepared.federation.clients:
        data = solo.samples(one, torch.device("cpu"), run.settings.torch_dtype())
        sent = server.pack(server.broadcast(outcome.server_state, one.client))
        broadcast = half.unpack(server.broadcast_type, dict(sent))
        state = to(outcome.client_states[one.client], "cpu")
        keys = {"seed": seed, "client": one.client, "round": rounds}
        adapted = solo.adapt(half, state, broadcast, data.train, "finetune", **keys)
        models.append((one.client, adapted, broadcast, data))
    found = {name: chosen(half, models, names, seed) for name, names in CHOICES.items()}
    return {"dataset": dataset, "method": method, "seed": seed, "rounds": rounds, **found}


def chosen(half: Any, models: list[Any], names: tuple[str, ...], seed: int) -> dict[str, Any]:
    """Return the numbers of all clients if the gate has these posteriors to choose from."""
    started, parts = time.process_time(), []
    for _, adapted, broadcast, data in models:
        known = Whole(half, False)
        known.names = names
        if "network" in names:
            with torch.no_grad():
                numbers = known.numbers(adapted, broadcast, data.train.x[:1])
                seen = [kfac.see(half.model, *numbers, piece) for piece in pieces(data.train)]
                known.factors = added(seen)
        fitted = uncertain.fit_alone(known, adapted, broadcast, data.train, data.num_held)
        parts.append((known, fitted, uncertain.hold_alone(known, fitted, data.held)))
    total = added([deciding.whole(own) for _, _, own in parts])
    parts = [
        (known, fitted, uncertain.score_alone(known, fitted, own, total, data.held, "shrunk"))
        for (known, fitted, own), (*_, data) in zip(parts, models, strict=True)
    ]
    total, ones = added([deciding.whole(own) for _, _, own in parts]), {}
    for (known, fitted, own), (client, *_, data) in zip(parts, models, strict=True):
        use, choice = uncertain.settled(known, fitted, own, total, data.held, "shrunk", 0.9)
        tests = tests_of(data.test, half.model, seed=seed, client=client)
        judged = uncertain.judge_alone(known, fitted, choice, tests)
        ones[client] = One(int(own.rows.sum()), use, judged)
    tests = sorted(next(iter(ones.values())).judged)
    every = {test: forms(ones, test) for test in tests}
    return {
        "tests": {
            test: {form: {key: said[form][key] for key in SHOWN} for form in said if form != "own"}
            for test, said in every.items()
        },
        "gate": [one.chosen.gate[0] for one in ones.values()],
        "calibrated": [one.chosen.posterior for one in ones.values()],
        "seconds": time.process_time() - started,
    }


def difference(run: dict[str, Any]) -> float:
    """Return the calibrated NLL with both posteriors minus that with the last layer's."""
    both, last = (run[name]["tests"]["test"]["calibrated"]["nll"] for name in ("both", "last"))
    return float(both - last)


def page(runs: Sequence[dict[str, Any]]) -> str:
    """Return the table of all runs: means over seeds."""
    by: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        by[run["dataset"], run["method"]].append(run)
    seeds = sorted({run["seed"] for run in runs})
    lines = [
        "# A posterior of the whole network beside that of the last layer",
        "",
        f"`benchmarks/whole_network.py`: default settings, {runs[0]['rounds']} rounds, seeds "
        f"{', '.join(map(str, seeds))} (means), one CPU core.",
        "*last*: the gate has the last layer's posterior, as runs do; *all*: that of the whole",
        "network; *both*: either. *posterior*: what passed the gate without affine scaling;",
        "*calibrated*: what a client takes home; *shifted*: calibrated, mean over shifts of the",
        "inputs. AUROC is that of finding errors by doubt. The last column says how many clients",
        "use the whole network's posterior in *both*, calibrated.",
        "",
        "| data | method | point NLL | posterior NLL: last, all, both | calibrated NLL: last, all, "
        "both | both − last, by seed | shifted NLL: last, both | AUROC: last, both | clients |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (dataset, method), some in by.items():

        def mean(choice: str, form: str, key: str, some: Any = some) -> float:
            return statistics.fmean(run[choice]["tests"]["test"][form][key] for run in some)

        def shifted(choice: str, some: Any = some) -> float:
            return statistics.fmean(
                said["calibrated"]["nll"]
                for run in some
                for test, said in run[choice]["tests"].items()
                if test != "test"
            )

        def three(form: str, mean: Any = mean) -> str:
            return ", ".join(f"{mean(choice, form, 'nll'):.3f}" for choice in CHOICES)

        each = [difference(run) for run in some]
        used = [name for run in some for name in run["both"]["calibrated"]]
        cells = [
            f"{mean('last', 'point', 'nll'):.3f}",
            three("posterior"),
            three("calibrated"),
            ", ".join(f"{value:+.4f}" for value in each),
            f"{shifted('last'):.3f}, {shifted('both'):.3f}",
            ", ".join(
                f"{mean(choice, 'calibrated', 'error_auroc'):.3f}" for choice in ("last", "both")
            ),
            f"{used.count('network')} of {len(used)}",
        ]
        lines.append(f"| {dataset} | {method} | {' | '.join(cells)} |")
    spent = {name: statistics.fmean(run[name]["seconds"] for run in runs) for name in CHOICES}
    lines += [
        "",
        "Seconds of a core for posteriors, gate and tests of a run's clients, mean: "
        + ", ".join(f"{name} {value:.1f}" for name, value in spent.items())
        + ".",
    ]
    every = [difference(run) for run in runs]
    error = statistics.stdev(every) / len(every) ** 0.5 if len(every) > 1 else 0.0
    counts = [sum(value < 0 for value in every), sum(value > 0 for value in every)]
    lines.append(
        f"Calibrated NLL, both − last, over all {len(every)} runs: {statistics.fmean(every):+.4f}, "
        f"standard error {error:.4f}; lower in {counts[0]}, higher in {counts[1]}."
    )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure what the options say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--datasets", nargs="+", default=["heart", "digits", "wisdm"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = []
    for dataset in options.datasets:
        for method in METHODS:
            for seed in options.seeds:
                runs.append(measure(dataset, method, seed, options.rounds, options.data_dir))
                print(json.dumps(runs[-1]), flush=True)
    print(page(runs))
    if options.json:
        options.json.write_text(json.dumps(runs) + "\n")
        options.json.with_suffix(".md").write_text(page(runs))


if __name__ == "__main__":
    main()
