"""Runs for a report: read from their folders, checked, and put into groups that differ by nothing
but the seed.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from .. import methods
from ..data import Identity, identities
from ..errors import ConfigError

FILE = "result.json"
NEEDED = ("method", "dataset", "partition", "seed", "config", "rounds", "final")
ALIKE = (
    "seed",
    "device",
    "data_dir",
    "download",
    "checkpoint_every",
    "max_fused",
    "workers",
    "worker_block",
    "cuda_graphs",
    "client_states",
    "stacking",
)
DATA = (
    "dataset",
    "partition",
    "beta",
    "num_clients",
    "new_clients",
    "keep",
    "test_fraction",
    "scenario",
    "classes_per_client",
    "samples_per_client",
    "major_classes",
    "minor_share",
)


@dataclass(frozen=True)
class Found:
    """One run: its folder and what its result.json says."""

    folder: Path
    result: dict[str, Any]

    @property
    def seed(self) -> int:
        """Return the run's seed."""
        return int(self.result["seed"])

    @cached_property
    def clients(self) -> dict[int, Identity]:
        """Return who the clients are, by number. Files from before have no names; there the
        partition says who a client is.
        """
        said, result = self.result.get("clients"), self.result
        if said:
            return {one["client"]: Identity(**one) for one in said}
        some = [(result["final"].get(view) or {}) for view in ("personal", "new_clients")]
        numbers = [[int(row["client"]) for row in one.get("per_client", [])] for one in some]
        found = identities(result["partition"], self.seed, (), *numbers)
        return {one.client: one for one in found}

    def name(self, client: int) -> str:
        """Return a client's name."""
        known = self.clients.get(client)
        return known.name if known else f"client {client}"


@dataclass(frozen=True)
class Group:
    """Runs of one method with the same settings, one a seed."""

    title: str
    runs: tuple[Found, ...]
    left_out: tuple[Found, ...] = ()  # with the same settings and seed as one of the runs

    @property
    def first(self) -> dict[str, Any]:
        """Return the first run's result."""
        return self.runs[0].result

    @property
    def method(self) -> str:
        """Return the method's name."""
        return str(self.first["method"])

    def values(self, key: str, view: str = "personal") -> list[float]:
        """Return a number of the final test from every run that has it."""
        blocks = [run.result["final"].get(view) for run in self.runs]
        return [float(block[key]) for block in blocks if block and block.get(key) is not None]

    def mean(self, pick: Callable[[dict[str, Any]], float | None]) -> float | None:
        """Return the mean over runs of what `pick` finds in a result."""
        found = [value for run in self.runs if (value := pick(run.result)) is not None]
        return statistics.fmean(found) if found else None

    def curve(
        self, pick: Callable[[dict[str, Any]], float | None]
    ) -> list[tuple[float, float, float, float]]:
        """Return (round, mean, lowest, highest) over seeds of what `pick` finds in a round."""
        by_round: dict[int, list[float]] = {}
        for run in self.runs:
            for record in run.result["rounds"]:
                if (value := pick(record)) is not None:
                    by_round.setdefault(int(record["round"]), []).append(float(value))
        return [
            (round, statistics.fmean(values), min(values), max(values))
            for round, values in sorted(by_round.items())
        ]

    def by_client(
        self, key: str = "accuracy", view: str = "personal"
    ) -> dict[tuple[int, str], float]:
        """Return a number of each client, by (seed, identity of the client)."""
        found = {}
        for run in self.runs:
            for one in (run.result["final"].get(view) or {}).get("per_client", []):
                if one.get(key) is not None and int(one["client"]) in run.clients:
                    found[run.seed, run.clients[int(one["client"])].id] = float(one[key])
        return found

    @cached_property
    def named(self) -> dict[str, str]:
        """Return the name of each client by its identity; the seed is part of a name where another
        seed has another client of that name.
        """
        several = len(self.runs) > 1
        return {
            one.id: one.name if one.lasting or not several else f"{one.name}, seed {run.seed}"
            for run in self.runs
            for one in run.clients.values()
        }


