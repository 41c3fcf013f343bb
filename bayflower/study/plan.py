"""What a study runs: methods with their settings, seeds, and the folder of each run. It is given by
options of `bayflower compare` or by a file for `bayflower study`.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .. import methods as table
from ..config import ENGINES, PRESET, Run, names, parse
from ..errors import ConfigError
from ..files import place

KEYS = ("methods", "seeds", "out", "engine", "jobs", "together", "preset", "tuned", "settings")
OWN = ("method", "tuned")  # keys of a method's table besides settings


@dataclass(frozen=True)
class Entry:
    """One method with its settings; `label` tells it from others of the same method."""

    label: str
    method: str
    given: Mapping[str, Any]  # settings, and perhaps `preset`; the seed comes with each run

    def run(self, seed: int) -> Run:
        """Return the run with a seed."""
        return parse(self.method, {**self.given, "seed": seed})


@dataclass(frozen=True)
class Study:
    """Entries × seeds."""

    entries: tuple[Entry, ...]
    seeds: tuple[int, ...]
    out: Path
    engine: str = "fused"
    jobs: int = 0  # 0 = by the machine
    together: bool = False  # train the seeds of an entry side by side

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ConfigError(f"engine must be one of {', '.join(ENGINES)}, got {self.engine!r}")
        if self.jobs < 0:
            raise ConfigError(f"jobs must be at least 0, got {self.jobs}; 0 = by the machine")
        if self.together and (self.engine != "fused" or self.jobs > 1):
            raise ConfigError(
                f"together trains seeds side by side in one process of the fused engine, got "
                f"engine {self.engine} and {self.jobs} jobs; leave it out"
            )
        labels = [place.plain(entry.label) for entry in self.entries]
        if twice := sorted({label for label in labels if labels.count(label) > 1}):
            raise ConfigError(f"{twice[0]} is there twice; give each entry a name of its own")


class Planned(NamedTuple):
    """One run of a study."""

    entry: Entry
    run: Run
    folder: Path
    finished: bool  # it is there already

    @property
    def given(self) -> dict[str, Any]:
        """Return the settings that were given, the seed among them."""
        return {**self.entry.given, "seed": self.run.settings.seed}


def planned(study: Study) -> list[Planned]:
    """Return every run of a study, seed by seed, with its folder; raise if a setting is invalid."""
    found = []
    for seed in study.seeds:
        for entry in study.entries:
            run = entry.run(seed)
            folder = place.place(study.out, entry.label, run, study.engine)
            there = place.held(folder)
            found.append(Planned(entry, run, folder, there is not None and there.finished))
    return found


def of_methods(names_of: Sequence[str], given: Mapping[str, Any]) -> tuple[Entry, ...]:
    """Return an entry a method; settings go to the methods that have them, and to none only by an
    error.
    """
    known = {method: names(method) for method in names_of}
    for key in given:
        if not any(key in keys for keys in known.values()):
            parse(names_of[0], {key: given[key]})  # raises with a hint
    return tuple(
        Entry(method, method, {key: value for key, value in given.items() if key in known[method]})
        for method in names_of
    )


def seeds_of(given: Any, first: int = 0) -> tuple[int, ...]:
    """Return the seeds that "5" (five, from `first` on), "0,3,7" or a list names."""
    try:
        if isinstance(given, str):
            given = [int(part) for part in given.split(",")] if "," in given else int(given)
        if isinstance(given, bool):
            raise ValueError
        found = range(first, first + given) if isinstance(given, int) else [int(s) for s in given]
    except (TypeError, ValueError):
        found = []
    if not found or min(found) < 0 or len(set(found)) < len(found):
        raise ConfigError(
            f"seeds must be a number of at least 1, or different seeds as in 0,3,7, got {given!r}"
        )
    return tuple(found)


# -- study.toml ----------------------------------------------------------------------------------
def read(path: Path) -> Study:
    """Return the study in a file; docs/studies.md describes its keys."""
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        raise ConfigError(
            f"{path} cannot be read ({reason}); docs/studies.md has an example"
        ) from None
    for key in content:
        if key not in KEYS:
            close = difflib.get_close_matches(key, KEYS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "settings belong below [settings]"
            raise ConfigError(f"{path} has an unknown key {key!r}; {hint}")
    shared = content.get("settings", {})
    if not isinstance(shared, dict) or "seed" in shared:
        raise ConfigError(f"settings in {path} must be a table without seed; give seeds instead")
    if PRESET in content:
        shared = {PRESET: content[PRESET], **shared}
    try:
        return Study(
            entries(path, content, shared),
            seeds_of(content.get("seeds", 5)),
            Path(str(content.get("out", Path("runs") / path.stem))),
            str(content.get("engine", "fused")),
            int(content.get("jobs", 0)),
            truth(content.get("together", False)),
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be used ({error}); docs/studies.md has an example"
        ) from None


def truth(given: Any) -> bool:
    """Return true or false as it was given."""
    if not isinstance(given, bool):
        raise ValueError(f"together must be true or false, got {given!r}")
    return given


def entries(path: Path, content: Mapping[str, Any], shared: Mapping[str, Any]) -> tuple[Entry, ...]:
    """Return the entries of a study's file. Later ones win: tuned values, [settings],
    [methods.NAME].
    """
    wanted = content.get("methods")
    if isinstance(wanted, list):
        wanted = {str(name): {} for name in wanted}
    if not isinstance(wanted, dict) or not wanted:
        raise ConfigError(f'{path} names no methods; write methods = ["fedmap", "local"]')
    if wrong := [name for name, own in wanted.items() if not isinstance(own, dict)]:
        raise ConfigError(f"methods.{wrong[0]} in {path} must be a table of settings")
    of = {name: str(own.get("method", name)) for name, own in wanted.items()}
    for method in of.values():
        table.get(method)  # raises with a hint
    known = {method: names(method) for method in of.values()}
    for key in shared:
        if not any(key in keys for keys in known.values()):
            parse(next(iter(of.values())), {key: shared[key]})  # raises with a hint
    found = []
    for name, own in wanted.items():
        method = of[name]
        chosen = own.get("tuned", content.get("tuned", ""))
        tuned = tuned_values(Path(str(chosen)), method) if chosen else {}
        common = {key: value for key, value in shared.items() if key in known[method]}
        mine = {key: value for key, value in own.items() if key not in OWN}
        entry = Entry(name, method, {**tuned, **common, **mine})
        entry.run(0)  # raises if a setting is invalid
        found.append(entry)
    return tuple(found)


def tuned_values(path: Path, method: str) -> dict[str, Any]:
    """Return the values that `bayflower tune` chose for a method; {} if it tuned others only."""
    try:
        entry = tomllib.loads(path.read_text()).get(method, {})
        return dict(entry.get("values", {}))
    except (OSError, UnicodeDecodeError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is not a file written by `bayflower tune` ({str(error).splitlines()[0]}); "
            "tune again, or leave out `tuned`"
        ) from None
