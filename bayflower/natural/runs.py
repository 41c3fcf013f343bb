"""The runs of the benchmark: one line of a JSON Lines file for every finished one.

A file that is there is gone on with: a finished run is never done again, and a last line that was
cut off by a kill is removed. Every run computes with one thread, so that the number of processes
changes no number but the seconds.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from threadpoolctl import threadpool_limits

from .. import methods
from ..errors import BayflowerError, ConfigError, in_one_line
from ..files.children import end_with_parent
from ..reproduce.cache import commit
from ..rounds import solo
from .protocol import Case, cases
from .rivals import RIVALS, Rival, only, score, why_not
from .sets import QUICK, SETS, Rows, Spec, load, named

PROTOCOL = 1  # a number of the file: lines of another one cannot be compared
Key = tuple[str, int, bool, int, str]
Line = dict[str, Any]
Say = Callable[[str], None]
# measured CPU seconds of a run, mean over sizes and rivals: what the first estimate is made of
SECONDS = {
    **{"heart": 0.9, "radon": 1.3, "election88": 2.1, "parkinson": 1.1, "brca": 0.7, "wisdm": 3.9},
    **{"officecaltech": 13.6, "shakespeare": 6.3},
}
BEGINS, SPARE = 8.0, 1.2  # seconds until processes have begun; what is not counted in a run


class Wanted(NamedTuple):
    """What was asked for."""

    datasets: tuple[str, ...]
    rivals: tuple[Rival, ...]
    seeds: int | None  # None: as each data set says
    quick: bool


class Planned(NamedTuple):
    """One run."""

    case: Case
    rival: Rival

    @property
    def key(self) -> Key:
        """Return what a line of the file is known by."""
        return (*self.case, self.rival.name)


def wanted(
    datasets: Sequence[str], names: Sequence[str], seeds: int | None, quick: bool, alone: bool
) -> Wanted:
    """Return what is asked for; raise if a name is not known. With `alone` the rivals and methods
    that are named take part, and no others.
    """
    known = datasets or (QUICK if quick else tuple(SETS))
    for name in known:
        named(name)
    if alone and not names:
        raise ConfigError("--only needs at least one --method")
    some = only(names if alone else (*RIVALS, *names))
    return Wanted(tuple(dict.fromkeys(known)), tuple(some), seeds, quick)


def planned(asked: Wanted, folder: Path, say: Say) -> list[Planned]:
    """Return all runs, data set by data set and seed by seed; raise if data cannot be read. Who
    cannot take part on a data set is said, unless it is a rival of the table.
    """
    found = []
    for name in asked.datasets:
        spec = named(name)
        every = cases(spec, asked.seeds, asked.quick)
        rows = loaded(name, folder)
        able = []
        for rival in asked.rivals:
            if rival.name in RIVALS:
                if rival.fits(spec):
                    able.append(rival)
            elif why := why_not(rival, spec, rows, every[0]):
                say(f"{rival.name} does not take part on {name}: {why}")
            else:
                able.append(rival)
        found += [Planned(case, rival) for case in every for rival in able]
    if not found:
        raise ConfigError("nobody can take part; name another --method or --dataset")
    return found


@lru_cache(maxsize=1)
def loaded(name: str, folder: Path) -> Rows:
    """Return a data set, kept until another one is asked for."""
    return load(name, folder)


# -- the file --------------------------------------------------------------------------------------
def key_of(line: Line) -> Key:
    """Return what a line is known by."""
    return line["dataset"], line["n"], line["later"], line["seed"], line["rival"]


def read(path: Path) -> dict[Key, Line]:
    """Return the finished runs of a file by key; the first counts where one is there twice."""
    found: dict[Key, Line] = {}
    if not path.exists():
        return found
    text = path.read_text()
    for number, one in enumerate(text.split("\n")[:-1], 1):
        try:
            line = json.loads(one)
            key = key_of(line)
            protocol = line["protocol"]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                f"{path}, line {number} is not a run of this benchmark; choose another --results"
            ) from None
        if protocol != PROTOCOL:
            raise ConfigError(
                f"{path} has runs of protocol {protocol}, this version has {PROTOCOL}; choose "
                "another --results"
            )
        found.setdefault(key, line)
    return found


def mended(path: Path) -> None:
    """Remove a last line that was cut off."""
    if not path.exists():
        return
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        with path.open("r+b") as file:
            file.truncate(end)


def add(path: Path, line: Line) -> None:
    """Write a finished run."""
    with path.open("ab") as file:
        file.write((json.dumps(line) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


# -- running ---------------------------------------------------------------------------------------
def expected(missing: Iterable[Planned], done: Iterable[Line]) -> float:
    """Return the CPU seconds that runs will take, by those that are finished on the same data and
    else by those that were measured when this was written.
    """
    seen: dict[str, list[float]] = {}
    for line in done:
        seen.setdefault(line["dataset"], []).append(line["seconds"])
    total = 0.0
    for one in missing:
        known = seen.get(one.case.dataset)
        total += sum(known) / len(known) if known else SECONDS[one.case.dataset]
    return total


def in_words(seconds: float) -> str:
    """Return a time for people."""
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def one_run(job: Planned, folder: Path) -> Line:
    """Return a finished run."""
    name = job.case.dataset
    spec: Spec = named(name)
    try:
        with solo.one_thread(), threadpool_limits(1):
            found = score(job.rival, spec, loaded(name, folder), job.case)
    except Exception as error:
        if job.rival.name in RIVALS and not isinstance(error, BayflowerError):
            raise
        kind = "" if isinstance(error, BayflowerError) else f"{type(error).__name__}: "
        text = in_one_line(error)
        raise BayflowerError(
            f"{job.rival.name} on {job.case.title} failed: {kind}{text}; the same command goes on "
            "with the runs that are missing"
        ) from error
    return {"protocol": PROTOCOL, **found}


def begin(level: int) -> None:
    """Prepare a process of its own: it ends with its parent, which alone hears Ctrl-C."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    logging.getLogger("bayflower").setLevel(level)


