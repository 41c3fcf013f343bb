"""All that only a GPU can show, by one command: tests, races, overheads, profiles, networks.

    python benchmarks/gpu.py runs/gpu --data-dir data
    python benchmarks/gpu.py runs/gpu --only tests --only overheads
    python benchmarks/gpu.py runs/gpu --page > benchmarks/results/gpu.md

Stages run one after the other, so that no time is measured beside other work; each has a file in
the folder, written after every row, and a log. A stage whose file says that it is complete is not
run again. `--seconds` ends the whole after that time; what is missing is named, and run next time.
`--at-once 6` measures six networks side by side: sooner done, but each shares the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from gpu_page import page

from bayflower.bench.networks import NETWORKS
from bayflower.bench.report import environment
from bayflower.bench.zoo import METHODS
from bayflower.config import named_device
from bayflower.files.texts import write_json

ROOT = Path(__file__).resolve().parent.parent
LONGEST = 3600.0


class Stage(NamedTuple):
    """A name, what it shows, and the words after `bayflower bench`; none: the tests."""

    name: str
    shows: str
    words: str = ""


FIFTY = "--workload fmnist-50 --method fedper --method pfedvmp"
TEN = "--workload cnn3-10 --method fedavg --method reptile --method metavd"
STAGES = (
    Stage("tests", "the tests marked gpu"),
    Stage(
        "methods",
        "rounds of FedPer, pFedVMP and FedNP on 50 clients",
        f"methods {FIFTY} --method fednp --no-loop --tf32 --rounds 40",
    ),
    Stage(
        "overheads",
        "rounds of MetaVD and Reptile on ten clients",
        f"races {TEN} --tf32 --rounds 40",
    ),
    Stage("overheads-float32", "the same in float32", f"races {TEN} --rounds 20"),
    Stage("races", "other simulators' workloads at their numbers of rounds", "races --tf32"),
    Stage(
        "profile",
        "where the time of rounds on 50 clients goes",
        f"profile {FIFTY} --method fednp --tf32",
    ),
    Stage(
        "profile-ten",
        "where the time of rounds on ten clients goes",
        "profile --workload cnn3-10 --method reptile --method metavd --tf32",
    ),
    Stage("single", "steps of clients one by one", "single --tf32"),
    Stage("networks", "networks that people bring", "networks"),
)


def remaining(stage: Stage, before: dict[str, Any], at_once: int = 1) -> list[str]:
    """Return the words of what a stage's file does not have yet, for each of several programs."""
    if stage.name != "networks":
        return [stage.words]
    rows = Counter(row.get("network") for row in before["rows"])
    missing = [name for name in NETWORKS if rows[name] < len(METHODS)]
    shares = [missing[place::at_once] for place in range(at_once)]
    words = (" ".join(f"--workload {name}" for name in share) for share in shares if share)
    return [f"{stage.words} {some}" for some in words]


