"""Where runs are kept. A folder holds one run. A finished run is never overwritten unasked, and a
run that is refused leaves no folder behind.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..config import Run, groups, names, parse
from ..data import absolute, name_of
from ..errors import BayflowerError, ConfigError
from ..settings import earlier
from . import checkpoint
from .lease import BUSY as BUSY
from .lease import BusyError as BusyError  # part of what this module offers
from .lease import alone_in
from .texts import read_json

RESULT = "result.json"
WRITTEN = (
    *(RESULT, checkpoint.FILE, "status.json", "metrics.prom", "calibration.safetensors"),
    *("stopping.json", "trackers.json"),
)
# settings that say where and how a run is computed; its results do not depend on them
ELSEWHERE = {
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
}
SHOWN = 3  # settings in the name of a folder; with more, a digest stands for the rest
LONGEST = 60  # characters of these settings


class Held(NamedTuple):
    """The run that a folder holds."""

    config: dict[str, Any]
    engine: str | None  # None if the run is not finished: a checkpoint does not say
    finished: bool
    round: int  # rounds it has done


def held(folder: Path) -> Held | None:
    """Return the run in `folder`; None if there is none, or none that has written a file yet."""
    result = read_json(folder / RESULT)
    if (folder / RESULT).exists() and not isinstance(result.get("config"), dict):
        raise ConfigError(
            f"{folder / RESULT} is not the result of a run; choose another folder with --out"
        )
    if result:
        return Held(result["config"], result.get("engine"), True, len(result.get("rounds", [])))
    saved = checkpoint.read(folder) if folder.is_dir() else None
    return None if saved is None else Held(saved.config, None, False, saved.round)


def decisive(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that decide a run's results, those of older files completed and paths
    absolute.
    """
    method = str(config["method"])
    before = checkpoint.BEFORE
    if "calibration" in config:  # of what came later, only `robust` is on by default
        before = {"robust": before["robust"]}
    known, own = names(method) - ELSEWHERE, earlier(groups(method)["options"])
    run = parse(method, {k: v for k, v in {**own, **before, **config}.items() if k in known})
    found = {**run.flat(), **absolute(run.data)}
    return {key: value for key, value in found.items() if key not in ELSEWHERE}


def same(there: Held, run: Run, engine: str) -> bool:
    """Return whether a folder holds this very run, finished or not."""
    try:
        equal = decisive(there.config) == decisive(run.flat())
    except BayflowerError:  # a method that is not known here
        return False
    return equal and there.engine in (None, engine)


