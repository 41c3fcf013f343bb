"""Metrics as tallies: counts and sums that are made where the data is, can be added anywhere, and
are the same on every engine.

torchmetrics and scikit-learn define these numbers, and the tests hold us to them, but at run time
they want all predictions in one place. A `Tally` is a fixed set of small tensors per client: it is
additive (any order, any tree), it is made under `torch.func.vmap` for all clients at once, and no
single prediction leaves a client. The real-valued sums are rounded to multiples of 2^-32 per term,
so they are whole numbers in disguise: adding tallies is exact below 2^21 (two million samples, or
nats), whatever the chunks, padding or device.

Calibration uses 10 equal bins over [0, 1], [0, 0.1), [0.1, 0.2), …, [0.9, 1], with edges in the
dtype of the probabilities as torchmetrics has them: p on an edge belongs to the upper bin. The one
difference: p = 1 falls into the last bin, where torchmetrics (1.9) opens an eleventh for it. Two
kinds: *top-label* bins the confidence of the predicted class; *all-class* bins all N×C
probabilities against one-hot labels, which is what MetaVD's tables show (E-V9). Balanced accuracy
is the mean recall of the classes present, which is what FedMAP's tables show (E-M7).

Of two classes the second is the *positive* one, as in scikit-learn. A tally then also counts the
probability of the positive class in 50 equal bins, apart for true negatives and true positives:
enough for the AUROC (ties within a bin count half) and, at the edges of the bins exactly, for every
threshold (`report/twoclass.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

NUM_BINS = 10
SCORE_BINS = 50  # of the probability of the second of two classes: a threshold every 0.02
GRID = 2.0**32
AT_ONCE = 2048  # probabilities whose bins are counted in one go; of more, a bin at a time
Sums = TypeVar("Sums", bound=tuple[Tensor, ...])
LARGEST_NLL = 709.0  # of one sample: −log of the smallest normal float64


class Tally(NamedTuple):
    """What is counted on test samples. Integers are int64, the other sums float64 and multiples of
    2^-32.
    """

    num_examples: Tensor
    correct: Tensor
    nll: Tensor  # Σ −log p_y
    class_total: Tensor  # (C,) samples of each class
    class_correct: Tensor  # (C,)
    bin_count: Tensor  # (10,) top-label bins
    bin_confidence: Tensor  # (10,) Σ p
    bin_correct: Tensor  # (10,)
    all_count: Tensor  # (10,) all-class bins
    all_confidence: Tensor  # (10,)
    all_correct: Tensor  # (10,) how many of these probabilities belong to the true class
    scores: Tensor  # (2, 50) samples by true class and P(second class); (0, 50) unless C = 2


def zero(num_classes: int, device: torch.device | str = "cpu") -> Tally:
    """Return the tally of no samples."""
    n = torch.zeros((), dtype=torch.int64, device=device)
    c = torch.zeros(num_classes, dtype=torch.int64, device=device)
    b = torch.zeros(NUM_BINS, dtype=torch.int64, device=device)
    s = torch.zeros(score_shape(num_classes), dtype=torch.int64, device=device)
    return Tally(n, n, n.double(), c, c, b, b.double(), b, b, b.double(), b, s)


def score_shape(num_classes: int) -> tuple[int, int]:
    """Return the shape of `Tally.scores`."""
    return (2 if num_classes == 2 else 0, SCORE_BINS)


def possible(t: Tally) -> bool:
    """Return whether a tally can have come from samples: nothing negative, parts within their
    wholes, and sums that agree.
    """
    number, classes = int(t.num_examples), t.class_total.numel()
    parts = (
        (t.class_correct, t.class_total),
        (t.bin_correct, t.bin_count),
        (t.all_correct, t.all_count),
    )
    sums = (
        (t.class_total, number),
        (t.bin_count, number),
        (t.all_count, number * classes),
        (t.all_correct, number),
        (t.class_correct, int(t.correct)),
        (t.bin_correct, int(t.correct)),
    )
    return (
        number < 2**40
        and all(bool((leaf >= 0).all()) and bool((leaf < 2**60).all()) for leaf in t)
        and all(bool((part <= whole).all()) for part, whole in parts)
        and all(int(leaf.sum()) == total for leaf, total in sums)
        and t.scores.sum(-1).tolist() == t.class_total.tolist()[: t.scores.shape[0]]
        and bool((t.bin_confidence <= t.bin_count + 1e-6).all())
        and bool((t.all_confidence <= t.all_count + 1e-6).all())
        and float(t.nll) <= LARGEST_NLL * number
    )


def add(a: Sums, b: Sums) -> Sums:
    """Return the tally of both sets of samples: of a Tally, or of another task's sums."""
    return type(a)(*(x + y for x, y in zip(a, b, strict=True)))


