"""The runs that tables need: which are there, which are missing, and doing those."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..config import named_device
from ..errors import BayflowerError, ConfigError
from .cache import Cache, Say, commit, engine_values, key_of, resolved
from .data import pooled, remedy
from .tables import Cell, Spec, Table

SPOKEN = 20.0  # seconds between two lines of progress
BLOCK = (
    "num_examples",
    "num_clients",
    "accuracy",
    "accuracy_mean",
    "balanced_accuracy",
    "balanced_accuracy_mean",
    "nll",
    "ece",
    "mce",
    "ece_allclass",
    "mce_allclass",
    "fairness_std",
    "fairness_cv",
    "worst_client_accuracy",
    "gap",
)


# settings that runs must have in common for one to foretell the other's time, the strictest first
SAME = (
    "dataset",
    "model",
    "num_clients",
    "fraction_train",
    "local_epochs",
    "local_steps",
    "images",
)
ALIKE = (
    ("method", *SAME, "images", "samples_per_client", "batch_size", "scenario", "curvature"),
    ("method", *SAME, "images"),
    (*SAME, "images"),
)


class OutOfTimeError(BayflowerError):
    """The time that --minutes gives is over in the middle of a run."""


@dataclass(frozen=True)
class Plan:
    """How a table is to be run and shown."""

    form: str = "full"
    seeds: int = 0  # 0 = as the form says
    changes: Mapping[str, Any] = field(default_factory=dict)  # e.g. rounds
    tuned: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # settings by method
    data_dir: str = "data"
    device: str = "auto"
    engine: str = "fused"
    minutes: float = 0.0
    part: tuple[int, int] = (1, 1)
    # only runs that have these settings; method and seed count as settings
    where: tuple[tuple[str, str], ...] = ()
    keep: str = ""  # a folder for the folders of runs
    together: bool = False  # train seeds of a setting side by side

    @property
    def side_by_side(self) -> bool:
        """Return whether seeds of a setting are trained side by side."""
        return self.together and self.engine == "fused"

    def wants(self, job: RunJob) -> bool:
        """Return whether a run is among those that are to be done."""
        values = {**job.spec.values(), "method": job.spec.method, "seed": job.seed}
        return all(str(values.get(key)) == value for key, value in self.where)

    def cells(self, table: Table) -> list[Cell]:
        """Return the table's cells in this form."""
        return list(table.cells(self.form, self.changes, self.tuned))

    def seed_list(self, table: Table) -> range:
        """Return the seeds."""
        return range(self.seeds or table.form(self.form)["seeds"])


class RunJob(NamedTuple):
    """One run; `curve` says that points over rounds are needed."""

    spec: Spec
    seed: int
    curve: bool


def jobs(table: Table, plan: Plan) -> list[RunJob]:
    """Return the runs of a table, each once, seed by seed."""
    found: dict[tuple[Spec, int], RunJob] = {}
    for seed in plan.seed_list(table):
        for cell in plan.cells(table):
            if cell.spec is not None:
                known = found.get((cell.spec, seed))
                found[cell.spec, seed] = RunJob(
                    cell.spec, seed, cell.column.at is not None or bool(known and known.curve)
                )
    return list(found.values())


def unique(tables: Iterable[Table], plan: Plan, cache: Cache) -> list[RunJob]:
    """Return the runs of some tables; one that two tables need, or that two rows state differently,
    is there once.
    """
    found: dict[str, RunJob] = {}
    for table in tables:
        for job in jobs(table, plan):
            key = cache.key(job.spec, job.seed)
            found[key] = job._replace(curve=job.curve or (key in found and found[key].curve))
    return list(found.values())


def missing_data(todo: Iterable[RunJob], data_dir: str) -> dict[str, str]:
    """Return the data sets of these runs that are not here, with what can be done about it."""
    wanted = sorted(
        {job.spec.values().get("dataset", "") for job in todo if job.spec.runner == "engine"}
    )
    return {name: remedy(name, data_dir) for name in wanted if pooled(name, data_dir) is None}


