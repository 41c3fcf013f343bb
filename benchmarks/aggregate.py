"""Memory and time of adding up the replies of a round: a plain running sum, the exact total, and
holding everything.

    python benchmarks/aggregate.py --replies 1000 --parameters 600000 --json FILE --markdown FILE

Replies are made one at a time (float32, as they arrive), turned into the statistic (n, nθ) and
added. Each measurement runs in a process of its own: memory is the growth of its peak resident size
(VmHWM) after imports and after one warm-up on a tiny model, in units of one float32 model. Times
are processor time without that of making the replies, as ratios to the plain sum. One torch thread.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bayflower.maths.exact import Total

LAYOUTS = ("cnn", "deep")
WAYS = ("plain", "exact", "hold")
making = 0.0  # seconds spent on making replies


def shapes(layout: str, parameters: int) -> list[int]:
    """Return the sizes of a model's tensors: a CNN's eight, most of it in one, or a deep network's
    200, half of them vectors.
    """
    if layout == "cnn":
        small = [800, 32, 51_200, 64, 5_120, 10, 512]
        small = small if sum(small) < parameters else []
        return [*small, parameters - sum(small)]
    vectors, matrices = [64] * 150, 50
    left = max(parameters - sum(vectors), matrices)
    return (
        vectors + [left // matrices] * (matrices - 1) + [left - left // matrices * (matrices - 1)]
    )


def reply(sizes: list[int], seed: int) -> tuple[int, dict[str, Tensor]]:
    """Return the seeded reply of one client: (n, float32 tensors)."""
    global making
    start = time.process_time()
    generator = torch.Generator().manual_seed(seed)
    n = int(torch.randint(10, 2000, (), generator=generator))
    params = {
        f"layer{i}": torch.randn(size, generator=generator).mul_(0.05)
        for i, size in enumerate(sizes)
    }
    making += time.process_time() - start
    return n, params


def plain(sizes: list[int], replies: int) -> dict[str, Tensor]:
    """Return the weighted mean by running float64 sums: fast, but it depends on the order."""
    total, sums = (
        0,
        {f"layer{i}": torch.zeros(size, dtype=torch.float64) for i, size in enumerate(sizes)},
    )
    for k in range(replies):
        n, params = reply(sizes, k)
        total += n
        for name, x in params.items():
            sums[name].add_(x.double().mul_(n))
    return {name: x.div_(total) for name, x in sums.items()}


def exact(sizes: list[int], replies: int) -> dict[str, Tensor]:
    """Return the weighted mean by exact sums."""
    total = Total()
    for k in range(replies):
        n, params = reply(sizes, k)
        total.add(
            {"n": torch.tensor(n), **{name: x.double().mul_(n) for name, x in params.items()}}
        )
        del params
    value = total.value()
    n_total = value.pop("n")
    return {name: x.div_(n_total) for name, x in value.items()}


def hold(sizes: list[int], replies: int) -> dict[str, Tensor]:
    """Return the weighted mean of replies that are all kept until the last has come; math.fsum
    gives exact sums, element by element.
    """
    kept = [reply(sizes, k) for k in range(replies)]
    total = sum(n for n, _ in kept)
    out = {}
    for name, x in kept[0][1].items():
        out[name] = torch.empty(x.shape, dtype=torch.float64)
        for start in range(0, len(x), 4096):  # in pieces, so that Python's floats do not count
            part = slice(start, start + 4096)
            columns = zip(
                *((n * params[name][part].double()).tolist() for n, params in kept), strict=True
            )
            out[name][part] = torch.tensor(
                [math.fsum(column) / total for column in columns], dtype=torch.float64
            )
    return out


def peak() -> int:
    """Return the peak resident size of this process in bytes (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def measure(way: str, layout: str, replies: int, parameters: int) -> dict[str, float]:
    """Return the peak growth in models and the seconds of one way, in this process."""
    torch.set_num_threads(1)
    run, sizes = globals()[way], shapes(layout, parameters)
    run(shapes(layout, 20_000), 2)
    before, start = peak(), time.process_time() - making
    run(sizes, replies)
    return {
        "models": (peak() - before) / (4 * parameters),
        "seconds": time.process_time() - making - start,
    }


def check(parameters: int) -> bool:
    """Return whether the exact way gives the bits of math.fsum on a small run."""
    sizes = shapes("deep", parameters)
    a, b = exact(sizes, 7), hold(sizes, 7)
    return all(torch.equal(a[name], b[name]) for name in b)


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    lines = [
        "# Adding up the replies of a round",
        "",
        f"Model of {result['parameters']:,} float32 parameters; memory in models (peak growth of "
        "the process, one reply and its",
        "statistic included), time per reply as a ratio to the plain sum. torch "
        f"{result['torch']}, one thread.",
        "The exact total equals math.fsum bit for bit: "
        f"{'yes' if result['equals_fsum'] else 'NO'}.",
        "",
        "| model | way | replies | memory, models | time, ratio |",
        "|---|---|---:|---:|---:|",
    ]
    names = {"plain": "float64 running sum", "exact": "`Total`", "hold": "hold all, then math.fsum"}
    kinds = {"cnn": "8 tensors, most in one", "deep": "200 tensors, 150 of them vectors"}
    for row in result["rows"]:
        lines.append(
            f"| {kinds[row['layout']]} | {names[row['way']]} | {row['replies']} | "
            f"{row['models']:.1f} | {row['ratio']:.1f} |"
        )
    lines += [
        "",
        "*Hold* is run with fewer replies because it keeps all: its memory grows with their "
        "number, the others' does not.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replies", type=int, default=1000)
    parser.add_argument(
        "--hold-replies",
        type=int,
        default=20,
        help="replies for the way that holds them all (default 20)",
    )
    parser.add_argument("--parameters", type=int, default=600_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument(
        "--only",
        nargs=2,
        metavar=("WAY", "LAYOUT"),
        help="one measurement in this process, as JSON",
    )
    args = parser.parse_args()
    if args.only:
        way, layout = args.only
        print(json.dumps(measure(way, layout, args.replies, args.parameters)))
        return
    result: dict[str, Any] = {
        "parameters": args.parameters,
        "torch": torch.__version__,
        "equals_fsum": check(20_000),
        "rows": [],
    }
    for layout in LAYOUTS:
        base = 0.0
        for way in WAYS:
            replies = min(args.replies, args.hold_replies) if way == "hold" else args.replies
            command = [
                sys.executable,
                __file__,
                "--only",
                way,
                layout,
                "--replies",
                str(replies),
                "--parameters",
                str(args.parameters),
            ]
            row = json.loads(
                subprocess.run(command, check=True, capture_output=True, text=True).stdout
            )
            per_reply = row["seconds"] / replies
            base = per_reply if way == "plain" else base
            models = round(row["models"], 2)
            result["rows"].append(
                {
                    "layout": layout,
                    "way": way,
                    "replies": replies,
                    "models": models,
                    "ratio": round(per_reply / base, 2),
                }
            )
    text = table(result)
    print(text)
    for path, content in ((args.json, json.dumps(result, indent=1) + "\n"), (args.markdown, text)):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)


if __name__ == "__main__":
    main()