def together(stage: Stage, before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return the content of both; what was measured twice is that of now."""
    if stage.name != "networks":
        return now
    fresh = {row.get("network") for row in now["rows"]}
    return now | {
        "rows": [row for row in before["rows"] if row.get("network") not in fresh] + now["rows"]
    }


def run_tests(folder: Path, processes: int, words: Sequence[str], limit: float) -> dict[str, Any]:
    """Return how many tests marked gpu passed, and which did not."""
    log = folder / "tests.log"
    call = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rf", "-p", "no:cacheprovider"]
    if processes > 1:
        call += ["-n", str(processes), "--dist", "worksteal"]
    begun = time.perf_counter()
    done = followed([*call, *words], log, limit, processes)
    return told(log.read_text(), done, round(time.perf_counter() - begun, 1))


def told(text: str, done: bool, seconds: float) -> dict[str, Any]:
    """Return what pytest has said: numbers of tests by outcome, and names of those that failed."""
    last = next((line for line in reversed(text.splitlines()) if " in " in line), "")
    counts = {
        kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|error)", last)
    }
    names = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
    # what asks for a device that is not there is skipped: a run of nothing shows nothing
    complete = done and bool(counts.get("passed"))
    return {"counts": counts, "not_passed": names, "seconds": seconds, "complete": complete}


def followed(call: Sequence[str], log: Path, limit: float, beside: int = 1) -> bool:
    """Run a program, its output in a log; return whether it ended within `limit` seconds. With
    others `beside` it, it has its share of the threads.
    """
    share = str(max(1, (os.cpu_count() or 1) // beside))
    log.parent.mkdir(parents=True, exist_ok=True)
    paths = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)
    with log.open("w") as file:
        try:
            subprocess.run(
                call,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={
                    **({"OMP_NUM_THREADS": share} if beside > 1 else {}),
                    **os.environ,
                    "PYTHONPATH": paths,
                    "PYTHONUNBUFFERED": "1",
                },
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
    return True


def run_stage(stage: Stage, folder: Path, given: argparse.Namespace, limit: float) -> bool:
    """Run a stage into its file; return whether it is complete."""
    file = folder / f"{stage.name}.json"
    if not stage.words:
        found = run_tests(folder, given.processes, given.tests, limit)
        place = environment(named_device(given.device))
        place["commit"] = given.commit or place["commit"]
        write_json(file, {"suite": "tests", "environment": place, **found})
        return bool(found["complete"])
    nothing: dict[str, Any] = {"rows": []}
    before = json.loads(file.read_text()) if file.exists() else nothing
    shares = remaining(stage, before, given.at_once)
    beside = {"at_once": len(shares)} if len(shares) > 1 else {}

    def run_share(place: int) -> tuple[bool, Path]:
        part = folder / "parts" / f"{stage.name}-{place}.json"
        part.unlink(missing_ok=True)
        words = [*shares[place].split(), "--device", given.device]
        words += ["--data-dir", str(given.data_dir.resolve()), "--json", str(part)]
        log = part.with_suffix(".log") if beside else folder / f"{stage.name}.log"
        call = [sys.executable, "-m", "bayflower", "bench", *words]
        return followed(call, log, limit, len(shares)), part

    with ThreadPoolExecutor(max(len(shares), 1)) as pool:
        ended = list(pool.map(run_share, range(len(shares))))
    for _, part in ended:
        if part.exists():
            now = json.loads(part.read_text())
            commit = given.commit or now["environment"]["commit"]
            now["environment"]["commit"] = commit
            # as it was given: the file names no place of this machine
            now["options"]["data_dir"] = str(given.data_dir)
            now["rows"] = [row | {"commit": commit, **beside} for row in now["rows"]]
            before = together(stage, before, now)
            part.unlink()
    complete = all(done for done, _ in ended)
    if "environment" in before:
        write_json(file, before | {"complete": complete})
    return complete


def is_complete(file: Path) -> bool:
    """Return whether a stage's file is there and whole."""
    return file.exists() and bool(json.loads(file.read_text()).get("complete"))


def main() -> None:
    """Run the stages that are missing, or print the page of those that are there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the files are, or will be")
    names = [stage.name for stage in STAGES]
    parser.add_argument("--only", action="append", choices=names, help="a stage; repeatable")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=LONGEST, help="time for all stages")
    parser.add_argument("--at-once", type=int, default=1, help="networks side by side")
    parser.add_argument("--processes", type=int, default=8, help="of the tests")
    parser.add_argument("--tests", action="append", default=[], help="word for pytest; repeatable")
    parser.add_argument("--commit", help="the code's, where it is no checkout")
    parser.add_argument("--page", action="store_true", help="print the page; run nothing")
    given = parser.parse_args()
    for name in ("at_once", "processes"):
        if (number := getattr(given, name)) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {number}")
    if given.page:
        print(page(given.folder), end="")
        return
    given.folder = given.folder.resolve()
    given.folder.mkdir(parents=True, exist_ok=True)
    end, missing = time.perf_counter() + given.seconds, []
    for stage in STAGES:
        if given.only and stage.name not in given.only:
            continue
        left = end - time.perf_counter()
        if is_complete(given.folder / f"{stage.name}.json"):
            print(f"{stage.name}: there", flush=True)
        elif left <= 0:
            missing.append(stage.name)
        else:
            print(f"{stage.name}: {stage.shows}", flush=True)
            begun = time.perf_counter()
            whole = run_stage(stage, given.folder, given, left)
            took = f"{time.perf_counter() - begun:.0f} s"
            log = given.folder / f"{stage.name}.log"
            print(f"{stage.name}: {'complete' if whole else f'not complete, see {log}'}, {took}")
            missing += [] if whole else [stage.name]
    if missing:
        sys.exit(f"missing: {', '.join(missing)}; the same command goes on with them")


if __name__ == "__main__":
    main()