def carry_out(jobs: Sequence[Planned], folder: Path, path: Path, processes: int, say: Say) -> None:
    """Do the runs that are missing in the file."""
    mended(path)
    done = read(path)
    missing = [job for job in jobs if job.key not in done]
    if len(missing) < len(jobs):
        say(f"{len(jobs) - len(missing)} of {len(jobs)} runs are in {path} already")
    if not missing:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    processes = max(1, min(processes, len(missing)))
    about = BEGINS + SPARE * expected(missing, done.values()) / processes
    say(
        f"{len(missing)} runs, {processes} at a time: about {in_words(about)} on a machine like "
        "that of the documentation"
    )
    about_here = {
        "commit": commit(),
        "torch": torch.__version__,
        "device": f"cpu ({platform.machine()})",
    }
    tell = Progress(len(missing), say)

    def finished(job: Planned, line: Line) -> None:
        add(path, {**line, **about_here})
        tell(job)

    if processes == 1:
        for job in missing:
            finished(job, one_run(job, folder))
        return
    outside = [job.rival.method for job in missing if job.rival.how == "method"]
    os.environ.update(methods.handed_on(dict.fromkeys(outside)))
    level = logging.getLogger("bayflower").level
    with ProcessPoolExecutor(processes, get_context("spawn"), begin, (level,)) as pool:
        side_by_side(pool, missing, folder, processes, finished)


def side_by_side(
    pool: ProcessPoolExecutor,
    missing: Sequence[Planned],
    folder: Path,
    processes: int,
    finished: Callable[[Planned, Line], None],
) -> None:
    """Do runs in several processes; the first error ends all."""
    waiting, active = list(missing), dict[Future[Line], Planned]()
    try:
        while waiting or active:
            while waiting and len(active) < processes + 1:
                job = waiting.pop(0)
                active[pool.submit(one_run, job, folder)] = job
            for future in wait(active, return_when=FIRST_COMPLETED).done:
                finished(active.pop(future), future.result())
    except BrokenProcessPool:
        raise BayflowerError(
            "a process of a run was ended, perhaps for lack of memory; give the same command again "
            "with --jobs 1, it goes on with the runs that are missing"
        ) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class Progress:
    """Says from time to time how many runs are done."""

    def __init__(self, total: int, say: Say, every: float = 10.0) -> None:
        self.total, self.say, self.every = total, say, every
        self.done, self.begun = 0, time.monotonic()
        self.said = self.begun

    def __call__(self, job: Planned) -> None:
        """Count a finished run."""
        self.done += 1
        now = time.monotonic()
        if now - self.said >= self.every or self.done == self.total:
            self.said, spent = now, now - self.begun
            left = in_words(spent / self.done * (self.total - self.done))
            self.say(
                f"{self.done} of {self.total} runs, {spent:.0f} s, about {left} left "
                f"({job.case.title}, {job.rival.name})"
            )
