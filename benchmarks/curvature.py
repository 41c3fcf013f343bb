"""Time and memory of FedBPS's curvature pass against one epoch of its local training, on LeNet-5
and ResNet-20.

    python benchmarks/curvature.py --json FILE --markdown FILE         # CPU, one client, one thread
    python benchmarks/curvature.py --device cuda --clients 20 --samples 600 … # on a GPU, stacked

Both go through the client half: an epoch is `step` over batches of 128 (SGD with momentum), the
pass is `survey` over all samples in the half's chunks. Each measurement runs in a process of its
own. Memory is what it needs beyond model and data: on a CPU the growth of the peak resident size
(VmHWM) after a warm-up on one sample, on a GPU torch's peak. Time is the fastest of `--repeats`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.func import vmap

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bayflower.clients.fedbps import Client
from bayflower.config import Training
from bayflower.contract import Work
from bayflower.networks.model import Batch, Model
from bayflower.networks.papers import build
from bayflower.rounds import solo
from bayflower.strategies.fedbps import Config
from bayflower.tree import map_tree

NETWORKS = {"lenet5": (1, 28, 28), "resnet20": (3, 32, 32)}
WAYS = ("epoch", "fisher", "sketch", "empirical", "laplace-torch")
BATCH = 128


def half_of(network: str, kind: str) -> Client:
    """Return the client half with the paper's training."""
    training = Training(optimizer="sgd", lr=0.01, momentum=0.9, weight_decay=5e-4, batch_size=BATCH)
    return Client(Config(curvature=kind), training, build(network, NETWORKS[network], 10))  # type: ignore[arg-type]


def problem(
    model: Model, shape: tuple[int, ...], clients: int, samples: int, device: str
) -> tuple[Work, Batch]:
    """Return the work and the data of `clients` stacked clients (not stacked if there is one)."""
    generator = torch.Generator().manual_seed(0)
    lead = (clients,) if clients > 1 else ()
    x = torch.randn(*lead, samples, *shape, generator=generator)
    y = torch.randint(0, 10, (*lead, samples), generator=generator)
    params, buffers = model.initial(0)
    work = Work(params, buffers, {})
    if clients > 1:
        work = work._replace(opt=work.opt._replace(steps=torch.zeros(())))
        work = map_tree(lambda leaf: leaf.expand(clients, *leaf.shape).clone(), work)
    return map_tree(lambda leaf: leaf.to(device), work), Batch(
        x.to(device), y.to(device), torch.ones(*lead, samples, device=device)
    )


def cut(data: Batch, start: int, size: int, clients: int) -> Batch:
    """Return some samples of every client."""
    return Batch(
        *(t[:, start : start + size] if clients > 1 else t[start : start + size] for t in data)
    )


def epoch(network: str, clients: int, device: str) -> Callable[[Work, Batch], Any]:
    """Return one epoch of local training as a function."""
    half = half_of(network, "fisher")
    phase = half.phases("train")[0]
    lift: Callable[..., Any] = vmap if clients > 1 else lambda fn: fn
    fresh, step = (
        lift(lambda w: solo.fresh_optimizer(phase, w)),
        lift(lambda w, b: half.step(phase, w, (b,), {})[0]),
    )

    def run(work: Work, data: Batch) -> Any:
        work = fresh(work)
        for start in range(0, data.y.shape[-1], BATCH):
            work = solo.detach(step(work, cut(data, start, BATCH, clients)))
        return work.params

    return run


def survey(network: str, clients: int, kind: str) -> Callable[[Work, Batch], Any]:
    """Return the curvature pass as a function."""
    half = half_of(network, kind)
    lift: Callable[..., Any] = vmap if clients > 1 else lambda fn: fn
    look = lift(lambda w, b: half.survey(w, b).total)

    def run(work: Work, data: Batch) -> Any:
        total = None
        with torch.no_grad():
            for start in range(0, data.y.shape[-1], half.survey_size):
                part = look(work, cut(data, start, half.survey_size, clients))
                total = part if total is None else map_tree(torch.add, total, part)
        return total

    return run


def laplace_torch(network: str) -> Callable[[Work, Batch], Any]:
    """Return laplace-torch's diagonal GGN (BackPACK, which knows Sequential networks) as a function
    of the same arguments.
    """
    from bayflower.data.vision import prepare_torchvision

    prepare_torchvision()
    warnings.simplefilter("ignore")
    from laplace.curvature import BackPackGGN

    module = build(network, NETWORKS[network], 10).factory().eval()
    backend = BackPackGGN(nn.Sequential(*module.base, module.head), "classification")  # type: ignore[misc]

    def run(work: Work, data: Batch) -> Any:
        return sum(
            backend.diag(data.x[s : s + BATCH], data.y[s : s + BATCH])[1]
            for s in range(0, len(data.y), BATCH)
        )

    return run


