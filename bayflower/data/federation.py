"""The data of every client, from settings and a seed alone.

Protocol: train and test samples of the data set are pooled, thinned to the share `keep`,
partitioned over all clients, and each client's part is split at random (not stratified) into a
training and a test part, or by time (`split`). With test_fraction 0 the data set's own test mark
decides instead. Tables (and synthetic data) are standardised for each client with statistics of its
own training part, or by everyone's (`moments`); images are as they are, or normalised
(`normalise`). A share of the training part is held out for calibration, unless calibration is off.
Which samples a client has depends on (seed, stream name) alone, so training longer or on another
engine shifts nothing.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..errors import ConfigError
from . import crowd, domains, partition, synthetic
from .batches import rng
from .clients import ClientData as ClientData  # part of what this module offers
from .clients import Federation as Federation
from .known import CROWD
from .parting import hold_out as hold_out
from .parting import parted, validated
from .scaling import Scaling, preparation
from .settings import DataSettings
from .sites import drawn_members, named_members, no_sites, resolve
from .source import Names, Source
from .sources import State, load_source, state_of


class _Layout(NamedTuple):
    """The samples of each client, as indices. Client i has part members[i]; without a source the
    samples are generated.
    """

    source: Source | None
    parts: list[np.ndarray]  # of all parts, in the partition's order
    members: list[int]
    description: dict[str, Any]


def num_classes(settings: DataSettings, seed: int) -> int:
    """Return the number of classes, without making any client's samples."""
    source = _layout(resolve(settings), seed).source
    return _made_classes(settings) if source is None else source.num_classes


def _made_classes(settings: DataSettings) -> int:
    """Return the number of classes of data that are generated."""
    return crowd.CLASSES if settings.dataset == CROWD else synthetic.NUM_CLASSES


def names(settings: DataSettings, seed: int) -> Names:
    """Return the names of clients (by number), classes and input columns, without making any
    client's samples.
    """
    settings = resolve(settings)
    layout = _layout(settings, seed)
    source = layout.source
    if source is None:
        return Names(classes=tuple(map(str, range(_made_classes(settings)))))
    sites: tuple[str, ...] = ()
    if settings.partition == "natural" and source.domain is None:
        known = dict(zip(source.owners(), source.site_names(), strict=True))
        there = layout.description["natural_clients"]  # of the samples that are kept
        sites = tuple(known[there[member]] for member in layout.members)
    return Names(sites, source.class_names(), source.names.columns)


def describe(settings: DataSettings, seed: int) -> dict[str, Any]:
    """Return the data set's name, its note, how it was split, and names, in JSON types; without
    the clients' sizes.
    """
    layout = _layout(resolve(settings), seed)
    source = layout.source
    name, note = (settings.dataset, "") if source is None else (source.name, source.note)
    said = {key: list(some) for key, some in names(settings, seed)._asdict().items()}
    return {"dataset": name, "note": note, "partition": layout.description, "names": said}


def load_federation(settings: DataSettings, seed: int) -> Federation:
    """Return every client's data. Kept while the files are the same: do not change the arrays."""
    return _federation(settings, seed, state_of(settings))


@lru_cache(maxsize=2)
def _federation(settings: DataSettings, seed: int, state: State) -> Federation:
    settings = resolve(settings)
    if settings.dataset == CROWD:
        return crowd.federation(settings, seed)
    layout = _layout(settings, seed)
    # tuning does not use the new clients
    made = settings.num_clients if settings.validation else settings.total_clients
    everyone = tuple(_client(layout, settings, seed, client) for client in range(made))
    sizes = {
        "train_sizes": [len(data.y_train) for data in everyone],
        "test_sizes": [len(data.y_test) for data in everyone],
    }
    if settings.calibrated:
        held = [0 if data.y_held is None else len(data.y_held) for data in everyone]
        sizes["calibration_sizes"] = held
    source, about = layout.source, describe(settings, seed)
    return Federation(
        clients=everyone[: settings.num_clients],
        new_clients=() if settings.validation else everyone[settings.num_clients :],
        num_classes=synthetic.NUM_CLASSES if source is None else source.num_classes,
        input_shape=everyone[0].x_train.shape[1:],
        dataset=about["dataset"],
        partition={**about["partition"], **sizes},
        note=about["note"],
        names=names(settings, seed),
        table=table_of(settings, seed, everyone[0].x_train),
    )


