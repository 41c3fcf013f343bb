"""One run from its settings to its folder: what `bayflower run` and `bayflower.fit` share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config import Run
from ..engines import Prepared, prepare, train
from ..files import checkpoint, place
from ..files.records import Progress


class Stop(Exception):  # noqa: N818 (no error)
    """Raised by a progress function: the run is to end after `round`, with its final test."""

    def __init__(self, round: int) -> None:
        super().__init__(f"stopped after round {round}")
        self.round = round


@dataclass(frozen=True)
class Job:
    """A run, where it is done and how it is watched."""

    run: Run
    given: Mapping[str, Any]  # the settings that were given
    engine: str
    folder: Path
    # makes a context that gives a progress function
    watch: Callable[[Prepared], AbstractContextManager[Progress]]
    refuse: Callable[[], None]  # raises if the folder holds a run that must not be replaced
    announce: Callable[[Prepared], None] = lambda prepared: None
    resume: bool = False
    overwrite: bool = False
    port: int = 0


def carried_out(job: Job) -> dict[str, Any]:
    """Return the result of a run, written to its folder; raise before anything starts if settings,
    data or network cannot be used, or the folder holds another run.
    """
    start = checkpoint.to_resume(job.folder, job.run) if job.resume else None
    if not (job.resume or job.overwrite):
        job.refuse()
    prepared = prepare(job.run, job.engine)
    job.announce(prepared)
    with place.making(job.folder):
        if job.resume:  # another process may have gone on with it meanwhile
            start = checkpoint.to_resume(job.folder, job.run)
        if job.overwrite and not job.resume:
            place.clear(job.folder)
        with job.watch(prepared) as progress:
            try:
                return train(prepared, job.given, job.folder, progress, start, job.port)
            except Stop as stop:
                return ended(job, prepared, stop.round, progress)


def ended(job: Job, prepared: Prepared, round: int, progress: Progress) -> dict[str, Any]:
    """Return the result of a run that was stopped: that of a run of `round` rounds. It goes on from
    the last checkpoint, and Flower's programs end with the round that was under way.
    """
    saved = checkpoint.read(job.folder)
    last = max(round, saved.round if saved else 0)
    run = replace(job.run, settings=replace(job.run.settings, rounds=last))
    given = {**job.given, "rounds": last}
    if run.training.scheduled:  # a schedule keeps the length it had
        given["schedule_rounds"] = run.training.schedule_rounds
    return train(prepared._replace(run=run), given, job.folder, progress, saved, job.port)
