"""How long it takes from nothing to a finished run, next to another version of the code.

    python benchmarks/setups.py BEFORE [--repeats 3]            as processes (--local)
    python benchmarks/setups.py BEFORE --images OLD,NEW         in containers, with an image each
                                                                writes benchmarks/results/setups.*

BEFORE is a working tree of the other version. Both versions do the same three commands: init with
three clients, up (until all programs are healthy), and submit (two rounds of FedMAP on digits).
They alternate, so that both meet the same noise, and start from an empty folder each time. Taking
the deployment down is not counted. Where the kernel counts them (cpuacct), seconds of processor
time of all programs are measured, too: on a busy machine they say more than the clock.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bayflower.files.texts import read_json, write_json

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
CLIENTS = 3
RUN = ["fedmap", "--set", "dataset=digits", "--set", f"num_clients={CLIENTS}"]
RUN += ["--set", "rounds=2", "--set", "local_epochs=1"]
STEPS = ("init", "up", "submit")
PROCESSOR = "processor"
GROUPS, USAGE = Path("/sys/fs/cgroup/cpuacct"), "cpuacct.usage"


class Meter:
    """Processor time of all processes that a set-up starts, and of all containers."""

    def __init__(self) -> None:
        self.folder = GROUPS / f"bayflower-setups-{os.getpid()}"
        try:
            self.folder.mkdir()
        except OSError:
            self.folder = Path()

    def join(self) -> None:
        """Count the calling process, and what it starts from now on."""
        if self.folder.name:
            (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def seconds(self) -> float:
        """Return the seconds used so far."""
        files = [self.folder / USAGE, *GROUPS.glob(f"docker/*/{USAGE}")] if self.folder.name else []
        return sum(int(file.read_text()) for file in files) / 1e9

    def close(self) -> None:
        """Give the group back, if all of its processes have ended."""
        with contextlib.suppress(OSError):
            self.folder.rmdir()


def command(meter: Meter, tree: Path, *words: object) -> float:
    """Return the seconds that `bayflower deploy` of a version takes; raise if it fails."""
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONWARNINGS": "ignore"}
    line = [sys.executable, "-m", "bayflower", "deploy", *map(str, words)]
    began = time.monotonic()
    done = subprocess.run(
        line, env=env, cwd=tree, capture_output=True, text=True, preexec_fn=meter.join
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(line)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return time.monotonic() - began


def once(tree: Path, image: str) -> dict[str, float]:
    """Return the seconds of the three commands, from nothing; `image` "": as processes."""
    meter = Meter()
    home = Path(tempfile.mkdtemp(prefix="bayflower-setups-"))
    home.chmod(0o755)
    folder = home / "fed"
    try:
        found = {
            "init": command(
                *(meter, tree, "init", folder, "--clients", CLIENTS),
                *(["--image", image] if image else []),
            )
        }
        found["up"] = command(meter, tree, "up", folder, *([] if image else ["--local"]))
        found["submit"] = command(meter, tree, "submit", folder, *RUN)
        return {**found, PROCESSOR: meter.seconds()}
    finally:
        if (folder / "deployment.json").exists():
            command(meter, tree, "down", folder)
            if image:
                line = [
                    "docker",
                    "compose",
                    "-f",
                    str(folder / "compose.yaml"),
                    "down",
                    "--volumes",
                ]
                subprocess.run(line, capture_output=True)
        shutil.rmtree(home, ignore_errors=True)
        meter.close()


def commit(tree: Path) -> str:
    """Return the commit of a working tree."""
    line = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    return subprocess.run(line, capture_output=True, text=True).stdout.strip()


def value(run: dict[str, float], step: str) -> float:
    """Return the seconds of a step of a set-up."""
    if step == "all three":
        return sum(run[one] for one in STEPS)
    return run.get(step if step in STEPS else PROCESSOR, 0.0)


def page(content: dict[str, Any]) -> str:
    """Return the page for people."""
    lines = ["# From nothing to a finished run", "", "Written by `benchmarks/setups.py`."]
    for way, one in sorted(content.items()):
        runs = one["runs"]
        lines += [
            "",
            f"## {way}",
            "",
            f"Median seconds of {len(runs['before'])} set-ups each, in turn. Before: commit "
            f"{one['before']}. Now: commit {one['after']}. {one['machine']}",
            "",
            "| | before | now | ratio of medians |",
            "|---|---|---|---|",
        ]
        for step in (*STEPS, "all three", "processor time of all programs"):
            a, b = (statistics.median(value(run, step) for run in runs[r]) for r in runs)
            if a:
                lines.append(f"| {step} | {a:.1f} | {b:.1f} | {b / a:.2f} |")
        whole = [
            value(new, "all three") / value(old, "all three")
            for old, new in zip(runs["before"], runs["after"], strict=True)
        ]
        lines += ["", f"Ratio of the whole, pair by pair: {', '.join(f'{r:.2f}' for r in whole)}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and write both files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--images", default="", help="image of the other version, image of this one"
    )
    parser.add_argument("--machine", default="", help="a sentence on the machine, for the page")
    given = parser.parse_args()
    trees = {"before": given.before.resolve(), "after": ROOT}
    images = dict(zip(trees, given.images.split(","), strict=True)) if given.images else {}
    runs: dict[str, list[dict[str, float]]] = {"before": [], "after": []}
    for number in range(given.repeats):
        for which in list(trees)[:: 1 if number % 2 == 0 else -1]:
            runs[which].append(once(trees[which], images.get(which, "")))
            print(which, {step: round(s, 1) for step, s in runs[which][-1].items()}, flush=True)
    path = RESULTS / "setups.json"
    content = read_json(path) or {}
    facts = {which: commit(tree) for which, tree in trees.items()}
    way = "In containers" if images else "As processes over TLS"
    content[way] = {**facts, "machine": given.machine, "runs": runs}
    write_json(path, content)
    path.with_suffix(".md").write_text(page(content))


if __name__ == "__main__":
    main()