def table_of(settings: DataSettings, seed: int, x: np.ndarray) -> np.ndarray | None:
    """Return which columns are 0 or 1 by construction, if inputs like `x` wait to be standardised
    by everyone's numbers; None if they do not.
    """
    source = _layout(resolve(settings), seed).source
    plain = settings.dataset == CROWD or (source is not None and source.plain)
    if settings.scaling != "federation" or plain or x.ndim != 2:
        return None
    flags = None if source is None else source.flags()
    return np.zeros(x.shape[1], bool) if flags is None else flags


def load_client(settings: DataSettings, seed: int, client: int) -> ClientData:
    """Return one client's data, the same as in `load_federation`, without making other clients."""
    settings = resolve(settings)
    if not 0 <= client < settings.total_clients:
        raise ConfigError(
            f"client must be in [0, {settings.total_clients - 1}], got {client}; num_clients is "
            f"{settings.num_clients} "
            f"and new_clients {settings.new_clients}"
        )
    return _client(_layout(settings, seed), settings, seed, client)


def _layout(settings: DataSettings, seed: int) -> _Layout:
    return _dealt(settings, seed, state_of(settings))


@lru_cache(maxsize=2)
def _dealt(settings: DataSettings, seed: int, state: State) -> _Layout:
    if settings.dataset == CROWD:
        return _Layout(None, [], [], crowd.described(settings, seed))
    total = settings.total_clients
    described: dict[str, Any] = {
        "seed": seed,
        "num_clients": settings.num_clients,
        "new_clients": settings.new_clients,
        "test_fraction": settings.fraction,
    }
    if settings.dataset == "synthetic":
        members = drawn_members(total, settings, seed)
        described |= {
            "kind": "synthetic",
            "scenario": settings.scenario,
            "nuisance_variance": settings.nuisance_variance,
            "parts": members,
        }
        return _Layout(None, [], members, described)
    source = load_source(settings)
    if settings.fraction == 0 and (
        source.test is None or not source.test.any() or source.test.all()
    ):
        raise ConfigError(
            f"test_fraction must be in (0, 1) for {source.name!r}, got 0; this data set does not "
            "mark test samples"
        )
    kept = kept_of(len(source.y), settings.keep, seed)
    draw = rng(seed, "partition")
    if source.domain is not None:
        parts, members, numbers = domains.deal(source, kept, settings, draw, rng(seed, "members"))
    else:
        parts, numbers = _parts(source, kept, settings, draw)
        members = []
    if len(parts) < total:
        raise ConfigError(
            f"num_clients + new_clients must be at most {len(parts)}, the natural clients of "
            f"{source.name!r}, got {total}; "
            f"lower num_clients or new_clients"
        )
    parts = [kept[part] for part in parts]
    if not members and (settings.new_sites or settings.leave_out):
        members = named_members(source, numbers["natural_clients"], settings, seed)
    members = members or drawn_members(len(parts), settings, seed)
    by_name = settings.partition == "natural" and source.domain is None and source.names.sites
    for client, member in enumerate(members):
        if len(parts[member]) < settings.min_size and by_name:
            owner = numbers["natural_clients"][member]
            site = dict(zip(source.owners(), source.site_names(), strict=True))[owner]
            raise ConfigError(
                f"site {site!r} has {len(parts[member])} samples, fewer than min_size "
                f"{settings.min_size}; leave it out (leave_out={site}) or lower min_size"
            )
        if len(parts[member]) < settings.min_size:
            raise ConfigError(
                f"client {client} would have {len(parts[member])} samples, fewer than min_size "
                f"{settings.min_size}; "
                f"lower min_size or the number of clients, or raise keep"
            )
    described |= {
        "kind": settings.partition,
        **numbers,
        "min_size": settings.min_size,
        "keep": settings.keep,
        "pooled": len(source.y),
    }
    described |= {
        "kept": len(kept),
        "used": sum(len(parts[member]) for member in members),
        "parts": members,
    }
    return _Layout(source, parts, members, described)


def kept_of(size: int, share: float, seed: int) -> np.ndarray:
    """Return which of the data set's samples are used, in order."""
    if share == 1:
        return np.arange(size)
    count = max(1, int(share * size + 0.5))
    return np.sort(rng(seed, "keep").choice(size, size=count, replace=False))


