"""What all test files share: golden vectors, short runs, and the order of the house. A small
federation and the trees' comparison are imported from here too.
"""

from __future__ import annotations

import fcntl
import functools
import gc
import importlib
import json
import logging
import os
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"  # real data sets, if any
DEADLINE = time.monotonic() + float(os.environ.get("BAYFLOWER_SLOW_SECONDS", "inf"))


def __getattr__(name: str) -> Any:
    """Return a name of `support/smallruns.py`. That loads torch, which the process that only hands
    out the tests does not need.
    """
    if name.startswith(("_", "pytest", "collect_ignore")):
        raise AttributeError(name)
    return getattr(importlib.import_module("smallruns"), name)


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
    """The folder of each method's short run. The process that is the first to ask makes it; the
    others wait for it and use the same.
    """
    from personalruns import trained

    root = tmp_path_factory.getbasetemp()
    root = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "short-runs"
    root.mkdir(exist_ok=True)

    def of(method: str) -> Path:
        with (root / f"{method}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (root / f"{method}.done").exists():
                trained(root / method, method)
                (root / f"{method}.done").touch()
        return root / method

    return of


def pytest_collection_finish() -> None:
    """One thread; and the collector of garbage passes over what imports have made, and comes more
    rarely.
    """
    if "torch" in sys.modules:  # small tensors: a second thread would only be in the way
        sys.modules["torch"].set_num_threads(1)
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where there is no time for all slow tests, other files come first with every commit: none is
    left out for good.
    """
    if first := os.environ.get("BAYFLOWER_SLOW_FIRST"):
        items.sort(key=lambda item: zlib.crc32(f"{first} {item.path.name}".encode()))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """No test marked slow or flower starts when BAYFLOWER_SLOW_SECONDS are gone."""
    for mark in ("slow", "flower"):
        if item.get_closest_marker(mark) and time.monotonic() > DEADLINE:
            pytest.skip(f"left out: there was no time for this test; by hand: make {mark}")


@pytest.fixture(scope="session", autouse=True)
def commands():
    """The parser of the command line is built once, not by every test that calls `main`."""
    import typer.main

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
        yield


@pytest.fixture(autouse=True)
def loggers():
    """The command line quietens the loggers of its process; in a test that must not last."""
    levels = {name: logging.getLogger(name).level for name in ("bayflower", "flwr")}
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
