"""Workers as Ray actors: started, called, and found dead.

Ray comes with the extra `simulation`. A cluster is found by RAY_ADDRESS; without it Ray is started
on this machine and ends with the run. A Ray that this process has started already is used as it is.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...errors import BayflowerError, ConfigError, in_one_line
from .worker import Worker

log = logging.getLogger("bayflower")
AUTO = "auto"
TRIES = 2  # more times that Ray is started here if a busy machine was too slow
PATIENCE = 60.0  # seconds until a line says that workers do not start


class LostError(Exception):
    """Workers have died."""

    def __init__(self, workers: Iterable[int]) -> None:
        super().__init__(f"workers {sorted(set(workers))} died")
        self.workers = sorted(set(workers))


class GoneError(Exception):
    """An object is lost: the machine that had it has died."""


def ray() -> Any:
    """Return the module; raise if it is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "workers need Ray, which is not installed; install it with: pip install "
            "'bayflower[simulation]', or leave workers out"
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray gives its workers the least priority; here they do all the work
    os.environ.setdefault("RAY_worker_niceness", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("ray")


def refusal(address: str | None, error: Exception) -> str:
    """Return the line that says why there is no Ray."""
    said = in_one_line(error, 200)
    if address:
        return f"there is no Ray at RAY_ADDRESS={address} ({said}); start it, or unset RAY_ADDRESS"
    return f"Ray could not be started ({said}); a busy machine starts it too slowly: try again"


class Crew:
    """Some workers. They are numbered, and a dead one's number is not used again."""

    def __init__(self, wanted: str, device: str, most: int, kind: type[Worker] = Worker) -> None:
        """Start as many workers as `wanted`, a number or auto, but at most `most`."""
        self.ray = ray()
        self.started = not self.ray.is_initialized()
        if self.started:
            self._start(wanted)
        there = self.ray.cluster_resources()
        gpus = 0 if device == "cpu" else int(there.get("GPU", 0))
        cores = int(there.get("CPU", 0))
        number = (gpus or cores) if wanted == AUTO else int(wanted)
        number = min(number, most)
        if number > cores:
            self.close()
            raise ConfigError(
                f"{number} workers need as many cores, and the Ray cluster has {cores}; use "
                f"workers={max(cores, 1)} or add machines"
            )
        self.gpu = gpus > 0
        share = min(1.0, gpus / number) if self.gpu else 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = self.ray.remote(kind).options(
                num_cpus=1, num_gpus=share, max_restarts=0, scheduling_strategy="SPREAD"
            )
            self.actors = {one: made.remote() for one in range(number)}
        self.lost = 0
        asked = [actor.process.remote() for actor in self.actors.values()]
        if late := self.ray.wait(asked, num_returns=number, timeout=PATIENCE)[1]:
            log.warning("waiting for %d of %d workers: the Ray cluster is busy", len(late), number)

    def _start(self, wanted: str) -> None:
        address = os.environ.get("RAY_ADDRESS")
        more: dict[str, Any] = {"address": address} if address else {"address": "local"}
        if not address:
            cores = os.cpu_count() or 1
            more["num_cpus"] = cores if wanted == AUTO else max(cores, int(wanted))
            more["include_dashboard"] = False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for left in range(0 if address else TRIES, -1, -1):
                try:
                    self.ray.init(**more, logging_level="error", log_to_driver=False)
                    return
                except Exception as error:  # Ray raises bare ones too
                    self.ray.shutdown()
                    if not left:
                        raise ConfigError(refusal(address, error)) from error
                    log.info("Ray did not start and is started again: %s", error)

    @property
    def workers(self) -> list[int]:
        """Return the workers that are alive, as far as is known."""
        return sorted(self.actors)

    def begin(self, halves: Any, run: Any, variables: Mapping[str, str]) -> None:
        """Begin a run on all workers; the dead ones are left out from then on."""
        folders = [os.path.abspath(one) for one in sys.path if os.path.isdir(one or ".")]
        both = self.put(halves), self.put(run)
        while True:
            calls = [
                (one, self.call(one, "look", folders, dict(variables))) for one in self.workers
            ]
            calls += [(one, self.call(one, "begin", *both)) for one in self.workers]
            try:
                self.get(calls)
                return
            except LostError as lost:
                self.bury(lost)

    def put(self, thing: Any) -> Any:
        """Return a reference to a thing that many workers get: it is copied once a machine."""
        return self.ray.put(thing)

    def call(self, worker: int, name: str, *args: Any, returns: int = 1) -> Any:
        """Return the references of what a worker will return."""
        method = getattr(self.actors[worker], name)
        return method.options(num_returns=returns).remote(*args)

    def get(self, calls: Sequence[tuple[int, Any]]) -> list[Any]:
        """Return what workers have returned, in order. Raise what one of them has raised, and
        `LostError` if some have died.
        """
        found, dead, gone = [], set(), None
        errors = self.ray.exceptions
        for worker, reference in calls:
            try:
                found.append(self.ray.get(reference))
            except errors.RayActorError:
                dead.add(worker)
            except errors.ObjectLostError as error:
                gone = error
            except errors.RayTaskError as error:
                cause = error.cause
                if isinstance(cause, errors.RayActorError):
                    dead.add(worker)
                elif isinstance(cause, errors.ObjectLostError):
                    gone = cause
                else:
                    raise cause if isinstance(cause, Exception) else error from None
        if dead:
            raise LostError(dead)
        if gone is not None:
            raise GoneError(str(gone).split("\n")[0]) from gone
        return found

    def bury(self, lost: LostError) -> None:
        """Leave dead workers out from now on; raise if none is left."""
        for worker in lost.workers:
            self.lost += self.actors.pop(worker, None) is not None
        if not self.actors:
            raise BayflowerError(
                "all workers have died; the last checkpoint is kept: add --resume to go on"
            )

    def close(self) -> None:
        """End all workers, and Ray if it was started for them."""
        for actor in getattr(self, "actors", {}).values():
            self.ray.kill(actor)
        self.actors = {}
        if self.started:
            self.ray.shutdown()
