"""Workloads, and how a run is timed: by the seconds of its own rounds, after a few that warm up."""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..config import named_device, parse
from ..data import ClientData, Federation
from ..engines import Prepared, execute, prepare
from ..errors import ConfigError
from ..fused.meter import Meter
from ..methods import METHODS
from ..rounds.halves import halves_for
from . import networks, races
from .networks import NETWORKS
from .races import RACES

Say = Callable[[str], None]
WARM_UP = 3  # rounds of the fused engine that do not count: kernels are compiled, steps recorded
# a round trains on all samples, and nothing follows the last one
QUIET = {"evaluate_every": 0, "checkpoint_every": 0, "calibration": "off"}
SGD = {"optimizer": "sgd", "lr": 0.01, "local_epochs": 1}
WORKLOADS: dict[str, dict[str, Any]] = {
    "digits": {"dataset": "digits", "beta": 0.3, "num_clients": 10, "batch_size": 10, **SGD},
    "fmnist-50": {
        "dataset": "fmnist",
        "keep": 0.25,
        "beta": 0.3,
        "num_clients": 50,
        "batch_size": 10,
        **SGD,
    },
    "cifar10-100": {
        "dataset": "cifar10",
        "keep": 1.0,
        "beta": 0.3,
        "num_clients": 100,
        "batch_size": 64,
        **SGD,
    },
}


@dataclass(frozen=True)
class Options:
    """What a person can choose; an empty tuple or 0 means the suite's own."""

    device: str = "auto"
    data_dir: str = "data"
    seed: int = 0
    rounds: int = 0  # that count
    seconds: float = 120.0  # after which a case ends early, with at least one round that counts
    methods: tuple[str, ...] = ()
    workloads: tuple[str, ...] = ()
    clients: tuple[int, ...] = ()
    one_by_one: bool = True  # compare with one client after another
    tf32: bool = False  # measure with TF32 too

    def __post_init__(self) -> None:
        known = (*WORKLOADS, *RACES, *NETWORKS)
        for name in self.workloads:
            if name not in known:
                raise ConfigError(f"workload must be one of {', '.join(known)}, got {name!r}")
        for name in self.methods:
            if name not in METHODS:
                raise ConfigError(f"method must be one of {', '.join(METHODS)}, got {name!r}")
        if min(self.clients, default=1) < 1:
            raise ConfigError(f"clients must be at least 1, got {min(self.clients)}")

    def found_device(self) -> torch.device | None:
        """Return the device, or None if it is not there."""
        device = named_device(self.device)
        return None if device.type == "cuda" and not torch.cuda.is_available() else device

    @property
    def gpu(self) -> bool:
        """Return whether the work is meant for a GPU."""
        found = self.found_device()
        return found is None or found.type == "cuda"

    def chosen_workloads(self) -> tuple[str, ...]:
        """Return the workloads; by default one that suits the device."""
        return self.workloads or (("fmnist-50",) if self.gpu else ("digits",))

    def values(self, workload: str, rounds: int, **more: Any) -> dict[str, Any]:
        """Return the settings of a run on a workload."""
        return {
            **WORKLOADS.get(workload, {}),
            **QUIET,
            "data_dir": self.data_dir,
            "seed": self.seed,
            "device": self.device,
            "rounds": rounds,
            **more,
        }


class Enough(Exception):  # noqa: N818 (not an error)
    """The rounds that were wanted are there."""


@dataclass
class Timing:
    """The seconds of a run's rounds, and what else was seen."""

    seconds: list[float]
    warm_up: int
    wall: float
    usage: Mapping[str, Any]
    remarks: tuple[str, ...] = ()

    def row(self) -> dict[str, Any]:
        """Return what a table shows of it; `ms` is the median of the rounds that count."""
        taken = [1000 * second for second in self.seconds]
        counted = taken[self.warm_up :]
        return {
            "ms": statistics.median(counted),
            "round_ms": [round(value, 4) for value in taken],
            "warm_up": self.warm_up,
            "num_rounds": len(counted),
            "wall": round(self.wall, 3),
            "remark": "; ".join(self.remarks) or None,
            **{key: self.usage.get(key) for key in ("peak_memory", "utilisation", "seconds")},
        }


