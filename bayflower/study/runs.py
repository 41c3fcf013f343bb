"""The runs of a study that are missing: one after another in this process, several processes at a
time on a CPU, or the seeds of a method side by side on a GPU. Runs that were killed go on from
their checkpoints; finished ones are not touched.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from ..config import names
from ..engines import Prepared, prepare, run_to_result, run_under_flower
from ..errors import BayflowerError
from ..files import checkpoint, place
from ..files.children import end_with_parent
from ..methods import handed_on
from ..networks.own import home
from .plan import Planned, Study, planned

MEMORY = 2**31  # bytes that a process of its own may need
POLL_SECONDS = 0.2

Say = Callable[[str], None]
# makes a context that shows progress (title, records of rounds) of runs, given as title → rounds
Watch = Callable[[dict[str, int]], AbstractContextManager[Callable[[str, list[Any]], None]]]


def jobs_of(study: Study, missing: Sequence[Planned]) -> int:
    """Return how many runs are done at a time. Unless the study says: 1 on a GPU, for one seed,
    with workers and for Flower's engines; else one a core, as far as there are 2 GB of free memory
    for each.
    """
    if study.engine not in ("fused", "loop") or not missing or study.together:
        return 1
    if study.jobs:
        return min(study.jobs, len(missing))
    on_gpu = any(one.run.settings.torch_device().type == "cuda" for one in missing)
    shared = any(one.run.settings.on_workers for one in missing)
    if on_gpu or shared or len(study.seeds) == 1:
        return 1
    return max(1, min(len(missing), cores(), free_memory() // MEMORY))


def cores() -> int:
    """Return the CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory() -> int:
    """Return the free memory in bytes; much where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if "MemAvailable" in line)
    except (OSError, StopIteration, ValueError):
        return 2**40


def carry_out(
    study: Study,
    say: Say,
    watch: Watch,
    overwrite: bool = False,
    port: int = 0,
    app: Path | None = None,
    announce: Callable[[Prepared], None] = lambda prepared: None,
    words: Sequence[str] = (),
) -> list[tuple[Planned, dict[str, Any]]]:
    """Do the missing runs of a study; return all its runs with the contents of their result.json.
    With `overwrite` all of its runs are done again. `announce` is told the first run that is ready.
    `words` are options of `bayflower run` for runs in processes of their own.
    """
    plan = planned(study)
    if overwrite:
        plan = [one._replace(finished=False) for one in plan]
    missing = [one for one in plan if not one.finished]
    if len(missing) < len(plan):
        say(f"{len(plan) - len(missing)} of {len(plan)} runs are there already")
    jobs = jobs_of(study, missing)
    ready = check(missing, study.engine, every=jobs == 1)
    for prepared in [*ready.values()][:1]:  # all share their data
        announce(prepared)
    if overwrite:
        for one in missing:
            with place.making(one.folder):
                place.clear(one.folder)
    if study.engine in ("ray", "deployment"):
        under_flower(study, missing, ready, watch, port, app)
    elif jobs > 1:
        say(f"{len(missing)} runs, {jobs} at a time")
        side_by_side(missing, study.engine, jobs, say, words)
    elif study.together:
        for some in by_entry(missing):
            beside_each_other(some, ready, watch, say)
    else:
        in_turn(missing, study.engine, ready, watch, say)
    return [(one, json.loads((one.folder / place.RESULT).read_text())) for one in plan]


def check(missing: Sequence[Planned], engine: str, every: bool) -> dict[Path, Prepared]:
    """Return what is ready to run; raise before anything starts if data or network cannot be used.
    Without `every`, one seed of each entry is looked at.
    """
    seen: dict[str, Planned] = {}
    for one in missing:
        seen.setdefault(one.entry.label, one)
    some = missing if every and len(missing) <= len(seen) else list(seen.values())
    return {one.folder: prepare(one.run, engine) for one in some}


def in_turn(
    missing: Sequence[Planned], engine: str, ready: dict[Path, Prepared], watch: Watch, say: Say
) -> None:
    """Run one after another in this process. A run that another process is doing comes last."""
    waiting, told_of = list(missing), False
    while waiting:
        one = waiting.pop(0)
        name = title(one)
        try:
            with place.making(one.folder), watch({name: one.run.settings.rounds}) as progress:
                if is_done(one):  # by another process, meanwhile
                    continue
                prepared = ready.pop(one.folder, None) or prepare(one.run, engine)
                run_to_result(prepared, one.folder, partial(progress, name), resumed(one))
        except place.BusyError as busy:
            if not told_of:
                say(f"{name}: {busy}; waiting")
            told_of = True
            waiting.append(one)
            time.sleep(POLL_SECONDS)


def by_entry(missing: Sequence[Planned]) -> list[list[Planned]]:
    """Return the runs of each entry."""
    found: dict[str, list[Planned]] = {}
    for one in missing:
        found.setdefault(one.entry.label, []).append(one)
    return list(found.values())


def beside_each_other(
    some: Sequence[Planned], ready: dict[Path, Prepared], watch: Watch, say: Say
) -> None:
    """Train runs that differ by their seed side by side in this process. One that fails does not
    end the others; those that another process is doing come last.
    """
    from ..fused.beside import Seat, side_by_side

    mine: list[Planned] = []
    with ExitStack() as held:
        for one in some:
            with suppress(place.BusyError):
                held.enter_context(place.making(one.folder))
                mine += [] if is_done(one) else [one]
        lengths = {title(one): one.run.settings.rounds for one in mine}
        progress = held.enter_context(watch(lengths))

        def run(one: Planned, seat: Seat) -> None:
            prepared = ready.pop(one.folder, None) or prepare(one.run, "fused")
            told = partial(progress, title(one))
            run_to_result(prepared, one.folder, told, resumed(one), seat=seat)

        if len(mine) > 1:
            say(f"{mine[0].entry.label}: {len(mine)} seeds side by side")
        found = side_by_side([partial(run, one) for one in mine])
    failed = [(one, why) for one, why in zip(mine, found, strict=True) if why is not None]
    for one, why in failed[1:]:
        say(f"{title(one)} failed: {why}")
    if failed:
        raise failed[0][1]
    in_turn([one for one in some if not is_done(one)], "fused", ready, watch, say)


def is_done(one: Planned) -> bool:
    """Return whether the folder of a run holds its result now."""
    return (one.folder / place.RESULT).exists()


def resumed(one: Planned) -> checkpoint.Checkpoint | None:
    """Return the checkpoint from which a killed run goes on."""
    there = checkpoint.read(one.folder) if one.folder.is_dir() else None
    return None if there is None else checkpoint.to_resume(one.folder, one.run)


def title(one: Planned) -> str:
    """Return the name of a run for a line."""
    return f"{one.entry.label}, seed {one.run.settings.seed}"


# -- several processes ---------------------------------------------------------------------------
def command(one: Planned, engine: str) -> list[str]:
    """Return the command of one run, as a person would give it."""
    words = [sys.executable, "-m", "bayflower", "run", one.entry.method, "--engine", engine]
    for key, value in one.given.items():
        words += ["--set", f"{key}={text_of(value)}"]
    if resumed(one) is not None:
        words.append("--resume")
    return [*words, "--json", "--out", str(one.folder)]


def text_of(value: Any) -> str:
    """Return a setting's value as --set reads it."""
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def side_by_side(
    missing: Sequence[Planned], engine: str, jobs: int, say: Say, words: Sequence[str] = ()
) -> None:
    """Run up to `jobs` processes at a time; they end with this one. The first failure ends all."""
    waiting, done, began = list(missing), 0, time.monotonic()
    active: list[tuple[Planned, subprocess.Popen[bytes], Any]] = []
    try:
        while waiting or active:
            while waiting and len(active) < jobs:
                one = waiting.pop(0)
                if is_done(one):  # by another process, meanwhile
                    done += 1
                else:
                    active.append((one, *start(one, engine, words)))
            time.sleep(POLL_SECONDS)
            for item in [item for item in active if item[1].poll() is not None]:
                active.remove(item)
                one, process, errors = item
                text = told(errors)
                if process.returncode and place.BUSY in text:
                    waiting.append(one)
                    continue
                if process.returncode and not is_done(one):
                    raise BayflowerError(
                        f"{title(one)} failed: {text or f'code {process.returncode}'}; the same "
                        "command goes on with the runs that are missing"
                    )
                done += 1
                spent = time.monotonic() - began
                say(f"{title(one)}: done ({done} of {len(missing)} runs, {spent:.0f} s)")
    finally:
        for _, process, _ in active:
            process.terminate()
        for _, process, errors in active:
            process.wait()
            errors.close()


