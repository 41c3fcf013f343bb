"""Trackers of runs and studies: what the command line and Python share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..files.trackers import Wanted, tracked
from ..study.plan import Planned, Study, planned
from ..study.runs import title

# shows the rounds of runs by their titles
Show = Callable[[str, list[Any]], None]


def wanted(tensorboard: bool, mlflow: str | Path, wandb: str, group: str = "") -> Wanted:
    """Return the trackers that are asked for; raise if one cannot be used."""

    def write(run: Path, file: Path) -> None:
        from ..report import write_report

        write_report([run], file, "none")

    for name, value, meaning in (
        ("mlflow", mlflow, "a tracking URI or a folder"),
        ("wandb", wandb, "the name of a project"),
    ):
        if not isinstance(value, str | Path):
            raise ConfigError(f"{name} must be {meaning}, got {value!r}")
    found = Wanted(bool(tensorboard), str(mlflow), str(wandb), group, write)
    found.check()
    return found


@contextmanager
def of_study(study: Study, trackers: Wanted | None, rounds: dict[str, int]) -> Iterator[Show]:
    """Give a progress function of (title, records) for the trackers of some runs of a study, which
    are given as title → rounds.
    """
    with ExitStack() as stack:
        tracks: dict[str, Callable[[list[Any]], None]] = {}
        for one in planned(study) if trackers is not None else ():
            if trackers is not None and title(one) in rounds:
                more = tracked(trackers, one.run, study.engine, one.folder)
                tracks[title(one)] = stack.enter_context(more)

        def see(name: str, records: list[Any]) -> None:
            if name in tracks:
                tracks[name](records)

        yield see


def by_title(study: Study) -> dict[str, Planned]:
    """Return the runs of a study by their titles."""
    return {title(one): one for one in planned(study)}
