"""What is handed over in Python, as settings of a run: a network and clients' data.

Data in memory are written to one .npz file in the run's folder, so that every engine, the report
and personal models find them there.
"""

from __future__ import annotations

import hashlib
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from ..data.checks import names_in
from ..data.doors import NOT_ASKED_FOR, SITES, save
from ..data.npz import Options, is_share
from ..data.objects import Reading, is_text, read_objects, text_of
from ..data.outcomes import kind_of
from ..data.source import Source
from ..errors import ConfigError
from ..files import place
from ..networks import own
from .words import in_python

APART = ("ray", "deployment")  # engines whose clients are other processes
# settings that say how data are read: used up when objects are read
READ = ("categorical", "drop", "layout", "white", "image_side")


def network_of(model: Any, engine: str) -> tuple[str, own.Named | None]:
    """Return (the network's name for the settings, the network itself unless it was named)."""
    if isinstance(model, str):
        return model, None
    known = own.named(model)
    if known.only_here and engine in APART:
        raise ConfigError(
            f"model {own.shown(model)} cannot be used with engine={engine!r}, whose clients are "
            f"other processes and import it by name: {known.only_here}; write a class or function "
            "without arguments in a module of your own and pass it, or use engine='fused'"
        )
    return known.name, known


def columns(target: str | Sequence[str] | None, site: str | None) -> str | None:
    """Return the column of the target, several with commas; raise unless texts name them."""
    names = list(target) if isinstance(target, list | tuple) else [target]
    for name, value, known in (("target", target, names), ("site", site, [site])):
        if value is not None and not (known and all(isinstance(one, str) for one in known)):
            raise ConfigError(f"{name} must be the name of a column, got {value!r}")
    return None if target is None else ",".join(map(str, names))


@contextmanager
def data_in(
    folder: Path,
    data: Any,
    settings: Mapping[str, Any],
    *,
    target: str | Sequence[str] | None = None,
    site: str | None = None,
    test: Any = None,
    num_classes: int | None = None,
    standardise: bool = False,
    whole: bool = False,
    name: str = "data",
) -> Iterator[dict[str, Any]]:
    """Give `settings` with those of the data; what was written to `folder` is removed if the run is
    refused.
    """
    target = columns(target, site)
    given = dict(settings)
    if is_text(data):
        more = {"target": target, "sites": site, "test": None if test is None else str(test)}
        for key, wanted in (("num_classes", num_classes), ("standardise", standardise or None)):
            if wanted is not None:
                raise ConfigError(f"{key} is for arrays and tensors; leave it out for {data}")
        yield {**given, "dataset": text_of(data), **{k: v for k, v in more.items() if v}}
        return
    share = test is not None and is_share(str(test))
    read = {key: given.pop(key) for key in READ if key in given}
    options = Options(
        target=target or "",
        site=site or "",
        test="" if test is None or share else str(test),
        unseen=",".join(
            one for key in ("new_sites", "leave_out") for one in names_in(str(given.get(key, "")))
        ),
        kind=kind_of(str(given.get("task", "classification"))),
        time=str(given.get("time", "")),
        **read,
    )
    given.pop("time", None)  # it is in the file
    source = read_objects(data, Reading(options, num_classes or 0, standardise, whole))
    told_of(source)
    if source.client is not None:
        given.setdefault("partition", "natural")
    elif (
        source.encoder is not None and site != "off" and not {"partition", "num_clients"} & {*given}
    ):
        raise ConfigError(
            f"the data frame has no column called {', '.join(SITES)}, so its clients are not "
            "known; name the column of the sites with site=, or divide the rows with num_clients="
        )
    asked_for = not any(NOT_ASKED_FOR in line for line in source.lines)
    if source.test is not None and asked_for and "test_fraction" not in given:
        given["test_fraction"] = 0
    if share:
        given["test"] = str(test)
    if wrong := [one for one in (folder, *folder.parents) if one.exists() and not one.is_dir()]:
        raise ConfigError(
            f"out {str(folder)!r} cannot be made: {wrong[0]} is a file; choose another"
        )
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    path = folder / f"data-{fingerprint(source)}" / f"{place.plain(name)}.npz"
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    if new:
        save(source, path)
    try:
        yield {**given, "dataset": str(path)}
    except BaseException:
        if new and not used(folder, path):
            shutil.rmtree(path.parent, ignore_errors=True)
            for one in missing:
                with suppress(OSError):
                    one.rmdir()  # only if it is empty
        raise


def told_of(source: Source) -> None:
    """Warn of rows and columns that were left out while reading, in one line."""
    lines = [line for line in source.lines if not line.endswith("as asked")]
    if lines:
        # the caller of `fit` or `compare`, behind the context
        warnings.warn(in_python(f"data: {'; '.join(lines)}"), UserWarning, stacklevel=5)


def used(folder: Path, path: Path) -> bool:
    """Return whether a run in a folder, or below it, has data at `path` to go on with."""
    homes = {one.parent for name in place.WRITTEN[:2] for one in folder.rglob(name)}
    runs = [place.held(home) for home in homes]
    return any(one is not None and one.config.get("dataset") == str(path) for one in runs)


def fingerprint(source: Source) -> str:
    """Return twelve letters that tell these data from others."""
    seal = hashlib.blake2b(repr((source.names, source.num_classes, source.plain)).encode())
    for part in (source.x, source.y, source.client, source.test, source.time):
        if part is not None:
            seal.update(f"{part.dtype}{part.shape}".encode())
            seal.update(np.ascontiguousarray(part).data)
    return seal.hexdigest()[:12]