def start(
    one: Planned, engine: str, words: Sequence[str] = ()
) -> tuple[subprocess.Popen[bytes], Any]:
    """Return the process of one run and the file of its errors."""
    errors = tempfile.TemporaryFile()  # noqa: SIM115 (read when the process has ended)
    process = subprocess.Popen(
        [*command(one, engine), *words],
        env=environment(one),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        preexec_fn=end_with_parent,
    )
    return process, errors


def environment(one: Planned) -> dict[str, str]:
    """Return the environment of a run's process, which finds methods and networks of one's own."""
    found = {**os.environ, "OMP_NUM_THREADS": "1", **handed_on([one.entry.method])}
    if search := home(str(one.entry.given.get("model", ""))):
        known = found.get("PYTHONPATH", "").split(os.pathsep)
        found["PYTHONPATH"] = os.pathsep.join([*filter(None, known), search])
    return found


def told(errors: Any) -> str:
    """Return the last line of a process's errors."""
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    errors.close()
    return lines[-1].removeprefix("bayflower: ") if lines else ""


# -- Flower's engines ----------------------------------------------------------------------------
def under_flower(
    study: Study,
    missing: Sequence[Planned],
    ready: dict[Path, Prepared],
    watch: Watch,
    port: int,
    app: Path | None,
) -> None:
    """Run under Flower's own programs; methods that one app can do share one."""
    for some in shared(missing):
        prepared = [ready.get(one.folder) or prepare(one.run, study.engine) for one in some]
        given = {key: value for one in some for key, value in one.given.items()}
        out = study.out if len(some) > 1 else some[0].folder
        titles = {one.run.method: title(one) for one in some}
        lengths = {title(one): one.run.settings.rounds for one in some}
        begun = any(resumed(one) is not None for one in some)
        with place.making(out), watch(lengths) as progress:

            def show(
                status: dict[str, Any],
                titles: dict[str, str] = titles,
                progress: Callable[[str, list[Any]], None] = progress,
            ) -> None:
                if status.get("method") in titles:
                    progress(titles[status["method"]], status.get("records", []))

            folders = [one.folder for one in some]
            run_under_flower(prepared, given, out, port, begun, show, app, folders)


def shared(missing: Sequence[Planned]) -> list[list[Planned]]:
    """Return the runs in lists that one app can do: one seed, different methods under their own
    names, and every setting that two of them have is the same.
    """
    found: list[list[Planned]] = []
    for one in missing:
        home = next((some for some in found if all(alike(one, other) for other in some)), None)
        if home is None:
            found.append([one])
        else:
            home.append(one)
    return found


def alike(one: Planned, other: Planned) -> bool:
    """Return whether one app can do both runs."""
    both = names(one.entry.method) & names(other.entry.method)
    mine, theirs = ({key: of.given.get(key) for key in both} for of in (one, other))
    named = all(of.entry.label == of.entry.method for of in (one, other))
    return named and one.entry.method != other.entry.method and mine == theirs
