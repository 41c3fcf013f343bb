"""Results as tables for a person."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from .collect import Group
from .verdict import METRICS, Verdict, probability, signed

BLOCKS = {
    "personal": "personal",
    "before": "before training",
    "global": "global",
    "new_clients": "new clients",
}


def percent(value: float | None) -> str:
    """Return e.g. "83.21"."""
    return "–" if value is None else f"{100 * value:.2f}"


def number(value: float | None, digits: int = 3) -> str:
    """Return the number with `digits` decimals, or as few as a large number needs."""
    if value is None:
        return "–"
    digits = digits if abs(value) < 100 else min(digits, 1) if abs(value) < 10_000 else 0
    return f"{value:.{digits}f}"


def size(value: float) -> str:
    """Return a number of bytes for a person."""
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"


def bare_table(title: str, caption: str) -> Table:
    """Return an empty table in the house's style."""
    return Table(
        title=escape(title),  # parts of both may come from a client
        caption=escape(caption),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )


def result_table(result: dict[str, Any]) -> Table:
    """Return the final block of one result: a row a model."""
    rounds = result["rounds"]
    title = (
        f"{result['method']} on {result['dataset']}, {result['num_clients']} clients, "
        f"{len(rounds)} rounds, seed {result['seed']}"
    )
    seconds = sum(record["seconds"] for record in rounds)
    if "accuracy" not in result["final"]["personal"]:
        return numbers_table(result, title)
    grid = bare_table(
        title,
        f"accuracies and ECE in %; {result['engine']} engine, {result['device']}, {seconds:.1f} s "
        "of rounds",
    )
    for column in ("model", "accuracy", "mean", "balanced", "worst", "NLL", "ECE", "fair. CV"):
        grid.add_column(column, justify="left" if column == "model" else "right", no_wrap=True)
    names = [*BLOCKS, *(name for name in result["final"] if name not in BLOCKS and name != "after")]
    for name in names:
        block = result["final"].get(name)
        if block:
            grid.add_row(
                BLOCKS.get(name, escape(name)),
                percent(block["accuracy"]),
                percent(block["accuracy_mean"]),
                percent(block["balanced_accuracy_mean"]),
                percent(block["worst_client_accuracy"]),
                number(block["nll"]),
                percent(block["ece"]),
                number(block["fairness_cv"]),
            )
    return grid


COVERAGE = ("coverage_50", "width_50", "coverage_90", "width_90")
# metrics of tasks other than classes, in the order of a table
SHOWN = (
    *("rmse", "mae", "nll", "crps", "deviance", *COVERAGE),
    *("c_index", "c_index_uno", "integrated_brier", "calibration_error"),
    *("macro_auroc", "macro_auprc", "micro_auroc", "micro_auprc"),
)


SHORT = {  # long names in two lines, so that a table fits a terminal of 80 columns
    **{key: key.replace("coverage", "covered").replace("_", "\n") for key in COVERAGE},
    **{key: key.replace("_", "\n") for key in ("integrated_brier", "calibration_error")},
    **{f"{one}_{two}": f"{one}\n{two}" for one in ("macro", "micro") for two in ("auroc", "auprc")},
}


def numbers_table(result: dict[str, Any], title: str) -> Table:
    """Return the final block of a result whose targets are no classes: a row a model."""
    grid = bare_table(title, f"{result['engine']} engine, {result['device']}")
    keys = [key for key in SHOWN if key in result["final"]["personal"]]
    for column in ("model", *(SHORT.get(key, key) for key in keys)):
        grid.add_column(column, justify="left" if column == "model" else "right", no_wrap=True)
    for name, block in result["final"].items():
        if block:
            grid.add_row(BLOCKS.get(name, escape(name)), *(number(block[key]) for key in keys))
    return grid


