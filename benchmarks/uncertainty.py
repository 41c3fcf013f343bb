"""Uncertainty on real data: what a run of `defaults.py` keeps of it, and the page made of that."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from bayflower import metrics

FORMS = ("point", "fitted", "posterior", "calibrated")
# quantiles of Student's t for a two-sided 95 % interval, by degrees of freedom
STUDENT = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 19: 2.093, 29: 2.045}
Run = dict[str, Any]


KEPT = ("accuracy", "nll", "ece", "coverage")  # of shifted samples


def slim(said: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a result's block "uncertainty" that the page needs."""
    clients = said["clients"]
    forms = {
        form: {key: value for key, value in block.items() if key != "risk_coverage"}
        for form, block in clients["forms"].items()
    }
    for form, block in forms.items():
        if form != "calibrated":
            del block["reliability"]
    return {
        "rows": said["rows"],
        "clients": {
            "forms": forms,
            "shifted": {name: few(block) for name, block in clients["shifted"].items()},
            "alarms": clients["alarms"],
            "per_client": clients["per_client"],
        },
    }


def few(forms: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of shifted samples that are kept."""
    return {
        form: {key: block[key] for key in KEPT if key in block} for form, block in forms.items()
    }


def other_site(prepared: Any, outcome: Any) -> dict[str, Any]:
    """Return the numbers of every client's model on the test rows of the next client."""
    import torch

    from bayflower.rounds import solo
    from bayflower.rounds.calibrated import One, forms, rates, take_home
    from bayflower.rounds.uncertain import Uncertain, judge_alone
    from bayflower.tree import to

    run, server, half = prepared.run, prepared.halves.server, prepared.halves.client
    cpu, dtype = torch.device("cpu"), run.settings.torch_dtype()
    clients = prepared.federation.clients
    data = [solo.samples(one, cpu, dtype) for one in clients]
    found = {}
    for place, one in enumerate(clients):
        keys = {"seed": run.settings.seed, "client": one.client}
        sent = server.pack(server.broadcast(outcome.server_state, one.client))
        broadcast = half.unpack(server.broadcast_type, dict(sent))
        state = to(outcome.client_states[one.client], "cpu")
        state = solo.adapt(
            half, state, broadcast, data[place].train, "finetune", round=run.settings.rounds, **keys
        )
        total = outcome.calibrated.total
        taken = take_home(half, state, broadcast, data[place], total, run.data, **keys)
        known = Uncertain(half, run.data.sets == "class")
        known.kinds = taken.kinds
        there = data[(place + 1) % len(data)].test
        judged = judge_alone(known, taken.fitted, taken.choice, {"test": there})
        found[one.client] = One(taken.one.rows, taken.one.chosen, judged)
    return {"forms": few(forms(found, "test")), "alarms": rates(found, "test")}


def page(runs: Sequence[Run], titles: Mapping[str, str]) -> str:
    """Return the page of some runs; `titles` names the data sets."""
    by_data: dict[str, dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in sorted(runs, key=lambda one: one["seed"]):
        if run.get("uncertainty"):
            by_data[run["dataset"]][run["method"]].append(run)
    known = {name: by_data[name] for name in titles if name in by_data}
    parts = [head(runs), short(known)]
    parts += [section(titles[name], methods) for name, methods in known.items()]
    return "\n\n".join(parts) + "\n"


def head(runs: Sequence[Run]) -> str:
    """Return what was run, on what."""
    devices = Counter(run["device"] for run in runs)
    commits = Counter(run["commit"] for run in runs)
    return f"""# Uncertainty on real data

Every method with its default settings, `benchmarks/defaults.py`: {len(runs)} runs, seeds
{", ".join(str(seed) for seed in sorted({run["seed"] for run in runs}))}; devices
{", ".join(f"{name} ({number})" for name, number in devices.most_common())}; commits
{", ".join(f"{name} ({number})" for name, number in commits.most_common())}. Numbers are those of
the last round on each client's own test samples. *point*: the personal model; *fitted*: with the
Laplace approximation of its last layer as it was fitted; *posterior*: with what passed the gate;
*calibrated*: with affine scaling too. Differences are paired by seed and client; ± is the 95 %
interval over seeds and clients together. ECE has ten bins, pooled over clients, mean over seeds;
*all seeds* is that of all seeds' samples in the same bins. *by chance* is the ECE that a perfectly
calibrated model with the same confidences and as many samples would have on average; on a few
hundred test samples it is not far below 5 %. *debiased* is the root mean square calibration error
without that part (Kumar, Liang and Ma, 2019:
Σ n_b/n ((a_b − p_b)² − a_b (1 − a_b)/(n_b − 1)), mean over seeds, then the root, 0 if negative). It
is no smaller than the ECE without chance. AUROC is that of error detection. *plain* is the
network's own largest probability on the same predictions and errors as *calibrated*, whose doubt is
the one in use. Sets promise 90 %."""


def numbers(runs: Sequence[Run], form: str, key: str) -> list[float]:
    """Return a number of a form from every run that has it."""
    blocks = [run["uncertainty"]["clients"]["forms"].get(form, {}) for run in runs]
    return [block[key] for block in blocks if block.get(key) is not None]


def mean(values: Sequence[float]) -> float:
    """Return the mean, NaN of nothing."""
    return statistics.fmean(values) if values else math.nan


def differences(runs: Sequence[Run], form: str) -> list[float]:
    """Return NLL of a form minus NLL of the point, a seed and client each."""
    return [
        row["nll"][form] - row["nll"]["point"]
        for run in runs
        for row in run["uncertainty"]["clients"]["per_client"]
        if row["nll"].get(form) is not None
    ]


def interval(values: Sequence[float]) -> float:
    """Return half the 95 % interval of the mean."""
    if len(values) < 2:
        return math.nan
    known = max((df for df in STUDENT if df <= len(values) - 1), default=1)
    student = STUDENT[known] if len(values) <= 30 else 1.96
    return student * statistics.stdev(values) / math.sqrt(len(values))


def by_chance(run: Run) -> float:
    """Return the expected ECE of a calibrated model with this run's confidences."""
    found = metrics.by_chance(bars(run))
    return math.nan if found is None else found


def bars(run: Run) -> list[dict[str, Any]]:
    """Return the reliability diagram of a run's calibrated models."""
    found: list[dict[str, Any]] = run["uncertainty"]["clients"]["forms"]["calibrated"][
        "reliability"
    ]
    return found


def debiased(runs: Sequence[Run]) -> float:
    """Return the debiased calibration error of some runs' calibrated models together."""
    found = metrics.debiased([metrics.squared_error(bars(run)) for run in runs])
    return math.nan if found is None else found


def over_seeds(runs: Sequence[Run]) -> float:
    """Return the ECE of the calibrated models of all seeds in one set of bins."""
    together: Counter[int] = Counter()
    gaps: dict[int, float] = {}
    for run in runs:
        for place, bar in enumerate(bars(run)):
            if bar["count"]:
                gap = bar["count"] * (bar["confidence"] - bar["accuracy"])
                gaps[place] = gaps.get(place, 0.0) + gap
                together[place] += bar["count"]
    total = together.total()
    return sum(abs(gap) for gap in gaps.values()) / total if total else math.nan


def outside(runs: Sequence[Run]) -> list[tuple[int, dict[str, Any]]]:
    """Return the (seed, client's row) whose covered samples lie outside their interval."""
    return [
        (run["seed"], row)
        for run in runs
        for row in run["uncertainty"]["clients"]["per_client"]
        if not row["covered_low"] <= row["covered"] <= row["covered_high"]
    ]


def verdicts(methods: dict[str, list[Run]]) -> dict[str, list[str]]:
    """Return by kind what falls short."""
    found: dict[str, list[str]] = {
        key: [] for key in ("nll", "ece", "seeds", "debiased", "cover", "clients", "auroc")
    }
    for method, runs in methods.items():
        gaps = differences(runs, "posterior")
        if mean(gaps) - interval(gaps) > 0.01:
            found["nll"].append(f"{method} (+{mean(gaps):.3f} ± {interval(gaps):.3f})")
        ece = mean(numbers(runs, "calibrated", "ece"))
        if ece > 0.05:
            chance = mean([by_chance(run) for run in runs])
            found["ece"].append(
                f"{method} ({100 * ece:.1f} %, by chance {100 * chance:.1f} %, debiased "
                f"{100 * debiased(runs):.1f} %)"
            )
        if over_seeds(runs) > 0.05:
            found["seeds"].append(f"{method} ({100 * over_seeds(runs):.1f} %)")
        if debiased(runs) > 0.05:
            found["debiased"].append(f"{method} ({100 * debiased(runs):.1f} %)")
        coverage = mean(numbers(runs, "calibrated", "coverage"))
        if not 0.88 <= coverage <= 0.93:
            found["cover"].append(f"{method} ({100 * coverage:.1f} %)")
        for seed, row in outside(runs):
            found["clients"].append(
                f"{method} seed {seed} client {row['client']}: {row['covered']} of "
                f"{row['num_examples']} ({row['covered_low']}–{row['covered_high']})"
            )
        before = mean(numbers(runs, "calibrated", "error_auroc_plain"))
        after = mean(numbers(runs, "calibrated", "error_auroc"))
        if after < before - 0.005:
            found["auroc"].append(f"{method} ({100 * before:.1f} → {100 * after:.1f})")
    return found


def short(by_data: dict[str, dict[str, list[Run]]]) -> str:
    """Return the summary: means over methods, and how many fall short."""
    lines = [
        "## In short",
        "",
        "Means over methods. *hurts*: methods whose posterior in use is worse than the point by "
        "more than 0.01 nats beyond the interval. *clients*: client runs whose sets cover fewer or "
        "more test samples than the 99 % interval allows.",
        "",
        "| data | NLL point | fitted | posterior | calibrated | ECE point | calibrated | by chance "
        "| all seeds | debiased | covered | set | AUROC point | plain | calibrated | hurts "
        "| ECE > 5 % | all seeds > 5 % | debiased > 5 % | not 88–93 % | clients |",
        "|---|" + "---|" * 20,
    ]
    for dataset, methods in by_data.items():
        every = [run for runs in methods.values() for run in runs]
        said = verdicts(methods)
        rows = sum(len(run["uncertainty"]["clients"]["per_client"]) for run in every)
        cells = [f"{mean(numbers(every, form, 'nll')):.3f}" for form in FORMS]
        cells += [f"{100 * mean(numbers(every, f, 'ece')):.1f}" for f in ("point", "calibrated")]
        cells.append(f"{100 * mean([by_chance(run) for run in every]):.1f}")
        cells.append(f"{100 * mean([over_seeds(runs) for runs in methods.values()]):.1f}")
        cells.append(f"{100 * debiased(every):.1f}")
        cells.append(f"{100 * mean(numbers(every, 'calibrated', 'coverage')):.1f}")
        cells.append(f"{mean(numbers(every, 'calibrated', 'set_size')):.2f}")
        cells += aurocs(every)
        cells += [
            f"{len(said[key])} of {len(methods)}"
            for key in ("nll", "ece", "seeds", "debiased", "cover")
        ]
        cells.append(f"{len(said['clients'])} of {rows}")
        lines.append(f"| {dataset} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def aurocs(runs: Sequence[Run]) -> list[str]:
    """Return the cells of error detection: point, plain and calibrated."""
    keys = (("point", "error_auroc"), ("calibrated", "error_auroc_plain"))
    return [
        f"{100 * mean(numbers(runs, form, key)):.1f}"
        for form, key in (*keys, ("calibrated", "error_auroc"))
    ]


def section(title: str, methods: dict[str, list[Run]]) -> str:
    """Return the tables of one data set."""
    some = next(iter(methods.values()))[0]
    rows = Counter(run["uncertainty"]["rows"] for runs in methods.values() for run in runs)
    lines = [
        f"## {title}",
        "",
        f"{some['rounds']} rounds, network {some['model']}, "
        f"{rows.most_common(1)[0][0]} held-out samples.",
        "",
        "| method | accuracy | calibrated | NLL point | fitted | posterior | calibrated "
        "| posterior − point | calibrated − point | Brier point | calibrated | ECE point "
        "| calibrated | by chance | all seeds | debiased | covered | set | AUROC point | plain "
        "| calibrated | uses a posterior |",
        "|---|" + "---|" * 21,
    ]
    for method, runs in sorted(methods.items()):
        cells = [f"{100 * mean(numbers(runs, f, 'accuracy')):.1f}" for f in ("point", "calibrated")]
        cells += [f"{mean(numbers(runs, form, 'nll')):.3f}" for form in FORMS]
        for form in ("posterior", "calibrated"):
            gaps = differences(runs, form)
            cells.append(f"{mean(gaps):+.3f} ± {interval(gaps):.3f}")
        cells += [f"{mean(numbers(runs, f, 'brier')):.3f}" for f in ("point", "calibrated")]
        cells += [f"{100 * mean(numbers(runs, f, 'ece')):.1f}" for f in ("point", "calibrated")]
        cells.append(f"{100 * mean([by_chance(run) for run in runs]):.1f}")
        cells.append(f"{100 * over_seeds(runs):.1f}")
        cells.append(f"{100 * debiased(runs):.1f}")
        cells.append(f"{100 * mean(numbers(runs, 'calibrated', 'coverage')):.1f}")
        cells.append(f"{mean(numbers(runs, 'calibrated', 'set_size')):.2f}")
        cells += aurocs(runs)
        used = Counter(
            row["posterior"] or "none"
            for run in runs
            for row in run["uncertainty"]["clients"]["per_client"]
        )
        cells.append(", ".join(f"{name} {count}" for name, count in used.most_common()))
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    parts = [*lines, "", *shortfalls(methods), "", *own_posteriors(methods), *shifts(methods)]
    return "\n".join(parts)


def own_posteriors(methods: dict[str, list[Run]]) -> list[str]:
    """Return each method's own posterior against the fitted Laplace approximation."""
    lines = []
    for method, runs in sorted(methods.items()):
        if not numbers(runs, "own", "nll"):
            continue
        rows = [row["nll"] for run in runs for row in run["uncertainty"]["clients"]["per_client"]]
        gaps = [row["own"] - row["fitted"] for row in rows if None not in row.values()]
        cells = [f"{mean(numbers(runs, form, 'nll')):.3f}" for form in ("point", "own", "fitted")]
        cells.append(f"{mean(gaps):+.3f} ± {interval(gaps):.3f}")
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    if not lines:
        return []
    return [
        "NLL of each method's own posterior against that of the fitted Laplace approximation, both "
        "at their own scale, on the same clients (the gate scales them):",
        "",
        "| method | point | own | Laplace | own − Laplace |",
        "|---|---|---|---|---|",
        *lines,
        "",
    ]


def shortfalls(methods: dict[str, list[Run]]) -> list[str]:
    """Return what falls short in words."""
    said = verdicts(methods)
    words = {
        "nll": "Posterior in use worse than the point by more than 0.01 nats beyond the interval",
        "ece": "ECE above 5 % after calibration",
        "seeds": "ECE of all seeds' samples together above 5 % after calibration",
        "debiased": "Debiased calibration error above 5 %",
        "cover": "Pooled coverage outside 88 to 93 %",
        "clients": "Clients outside their 99 % interval",
        "auroc": "Doubt in use finds errors worse than the network's own largest probability",
    }
    return [f"* {words[key]}: {'; '.join(said[key]) or 'none'}." for key in words]


def shifts(methods: dict[str, list[Run]]) -> list[str]:
    """Return the table of shifted samples: means over methods."""
    every = [run for runs in methods.values() for run in runs]
    tests: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for run in every:
        block = run["uncertainty"]["clients"]
        tests.setdefault("as they are", []).append((block["forms"], block["alarms"]["test"]))
        for name, forms in block["shifted"].items():
            tests.setdefault(name, []).append((forms, block["alarms"][name]))
        if run.get("other_site"):
            other = run["other_site"]
            tests.setdefault("other site", []).append((other["forms"], other["alarms"]))
    lines = [
        "Shifted samples, means over methods and seeds; alarms in % of samples:",
        "",
        "| samples | accuracy | NLL point | posterior | calibrated | ECE point | calibrated "
        "| covered | entropy alarms | information | distance |",
        "|---|" + "---|" * 10,
    ]
    for name, found in tests.items():

        def of(form: str, key: str, found: Any = found) -> float:
            return mean([f[form][key] for f, _ in found if f.get(form, {}).get(key) is not None])

        cells = [f"{100 * of('point', 'accuracy'):.1f}"]
        cells += [f"{of(form, 'nll'):.3f}" for form in ("point", "posterior", "calibrated")]
        cells += [f"{100 * of(form, 'ece'):.1f}" for form in ("point", "calibrated")]
        cells.append(f"{100 * of('calibrated', 'coverage'):.1f}")
        for alarm in ("entropy", "information", "distance"):
            rates = [alarms[alarm] for _, alarms in found if alarms.get(alarm) is not None]
            cells.append(f"{100 * mean(rates):.1f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines
