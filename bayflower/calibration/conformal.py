"""Prediction sets by split conformal prediction, from histograms of scores that add up exactly.

The score of class c for a sample is u_c = log p_c − log(1 − p_c), the logit of its probability: a
set holds the classes whose score is at least a threshold. Scores are counted in BINS bins of width
WIDTH logits. The threshold is the lower edge of the bin that holds the score of rank
⌈(n + 1)·coverage + d⌉ from above, so it equals the threshold of the pooled scores to one bin, for
any order and tree of aggregation. Beyond n samples there is no such score: the set holds every
class.

d counts the PARAMETERS of affine scaling, which are fitted to the same samples (`reused`). A
parameter that moves some scores against others, such as the bias, fits the held-out ones too well:
new scores spread wider, by one part in N, the samples that the fit weighs. Of n scores with a
bell-shaped distribution z·φ(z)·n/N then leave the set, for the normal quantile z of `coverage` (a
fifth of a sample for each parameter at 90 %).

The promise: if new samples are like the held-out ones (exchangeable), a set holds the true class
with probability at least `coverage`; with calibration=shrunk, about `coverage`. A set may be empty:
then no class is likely enough.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import torch
from torch import Tensor

from .curves import STRENGTH

BINS = 2048
SPAN = 24.0  # scores beyond ±SPAN count as ±SPAN
WIDTH = 2 * SPAN / BINS
ENOUGH = 30  # a client with as many held-out samples needs nobody else's
PARAMETERS = 3  # fitted to the same samples: temperature, share of the bias, scale of the posterior


def scores(log_probs: Tensor) -> Tensor:
    """Return the score of every class (N, K), float64."""
    wide = log_probs.double()
    top = wide.argmax(-1, keepdim=True)
    best = torch.zeros_like(wide, dtype=torch.bool).scatter(-1, top, True)
    # of the likeliest class from the others, so that 1 − p keeps its digits where p is nearly 1
    rest = wide.masked_fill(best, -torch.inf).logsumexp(-1, keepdim=True)
    return wide - torch.where(best, rest, torch.log1p(-wide.exp().clamp(max=0.5)))


def bins(score: Tensor) -> Tensor:
    """Return the bin of each score, int64; NaN counts as the lowest."""
    place = torch.floor((torch.nan_to_num(score, nan=-SPAN) + SPAN) / WIDTH)
    return place.clamp(0, BINS - 1).long()


def histogram(log_probs: Tensor, y: Tensor, mask: Tensor, by_class: bool) -> Tensor:
    """Return how often the true class's score fell into each bin, int64: (1, BINS), or (K, BINS) by
    the true class; runs under vmap.
    """
    classes = log_probs.shape[-1]
    truth = y.clamp(0, classes - 1)
    place = bins(scores(log_probs).gather(-1, truth[:, None])[:, 0])
    used = (mask != 0).long()
    group = truth if by_class else torch.zeros_like(truth)
    groups = classes if by_class else 1
    flat = torch.zeros(groups * BINS, dtype=torch.int64, device=log_probs.device)
    return flat.scatter_add(0, group * BINS + place, used).reshape(groups, BINS)


def threshold(own: Tensor, total: Tensor, coverage: float, how: str) -> Tensor:
    """Return the lowest bin that a set takes in, int64 of the histograms' leading shape.

    `how`: client (own scores), global (everyone's), shrunk (own, filled up with everyone's to
    ENOUGH samples, and between two scores instead of at the lower one).
    """
    mine, everyone = own.double(), total.double()
    if how != "shrunk":
        counts = mine if how == "client" else everyone
        return lowest_bin(counts, coverage, reused(counts, counts.sum(), coverage))
    number, others = mine.sum(-1, keepdim=True), everyone.sum(-1, keepdim=True)
    filled = mine + (ENOUGH - number).clamp(min=0) * everyone / others.clamp(min=1)
    return between_bins(filled, coverage, reused(filled, mine.sum() + STRENGTH, coverage))


def reused(counts: Tensor, weighed: Tensor, coverage: float) -> Tensor:
    """Return by how many samples the rank grows because affine scaling was fitted to the samples
    too; `weighed` is the weight of the samples of that fit.
    """
    return PARAMETERS * spread(coverage) * counts.sum(-1) / weighed.clamp(min=1)


def spread(coverage: float) -> float:
    """Return z·φ(z) for the normal quantile z of `coverage`, 0 below a half."""
    normal = NormalDist()
    z = max(normal.inv_cdf(coverage), 0.0)
    return z * normal.pdf(z)


def fewest(coverage: float) -> int:
    """Return the number of held-out samples from which a client's own sets leave classes out."""
    return math.ceil((coverage + PARAMETERS * spread(coverage)) / (1 - coverage) - 1e-9)


def lowest_bin(counts: Tensor, coverage: float, more: Tensor | float = 0.0) -> Tensor:
    """Return the bin that holds the score of rank ⌈(n + 1)·coverage + more⌉ from above; 0 (every
    class) where there are too few samples.
    """
    number = counts.sum(-1).double()
    wanted = torch.ceil((number + 1) * coverage + more - 1e-9)[..., None]
    reached = counts.double().flip(-1).cumsum(-1) >= wanted
    place = BINS - 1 - reached.long().argmax(-1)
    return torch.where(reached.any(-1), place, torch.zeros_like(place))


def between_bins(counts: Tensor, coverage: float, more: Tensor) -> Tensor:
    """Return the bin at rank (n + 1)·coverage + more, between the two scores beside it; 0 (every
    class) where there are too few samples. Rounding the rank up would cover more than promised.
    """
    found = []
    for one, extra in zip(counts.reshape(-1, BINS), more.reshape(-1).tolist(), strict=True):
        places = one.nonzero()[:, 0].flip(0)
        mass = one[places]
        ranks = mass.cumsum(0) - mass / 2 + 0.5
        wanted = (float(one.sum()) + 1) * coverage + extra
        after = int((ranks < wanted - 1e-9).sum())
        if after == len(places):
            # of many scores in the lowest bin, the middle one may lie above the wanted rank
            within = len(places) and wanted - 1e-9 <= float(one.sum())
            found.append(int(places[-1]) if within else 0)
        elif after == 0:
            found.append(int(places[0]))
        else:
            low, high = float(ranks[after - 1]), float(ranks[after])
            share = (wanted - low) / (high - low)
            at = float(places[after - 1]) * (1 - share) + float(places[after]) * share
            found.append(math.floor(at + 1e-9))
    return torch.tensor(found, dtype=torch.int64).reshape(counts.shape[:-1])


def sets(log_probs: Tensor, lowest: Tensor) -> Tensor:
    """Return which classes each sample's set holds, bool (N, K); `lowest` is (1,) or (K,) bins."""
    place = bins(scores(log_probs))
    return (place >= lowest) | (lowest == 0)


def edge(lowest: Tensor) -> Tensor:
    """Return the smallest probability that a set takes in, for a card: of bin 0, zero."""
    score = lowest.double() * WIDTH - SPAN
    return torch.where(lowest == 0, torch.zeros_like(score), torch.sigmoid(score))


def interval(held: int, tested: int, coverage: float, level: float = 0.99) -> tuple[int, int]:
    """Return the counts of covered test samples that lie inside the `level` interval of the
    beta-binomial distribution that split conformal prediction has for these numbers of samples.
    """
    wanted = math.ceil((held + 1) * coverage - 1e-9)
    if wanted > held:
        return tested, tested
    a, b = wanted, held + 1 - wanted
    logs = [
        math.lgamma(tested + 1)
        - math.lgamma(k + 1)
        - math.lgamma(tested - k + 1)
        + math.lgamma(k + a)
        + math.lgamma(tested - k + b)
        - math.lgamma(tested + a + b)
        + math.lgamma(a + b)
        - math.lgamma(a)
        - math.lgamma(b)
        for k in range(tested + 1)
    ]
    tail, low, high = (1 - level) / 2, 0, tested
    below = 0.0
    for k, value in enumerate(logs):
        below += math.exp(value)
        if below > tail:
            low = k
            break
    above = 0.0
    for k in range(tested, -1, -1):
        above += math.exp(logs[k])
        if above > tail:
            high = k
            break
    return low, high
