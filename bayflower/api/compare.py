"""`bayflower.compare`: several methods on the same data, with one seed or several."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..config import names
from ..errors import ConfigError
from ..networks import own
from ..report import flat, write_report
from ..report.collect import group
from ..report.verdict import Verdict, verdicts
from ..study.plan import Entry, Study, seeds_of
from ..study.runs import carry_out
from .fit import folder_for, shared
from .handed import data_in, network_of
from .method import Method, check_settings, method_of
from .progress import Shown, bars, is_hidden
from .result import Result, html_table, table
from .words import spoken


def compare(
    methods: Sequence[str | Method],
    data: Any,
    *,
    model: Any = "auto",
    rounds: int | None = None,
    seed: int = 0,
    seeds: int | Sequence[int] = 1,
    device: str | None = None,
    engine: str = "fused",
    target: str | None = None,
    site: str | None = None,
    test: Any = None,
    num_classes: int | None = None,
    standardise: bool = False,
    name: str = "data",
    out: str | Path | None = None,
    jobs: int | None = None,
    overwrite: bool = False,
    progress: Shown = "auto",
    verbose: bool = False,
    port: int = 0,
    **settings: Any,
) -> Comparison:
    """Train several methods on the same data with the same training; return what they say.

    The arguments are those of `fit`, and:

    methods   names, or `bayflower.Method(name, label=…, …)` with settings of their own
    seeds     number of seeds from `seed` on, or a list of them
    out       folder; runs go to OUT/LABEL/seed-SEED, and those that are there are not done again
    jobs      runs at a time, each in a process of its own; None = one a core for several seeds on a
              CPU, else one. A network that cannot be imported is trained in this process
    settings  go to the methods that have them
    """
    with spoken(verbose):
        chosen = [method_of(one) for one in methods]
        if not chosen:
            raise ConfigError("methods is empty; name at least one method")
        for key in settings:
            if not any(key in names(one.name) for one in chosen):
                check_settings(
                    chosen[0].name, {key: 0}, tuple(inspect.signature(compare).parameters)
                )
        hidden = is_hidden(progress)
        given = shared(settings, rounds=rounds, device=device)
        given["model"], known = network_of(model, engine)
        home, folder = folder_for(out)
        how = {"target": target, "site": site, "test": test, "num_classes": num_classes}
        whole = own.is_own(given["model"])
        with (
            own.given(known),
            data_in(
                folder, data, given, **how, standardise=standardise, whole=whole, name=name
            ) as given,
        ):
            at_once = 1 if known is not None and known.only_here else jobs or 0
            entries = tuple(entry_of(one, given) for one in chosen)
            study = Study(entries, seeds_of(seeds, seed), folder, engine, at_once)
            done = carry_out(
                study,
                say=lambda text: None,
                watch=lambda lengths: bars(lengths, hidden),
                overwrite=overwrite,
                port=port,
            )
        return Comparison([Result(one.folder, known, home) for one, _ in done], folder, home)


def entry_of(one: Method, given: dict[str, Any]) -> Entry:
    """Return a method with the settings that it has."""
    known = names(one.name)
    own_ones = {key: value for key, value in given.items() if key in known}
    return Entry(one.label, one.name, {**own_ones, **one.settings})


class Comparison:
    """Runs of several methods on the same data.

    results   a `Result` for each run
    metrics   a data frame: one row for each client of each tested model of each run
    table     a data frame: one row for each tested model of each run
    verdicts  what is beyond noise, in sentences
    """

    def __init__(self, results: Sequence[Result], folder: Path, home: Any = None) -> None:
        self.results, self.folder, self._home = list(results), Path(folder), home

    def __getitem__(self, label: str) -> Result:
        """Return the run of a method, by its label; with several seeds the first."""
        for one in self.results:
            if label in (one.folder.parent.name, one.result["method"]):
                return one
        known = ", ".join(dict.fromkeys(one.folder.parent.name for one in self.results))
        raise KeyError(f"there is no run of {label!r}; there are {known}")

    @property
    def _found(self) -> list[Any]:
        return [one.found for one in self.results]

    @property
    def metrics_rows(self) -> list[dict[str, Any]]:
        """Return the rows of `metrics` as dicts."""
        return flat.of_clients(self._found)

    @property
    def metrics(self) -> Any:
        """Return one row for each client of each tested model of each run, as a data frame."""
        return table(self.metrics_rows, "metrics")

    @property
    def table_rows(self) -> list[dict[str, Any]]:
        """Return the rows of `table` as dicts."""
        return flat.of_runs(self._found)

    @property
    def table(self) -> Any:
        """Return one row for each tested model of each run with what it cost, as a data frame."""
        return table(self.table_rows, "table")

    def verdicts(self, metric: str = "accuracy", model: str = "personal") -> list[Verdict]:
        """Return what the runs say: which methods differ beyond noise, and who gains and loses."""
        return verdicts(group(self._found), metric, model)

    def report(self, file: str | Path | None = None, features: str = "auto") -> Path:
        """Write the report, one HTML page, and return its path; default: report.html in the
        folder.
        """
        path = Path(file) if file is not None else self.folder / "report.html"
        with spoken(), own.given(self.results[0].network):
            write_report([one.folder for one in self.results], path, features)
        return path

    def __repr__(self) -> str:
        runs: dict[str, list[float]] = {}
        for one in self.results:
            runs.setdefault(one.folder.parent.name, []).append(one.accuracy)
        said = ", ".join(
            f"{label} {sum(found) / len(found):.1%}" + f" ({len(found)} seeds)" * (len(found) > 1)
            for label, found in runs.items()
        )
        return f"<Comparison of {len(self.results)} runs: mean accuracy {said}, in {self.folder}>"

    def _repr_html_(self) -> str:
        rows = [
            (
                f"{one.folder.parent.name}, seed {one.result['seed']}",
                *(
                    one.result["final"]["personal"].get(key)
                    for key in ("accuracy", "balanced_accuracy", "nll", "ece")
                ),
            )
            for one in self.results
        ]
        columns = ("personal models", "accuracy %", "balanced %", "NLL", "ECE")
        words = [line for one in self.verdicts() for line in one.words] if len(rows) > 1 else []
        said = "".join(f"<li>{escape(line)}</li>" for line in words)
        return f"<div>{html_table(columns, rows)}<ul>{said}</ul></div>"
