"""`bayflower.compare`: several methods on the same data, with one seed or several."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from ..config import names
from ..errors import ConfigError
from ..files import place
from ..files.texts import read_json
from ..files.trackers import Wanted
from ..networks import own
from ..report import flat, write_report
from ..report.collect import group
from ..report.verdict import Verdict, verdicts
from ..study.plan import Entry, Planned, Study, seeds_of
from ..study.runs import carry_out
from .fit import folder_for, searching, shared
from .handed import data_in, network_of
from .method import Method, check_settings, method_of
from .progress import Shown, bars, is_hidden
from .result import Result, html_table, table
from .trackers import Show, by_title, of_study, wanted
from .watching import SHARE, OnRound, Patience, Watcher, Which, callbacks_of, rounds_by
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
    target: str | Sequence[str] | None = None,
    site: str | None = None,
    test: Any = None,
    num_classes: int | None = None,
    standardise: bool = False,
    name: str = "data",
    callbacks: Any = None,
    patience: int | None = None,
    monitor: str = "accuracy",
    out: str | Path | None = None,
    jobs: int | None = None,
    together: bool = False,
    overwrite: bool = False,
    progress: Shown = "auto",
    verbose: bool = False,
    port: int = 0,
    tensorboard: bool = False,
    mlflow: str | Path = "",
    wandb: str = "",
    **settings: Any,
) -> Comparison:
    """Train several methods on the same data with the same training; return what they say.

    The arguments are those of `fit`, and:

    methods    names, or `bayflower.Method(name, label=…, …)` with settings of their own
    seeds      number of seeds from `seed` on, or a list of them
    callbacks  a function of (round, numbers) or (round, numbers, run), or several, where `run` has
               label, method, seed and folder. The runs go one after another then, and none of them
               can be ended early
    patience   early stopping: the rounds of each method are chosen with the first seed, as `fit`
               does it, and trained with every seed
    out        folder; runs go to OUT/LABEL/seed-SEED, and those that are there are not done again
    jobs       runs at a time, each in a process of its own; None = one a core for several seeds on
               a CPU, else one. A network that cannot be imported is trained in this process
    together   fused engine: train the seeds of a method side by side in one stack
    settings   go to the methods that have them
    """
    with spoken(verbose):
        if isinstance(methods, str | Method):
            raise ConfigError(f"methods must be a list of methods, got {methods!r}; put it in [ ]")
        chosen = [method_of(one) for one in methods]
        if not chosen:
            raise ConfigError("methods is empty; name at least one method")
        for key in settings:
            if not any(key in names(one.name) for one in chosen):
                check_settings(
                    chosen[0].name, {key: 0}, tuple(inspect.signature(compare).parameters)
                )
        hidden, functions = is_hidden(progress), callbacks_of(callbacks)
        if functions and (jobs or 1) > 1:
            raise ConfigError(
                f"callbacks are called in this process, and jobs is {jobs}; leave jobs out, or "
                "leave out callbacks"
            )
        given = shared(settings, rounds=rounds, device=device)
        share = given.pop("validation", SHARE) if patience is not None else None
        given["model"], known = network_of(model, engine)
        home, folder = folder_for(out)
        trackers = wanted(tensorboard, mlflow, wandb, folder.name if out is not None else "")
        how = {"target": target, "site": site, "test": test, "num_classes": num_classes}
        whole = own.is_own(given["model"])
        with (
            own.given(known),
            data_in(
                folder, data, given, **how, standardise=standardise, whole=whole, name=name
            ) as given,
        ):
            alone = bool(functions) or (known is not None and bool(known.only_here))
            entries = tuple(entry_of(one, given) for one in chosen)
            numbers = seeds_of(seeds, seed)
            study = Study(entries, numbers, folder, engine, 1 if alone else jobs or 0, together)
            if patience is not None:
                limit = Patience(patience, monitor, float(share))  # type: ignore[arg-type]
                found = [stopped(one, numbers[0], limit, study, hidden, port) for one in entries]
                study = replace(study, entries=tuple(found))
            done = carry_out(
                study,
                say=lambda text: None,
                watch=lambda lengths: watching(lengths, study, functions, trackers, hidden),
                overwrite=overwrite,
                port=port,
                words=trackers.words(),
            )
        return Comparison([Result(one.folder, known, home) for one, _ in done], folder, home)


def entry_of(one: Method, given: dict[str, Any]) -> Entry:
    """Return a method with the settings that it has."""
    known = names(one.name)
    own_ones = {key: value for key, value in given.items() if key in known}
    return Entry(one.label, one.name, {**own_ones, **one.settings})


def stopped(
    entry: Entry, seed: int, limit: Patience, study: Study, hidden: bool, port: int
) -> Entry:
    """Return a method with the number of rounds that validation samples choose with one seed. The
    choice is kept in the folder of the method.
    """
    run = entry.run(seed)
    place_of = study.out / place.plain(entry.label) / f"stopping-{place.digest(run, study.engine)}"
    watch = searching(entry.label, run.settings.rounds, hidden)
    given = {**entry.given, "seed": seed}
    chosen, _ = rounds_by(limit, entry.method, given, study.engine, place_of, watch, port)
    return replace(entry, given={key: chosen[key] for key in chosen if key != "seed"})


@contextmanager
def watching(
    lengths: dict[str, int],
    study: Study,
    functions: Sequence[OnRound],
    trackers: Wanted,
    hidden: bool,
) -> Iterator[Show]:
    """Give a progress function of (title, records) that shows bars, tells the trackers and calls
    the user's functions; at the end of a run with its last rounds.
    """
    known = {name: one for name, one in by_title(study).items() if name in lengths}
    watchers = {name: Watcher(functions, which(one), ends=False) for name, one in known.items()}
    with bars(lengths, hidden) as shown, of_study(study, trackers, lengths) as track:

        def see(name: str, records: list[Any]) -> None:
            shown(name, records)
            track(name, records)
            watchers[name].progress(records)

        yield see
    for name, watcher in watchers.items():
        watcher.finish(read_json(known[name].folder / place.RESULT).get("rounds", []))


def which(one: Planned) -> Which:
    """Return a run as callbacks are told of it."""
    return Which(one.entry.label, one.entry.method, one.run.settings.seed, one.folder)


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

    def verdicts(self, metric: str = "auto", model: str = "personal") -> list[Verdict]:
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
            runs.setdefault(one.folder.parent.name, []).append(one.leading[1])
        name, share = self.results[0].leading[0], self.results[0].leading[0] == "accuracy"
        said = ", ".join(
            (f"{label} {mean:.1%}" if share else f"{label} {mean:.4f}")
            + f" ({len(found)} seeds)" * (len(found) > 1)
            for label, found in runs.items()
            for mean in [sum(found) / len(found)]
        )
        return f"<Comparison of {len(self.results)} runs: mean {name} {said}, in {self.folder}>"

    def _repr_html_(self) -> str:
        keys: tuple[str, ...] = ("accuracy", "balanced_accuracy", "nll", "ece")
        heads: tuple[str, ...] = ("accuracy %", "balanced %", "NLL", "ECE")
        if self.results[0].leading[0] != "accuracy":
            keys = ("rmse", "nll", "crps", "coverage_90")
            heads = ("RMSE", "NLL", "CRPS", "in 90 % intervals, %")
        rows = [
            (
                f"{one.folder.parent.name}, seed {one.result['seed']}",
                *(one.result["final"]["personal"].get(key) for key in keys),
            )
            for one in self.results
        ]
        columns = ("personal models", *heads)
        words = [line for one in self.verdicts() for line in one.words] if len(rows) > 1 else []
        said = "".join(f"<li>{escape(line)}</li>" for line in words)
        return f"<div>{html_table(columns, rows)}<ul>{said}</ul></div>"
