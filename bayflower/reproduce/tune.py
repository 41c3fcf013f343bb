"""Settings chosen by search, with an equal number of trials for every method of a comparison.

A trial trains on the training clients less a validation part of each one's training data, and is
scored on that part. Test data and new clients are not touched. The study is kept in a journal in
the output folder; a search that was killed goes on with the trials it lacks.
"""

from __future__ import annotations

import json
import os
import random
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..config import parse
from ..errors import BayflowerError, ConfigError
from ..methods import get
from .cache import Say, digest
from .tables import ABOUT, Cell, Table, settings_of

RANGES = Path(__file__).parent / "ranges.toml"
SPREAD = 10  # first trials of a search, which cover the range; then Optuna's TPE goes on from them
SCORES: dict[str, Literal["maximize", "minimize"]] = {
    "accuracy": "maximize",
    "accuracy_mean": "maximize",
    "balanced_accuracy_mean": "maximize",
    "nll": "minimize",
    "rmse": "minimize",
    "mae": "minimize",
    "c_index": "maximize",
    "integrated_brier": "minimize",
    "macro_auroc": "maximize",
    "macro_auprc": "maximize",
    "crps": "minimize",
    "deviance": "minimize",
}


@dataclass(frozen=True)
class Search:
    """What is searched: settings that stay, how a trial is scored, on which share of the training
    data, over how many seeds.
    """

    settings: Mapping[str, Any]
    trials: int = 20
    metric: str = "auto"  # accuracy; of tasks without classes the NLL
    validation: float = 0.2
    seeds: int = 1

    def __post_init__(self) -> None:
        task = self.settings.get("task", "classification")
        if self.metric == "auto":
            classes = task in ("classification", "ordinal")
            object.__setattr__(self, "metric", "accuracy" if classes else "nll")
        if self.metric not in SCORES:
            raise ConfigError(f"metric must be one of {', '.join(SCORES)}, got {self.metric!r}")
        if not 0 < self.validation < 1:
            raise ConfigError(
                f"validation must be in (0, 1), got {self.validation}; it is a share of each "
                "client's training data"
            )
        if self.trials < 1 or self.seeds < 1:
            raise ConfigError(
                f"trials and seeds must be at least 1, got {self.trials} and {self.seeds}"
            )


