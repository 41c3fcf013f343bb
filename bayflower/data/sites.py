"""Which sites train, which are new and which are left out; and what the data decide where settings
leave it open.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..errors import ConfigError
from .batches import rng
from .checks import names_in
from .settings import CLIENTS, REST, DataSettings
from .source import Source
from .sources import at_hand, load_source
from .tables import is_table


def resolve(settings: DataSettings) -> DataSettings:
    """Return the settings with `partition` and `num_clients` as the data decide where they were
    left open. Data that are not on this machine are not asked, if the number of clients is set.
    """
    if settings.num_clients and settings.partition != "auto":
        return settings
    if settings.num_clients and not at_hand(settings):
        return settings
    source = load_source(settings)
    sites = source.site_names()
    partition = settings.partition
    if partition == "auto":
        partition = "natural" if sites else "dirichlet"
    if partition != "natural":
        if settings.new_sites or settings.leave_out:
            raise ConfigError(f"{source.name!r} has no sites; leave out new_sites and leave_out")
        return replace(settings, partition=partition, num_clients=settings.num_clients or CLIENTS)
    if not sites:
        raise ConfigError(no_sites(source.name))
    left = len(sites) - len(chosen(settings.leave_out, sites, "leave_out")) - settings.new_clients
    if not settings.num_clients and left < 1:
        raise ConfigError(
            f"{source.name!r} has {len(sites)} sites, so none is left to train; leave out or set "
            "aside fewer"
        )
    return replace(settings, partition="natural", num_clients=settings.num_clients or left)


def absolute(settings: DataSettings) -> dict[str, str]:
    """Return the settings that are paths, as absolute paths, for programs that run in another
    folder.
    """
    found = {"data_dir": str(Path(settings.data_dir).resolve())}
    if settings.server_data not in ("", REST):
        found["server_data"] = os.path.abspath(settings.server_data)
    if not settings.is_path:
        return found
    whole = Path(settings.dataset)
    parts = [settings.dataset] if whole.exists() else settings.dataset.split(",")
    found["dataset"] = ",".join(os.path.abspath(part.strip()) for part in parts)
    sites, test, folder = settings.sites, settings.test, whole.is_dir()
    if sites and folder and Path(sites).is_file():
        found["sites"] = os.path.abspath(sites)
    if test and (Path(test).is_dir() if folder else is_table(test)):
        found["test"] = os.path.abspath(test)
    return found


def no_sites(name: str) -> str:
    """Return the error for data without sites."""
    return (
        f"partition must not be 'natural' for {name!r}, which has no natural clients; try "
        "'dirichlet', or name the column of the sites with --site"
    )


def chosen(text: str, sites: tuple[str, ...], what: str) -> list[str]:
    """Return the sites in a list of names, checked."""
    names = [text] if text in sites else names_in(text)
    for name in names:
        if name not in sites:
            close = difflib.get_close_matches(name, sites, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sites[:10])}"
            raise ConfigError(f"{what} names no site {name!r}; {hint}")
    if len(set(names)) < len(names):
        raise ConfigError(f"{what} names a site twice: {text}")
    return names


def drawn_members(parts: int, settings: DataSettings, seed: int) -> list[int]:
    """Return the part of each client id. A seeded permutation chooses which parts train and which
    are new; both stay in order.
    """
    order = rng(seed, "members").permutation(parts)
    training, new = (
        order[: settings.num_clients],
        order[settings.num_clients : settings.total_clients],
    )
    return [int(part) for part in (*np.sort(training), *np.sort(new))]


def named_members(
    source: Source, owners: list[int], settings: DataSettings, seed: int
) -> list[int]:
    """Return the part of each client id, where sites were chosen by name: those that train, in
    order, then the new ones in the order of their list.
    """
    sites = source.site_names()
    place = dict(zip(sites, source.owners(), strict=True))
    away = [place[one] for one in chosen(settings.leave_out, sites, "leave_out")]
    new = [place[one] for one in chosen(settings.new_sites, sites, "new_sites")]
    if both := set(away) & set(new):
        raise ConfigError(f"site {sites[source.owners().index(min(both))]!r} is new and left out")
    rest = [part for part, owner in enumerate(owners) if owner not in (*away, *new)]
    more = 0 if settings.new_sites else settings.new_clients
    if len(rest) < settings.num_clients + more:
        raise ConfigError(
            f"num_clients must be at most {len(rest) - more}, the sites that are left, got "
            f"{settings.num_clients}"
        )
    order = rng(seed, "members").permutation(len(rest))
    train, drawn = (
        [rest[one] for one in np.sort(order[a:b])]
        for a, b in ((0, settings.num_clients), (settings.num_clients, settings.num_clients + more))
    )
    return [*train, *drawn, *(owners.index(one) for one in new)]