def _parts(
    source: Source, kept: np.ndarray, settings: DataSettings, draw: np.random.Generator
) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Return (positions in `kept` of each part, the numbers that made them)."""
    s, y, total, classes = settings, source.y[kept], settings.total_clients, source.num_classes
    if s.partition == "iid":
        return partition.iid(y, total, draw), {}
    if s.partition == "dirichlet":
        return partition.dirichlet(y, total, s.beta, s.min_size, draw), {"beta": s.beta}
    if s.partition == "quantity":
        return partition.quantity(y, total, s.beta, s.min_size, draw), {"beta": s.beta}
    if s.partition == "pathological":
        numbers: dict[str, Any] = {
            "classes_per_client": s.classes_per_client,
            "samples_per_class": s.samples_per_class,
        }
        return partition.pathological(
            y, total, s.classes_per_client, s.samples_per_class, classes, draw
        ), numbers
    if s.partition == "major-minor":
        parts = partition.major_minor(
            y,
            total,
            s.major_classes,
            s.minor_share,
            s.major_minor_reading,
            s.samples_per_client,
            classes,
            draw,
        )
        shares = partition.major_minor_shares(
            s.major_minor_reading, s.major_classes, s.minor_share, classes
        )
        numbers = {
            "major_classes": s.major_classes,
            "minor_share": s.minor_share,
            "reading": s.major_minor_reading,
        }
        return parts, {
            **numbers,
            "samples_per_client": len(parts[0]),
            "share_of_a_major": shares[0],
            "share_of_a_minor": shares[1],
        }
    if source.client is None:
        raise ConfigError(no_sites(source.name))
    owners = source.client[kept]
    return partition.natural(owners), {
        "natural_clients": [int(owner) for owner in np.unique(owners[owners >= 0])]
    }


def raw_client(settings: DataSettings, seed: int, client: int) -> ClientData:
    """Return one client's data as they were read, neither standardised nor normalised."""
    settings = resolve(settings)
    return _raw(_layout(settings, seed), settings, seed, client)


def client_scaling(settings: DataSettings, seed: int, client: int) -> Scaling | None:
    """Return how a client's inputs are prepared; None if they are not."""
    settings = resolve(settings)
    layout = _layout(settings, seed)
    if settings.dataset == CROWD:
        return None
    data = _raw(layout, settings, seed, client)
    return preparation(settings, layout.source, data.x_train)


def _client(layout: _Layout, settings: DataSettings, seed: int, client: int) -> ClientData:
    data = _raw(layout, settings, seed, client)
    ready = settings.dataset == CROWD
    known = None if ready else preparation(settings, layout.source, data.x_train)
    if known is None:
        return data
    held = None if data.x_held is None else known.apply(data.x_held)
    x_train, x_test = known.apply(data.x_train), known.apply(data.x_test)
    return data._replace(x_train=x_train, x_test=x_test, x_held=held)


def _raw(layout: _Layout, settings: DataSettings, seed: int, client: int) -> ClientData:
    if settings.dataset == CROWD:
        return crowd.one(settings, seed, client)
    member = layout.members[client]
    source = layout.source
    marks = None
    if source is None:
        x, y = synthetic.client_samples(
            seed, member, settings.total_clients, settings.scenario, settings.nuisance_variance
        )
    else:
        indices = layout.parts[member]
        x, y = source.samples(indices), source.y[indices]
        marks = source.test[indices] if settings.fraction == 0 and source.test is not None else None
    order = None
    if settings.split == "time":
        known = None if source is None else source.time
        order = np.arange(len(y)) if known is None else np.argsort(known[indices], kind="stable")
    by_time = order is not None
    if order is None:
        order = rng(seed, "split", member).permutation(len(y))
    train, test = parted(len(y), settings.fraction, marks, order, by_time)
    few = settings.targets == "numbers"  # a client of one sample trains, and has no test
    if len(train) == 0 or (len(test) == 0 and not few):
        raise ConfigError(
            f"client {client} would have {len(train)} training and {len(test)} test samples; "
            "every client needs one of each: "
            f"raise min_size, or set test_fraction above 0"
        )
    if settings.validation and client < settings.num_clients:
        train, test = validated(train, settings.validation, client, few, by_time)
    train = train[: settings.train_rows or None]
    held = train[:0]
    if settings.calibrated:
        share = settings.calibration_share
        if by_time and not settings.train_rows:  # as far from training as the test is
            share = max(share, min(len(test) / len(train), 0.5))
        train, held = hold_out(train, share, settings.calibration_rows)
    parts = (x[train], y[train], x[test], y[test])
    return ClientData(client, *parts, *((x[held], y[held]) if len(held) else (None, None)))