NUMBERS = (
    *(("rmse", "RMSE", number), ("mae", "MAE", number), ("nll", "NLL", number)),
    *(("crps", "CRPS", number), ("deviance", "dev.", number)),
    *(("coverage_50", "in 50 %", percent), ("coverage_90", "in 90 %", percent)),
    ("width_90", "width", number),
    ("c_index", "C-index", number),
    ("c_index_uno", "Uno's C", number),
    ("integrated_brier", "Brier", number),
    ("macro_auroc", "macro AUROC", percent),
    ("macro_auprc", "macro AUPRC", percent),
    ("micro_auroc", "micro AUROC", percent),
)


def numbers_comparison(results: list[dict[str, Any]], title: str) -> Table:
    """Return one row a method whose targets are numbers: the personal model, and what it cost."""
    block = results[0]["final"]["personal"]
    columns = [one for one in NUMBERS if one[0] in block]
    words = "personal models, last round, all test samples; "
    if "rmse" in block:
        words += "lower is better; in 50 %, in 90 %: share of samples in these intervals, "
        words += "width: of 90 % intervals; "
    grid = bare_table(title, f"{words}up, down: bytes a round; s: seconds")
    grid.padding = 0  # eleven columns in eighty characters
    for column in ("method", *(words for _, words, _ in columns), "up", "down", "s"):
        grid.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    best = min(result["final"]["personal"].get("rmse") or 0.0 for result in results)
    for result in results:
        one, rounds = result["final"]["personal"], result["rounds"]
        costs = [sum(r[key] for r in rounds) / len(rounds) for key in ("bytes_up", "bytes_down")]
        grid.add_row(
            result["method"],
            *(show(one.get(key)) for key, _, show in columns),
            *map(size, costs),
            f"{sum(r['seconds'] for r in rounds):.1f}",
            style="bold" if one.get("rmse") == best else "",
        )
    return grid


def numbers_uncertainty(said: dict[str, Any]) -> Table:
    """Return the uncertainty of personal models of numbers: a row a form."""
    rows = said["clients"]["per_client"]
    used = sum(row["posterior"] is not None for row in rows)
    grid = bare_table(
        f"intervals, calibrated on {said['rows']} held-out samples ({said['calibration']})",
        f"a posterior is used by {used} of {len(rows)} clients; calibrated: conformal intervals; "
        "in 50 %, in 90 %: share of test samples in these intervals",
    )
    keys = [one for one in NUMBERS if one[0] in said["clients"]["forms"]["point"]]
    for column in ("form", *(words for _, words, _ in keys)):
        grid.add_column(column, justify="left" if column == "form" else "right", no_wrap=True)
    for form, name in FORMS.items():
        if block := said["clients"]["forms"].get(form):
            grid.add_row(name, *(show(block.get(key)) for key, _, show in keys))
    return grid


FORMS = {
    "point": "point",
    "fitted": "posterior as fitted",
    "own": "method's posterior",
    "posterior": "posterior in use",
    "calibrated": "calibrated",
}


def who_uses(used: int, number: int) -> str:
    """Return in words how many clients use a posterior."""
    if used == number:
        return f"a posterior is used by all {number} clients"
    others = "withheld from the others" if used else "withheld from all"
    return f"a posterior is used by {used} of {number} clients, {others} because it would not help"


def uncertainty_table(result: dict[str, Any]) -> Table | None:
    """Return the uncertainty of the personal models: a row a form; None without calibration."""
    said = result.get("uncertainty")
    if not said:
        return None
    if "task" in said:
        return numbers_uncertainty(said)
    rows, promise = said["clients"]["per_client"], 100 * said["coverage"]
    used = sum(row["posterior"] is not None for row in rows)
    grid = bare_table(
        f"uncertainty, calibrated on {said['rows']} held-out samples ({said['calibration']})",
        f"{who_uses(used, len(rows))}; sets promise {promise:.0f} %; set: classes in one; AUROC: "
        "how well doubt finds errors",
    )
    heads = ("form", "acc.", "NLL", "Brier", "ECE", "AUROC", "covered", "set")
    for column in heads:
        grid.add_column(column, justify="left" if column == "form" else "right", no_wrap=True)
    for form, name in FORMS.items():
        if block := said["clients"]["forms"].get(form):
            grid.add_row(
                name,
                percent(block["accuracy"]),
                number(block["nll"]),
                number(block["brier"]),
                percent(block["ece"]),
                percent(block["error_auroc"]),
                percent(block.get("coverage")),
                number(block.get("set_size"), 2),
            )
    return grid