def tally(probs: Tensor, y: Tensor, mask: Tensor) -> Tally:
    """Return the tally of the samples that the mask (N,) marks with 1: probs (N, C), y (N,). Pure,
    and runs under vmap.

    −log p is taken at the smallest normal number of the dtype where p is below it (87 in float32,
    708 in float64), never inf. A sample with a probability that is not finite counts as p = 0
    everywhere and is wrong.
    """
    used = mask != 0
    finite = probs.isfinite().all(-1)
    probs = torch.where(finite[:, None], probs, 0.0)
    num_classes = probs.shape[-1]
    classes = torch.arange(num_classes, device=probs.device)
    truth = (y[:, None] == classes) & used[:, None]
    confidence, predicted = probs.max(-1)
    hit = (predicted == y) & finite & used
    p_true = probs.gather(-1, y.clamp(0, num_classes - 1)[:, None])[:, 0]
    nll = -p_true.clamp(min=torch.finfo(probs.dtype).tiny).double().log()
    return Tally(
        used.sum(),
        hit.sum(),
        on_grid(nll).mul(used).sum().double() / GRID,
        truth.sum(0),
        (truth & hit[:, None]).sum(0),
        *binned(confidence, hit, used),
        *binned(probs.flatten(), truth.flatten(), used[:, None].expand(-1, num_classes).flatten()),
        scored(probs, truth),
    )


def scored(probs: Tensor, truth: Tensor) -> Tensor:
    """Return the counts of P(second class) of two by true class and bin; `truth` (N, C) marks the
    true class of the samples that count. An edge belongs to the upper bin, 1 to the last.
    """
    rows, width = score_shape(probs.shape[-1])
    if not rows:
        return torch.zeros((0, width), dtype=torch.int64, device=probs.device)
    edges = torch.linspace(0, 1, width + 1, dtype=probs.dtype, device=probs.device)[1:-1]
    above = probs[:, 1, None] >= edges  # (N, 49): a sample is above its lower edges
    above = torch.cat([torch.ones_like(above[:, :1]), above], 1)
    tail = (truth[:, :, None] & above[:, None, :]).sum(0)
    return tail - torch.cat([tail[:, 1:], torch.zeros_like(tail[:, :1])], 1)


def on_grid(x: Tensor) -> Tensor:
    """Return x in units of 2^-32, rounded, int64: sums of these have no rounding."""
    return (x.double() * GRID).round().long()