def peak(device: str) -> float:
    """Return the peak memory of this process in bytes (Linux), or of the GPU."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated()
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def measure(way: str, network: str, args: argparse.Namespace) -> dict[str, float]:
    """Return seconds and megabytes of one way, in this process."""
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if way == "epoch":
        run = epoch(network, args.clients, args.device)
    else:
        run = (
            laplace_torch(network) if way == "laplace-torch" else survey(network, args.clients, way)
        )
    work, data = problem(
        half_of(network, "fisher").model, NETWORKS[network], args.clients, args.samples, args.device
    )
    wait = torch.cuda.synchronize if args.device != "cpu" else lambda: None
    clock = time.perf_counter if args.device != "cpu" else time.process_time
    run(work, cut(data, 0, 2, args.clients))
    if args.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    before = peak(args.device) if args.device == "cpu" else torch.cuda.memory_allocated()
    seconds = []
    for _ in range(args.repeats):
        wait()
        start = clock()
        run(work, data)
        wait()
        seconds.append(clock() - start)
    return {"seconds": min(seconds), "megabytes": (peak(args.device) - before) / 2**20}


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    lines = [
        "# The curvature pass of FedBPS against one epoch of training",
        "",
        f"{result['clients']} client(s) × {result['samples']} samples of random data, 10 classes, "
        f"float32, {result['device']}, torch "
        f"{result['torch']}. Epoch: SGD, batches of {BATCH}; pass: chunks of 19 samples "
        "(`sketch`, `empirical`: 64).",
        "",
        "| network | what | time, ms | in epochs | memory, MB | in epochs' |",
        "|---|---|---:|---:|---:|---:|",
    ]
    names = {
        "epoch": "one epoch of training",
        "fisher": "curvature `fisher` (exact, 10 columns)",
        "sketch": "curvature `sketch` (1 column)",
        "empirical": "curvature `empirical` (1 column)",
        "laplace-torch": "laplace-torch's diagonal GGN",
    }
    for row in result["rows"]:
        lines.append(
            f"| {row['network']} | {names[row['way']]} | {1000 * row['seconds']:.0f} | "
            f"{row['time_ratio']:.1f} | "
            f"{row['megabytes']:.0f} | {row['memory_ratio']:.1f} |"
        )
    lines += [
        "",
        "Counting products: an epoch is one pass forward, two back (to weights, to inputs); the "
        "exact diagonal is one forward and two back",
        "for each class. With 10 classes that is (1 + 20)/3 = 7 epochs where both run at the "
        "machine's peak. A matrix of rank 9 a sample",
        "needs 9 passes back, so no exact way is much cheaper. Less is due to Linear layers, "
        "which form no gradients, and to training that",
        "does not reach the peak (small batches, the optimiser, launches of kernels on a GPU). "
        "`sketch` and `empirical` are one column.",
        *(
            ["On a CPU shared with other work these times vary by a third from run to run."]
            if "CPU" in result["device"]
            else []
        ),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--samples", type=int, default=600)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument(
        "--only",
        nargs=2,
        metavar=("WAY", "NETWORK"),
        help="one measurement in this process, as JSON",
    )
    args = parser.parse_args()
    if args.only:
        print(json.dumps(measure(*args.only, args)))
        return
    name = "one CPU thread" if args.device == "cpu" else torch.cuda.get_device_name(args.device)
    facts = {
        "device": name,
        "clients": args.clients,
        "samples": args.samples,
        "torch": torch.__version__,
    }
    result: dict[str, Any] = {**facts, "rows": []}
    for network in NETWORKS:
        base: dict[str, float] = {}
        for way in WAYS:
            known = importlib.util.find_spec("laplace") and importlib.util.find_spec("backpack")
            if way == "laplace-torch" and (
                not known or network != "lenet5" or args.clients > 1 or args.device != "cpu"
            ):
                continue
            more = [
                f"--{key}={getattr(args, key)}"
                for key in ("device", "clients", "samples", "repeats")
            ]
            done = subprocess.run(
                [sys.executable, __file__, "--only", way, network, *more],
                check=True,
                capture_output=True,
                text=True,
            )
            row = json.loads(done.stdout.splitlines()[-1])
            base = base or row
            ratios = {
                "time_ratio": row["seconds"] / base["seconds"],
                "memory_ratio": row["megabytes"] / max(base["megabytes"], 1e-9),
            }
            result["rows"].append({"network": network, "way": way, **row, **ratios})
    text = table(result)
    print(text)
    for path, content in ((args.json, json.dumps(result, indent=1) + "\n"), (args.markdown, text)):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)


if __name__ == "__main__":
    main()