def ranges(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is searched for a method: its own ranges, some of which depend on what is given,
    and those of every method, less that.
    """
    content = tomllib.loads(RANGES.read_text())
    known = settings_of(method)
    both = {**content["every"], **get(method).ranges, **content.get(method, {})}
    for key, cases in content["when"].get(method, {}).items():
        both |= cases.get(given.get(key), {})
    return {name: values for name, values in both.items() if name in known and name not in given}


def fixed(method: str) -> set[str]:
    """Return the settings on which a method's ranges depend."""
    return set(tomllib.loads(RANGES.read_text())["when"].get(method, {}))


def point(name: str, values: Any, place: int) -> Any:
    """Return the value of a setting at a place of a sequence whose beginnings are spread over its
    range, the same for every method.

    A list is gone through in an order drawn by the setting's name, another one every time; a
    stretch is halved, and its parts again (van der Corput), from a start drawn by the name.
    """
    draw = random.Random(f"{name} {place // len(values) if isinstance(values, list) else ''}")
    if isinstance(values, list):
        return draw.sample(values, len(values))[place % len(values)]
    share = (sum((place + 1 >> bit & 1) / 2 ** (bit + 1) for bit in range(32)) + draw.random()) % 1
    if values.get("log"):
        return values["low"] * (values["high"] / values["low"]) ** share
    return values["low"] + share * (values["high"] - values["low"])


def suggest(trial: Any, name: str, values: Any) -> Any:
    """Return the trial's value of a setting."""
    if isinstance(values, list):
        return trial.suggest_categorical(name, values)
    return trial.suggest_float(name, values["low"], values["high"], log=values.get("log", False))


def rows_of(table: Table, where: Callable[[Cell], bool]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return (method, settings that stay) of every row that has runs in the form `full`; what its
    range names is searched.

    A row needs cells of one setting only, so that all its columns get the same values: `where`
    chooses them.
    """
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for cell in table.cells("full"):
        if cell.column.method:
            raise ConfigError(
                f"the methods of {table.id} are its columns, not its rows; name methods instead, "
                f"e.g. {cell.column.method}"
            )
        if cell.spec is None or not where(cell):
            continue
        method, stated = cell.spec.method, cell.spec.values()
        searched = {
            *ranges(method, {}),
            *ranges(method, {key: value for key, value in stated.items() if key in fixed(method)}),
        }
        stay = {key: value for key, value in stated.items() if key not in searched}
        if found.setdefault(cell.row.name, (cell.spec.method, stay)) != (cell.spec.method, stay):
            both = {**found[cell.row.name][1], **stay}
            key = next(key for key in both if found[cell.row.name][1].get(key) != stay.get(key))
            raise ConfigError(
                f"{table.id}'s columns differ in {key}, and a row gets one set of values; choose, "
                f"e.g. with --where {key}={stay.get(key)}"
            )
    return found


def search(
    method: str,
    wanted: Search,
    out: Path,
    say: Say,
    run: Callable[..., dict[str, Any]] | None = None,
    label: str = "",
) -> dict[str, Any]:
    """Do the trials that are missing and return the entry of the chosen values; `label` stands for
    the method in what is said.
    """
    label = label or method
    try:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend
    except ImportError:
        raise ConfigError(
            "tuning needs Optuna, which is not installed: pip install 'bayflower[tune]'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # a failed trial has a line of ours
    space = ranges(method, wanted.settings)
    if not space:
        raise ConfigError(
            f"nothing is left to search for {method}: every setting of its range was given; leave "
            "one out"
        )
    # what is wrong with the settings is said before the first trial
    parse(method, dict(wanted.settings))
    stay = {
        key: value for key, value in wanted.settings.items() if key not in ("device", "data_dir")
    }
    about = {
        "method": method,
        "settings": stay,
        "space": space,
        "metric": wanted.metric,
        "validation": wanted.validation,
        "seeds": wanted.seeds,
    }
    name = f"{method}-{digest(about)[:12]}"
    journal = out / f"{name}.journal"
    if not journal.exists():  # so is what is wrong with the data
        usable(method, wanted)
    out.mkdir(parents=True, exist_ok=True)
    storage = JournalStorage(JournalFileBackend(str(journal)))
    study = optuna.create_study(
        storage=storage, study_name=name, direction=SCORES[wanted.metric], load_if_exists=True
    )
    finished = [one for one in study.trials if one.state.is_finished()]
    study.sampler = optuna.samplers.TPESampler(seed=len(study.trials))
    say(
        f"{label}: {len(finished)} of {wanted.trials} trials are there; searching "
        f"{', '.join(space)}"
    )

    def objective(trial: Any) -> float:
        chosen = {key: suggest(trial, key, values) for key, values in space.items()}
        try:
            score = (
                sum(
                    trial_score(method, {**wanted.settings, **chosen}, seed, wanted, run)
                    for seed in range(wanted.seeds)
                )
                / wanted.seeds
            )
        except ConfigError:
            raise
        except BayflowerError as error:  # a run that broke down counts as a trial
            say(f"{label}, trial {trial.number}: {error}")
            raise optuna.TrialPruned from None
        say(
            f"{label}, trial {trial.number}: {wanted.metric} {score:.4f} with "
            + ", ".join(f"{k}={v:g}" for k, v in chosen.items())
        )
        return score

    for place in range(len(finished), wanted.trials):
        if place < SPREAD:
            study.enqueue_trial({key: point(key, values, place) for key, values in space.items()})
        study.optimize(objective, n_trials=1)
    complete = [one for one in study.trials if one.state == optuna.trial.TrialState.COMPLETE]
    if not complete:
        raise BayflowerError(f"every trial of {label} failed; use other settings")
    ended = sum(one.state.is_finished() for one in study.trials)
    return {
        "dataset": str(parse(method, dict(wanted.settings)).data.dataset),
        "trials": ended,
        "metric": wanted.metric,
        "score": float(study.best_value),
        "validation": wanted.validation,
        "seeds": wanted.seeds,
        "study": name,
        "values": dict(study.best_params),
    }


def usable(method: str, wanted: Search) -> None:
    """Raise if the data of a search cannot be used."""
    from ..engines import prepare

    given = {**wanted.settings, "seed": 0, "validation": wanted.validation}
    prepare(parse(method, given), "fused")


def trial_score(
    method: str,
    settings: Mapping[str, Any],
    seed: int,
    wanted: Search,
    run: Callable[..., dict[str, Any]] | None,
) -> float:
    """Return the score of one run on the validation part."""
    from ..engines import prepare, run_to_result

    chosen = parse(
        method,
        {
            "evaluate_every": 0,
            **settings,
            "seed": seed,
            "validation": wanted.validation,
            "checkpoint_every": 0,
        },
    )
    result = (run or run_to_result)(prepare(chosen, "fused"))
    return float(result["final"]["personal"][wanted.metric])


def write(path: Path, method: str, entry: dict[str, Any]) -> None:
    """Put a method's entry into the file of chosen values; the others stay."""
    entries = {**(read(path) if path.exists() else {}), method: entry}
    put(
        path,
        "`bayflower tune`; `bayflower reproduce TABLE --tuned FILE` takes the values",
        dict(sorted(entries.items())),
    )


def write_table(
    path: Path,
    table: Table,
    wanted: Search,
    entries: Mapping[str, dict[str, Any]],
    note: Mapping[str, Any],
) -> None:
    """Write the values chosen for a table's rows, and how they were chosen."""
    said = ", ".join(f"{key} = {value}" for key, value in note.items())
    words = (
        f"Every row had {wanted.trials} trials{f' ({said})' if said else ''}, scored by "
        f"{wanted.metric} on {wanted.validation:.0%} of the "
        "training clients' training data; the best trial's values are used in all columns."
    )
    put(
        path,
        f"`bayflower tune --table {table.id}`; the table's form full takes the values",
        {ABOUT: {"words": words}, **entries},
    )


def put(path: Path, author: str, entries: Mapping[str, dict[str, Any]]) -> None:
    """Write entries as TOML, whole or not at all."""
    lines = [f"# Written by {author}."]
    for name, one in entries.items():
        key = (
            name
            if name.replace("-", "").isalnum() and name.isascii()
            else json.dumps(name, ensure_ascii=False)
        )
        lines += [
            "",
            f"[{key}]",
            *(
                f"{item} = {json.dumps(value, ensure_ascii=False)}"
                for item, value in one.items()
                if item != "values"
            ),
        ]
        if "values" in one:
            lines += [
                f"[{key}.values]",
                *(f"{item} = {json.dumps(value)}" for item, value in one["values"].items()),
            ]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text("\n".join(lines) + "\n")
    part.replace(path)


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Return the entries of a file of chosen values, by method."""
    try:
        content = tomllib.loads(path.read_text())
        return {
            method: {**entry, "values": dict(entry["values"])} for method, entry in content.items()
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is not a file written by `bayflower tune` ({error}); tune again"
        ) from None
