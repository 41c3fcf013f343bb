"""What several test files share: golden vectors, a small federation, and the trees' comparison."""

from __future__ import annotations

import functools
import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

import pytest
import torch

from bayflower.config import Run, parse
from bayflower.engines import Prepared, execute, prepare
from bayflower.files import checkpoint
from bayflower.files.records import Outcome
from bayflower.methods import METHODS
from bayflower.testing import assert_same_bits as assert_same_bits
from bayflower.testing import worst_difference as worst_difference
from bayflower.testing.bench import PEACE as PEACE
from bayflower.testing.bench import SMALL

torch.set_num_threads(1)  # small tensors: a second thread only gets in the way of other processes
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"  # real data sets, if any
DEADLINE = time.monotonic() + float(os.environ.get("BAYFLOWER_SLOW_SECONDS", "inf"))
# what a method needs to be itself: normalisation layers; a prototype of every class
NEEDED = {"fedbn": {"model": "mlp-bn"}, "fedproto": {"min_count": 1}, "fedpac": {"min_count": 1}}
# methods of which `make test` has few promises on one engine; `make test-all` has them all
LATER = {
    "moon-ft",
    "fedpa-ft",
    "ditto",
    "fedproto",
    "fedrod",
    "pfedbayes",
    "pvi",
    "fedep",
    "fedep-ft",
    "fedsep",
    "fedpac",
    "pfedbred",
    "pfedme",
    "fedbe",
    "fedala",
    "fedpop",
    "gpfl",
    "fedcp",
    "pfedgp",
    "fedivon",
    "qlsd",
    "qlsd-ft",
}
FEWER = {"fedpa": {"num_samples": 2, "sample_steps": 3}}  # steps that only take time
FEWER["fedpa-ft"] = FEWER["fedpa"]
# methods with states or normalisation layers of their own kind: `make test` has them on both
# networks where the others are on one, and `make test-all` all of them on both
BOTH = {"fedbn", "fedbps", "fedmap", "fednp", "metavd", "pfedvmp"}


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "golden.json").read_text())


@pytest.fixture(scope="session")
def baselines() -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "golden_baselines.json").read_text())


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the real data sets, unpacked."""
    if not (SHARED / "unpack").is_file():
        pytest.skip("the real data sets (../shared/data) are not beside this repository")
    folder = tmp_path_factory.mktemp("real")
    subprocess.run(
        [sys.executable, str(SHARED / "unpack"), str(folder), "fmnist", "heart"],
        check=True,
        capture_output=True,
    )
    return folder


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """The folder of each method's short run, made when it is first asked for."""
    from personalruns import trained

    root, known = tmp_path_factory.mktemp("runs"), {}

    def of(method: str) -> Path:
        if method not in known:
            known[method] = trained(root / method, method)
        return known[method]

    return of


def pytest_collection_finish() -> None:
    """Let the collector of garbage pass over what imports have made, and come more rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """No test marked slow or flower starts when BAYFLOWER_SLOW_SECONDS are gone."""
    for mark in ("slow", "flower"):
        if item.get_closest_marker(mark) and time.monotonic() > DEADLINE:
            pytest.skip(f"left out: there was no time for this test; by hand: make {mark}")


@pytest.fixture(autouse=True)
def loggers():
    """The command line quietens the loggers of its process; in a test that must not last."""
    levels = {name: logging.getLogger(name).level for name in ("bayflower", "flwr")}
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def small(method: str, **changes: Any) -> Run:
    """Return a run of a few seconds."""
    own = {**NEEDED.get(method, {}), **FEWER.get(method, {})}
    return parse(method, {**SMALL, **own, "device": "cpu", **changes})


def small_prepared(method: str, engine: str = "loop", **changes: Any) -> Prepared:
    return prepare(small(method, **changes), engine)


class Whole(NamedTuple):
    """A run left in peace, and the checkpoint that it wrote after its second round."""

    outcome: Outcome
    stopped: bytes


@functools.cache
def whole_run(method: str, engine: str) -> Whole:
    """Return three rounds with a part of the clients; made once."""
    written, save = [], checkpoint.save_tensors

    def remember(path: Path, *given: Any, **more: Any) -> None:
        save(path, *given, **more)
        written.append(path.read_bytes())

    prepared = small_prepared(method, engine, **PEACE, checkpoint_every=1)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save_tensors", remember)
        return Whole(execute(prepared, out=Path(folder)), written[1])


def cases(
    first: str, both: Collection[str] = BOTH, only: Collection[str] = frozenset(METHODS) - LATER
) -> list:
    """Return (method, network) for the methods in `only` on the network `first`, and for those in
    `both` on the other one too; the rest is slow.
    """
    return [
        pytest.param(
            (method, model),
            id=f"{method}-{model}",
            marks=() if method in both or (model == first and method in only) else pytest.mark.slow,
        )
        for method in sorted(METHODS)
        for model in ("mlp", "mlp-bn")
    ]


def some(names: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """Return the parameters of a test, of which only those in `kept` are in the default run."""
    return [pytest.param(one, marks=() if one in kept else pytest.mark.slow) for one in names]