def read(folders: Sequence[Path]) -> list[Found]:
    """Return the runs in some folders and the folders below them."""
    found: dict[Path, Found] = {}
    for folder in folders:
        if not folder.exists():
            raise ConfigError(f"{folder} does not exist; give the --out of one or more runs")
        paths = [folder] if folder.is_file() else sorted(folder.rglob(FILE))
        if not paths:
            raise ConfigError(f"{folder} has no {FILE}; give the --out of a run that has finished")
        for path in paths:
            found[path.resolve()] = Found(path.parent, load(path))
    return list(found.values())


def load(path: Path) -> dict[str, Any]:
    """Return a result.json; raise if it is none."""
    try:
        result = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read as JSON ({str(error).splitlines()[0]}); run it again or leave "
            "it out"
        ) from None
    if not isinstance(result, dict) or (missing := [key for key in NEEDED if key not in result]):
        lacks = f"it lacks {missing[0]!r}" if isinstance(result, dict) else "it is not an object"
        raise ConfigError(
            f"{path} is not the result of a run: {lacks}; docs/results-file.md describes the file"
        )
    if not isinstance(result["final"].get("personal"), dict) or not result["rounds"]:
        raise ConfigError(f"{path} has no test of the personal models; the run did not finish")
    return result


def group(runs: Sequence[Found]) -> list[Group]:
    """Return the runs in groups; a title says what tells a group from others of its method."""
    sets: dict[str, list[Found]] = {}
    for run in runs:
        config = {key: value for key, value in run.result["config"].items() if key not in ALIKE}
        sets.setdefault(
            json.dumps([run.result["dataset"], run.result["engine"], config], sort_keys=True), []
        ).append(run)
    members = [sorted(some, key=lambda run: run.seed) for some in sets.values()]
    groups = []
    for some in members:
        once = {run.seed: run for run in some}  # the same run in two folders counts once
        twice = tuple(run for run in some if once[run.seed] is not run)
        others = [
            other
            for other in members
            if other is not some and other[0].result["method"] == some[0].result["method"]
        ]
        groups.append(
            Group(
                title(some[0].result, [other[0].result for other in others]),
                tuple(once.values()),
                twice,
            )
        )
    known = list(methods.METHODS)
    return sorted(
        groups,
        key=lambda one: (
            str(one.first["dataset"]),
            known.index(one.method) if one.method in known else 99,
            one.title,
        ),
    )


def title(result: dict[str, Any], others: Sequence[dict[str, Any]]) -> str:
    """Return the method's title and the settings in which it differs from the others."""
    row = methods.METHODS.get(result["method"])
    # titles are names of classes
    name = row.title.replace("PFed", "pFed") if row else str(result["method"])
    differ = sorted(
        {
            key
            for other in others
            for key in {*result["config"], *other["config"]} - set(ALIKE)
            if result["config"].get(key) != other["config"].get(key)
        }
    )
    said = [f"{key}={brief(result['config'].get(key))}" for key in differ if key != "method"]
    if any(other["engine"] != result["engine"] for other in others):
        said.append(str(result["engine"]))
    return f"{name} ({', '.join(said)})" if said else name


def brief(value: Any) -> str:
    """Return a setting's value for a label."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def unequal(groups: Sequence[Group]) -> dict[str, dict[str, Any]]:
    """Return the settings that all groups have and in which they differ, by name and group."""
    configs = {group.title: group.first["config"] for group in groups}
    shared = set.intersection(*(set(config) for config in configs.values()))
    return {
        key: {title: config[key] for title, config in configs.items()}
        for key in sorted(shared - {*ALIKE, "method"})
        if len({json.dumps(config[key]) for config in configs.values()}) > 1
    }


def same_data(a: Group, b: Group) -> bool:
    """Return whether two groups were given the same data in the same way."""
    return (
        all(a.first["config"].get(key) == b.first["config"].get(key) for key in DATA)
        and a.first["dataset"] == b.first["dataset"]
    )