def timed(
    prepared: Prepared, warm_up: int, limit: float, test: bool = False, out: Path | None = None
) -> Timing:
    """Return the times of a run. After `limit` seconds it ends, one round counted; without `test`
    it ends before the final test.
    """
    wanted, records = prepared.run.settings.rounds, list[Any]()
    begun = time.perf_counter()

    def progress(now: list[Any]) -> None:
        records[:] = now
        late = time.perf_counter() - begun > limit
        if (len(now) == wanted and not test) or (len(now) < wanted and late and len(now) > warm_up):
            raise Enough

    # only for what a run that ends early cannot say itself
    meter = Meter(prepared.run.settings.torch_device())
    usage: Mapping[str, Any] | None = None
    remarks: tuple[str, ...] = ()
    try:
        with tempfile.TemporaryDirectory(prefix="bayflower-bench-") as folder:
            outcome = execute(
                prepared,
                progress,
                out or (Path(folder) if prepared.run.settings.client_states == "disk" else None),
            )
        usage, remarks = outcome.usage, outcome.remarks
        del outcome
    except Enough:
        usage = meter.report() | {"seconds": None}
    wall = time.perf_counter() - begun
    free()
    return Timing([record["seconds"] for record in records], warm_up, wall, usage or {}, remarks)


def free() -> None:
    """Give back the memory of a run, so that the next one's peak is its own."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def why(error: Exception) -> str:
    """Return a reason in one line."""
    lines = str(error).strip().splitlines()
    known = isinstance(error, ConfigError)
    return (
        (lines[0] if lines else "no reason given")
        if known
        else f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"
    )


def described(federation: Federation) -> str:
    """Return what the data are, for a table: the file may be a part of the data set it is named
    after.
    """
    samples = sum(len(data.y_train) + len(data.y_test) for data in federation.clients)
    note = f" ({federation.note})" if federation.note else ""
    return (
        f"{federation.dataset}{note}: {samples:,} samples with {len(federation.clients):,} clients"
    )


def loaded(
    method: str, values: Mapping[str, Any], engine: str = "fused", workload: str = ""
) -> Prepared:
    """Return the run, ready."""
    if workload in RACES:
        return races.prepared(workload, method, values, engine)
    if workload in NETWORKS:
        return networks.prepared(workload, method, values, engine)
    return prepare(parse(method, values), engine)


def pictures(
    clients: int,
    train: int,
    test: int,
    seed: int,
    shape: tuple[int, ...] = (1, 28, 28),
    classes: int = 10,
) -> Federation:
    """Return clients with equally many noisy pictures of ten prototypes: made in memory, for sizes
    that no data set has.
    """
    rng, each = np.random.default_rng(seed), train + test
    prototypes = rng.standard_normal((classes, *shape), dtype=np.float32)
    y = rng.integers(0, classes, size=(clients, each))
    x = rng.standard_normal((clients, each, *shape), dtype=np.float32)
    x *= 0.5
    x += prototypes[y]
    owners = tuple(
        ClientData(i, x[i, :train], y[i, :train], x[i, train:], y[i, train:])
        for i in range(clients)
    )
    about = {"kind": "made in memory", "train": train, "test": test}
    return Federation(owners, (), classes, shape, "pictures made in memory", about, "")


def on_pictures(method: str, federation: Federation, values: Mapping[str, Any]) -> Prepared:
    """Return a run on made pictures, ready."""
    run = parse(
        method,
        {
            **QUIET,
            **SGD,
            "batch_size": 10,
            "model": "cnn",
            "num_clients": len(federation.clients),
            **values,
        },
    )
    return Prepared(run, "fused", federation, halves_for(run, federation))


def data_bytes(federation: Federation) -> int:
    """Return what the samples of all clients take on the device."""
    return sum(part.nbytes for data in federation.clients for part in data[1:] if part is not None)