def binned(p: Tensor, hit: Tensor, used: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for each bin, how many p fall into it, their sum, and how many of them hit."""
    edges = torch.linspace(0, 1, NUM_BINS + 1, dtype=p.dtype, device=p.device)[1:-1]
    # a bin is what is above its lower edge less what is above its upper edge
    terms = on_grid(p)
    if len(p) <= AT_ONCE:  # whole numbers: their sums are equal in any order
        above = torch.cat([used[None], used & (p >= edges[:, None])])
        tails = [above.sum(1), (terms * above).sum(1), (hit & above).sum(1)]
    else:
        each = [used, *(used & (p >= edge) for edge in edges)]
        every = (torch.ones_like(terms), terms, hit.long())
        tails = [torch.stack([(x * a).sum() for a in each]) for x in every]
    count, total, hits = (
        tail - torch.cat([tail[1:], torch.zeros_like(tail[:1])]) for tail in tails
    )
    return count, total.double() / GRID, hits


def summarise(tallies: Mapping[int, Tally]) -> dict[str, Any]:
    """Return the block METRICS of a result: plain numbers, None where a number is not defined.

    Means over clients leave out clients without test samples; `per_client` lists those with None.
    `num_clients` counts those with samples.
    """
    clients = [(client, tallies[client]) for client in sorted(tallies)]
    seen = [(client, t) for client, t in clients if int(t.num_examples) > 0]
    per_client = [
        {
            "client": int(client),
            "num_examples": int(t.num_examples),
            "accuracy": ratio(t.correct, t.num_examples),
            "balanced_accuracy": balanced_accuracy(t),
            "nll": ratio(t.nll, t.num_examples),
            "ece": calibration(*t[5:8])[0],
            **two_classes(t),
        }
        for client, t in clients
    ]
    accuracies = [float(t.correct) / float(t.num_examples) for _, t in seen]
    balanced = [b for _, t in seen if (b := balanced_accuracy(t)) is not None]
    mean = math.fsum(accuracies) / len(accuracies) if seen else None
    std = (
        math.sqrt(math.fsum((a - mean) ** 2 for a in accuracies) / len(accuracies))
        if mean is not None
        else None
    )
    pooled = reduce(add, (t for _, t in seen)) if seen else zero(1)
    ece, mce = calibration(pooled.bin_count, pooled.bin_confidence, pooled.bin_correct)
    ece_all, mce_all = calibration(pooled.all_count, pooled.all_confidence, pooled.all_correct)
    return {
        "num_examples": int(pooled.num_examples),
        "num_clients": len(seen),
        "accuracy": ratio(pooled.correct, pooled.num_examples),
        "accuracy_mean": mean,
        "balanced_accuracy": balanced_accuracy(pooled),
        "balanced_accuracy_mean": math.fsum(balanced) / len(balanced) if balanced else None,
        "nll": ratio(pooled.nll, pooled.num_examples),
        "ece": ece,
        "ece_allclass": ece_all,
        "mce": mce,
        "mce_allclass": mce_all,
        "fairness_std": std,
        "fairness_cv": std / mean if std is not None and mean else None,
        "worst_client_accuracy": min(accuracies, default=None),
        **two_classes(pooled),
        "per_client": per_client,
        "reliability": {
            "top_label": diagram(pooled.bin_count, pooled.bin_confidence, pooled.bin_correct),
            "all_class": diagram(pooled.all_count, pooled.all_confidence, pooled.all_correct),
        },
    }


def two_classes(t: Tally) -> dict[str, Any]:
    """Return what is defined for two classes alone, {} for others. `confusion` has a row a true
    class, a column a predicted one; a score that is not finite is predicted wrong.
    """
    if not t.scores.numel():
        return {}
    (negatives, positives), (right_n, right_p) = t.class_total.tolist(), t.class_correct.tolist()
    return {
        "sensitivity": ratio(t.class_correct[1], t.class_total[1]),
        "specificity": ratio(t.class_correct[0], t.class_total[0]),
        "auroc": area(t.scores),
        "confusion": [[right_n, negatives - right_n], [positives - right_p, right_p]],
        "scores": t.scores.tolist(),
    }


def area(scores: Tensor) -> float | None:
    """Return the AUROC: the share of pairs in which the positive has the higher score, ties (the
    same bin) counting half; None without both classes.
    """
    negatives, positives = (row.tolist() for row in scores)
    pairs = sum(negatives) * sum(positives)
    below = won = 0
    for n, p in zip(negatives, positives, strict=True):
        won += p * (2 * below + n)
        below += n
    return won / (2 * pairs) if pairs else None


def ratio(part: Tensor, whole: Tensor) -> float | None:
    """Return part / whole, None for 0/0."""
    return float(part) / float(whole) if float(whole) else None


def balanced_accuracy(t: Tally) -> float | None:
    """Return the mean recall over the classes that have samples."""
    recalls = [
        c / n for n, c in zip(t.class_total.tolist(), t.class_correct.tolist(), strict=True) if n
    ]
    return math.fsum(recalls) / len(recalls) if recalls else None


def calibration(
    count: Tensor, confidence: Tensor, correct: Tensor
) -> tuple[float | None, float | None]:
    """Return (expected, maximum) calibration error: the mean, weighted by count, and the largest
    |accuracy − confidence| of the bins.
    """
    rows = [
        row
        for row in zip(count.tolist(), confidence.tolist(), correct.tolist(), strict=True)
        if row[0]
    ]
    if not rows:
        return None, None
    gaps = [abs(hits - total) for _, total, hits in rows]
    return math.fsum(gaps) / sum(row[0] for row in rows), max(
        gap / row[0] for gap, row in zip(gaps, rows, strict=True)
    )


def by_chance(bars: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the ECE that a perfectly calibrated model with the confidences of these bars would
    have on average on as many samples: Σ_b n_b/n · √(2 p_b (1 − p_b) / (π n_b)).
    """
    total = sum(bar["count"] for bar in bars)
    if not total:
        return None
    return (
        math.fsum(
            math.sqrt(2 / math.pi * bar["confidence"] * (1 - bar["confidence"]) * bar["count"])
            for bar in bars
            if bar["count"]
        )
        / total
    )


def squared_error(bars: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the mean squared calibration error without the part due to chance (Kumar, Liang and
    Ma, 2019): Σ_b n_b/n · ((a_b − p_b)² − a_b (1 − a_b) / (n_b − 1)) over bins of two samples or
    more. It is right on average for any number of samples, and may be negative; None without bins.
    """
    kept = [bar for bar in bars if bar["count"] > 1]
    total = sum(bar["count"] for bar in kept)
    if not total:
        return None
    return (
        math.fsum(
            bar["count"]
            * (
                (bar["accuracy"] - bar["confidence"]) ** 2
                - bar["accuracy"] * (1 - bar["accuracy"]) / (bar["count"] - 1)
            )
            for bar in kept
        )
        / total
    )


def debiased(squares: Sequence[float | None]) -> float | None:
    """Return the root of the mean of squared errors, 0 if it is negative; None of nothing."""
    known = [square for square in squares if square is not None]
    return math.sqrt(max(math.fsum(known) / len(known), 0.0)) if known else None


def diagram(count: Tensor, confidence: Tensor, correct: Tensor) -> list[dict[str, Any]]:
    """Return the bars of a reliability diagram."""
    return [
        {
            "low": i / NUM_BINS,
            "high": (i + 1) / NUM_BINS,
            "count": int(n),
            "confidence": total / n if n else None,
            "accuracy": hits / n if n else None,
        }
        for i, (n, total, hits) in enumerate(
            zip(count.tolist(), confidence.tolist(), correct.tolist(), strict=True)
        )
    ]
