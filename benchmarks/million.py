"""A million clients, of which ten thousand train in a round, with their states on disk.

    python benchmarks/million.py --device cuda
    python benchmarks/million.py --device cpu --clients 100000 --per-round 1000

Clients are made up (dataset=crowd): 20 samples each, 16 of them for training. The method is Ditto,
whose clients keep a whole personal network: 18 kB with the mlp on 32 inputs and 10 classes. Three
things are done, each in processes of its own:

    whole    all rounds, undisturbed
    cut      the same run, killed by SIGKILL at random moments and resumed after each
    compare  server state, final test and all states on disk of both, to the bit

The mean of the seconds a round is that of the clock from the end of the third round to the end of
the last, checkpoints included: the first rounds load and record kernels. The median is that of the
rounds' own records, without checkpoints. `memory` is the resident memory of the process when a
round is recorded.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
WARM = 3  # rounds that are left out of the median


def resident() -> int:
    """Return the resident memory of this process in bytes (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def settings_of(given: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the run."""
    return {
        "dataset": "crowd",
        "num_clients": given.clients,
        "fraction_train": given.per_round / given.clients,
        "fraction_evaluate": min(1.0, given.tested / given.clients),
        "model": "mlp",
        "rounds": given.rounds,
        "local_epochs": given.epochs,
        "batch_size": 8,
        "lr": 0.005,
        "calibration": "off",
        "evaluate_every": 0,
        "checkpoint_every": given.every,
        "client_states": given.states,
        "device": given.device,
        "stacking": "yes",
        "robust": given.robust,
    }


def child(given: argparse.Namespace) -> None:
    """Do the run in a folder, or go on with it; note every round in a file."""
    from bayflower.config import parse
    from bayflower.engines import prepare, run_to_result
    from bayflower.files.checkpoint import to_resume

    begun = time.time()
    out = given.child
    prepared = prepare(parse(given.method, settings_of(given)), "fused")
    resume = to_resume(out, prepared.run) if (out / "checkpoint.safetensors").exists() else None
    notes = (out.parent / f"{out.name}.jsonl").open("a", buffering=1)
    notes.write(json.dumps({"start": begun, "ready": time.time(), "pid": os.getpid()}) + "\n")

    def progress(records: list[Any]) -> None:
        one = {"round": records[-1]["round"], "time": time.time(), "memory": resident()}
        notes.write(json.dumps({**one, "device_seconds": records[-1]["seconds"]}) + "\n")

    result = run_to_result(prepared, out, progress, resume)
    done = {"done": time.time(), "usage": result["usage"], "disk": on_disk(out)}
    notes.write(json.dumps({**done, "bits": bits_of(out, result)}) + "\n")


def on_disk(out: Path) -> dict[str, int]:
    """Return the bytes of the states and of the checkpoint."""
    states = [path for path in (out / "states").glob("*")]
    return {
        "states": sum(path.stat().st_blocks * 512 for path in states),
        "checkpoint": (out / "checkpoint.safetensors").stat().st_size,
    }


def bits_of(out: Path, result: dict[str, Any]) -> dict[str, Any]:
    """Return digests of the server's state, of the final test and of every state on disk."""
    import numpy as np

    from bayflower.files import checkpoint
    from bayflower.files.atomic import load_tensors
    from bayflower.files.shards import FORMAT, Shards, index_name
    from bayflower.tree import digest

    saved = checkpoint.read(out)
    assert saved is not None
    found = {
        "server": digest(saved.server),
        "final": hashlib.sha256(json.dumps(result["final"]).encode()).hexdigest(),
    }
    path = out / "states" / index_name(saved.round)
    if path.exists():
        content, head = load_tensors(path, FORMAT, "index")
        shards = Shards(out / "states", int(head["words"]), 0, "", saved.round)
        have, seal = np.flatnonzero(content["slot"].numpy() >= 0), hashlib.sha256()
        for begin in range(0, len(have), 4096):
            some = have[begin : begin + 4096]
            rows = np.zeros((len(some), shards.width), np.uint64)
            shards.read(some, rows)
            seal.update(rows.data)
        shards.close()
        found |= {"states": seal.hexdigest(), "clients_with_states": len(have)}
        found["state_bytes"] = int(head["words"]) * 8
    return found


def lines(path: Path) -> list[dict[str, Any]]:
    """Return what a child has noted so far."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def started(out: Path, more: list[str]) -> subprocess.Popen[bytes]:
    """Return a child that works in a folder."""
    out.mkdir(parents=True, exist_ok=True)
    log = (out.parent / f"{out.name}.log").open("ab")
    command = [sys.executable, str(Path(__file__).resolve()), *more, "--child", str(out)]
    paths = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    around = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.Popen(command, stdout=log, stderr=log, env=around)


def finished(out: Path, process: subprocess.Popen[bytes]) -> None:
    """Wait for a child; raise with the end of its log if it failed."""
    if process.wait() != 0:
        text = (out.parent / f"{out.name}.log").read_text()
        raise SystemExit(f"the run in {out} failed:\n{text[-3000:]}")


def killed(out: Path, process: subprocess.Popen[bytes], round: int, wait: float) -> dict[str, Any]:
    """Kill a child some time after it has noted a round; return when that was."""
    path = out.parent / f"{out.name}.jsonl"
    while True:
        if process.poll() is not None:
            finished(out, process)
            raise SystemExit(f"the run in {out} ended before it was killed")
        if any(line.get("round", 0) >= round for line in lines(path)):
            break
        time.sleep(0.01)
    time.sleep(wait)
    process.send_signal(signal.SIGKILL)
    process.wait()
    last = max(line.get("round", 0) for line in lines(path))
    return {"after_round": last, "seconds_later": round_to(wait)}


def round_to(value: float, digits: int = 3) -> float:
    """Return a number for a person."""
    return float(f"{value:.{digits}f}")


def main() -> None:
    """Measure, print and write."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--clients", type=int, default=1_000_000)
    asked.add_argument("--per-round", type=int, default=10_000)
    asked.add_argument("--rounds", type=int, default=20)
    asked.add_argument("--epochs", type=int, default=2)
    asked.add_argument("--every", type=int, default=5, help="rounds between checkpoints")
    asked.add_argument("--tested", type=int, default=10_000, help="clients of the final test")
    asked.add_argument("--method", default="ditto")
    asked.add_argument("--robust", default="gate")
    asked.add_argument("--states", default="disk", help="disk, device or auto")
    asked.add_argument("--device", default="auto")
    asked.add_argument(
        "--folder",
        type=Path,
        help="where to work, an empty folder that is kept; else a temporary one",
    )
    asked.add_argument("--kills", type=int, default=1, help="0 = no kill test")
    asked.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    asked.add_argument("--name", default="million", help="of the files in benchmarks/results")
    asked.add_argument("--results", type=Path, default=HERE / "results")
    asked.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = asked.parse_args()
    if given.child:
        child(given)
        return
    own = given.folder or Path(tempfile.mkdtemp(prefix="million-"))
    own.mkdir(parents=True, exist_ok=True)
    begun = time.time()
    try:
        found = measured(given, own)
    finally:
        if not given.folder:
            shutil.rmtree(own, ignore_errors=True)
    found["total_seconds"] = round_to(time.time() - begun, 1)
    given.results.mkdir(parents=True, exist_ok=True)
    (given.results / f"{given.name}.json").write_text(json.dumps(found, indent=1) + "\n")
    text = page(found)
    (given.results / f"{given.name}.md").write_text(text)
    print(text)
    if found.get("equal_bits") is False:
        raise SystemExit("the resumed run has other bits")


def measured(given: argparse.Namespace, own: Path) -> dict[str, Any]:
    """Return all measurements."""
    own = own.resolve()
    names = ("clients", "per_round", "rounds", "epochs", "every", "tested", "method", "robust")
    pairs = {name: getattr(given, name) for name in (*names, "states", "device")}
    more = [
        text
        for name, value in pairs.items()
        for text in (f"--{name.replace('_', '-')}", str(value))
    ]
    whole = own / "whole"
    finished(whole, started(whole, more))
    notes = lines(own / "whole.jsonl")
    rounds = [line for line in notes if "round" in line]
    # the last round is noted again after the final test
    by_round = {line["round"]: line for line in reversed(rounds)}
    times = [by_round[number]["time"] for number in sorted(by_round)]
    ready, done = notes[0]["ready"], notes[-1]
    seconds = [by_round[number]["device_seconds"] for number in sorted(by_round)]
    warm = min(WARM, len(times) - 1)
    found: dict[str, Any] = {
        **pairs,
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "load": round_to(os.getloadavg()[0], 1),
            "python": platform.python_version(),
            "device": device_name(given.device),
        },
        "state_bytes": done["bits"].get("state_bytes"),
        "start_seconds": round_to(ready - notes[0]["start"]),
        "round_seconds": [round_to(one) for one in seconds],
        "mean_round_seconds": round_to((times[-1] - times[warm - 1]) / (len(times) - warm)),
        "median_round_seconds": round_to(statistics.median(seconds[warm:])),
        "slowest_round_seconds": round_to(max(seconds[warm:])),
        "seconds_to_first_round": round_to(times[0] - ready),
        "test_seconds": round_to(done["done"] - times[-1]),
        "memory_bytes": [by_round[number]["memory"] for number in sorted(by_round)],
        "device_peak_bytes": done["usage"]["peak_memory"],
        "usage_seconds": done["usage"]["seconds"],
        "disk_bytes": done["disk"],
        "clients_with_states": done["bits"].get("clients_with_states"),
        "bits": done["bits"],
    }
    if given.kills:
        found |= after_kills(given, own, more, done["bits"])
    return found


