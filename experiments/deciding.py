"""The five deciding experiments (tables decide-…), run side by side in the order of their value.

    python experiments/deciding.py --data-dir DATA --device cuda --minutes 7.5 --out runs.jsonl
    bayflower reproduce --take runs.jsonl --collect
    bayflower reproduce decide-metavd decide-fedbps decide-fednp --no-run

Needs neither Flower nor the command line's packages, so it runs on a bare GPU machine. FedMAP's
runs go to CPU cores, all others to `--device`. A finished run is a file of `--results` and at once
a line of `--out`; a second call does what is missing. `--take` brings the lines into a checkout's
cache, `reproduce` shows the tables with a verdict on each claim. With `--quick` each run is a small
one that shows nothing but that it goes through.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from bayflower.reproduce import Cache, find
from bayflower.reproduce.collect import line
from bayflower.reproduce.sweep import OutOfTimeError, Plan, RunJob, missing_data, run_one, unique

ON_CPU = "decide-fedmap"
Values = dict[str, Any]
# in the order of value; a run that two stages name belongs to the first
STAGES: tuple[tuple[str, Callable[[Values], bool]], ...] = (
    ("decide-metavd", lambda v: v["beta"] == 0.5 and "hyper_reach" not in v),
    ("decide-fedbps", lambda v: v.get("personal_share", 0.3) in (0.3, 0.7)),
    ("decide-fednp", lambda v: v.get("np_weight") != 0.1),
    ("decide-metavd", lambda v: v["beta"] == 0.5),
    ("decide-metavd", lambda v: v["beta"] == 0.1 and "hyper_reach" not in v),
    ("decide-fedbps", lambda v: True),
    ("decide-fednp", lambda v: True),
    ("decide-pfedvmp", lambda v: True),
    ("decide-metavd", lambda v: True),
    (ON_CPU, lambda v: True),
)


def ordered(plan: Plan, cache: Cache, wanted: list[str]) -> list[tuple[str, RunJob]]:
    """Return (table, run) of all runs of these tables, each once, in the order of `STAGES`."""
    found: dict[str, tuple[str, RunJob]] = {}
    for table, chosen in STAGES:
        for job in unique([find(table)], plan, cache) if table in wanted else ():
            if chosen(dict(job.spec.settings)):
                found.setdefault(cache.key(job.spec, job.seed), (table, job))
    return list(found.values())


def words_of(job: RunJob) -> str:
    """Return a run for a person."""
    names = ("scenario", "sigma2", "beta", "model", "personal_share", "ranking", "threshold")
    names += ("centroid", "site", "np_weight", "settle_epochs", "hyper_reach", "adapt_steps")
    values = dict(job.spec.settings)
    said = [f"{name}={values[name]}" for name in names if name in values]
    return " ".join([job.spec.method, *said, f"seed={job.seed}"])


def work(job: RunJob, plan: Plan, end: float) -> tuple[dict[str, Any], int] | None:
    """Return a run's result and the samples of its data; None if the time is over."""
    import torch

    torch.set_num_threads(1)
    left = end - time.time()
    if left < 0:
        return None
    words = words_of(job)
    return run_one(job, plan, words, lambda text: print(text, flush=True), time.monotonic() + left)


def main(arguments: list[str] | None = None) -> int:
    """Do the missing runs; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--device", default="auto", help="of all but FedMAP's runs")
    parser.add_argument("--results", type=Path, default=Path("experiments/results/runs"))
    parser.add_argument(
        "--out", type=Path, required=True, help="file of finished runs, a line each"
    )
    parser.add_argument("--tables", default=",".join(dict.fromkeys(name for name, _ in STAGES)))
    parser.add_argument("--jobs", type=int, default=3, help="runs at a time on the device")
    parser.add_argument("--cpu-jobs", type=int, default=10, help="runs at a time on CPU cores")
    parser.add_argument("--minutes", type=float, default=0.0, help="0 = no limit")
    parser.add_argument("--seeds", type=int, default=0, help="0 = as the tables say")
    parser.add_argument("--quick", action="store_true", help="small runs, which show nothing")
    options = parser.parse_args(arguments)
    end = time.time() + 60 * options.minutes if options.minutes else float("inf")
    form = "quick" if options.quick else "full"
    plan = Plan(form, options.seeds, data_dir=options.data_dir, device=options.device)
    cache = Cache(options.results, print)
    everything = ordered(plan, cache, options.tables.split(","))
    todo = [
        (table, job)
        for table, job in everything
        if cache.get(job.spec, job.seed, plan.data_dir, job.curve) is None
    ]
    absent = missing_data([job for _, job in todo], plan.data_dir)
    for name, remedy in absent.items():
        print(f"no data: {name} is not in {plan.data_dir}; {remedy}")
    todo = [(table, job) for table, job in todo if job.spec.values()["dataset"] not in absent]
    print(f"{len(everything)} runs, {len(todo)} to do", flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that are started below
    spawn = multiprocessing.get_context("spawn")
    failed, started = 0, time.time()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with (
        ProcessPoolExecutor(options.jobs, mp_context=spawn) as device,
        ProcessPoolExecutor(options.cpu_jobs, mp_context=spawn) as cores,
        options.out.open("a", encoding="utf-8") as lines,
    ):
        waiting: dict[Future[Any], RunJob] = {}
        for table, job in todo:
            pool = cores if table == ON_CPU else device
            own = Plan(form, data_dir=plan.data_dir, device="cpu") if table == ON_CPU else plan
            waiting[pool.submit(work, job, own, end)] = job
        for future in as_completed(waiting):
            job = waiting[future]
            try:
                found = future.result()
            except Exception as error:  # the others may still go
                over = isinstance(error, OutOfTimeError)
                failed += not over
                kind = "stopped" if over else f"failed: {type(error).__name__}"
                print(f"{words_of(job)}: {kind}: {error}", flush=True)
                continue
            if found is None:
                continue
            result, samples = found
            path = cache.put(job.spec, job.seed, result, samples)
            lines.write(line(path.stem, json.loads(path.read_text())))
            lines.flush()
            views = {view: round(100 * one["accuracy"], 2) for view, one in result["final"].items()}
            said = f"{views}, {result['seconds']:.0f} s, {time.time() - started:.0f} s in all"
            print(f"{words_of(job)}: {said}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