def expected(job: RunJob, records: list[dict[str, Any]], device: str = "auto") -> float | None:
    """Return the seconds a run should take on `device`, by runs of the same network on the same
    data and the same kind of device, the most similar ones first; None if there are none.
    """
    now = resolved(job.spec, job.seed)[0]
    want = {**now, "method": job.spec.method}
    on_cpu = named_device(device).type == "cpu"
    alike = [
        one
        for one in records
        if one["runner"] == job.spec.runner
        and str(one["result"]["device"]).startswith("cpu") == on_cpu
    ]
    for keys in ALIKE:
        seconds = [
            one["result"]["seconds"] / max(1, one["result"]["rounds"])
            for one in alike
            if all(
                {**one["config"], "method": one["method"]}.get(key, want.get(key)) == want.get(key)
                for key in keys
            )
        ]
        if seconds:
            return statistics.median(seconds) * int(want.get("rounds") or 1)
    return None


def run_missing(tables: list[Table], plan: Plan, cache: Cache, say: Say) -> int:
    """Do the runs that are not there yet, each written when it is done; return how many failed."""
    place, parts = plan.part
    chosen = [job for job in unique(tables, plan, cache) if plan.wants(job)]
    if not chosen and plan.where:
        said = " ".join(f"{key}={value}" for key, value in plan.where)
        raise ConfigError(
            f"no run of these tables has {said}; `method`, `seed` and the settings in the tables' "
            "files can be named"
        )
    # before looking what is there: a late process has the same part
    needed = chosen[place - 1 :: parts]
    todo = [
        job for job in needed if cache.get(job.spec, job.seed, plan.data_dir, job.curve) is None
    ]
    absent = missing_data(todo, plan.data_dir)
    for name, words in absent.items():
        say(f"no data: {name} is not in {plan.data_dir}; {words}")
    todo = [job for job in todo if job.spec.values().get("dataset") not in absent]
    say(
        f"{len(needed)} runs, {len(todo)} to "
        f"do{f' in part {place} of {parts}' if parts > 1 else ''}"
    )
    end = time.monotonic() + 60 * plan.minutes if plan.minutes else math.inf
    failed = number = 0
    for some in groups(todo, plan):
        named = {}
        for job in some:
            number += 1
            named[job] = f"{number}/{len(todo)} {told(job)}"
        guess = len(some) * (expected(some[0], cache.everything(), plan.device) or 0)
        if time.monotonic() + guess > end:
            for words in named.values():
                say(
                    f"{words}: not started, the limit of {plan.minutes:g} minutes is nearly reached"
                )
            continue
        over = False
        for job, found in run_some(named, plan, say, end):
            words = named[job]
            if isinstance(found, OutOfTimeError):
                say(f"{words}: stopped, the limit of {plan.minutes:g} minutes is reached")
                over = True
            elif isinstance(found, BayflowerError):  # the other runs may still go
                say(f"{words}: failed: {found}")
                failed += 1
            elif isinstance(found, Exception):
                raise found
            else:
                cache.put(job.spec, job.seed, *found)
                say(f"{words}: done, {found[0]['seconds']:.1f} s")
        if over:
            break
    return failed


def told(job: RunJob) -> str:
    """Return a run in words."""
    values = job.spec.values()
    keys = ("dataset", "scenario", "beta", "num_clients", "rounds")
    said = " ".join(f"{key}={values[key]}" for key in keys if key in values)
    return f"{job.spec.method} {said} seed={job.seed}"


def groups(todo: Iterable[RunJob], plan: Plan) -> list[list[RunJob]]:
    """Return the runs in groups that are trained side by side: the seeds of one setting."""
    if not plan.side_by_side:
        return [[job] for job in todo]
    found: dict[Any, list[RunJob]] = {}
    for job in todo:
        alone = job.seed if job.spec.runner == "toy" else None
        found.setdefault((job.spec, alone), []).append(job)
    return list(found.values())