def after_kills(
    given: argparse.Namespace, own: Path, more: list[str], want: dict[str, Any]
) -> dict[str, Any]:
    """Return what became of a run that was killed and resumed."""
    chance, cut, kills = random.Random(given.seed), own / "cut", []
    for number in range(given.kills):
        # between two checkpoints, later each time
        at = max(1, int(given.rounds * (number + 0.65) / given.kills))
        at = at + 1 if at % given.every == 0 and at + 1 < given.rounds else at
        at = min(at, given.rounds - 2)
        process = started(cut, more)
        kills.append(killed(cut, process, at, chance.random() * 0.5))
        print("killed", kills[-1], flush=True)
    finished(cut, started(cut, more))
    notes = lines(own / "cut.jsonl")
    got = notes[-1]["bits"]
    again = [line for line in notes if "start" in line]
    resumed = next(line["round"] for line in notes[notes.index(again[-1]) :] if "round" in line)
    return {
        "kills": kills,
        "resumed_at_round": resumed,
        "equal_bits": got == want,
        "resumed_bits": got,
    }


def device_name(device: str) -> str:
    """Return the name of the device."""
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return "cpu"
    return torch.cuda.get_device_name(0)


def page(found: dict[str, Any]) -> str:
    """Return the result as a page."""
    memory = found["memory_bytes"]
    late = memory[min(WARM, len(memory) - 1) :]
    rows = [
        (
            "clients, a round, rounds",
            f"{found['clients']:,}, {found['per_round']:,}, {found['rounds']}",
        ),
        ("method, robust, states", f"{found['method']}, {found['robust']}, {found['states']}"),
        ("state of a client", f"{(found['state_bytes'] or 0) / 1e3:.1f} kB"),
        ("seconds a round, mean with checkpoints", f"{found['mean_round_seconds']:.2f}"),
        (
            "seconds a round, median and slowest without checkpoints",
            f"{found['median_round_seconds']:.2f}, {found['slowest_round_seconds']:.2f}",
        ),
        ("seconds of the first round", f"{found['round_seconds'][0]:.2f}"),
        (
            f"seconds of the final test of {found['tested']:,} clients",
            f"{found['test_seconds']:.2f}",
        ),
        (
            "host memory after the third round, at the end, most",
            f"{late[0] / 1e9:.2f}, {late[-1] / 1e9:.2f}, {max(memory) / 1e9:.2f} GB",
        ),
        ("device memory, peak", f"{found['device_peak_bytes'] / 1e9:.2f} GB"),
        (
            "states on disk",
            f"{found['disk_bytes']['states'] / 1e9:.2f} GB of "
            f"{found['clients_with_states'] or 0:,} clients",
        ),
        ("checkpoint beside them", f"{found['disk_bytes']['checkpoint'] / 1e6:.1f} MB"),
    ]
    if "kills" in found:
        when = "; ".join(
            f"{one['seconds_later']:.2f} s after round {one['after_round']}"
            for one in found["kills"]
        )
        rows += [
            ("kill -9", when),
            ("resumed", f"first round after it: {found['resumed_at_round']}"),
            ("equal bits of server, test and all states", str(found["equal_bits"]).lower()),
        ]
    rows.append(("seconds of the whole benchmark", f"{found['total_seconds']:.0f}"))
    machine = found["machine"]
    where = f"{machine['device']}, {machine['cores']} cores (load {machine['load']}), "
    where += f"Python {machine['python']}"
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return (
        f"# {found['clients']:,} clients with states on disk\n\n`benchmarks/million.py`, on "
        f"{where}.\n\n| what | measured |\n|---|---|\n{table}\n"
    )


if __name__ == "__main__":
    main()