def uncertainty_comparison(results: list[dict[str, Any]]) -> Table | None:
    """Return one row a method: the point and the calibrated model; None without calibration."""
    known = [result for result in results if result.get("uncertainty")]
    if not known or "task" in known[0]["uncertainty"]:
        return numbers_calibrated(known) if known else None
    said = known[0]["uncertainty"]
    grid = bare_table(
        f"uncertainty, calibrated on {said['rows']} held-out samples ({said['calibration']})",
        f"point → calibrated; ECE and AUROC in %; sets promise {100 * said['coverage']:.0f} %; "
        "posterior: clients that use one",
    )
    for column in ("method", "NLL", "ECE", "AUROC", "covered", "set", "posterior"):
        grid.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for result in known:
        clients = result["uncertainty"]["clients"]
        point, shown = clients["forms"]["point"], clients["forms"]["calibrated"]
        used = sum(row["posterior"] is not None for row in clients["per_client"])
        grid.add_row(
            result["method"],
            f"{number(point['nll'])} → {number(shown['nll'])}",
            f"{percent(point['ece'])} → {percent(shown['ece'])}",
            f"{percent(point['error_auroc'])} → {percent(shown['error_auroc'])}",
            percent(shown["coverage"]),
            number(shown["set_size"], 2),
            f"{used} of {len(clients['per_client'])}",
        )
    return grid


def numbers_calibrated(known: list[dict[str, Any]]) -> Table:
    """Return one row a method of numbers: the point and the calibrated model."""
    said = known[0]["uncertainty"]
    grid = bare_table(
        f"intervals, calibrated on {said['rows']} held-out samples ({said['calibration']})",
        "point → calibrated; in 90 %: share of test samples in 90 % intervals; width: of those",
    )
    keys = ("nll", "crps", "coverage_90", "width_90")
    wanted = [one for one in NUMBERS if one[0] in keys]
    for column in ("method", *(words for _, words, _ in wanted), "posterior"):
        grid.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for result in known:
        clients = result["uncertainty"]["clients"]
        point, shown = clients["forms"]["point"], clients["forms"]["calibrated"]
        used = sum(row["posterior"] is not None for row in clients["per_client"])
        cells = [f"{show(point[key])} → {show(shown[key])}" for key, _, show in wanted]
        grid.add_row(result["method"], *cells, f"{used} of {len(clients['per_client'])}")
    return grid


def comparison_table(results: list[dict[str, Any]]) -> Table:
    """Return one row a method: the personal model, and what it cost."""
    first = results[0]
    title = (
        f"{first['dataset']}, {first['num_clients']} clients, {len(first['rounds'])} rounds, "
        f"seed {first['seed']}"
    )
    if "accuracy" not in first["final"]["personal"]:
        return numbers_comparison(results, title)
    words = (
        "personal models, last round, all test samples; % but for NLL and CV; bal.: balanced "
        "accuracy, mean over clients; worst client; aECE: over all"
    )
    grid = bare_table(
        title, f"{words} classes' probabilities; CV: fairness; up, down: bytes a round; s: seconds"
    )
    grid.padding = 0  # eleven columns in eighty characters
    for column in (
        "method",
        "acc.",
        "bal.",
        "worst",
        "NLL",
        "ECE",
        "aECE",
        "CV",
        "up",
        "down",
        "s",
    ):
        grid.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    best = max(result["final"]["personal"]["balanced_accuracy_mean"] for result in results)
    for result in results:
        block, rounds = result["final"]["personal"], result["rounds"]
        mark = "bold" if block["balanced_accuracy_mean"] == best else ""
        grid.add_row(
            result["method"],
            percent(block["accuracy"]),
            percent(block["balanced_accuracy_mean"]),
            percent(block["worst_client_accuracy"]),
            number(block["nll"]),
            percent(block["ece"]),
            percent(block["ece_allclass"]),
            number(block["fairness_cv"]),
            *(
                size(sum(r[key] for r in rounds) / len(rounds))
                for key in ("bytes_up", "bytes_down")
            ),
            f"{sum(r['seconds'] for r in rounds):.1f}",
            style=mark,
        )
    return grid


