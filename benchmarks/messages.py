"""Bytes and client time of pFedVMP's messages: low-rank factors against dense precision matrices.

    python benchmarks/messages.py --json FILE --markdown FILE

One client with the same number of samples of each class, features from a random two-layer network,
so that their spectrum decays. Low rank: `class_factors` on all classes at once, then `pack`. Dense:
for each class the covariance, its eigenvalues, the pseudo-inverse, and its packed triangle. Both in
float64 inside, float32 on the wire, with the same cut. The two are timed in turn, repetition by
repetition, and the ratio is the median of the repetitions' ratios, so that a busy machine hurts
both alike. One torch thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bayflower.maths.classmessages import pack_factors, roots
from bayflower.maths.classwise import class_factors, to_triangle
from bayflower.tree import shapes
from bayflower.wire.protocol import array_bytes

CUT = 1e-5


def features(classes: int, samples: int, dim: int) -> tuple[Tensor, Tensor]:
    """Return (z, y): `samples` of each class, after two random layers with LeakyReLU, classes
    shifted apart.
    """
    generator = torch.Generator().manual_seed(classes)
    y = torch.arange(classes).repeat_interleave(samples)
    x = (
        torch.randn(len(y), 64, generator=generator)
        + 2 * torch.randn(classes, 64, generator=generator)[y]
    )
    hidden = torch.nn.functional.leaky_relu(x @ torch.randn(64, 1024, generator=generator) / 8, 0.1)
    return torch.nn.functional.leaky_relu(
        hidden @ torch.randn(1024, dim, generator=generator) / 32, 0.1
    ), y


def low_rank(z: Tensor, y: Tensor, classes: int) -> dict[str, Tensor]:
    """Return what travels of all classes."""
    basis, weight, _ = class_factors(z, y, torch.ones(len(y)), classes, CUT)
    return pack_factors(basis, weight, y, classes)


def dense(z: Tensor) -> Tensor:
    """Return what would travel of one class: the packed triangle of the pseudo-inverse."""
    exact = z.double()
    centred = exact - exact.mean(0)
    values, vectors = torch.linalg.eigh(centred.mT @ centred / len(z))
    keep = values > CUT * values[-1]
    inverse = (vectors[:, keep] / values[keep]) @ vectors[:, keep].mT
    return to_triangle(inverse).float()


def seconds(work: Any, *args: Any) -> tuple[float, Any]:
    """Return (seconds, result)."""
    start = time.perf_counter()
    result = work(*args)
    return time.perf_counter() - start, result


def measure(classes: int, samples: int, dim: int, repetitions: int) -> dict[str, Any]:
    """Return bytes and times of a client with `classes` classes; the dense route is timed on a few
    of them.
    """
    z, y = features(classes, samples, dim)
    timed = min(classes, 3)
    low_rank(z, y, classes), dense(z[y == 0])  # warm
    low, full, worst = [], [], 0.0
    for _ in range(repetitions):
        taken, packed = seconds(low_rank, z, y, classes)
        low.append(taken / classes)
        taken, triangles = seconds(lambda: [dense(z[y == k]) for k in range(timed)])
        full.append(taken / timed)
    for k, root in enumerate(roots(packed, list(range(timed)))):
        want = triangles[k].double()
        worst = max(worst, float((to_triangle(root.mT @ root) - want).norm() / want.norm()))
    sizes = {
        "low_rank": sum(array_bytes(shape, kind) for _, shape, kind in shapes(packed)),
        "triangle": array_bytes((classes, dim * (dim + 1) // 2), "float32"),
        "square": array_bytes((classes, dim, dim), "float32"),
    }
    return {
        "classes": classes,
        "bytes": sizes,
        "low_ms": 1000 * statistics.median(low),
        "dense_ms": 1000 * statistics.median(full),
        "time_ratio": statistics.median(b / a for a, b in zip(low, full, strict=True)),
        "rank": int(packed["ranks"].max()),
        "worst_difference": worst,
    }


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    lines = [
        "# pFedVMP's messages: low rank against dense",
        "",
        f"D = {result['dim']} features, {result['samples']} samples a class, float32 on the wire. "
        "Bytes of the precisions of one client as",
        "Flower lays them out; means and the base model come on top in every form. Times are a "
        "client's, per class, median of",
        f"{result['repetitions']} repetitions in turn; CPU, one thread, torch {result['torch']}. "
        "Script: `benchmarks/messages.py`.",
        "",
        "| classes | rank | low rank | packed triangle | D × D | bytes, ratios | low rank, ms | "
        "dense, ms | time, ratio |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        size = {name: f"{value / 1e6:.3f} MB" for name, value in row["bytes"].items()}
        ratios = [row["bytes"][name] / row["bytes"]["low_rank"] for name in ("triangle", "square")]
        lines.append(
            f"| {row['classes']} | {row['rank']} | {size['low_rank']} | {size['triangle']} | "
            f"{size['square']} "
            f"| {ratios[0]:.1f} and {ratios[1]:.1f} "
            f"| {row['low_ms']:.2f} | {row['dense_ms']:.1f} | {row['time_ratio']:.0f} |"
        )
    worst = max(row["worst_difference"] for row in result["rows"])
    lines += [
        "",
        f"The two give the same matrices: largest relative difference {worst:.1e} (Frobenius), "
        "which is float32's rounding.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--classes", type=int, nargs="+", default=[10, 47, 100])
    parser.add_argument("--samples", type=int, default=35)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(classes, args.samples, args.dim, args.repetitions) for classes in args.classes]
    result = {
        "dim": args.dim,
        "samples": args.samples,
        "repetitions": args.repetitions,
        "torch": torch.__version__,
        "rows": rows,
    }
    text = table(result)
    print(text)
    for path, content in ((args.json, json.dumps(result, indent=1) + "\n"), (args.markdown, text)):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)


if __name__ == "__main__":
    main()