def run_some(
    named: Mapping[RunJob, str], plan: Plan, say: Say, end: float
) -> Iterable[tuple[RunJob, Any]]:
    """Return each run with what `run_one` returns of it, or with its error."""
    if len(named) == 1:
        ((job, words),) = named.items()
        try:
            return [(job, run_one(job, plan, words, say, end))]
        except BayflowerError as error:
            return [(job, error)]
    from ..fused.beside import side_by_side

    def call(job: RunJob, seat: Any) -> Any:
        return run_one(job, plan, named[job], say, end, seat, len(named))

    return zip(named, side_by_side([partial(call, job) for job in named]), strict=True)


def run_one(
    job: RunJob,
    plan: Plan,
    words: str,
    say: Say,
    end: float = math.inf,
    seat: Any = None,
    share: int = 1,
) -> tuple[dict[str, Any], int]:
    """Return what the tables need of a run, and how many samples the data set has here. Of `share`
    runs side by side each counts an equal part of the time.
    """
    if job.spec.runner == "toy":
        from .toy import run_toy

        return run_toy(job.spec, job.seed), 0
    from ..config import parse
    from ..engines import prepare, run_to_result

    if plan.engine not in ("fused", "loop"):
        raise ConfigError(
            f"engine must be fused or loop for tables, got {plan.engine!r}; `bayflower run` has "
            "the others"
        )
    values = engine_values(job.spec, job.seed, plan.data_dir, plan.device)
    out = Path(plan.keep) / f"{job.spec.method}-{key_of(job.spec, job.seed)}" if plan.keep else None
    chosen = parse(
        job.spec.method,
        {**values, **({"checkpoint_every": values.get("rounds", 50)} if out else {})},
    )
    started = time.monotonic()
    try:
        result = run_to_result(
            prepare(chosen, plan.engine),
            out,
            speaker(words, chosen.settings.rounds, say, end),
            overwrite=True,  # the folder's name has the settings: it is the same run
            seat=seat,
        )
    finally:
        gc.collect()
        free_device()
    samples = pooled(job.spec.values().get("dataset", "digits"), plan.data_dir) or 0
    return condensed(result, (time.monotonic() - started) / share), samples


def speaker(words: str, rounds: int, say: Say, end: float) -> Callable[[list[Any]], None]:
    """Return a function that says now and then how far a run is, and ends it when time is over."""
    said = time.monotonic()

    def progress(records: list[Any]) -> None:
        nonlocal said
        now = time.monotonic()
        if now > end and len(records) < rounds:
            raise OutOfTimeError("time is over")
        if now - said > SPOKEN:
            said = now
            say(f"{words}: round {len(records)} of {rounds}")

    return progress


def free_device() -> None:
    """Give memory of a GPU back, so that the next run sees how much there is."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def condensed(result: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Return the part of result.json that tables and figures need."""
    rounds = result["rounds"]
    curve = [
        {key: value for key, value in one.items() if key != "num_clients"}
        for one in rounds
        if "personal" in one
    ]
    final = {}
    for view, block in result["final"].items():
        if block and view != "after":
            final[view] = {key: block[key] for key in BLOCK if key in block}
            final[view]["per_client"] = [
                {
                    key: client[key]
                    for key in ("client", "num_examples", "accuracy", "balanced_accuracy")
                }
                for client in block["per_client"]
            ]
    partition = {
        key: value
        for key, value in result["partition"].items()
        if key not in ("parts", "train_sizes", "test_sizes")
    }
    return {
        "method": result["method"],
        "dataset": result["dataset"],
        "note": result["note"],
        "partition": partition,
        "model": result["model"],
        "engine": result["engine"],
        "device": result["device"],
        "versions": result["versions"],
        "commit": commit(),
        "origin": "reproduce",
        "seconds": round(seconds, 3),
        "spent": (result.get("usage") or {}).get("seconds", {}),
        "seconds_per_round": sum(one["seconds"] for one in rounds) / len(rounds),
        "rounds": len(rounds),
        "bytes_up": rounds[-1]["bytes_up"],
        "bytes_down": rounds[-1]["bytes_down"],
        "remark": result["remark"],
        "faults": len(result["faults"]),
        "last": {key: value for key, value in rounds[-1].items() if isinstance(value, int | float)},
        "curve": curve,
        "final": final,
    }