OF_CLASSES = (
    ("worst", "worst_client_accuracy", 100, 1),
    *(("NLL", "nll", 1, 3), ("ECE", "ece", 100, 1)),
)
OF_NUMBERS = (
    ("worst", "worst_client_rmse", 1, 3),
    *(("NLL", "nll", 1, 3), ("CRPS", "crps", 1, 3), ("in 90 %", "coverage_90", 100, 1)),
)
OF_EVENTS = (
    ("NLL", "nll", 1, 3),
    ("Uno's C", "c_index_uno", 1, 3),
    ("Brier", "integrated_brier", 1, 3),
)
OF_LABELS = (("NLL", "nll", 1, 3), ("macro AUPRC", "macro_auprc", 100, 1))


def verdict_table(found: Verdict, groups: Sequence[Group], view: str = "personal") -> Table:
    """Return one row a method: means over seeds, and the paired difference to local training."""
    metric, by_title = METRICS[found.metric], {group.title: group for group in groups}
    most = max(found.seeds.values(), default=0)
    one = next(iter(by_title.values())).first
    sites = "sites" if found.lasting else "clients"
    number = one["num_new_clients" if view == "new_clients" else "num_clients"]
    title = f"{found.dataset}, {number} {sites}, {len(one['rounds'])} rounds, "
    title += f"{most} seed{'s' if most != 1 else ''}"
    words = f"{BLOCKS.get(view, view)} models, last round; mean ± standard deviation over seeds"
    against = {row.title: row for row in found.against}
    if against:
        words += f"; − local: paired difference in {metric.unit}, 95 % interval, p"
    grid = bare_table(title, f"{metric.words}: mean over clients; worst client; {words}")
    known = one["final"]["personal"]
    kinds = (("accuracy", OF_CLASSES), ("c_index", OF_EVENTS), ("macro_auroc", OF_LABELS))
    columns = next((some for key, some in kinds if key in known), OF_NUMBERS)
    more = [words for words, *_ in columns]
    heads = ["method", metric.words, *more, *(["− local", "p"] if against else [])]
    for column in heads:
        first = column == "method"  # it may be long: settings that differ are part of it
        grid.add_column(
            column,
            justify="left" if first else "right",
            no_wrap=not first,
            overflow="fold" if first else "ellipsis",
        )
    for name, mean in found.means.items():
        group, spread = by_title[name], found.spreads[name]
        near = "" if spread is None else f" ± {metric.factor * spread:.{metric.digits}f}"
        cells = [escape(name), f"{metric.factor * mean:.{metric.digits}f}{near}"]
        cells += [
            f"{factor * statistics.fmean(values):.{digits}f}"
            if (values := group.values(key, view))
            else "–"
            for _, key, factor, digits in columns
        ]
        if against:
            cells += list(differing(found, against.get(name)))
        grid.add_row(*cells)
    return grid


def differing(found: Verdict, row: Any) -> tuple[str, str]:
    """Return a difference with its interval, and its p-value, as cells."""
    if row is None:
        return "", ""
    d = row.difference
    text = signed(found, d.mean)
    if d.low is not None:
        text += f" ({signed(found, d.low)}…{signed(found, d.high)})"
    return text, "–" if row.p is None else probability(row.p).removeprefix("= ")