def digest(run: Run, engine: str) -> str:
    """Return six letters that tell the settings of a run from others."""
    text = json.dumps([decisive(run.flat()), engine], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def usual_folder(run: Run, engine: str = "fused") -> Path:
    """Return runs/METHOD-DATASET-SEED with the settings that differ from the defaults: up to three
    in words, and a digest where these do not say everything.
    """
    now, before = decisive(run.flat()), decisive(parse(run.method).flat())
    differ = {key: now[key] for key in now if now[key] != before[key]}
    file = run.data.is_path
    differ.pop("seed", None)
    differ.pop("dataset", None)
    words = [
        plain(f"{key}{value}" if isinstance(value, int | float) else f"{key}_{value}")
        for key, value in differ.items()
    ]
    words += [] if engine == "fused" else [engine]
    shown: list[str] = []
    for word in words[:SHOWN]:
        if len("-".join([*shown, word])) <= LONGEST:
            shown.append(word)
    if len(shown) < len(words) or file:
        shown.append(digest(run, engine))
    stem = plain(name_of(run.data.dataset))
    return Path("runs") / "-".join([run.method, stem, str(run.settings.seed), *shown])


def plain(text: str) -> str:
    """Return the text as part of a file's name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).strip("_.") or "x"


def place(out: Path, label: str, run: Run, engine: str) -> Path:
    """Return the folder of one run of several: OUT/LABEL/seed-S, or, where another run has that
    folder, the same with a digest of the settings.
    """
    folder = out / plain(label) / f"seed-{run.settings.seed}"
    there = held(folder)
    if there is None or same(there, run, engine):
        return folder
    return folder.with_name(f"{folder.name}-{digest(run, engine)}")


def the_run(folder: Path) -> Path:
    """Return the folder of the run in `folder`: itself, or the only one below it, as in
    OUT/METHOD/seed-SEED. If there are several, raise with their names.
    """
    if any((folder / name).exists() for name in (RESULT, checkpoint.FILE)):
        return folder
    below = {path.parent for name in (RESULT, checkpoint.FILE) for path in folder.rglob(name)}
    if len(below) > 1:
        some = ", ".join(str(path) for path in sorted(below)[:4])
        raise ConfigError(f"{folder} holds {len(below)} runs; name one: {some}")
    return next(iter(below), folder)


def next_free(folder: Path) -> Path:
    """Return FOLDER-2, or the next one that does not exist."""
    return next(
        path
        for number in range(2, 10**6)
        if not (path := folder.with_name(f"{folder.name}-{number}")).exists()
    )


def check_free(
    folder: Path,
    run: Run,
    engine: str,
    command: list[str] | None = None,
    overwrite: str = "--overwrite",
) -> None:
    """Raise if `folder` holds a run; the text has the command that goes on with it, the one for a
    new folder, and the option that replaces it. `command` is the one that was given, without
    --out.
    """
    there = held(folder)
    if there is None:
        return
    words = command or ["bayflower", "run", run.method]
    said = f"method {there.config.get('method')}, seed {there.config.get('seed')}"
    new = shlex.join([*words, "--out", str(next_free(folder))])
    ends = f"a new folder: {new}; or {overwrite} to replace it"
    if not there.finished:
        more = shlex.join([*words, "--out", str(folder), "--resume"])
        raise ConfigError(
            f"{folder} holds a run that stopped after round {there.round} of "
            f"{there.config['rounds']}; add --resume to continue it ({more}), or {ends}"
        )
    on = ""
    if same_but_rounds(there, run, engine) and (folder / checkpoint.FILE).exists():
        rounds = max(2 * there.round, run.settings.rounds)
        rest = without(words, "--rounds")
        longer = [*rest, "--rounds", str(rounds), "--out", str(folder), "--resume"]
        on = f"go on from it: {shlex.join(longer)}; "
    raise ConfigError(f"{folder} holds a finished run ({said}, {there.round} rounds); {on}{ends}")


def without(words: list[str], option: str) -> list[str]:
    """Return a command without an option and its value."""
    if option not in words:
        return words
    at = words.index(option)
    return [*words[:at], *words[at + 2 :]]


def same_but_rounds(there: Held, run: Run, engine: str) -> bool:
    """Return whether more rounds of the run in a folder would be this run."""
    config = {**there.config, "rounds": run.settings.rounds}
    config |= {key: run.flat().get(key) for key in checkpoint.FREE if key in run.flat()}
    return same(there._replace(config=config), run, engine)


def clear(folder: Path) -> None:
    """Remove the run in `folder`; files of others stay."""
    old = None
    with suppress(BayflowerError):
        old = checkpoint.read(folder)
    if old is not None and re.fullmatch(r"[0-9a-f]{32}", old.run):
        shutil.rmtree(folder / "state" / old.run, ignore_errors=True)
    for name in WRITTEN:
        (folder / name).unlink(missing_ok=True)


@contextmanager
def making(folder: Path) -> Iterator[None]:
    """Make `folder` for a run and keep other processes out of it; if the run is refused or fails
    with nothing in it, remove what was made.
    """
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"out {str(folder)!r} cannot be made ({error.strerror}); choose another folder"
        ) from None
    try:
        with alone_in(folder):
            yield
    except BaseException:
        for one in missing:
            with suppress(OSError):
                one.rmdir()  # only if it is empty
        raise
