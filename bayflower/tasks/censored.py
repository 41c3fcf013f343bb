"""What judges predicted times to an event, from sums that clients may add.

    table     (2, K + 1, 256)  samples by event, interval of the time, and bin of the risk
    early     (K, K)           Σ S_k² over events in interval j, for the horizon e_k
    late      (K,)             Σ (1 − S_k)² over samples whose time is beyond e_k
    near      (2, K + 1, 20)   samples by event, interval, and bin of 1 − S at the horizon
    said      (20,)            Σ (1 − S) at the horizon, by the same bin
    whole     (K,)             Σ S_k

    d_j events, c_j censored, n_j at risk at the beginning of interval j
    G_j = Π_{i≤j} (1 − c_i / (n_i − d_i))       nobody was censored by e_j (Kaplan and Meier)
    Harrell   share of pairs (event in j, later time) with the higher risk for the event
    Uno       the same with pairs weighted by 1/G_j²
    Brier     at e_k: (Σ_{j≤k} early_jk / G_j + late_k / G_k) / n;  integrated: mean over time
    observed  at the horizon, of a bin: 1 − Π_{j≤h} (1 − d_j / n_j)

An interval's events come before those censored in it, as in scikit-survival for equal times: for
times on the edges and risks in the middle of their bins all numbers are those of that library.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

SCORES = 256  # bins of the risk, for the concordance
NEAR = 20  # bins of the predicted probability of an event by the horizon
GROUPS, FEW = 10, 10  # of calibration: most groups of samples, and the fewest samples of one


class Parts(NamedTuple):
    """All of the above for some samples."""

    table: Tensor
    early: Tensor
    late: Tensor
    near: Tensor
    said: Tensor
    whole: Tensor


def one_hot(place: Tensor, number: int) -> Tensor:
    """Return 0 and 1 (B, number), float64: products of these are exact counts."""
    return (place[..., None] == torch.arange(number, device=place.device)).double()


def counted(place: Tensor, event: Tensor, bins: Tensor, used: Tensor, shape: Any) -> Tensor:
    """Return samples by event, interval and bin, in the `shape` (2, K + 1, bins)."""
    _, intervals, number = shape
    cell = one_hot(event.long() * intervals + place, 2 * intervals) * used[:, None]
    return (cell.mT @ one_hot(bins, number)).round().long().reshape(2, intervals, number)


def not_censored(table: Tensor) -> Tensor:
    """Return G_1, …, G_K."""
    censored, events = table.sum(-1).double()
    both = censored + events
    risky = both.flip(0).cumsum(0).flip(0) - events
    step = torch.where(censored > 0, censored / risky.clamp(min=1), 0.0)
    return (1 - step).cumprod(0)[:-1]


def concordance(table: Tensor, weights: Tensor | None = None) -> tuple[float, float]:
    """Return (concordant, comparable) pairs, weighted by the interval of the event: an event, and
    a sample with a later interval, or censored in the same one. The same bin counts half.
    """
    known = table.double()
    both = known.sum(0)
    later = both.flip(0).cumsum(0).flip(0) - both + known[0]  # (K + 1, bins)
    lower = later.cumsum(-1) - 0.5 * later
    events = known[1, :-1] if weights is None else known[1, :-1] * weights[:, None]
    right = float((events * lower[:-1]).sum())
    return right, float((events.sum(-1) * later[:-1].sum(-1)).sum())


def inverse(share: Tensor) -> Tensor:
    """Return 1/G, 0 where G is 0."""
    return torch.where(share > 0, 1 / share.clamp(min=1e-300), 0.0)


def brier(parts: Parts, weights: Tensor) -> Tensor:
    """Return the Brier score at each edge (K,)."""
    number = parts.table.sum()
    return ((weights[:, None] * parts.early).sum(0) + weights * parts.late) / number


def integrated(scores: Tensor, edges: tuple[float, ...], share: Tensor) -> float | None:
    """Return the mean of the Brier score over time, from the first edge to the last by which some
    samples are not censored.
    """
    last = int((share > 0).sum())
    times = torch.tensor(edges[:last], dtype=torch.float64)
    if last < 2:
        return None
    return float(torch.trapezoid(scores[:last], times) / (times[-1] - times[0]))


def observed(table: Tensor, horizon: int) -> float | None:
    """Return the probability of an event by edge `horizon`, by Kaplan and Meier; None of none."""
    censored, events = table.double()
    both = censored + events
    risky = both.flip(0).cumsum(0).flip(0)[: horizon + 1]
    if not float(both.sum()):
        return None
    steps = torch.where(risky > 0, events[: horizon + 1] / risky.clamp(min=1), 0.0)
    return 1 - float((1 - steps).prod())


def calibration(parts: Parts, horizon: int) -> list[dict[str, Any]]:
    """Return (predicted, observed) probability of an event by the horizon, by bin."""
    filled = [[place] for place in range(NEAR) if int(parts.near[..., place].sum())]
    return [compared(parts, places, horizon) for places in filled]


def grouped(parts: Parts, horizon: int) -> list[dict[str, Any]]:
    """Return the same by groups of rising probability: bins put together until a group has a tenth
    of the samples, and at least FEW. A bin alone may have too few to tell.
    """
    least, groups = max(FEW, int(parts.near.sum()) / GROUPS), []
    open_ones: list[int] = []
    for place in range(NEAR):
        open_ones.append(place)
        if int(parts.near[..., open_ones].sum()) >= least:
            groups.append(open_ones)
            open_ones = []
    if int(parts.near[..., open_ones].sum()):  # too few: they go to the last group
        groups = [*groups[:-1], [*(groups[-1] if groups else []), *open_ones]]
    return [compared(parts, places, horizon) for places in groups]


def compared(parts: Parts, places: list[int], horizon: int) -> dict[str, Any]:
    """Return the predicted and the observed probability of the samples in some bins."""
    table = parts.near[..., places].sum(-1)
    number, said = int(table.sum()), float(parts.said[places].sum())
    seen = observed(table, horizon)
    return {"num_examples": number, "predicted": said / number, "observed": seen}


def over_time(parts: Parts, edges: tuple[float, ...]) -> list[dict[str, Any]]:
    """Return at each edge the mean predicted S, the observed one (Kaplan and Meier) and the Brier
    score, as long as some samples are not censored; [] of no samples.
    """
    number, share = int(parts.table.sum()), not_censored(parts.table)
    if not number:
        return []
    scores, rows = brier(parts, inverse(share)), []
    for k, edge in enumerate(edges):
        if float(share[k]) > 0:
            seen = observed(parts.table.sum(-1), k)
            rows.append(
                {
                    "time": edge,
                    "predicted": float(parts.whole[k]) / number,
                    "observed": None if seen is None else 1 - seen,
                    "brier": float(scores[k]),
                }
            )
    return rows


def shown(parts: Parts, nll: float, edges: tuple[float, ...], horizon: int) -> dict[str, Any]:
    """Return the metrics of some samples."""
    number, events = int(parts.table.sum()), int(parts.table[1].sum())
    found: dict[str, Any] = {"num_examples": number, "events": events}
    names = ("nll", "c_index", "c_index_uno", "integrated_brier", "brier", "calibration_error")
    if not number:
        return {**found, **dict.fromkeys(names)}
    share = not_censored(parts.table)
    weights = inverse(share)
    scores = brier(parts, weights)
    right, pairs = concordance(parts.table)
    uno, weighed = concordance(parts.table, weights.square())
    rows = calibration(parts, horizon)
    off = math.fsum(row["num_examples"] * abs(row["predicted"] - row["observed"]) for row in rows)
    return {
        **found,
        "nll": nll / number,
        "c_index": right / pairs if pairs else None,
        "c_index_uno": uno / weighed if weighed else None,
        "integrated_brier": integrated(scores, edges, share),
        "brier": float(scores[horizon]) if float(share[horizon]) > 0 else None,
        "calibration_error": off / number,
    }


def of_curves(table: Tensor, curves: Tensor, horizon: int) -> Parts:
    """Return the parts of samples known only by their table, where everyone in a bin of the risk
    has the same curve S (256, K).
    """
    known, intervals = table.double(), table.shape[1]
    early = torch.triu(known[1, :-1] @ curves.square())
    beyond = known.sum(0).flip(0).cumsum(0).flip(0)[1:]  # (K, 256) with a time beyond e_k
    late = (beyond * (1 - curves.mT).square()).sum(-1)
    risk = 1 - curves[:, horizon]
    hot = one_hot(near(risk), NEAR)  # (256, 20)
    return Parts(
        table,
        early,
        late,
        (known.reshape(-1, SCORES) @ hot).reshape(2, intervals, NEAR).round().long(),
        (known.sum((0, 1)) * risk) @ hot,
        known.sum((0, 1)) @ curves,
    )


def near(risk: Tensor) -> Tensor:
    """Return the bin of a probability of an event by the horizon."""
    return (risk * NEAR).long().clamp(0, NEAR - 1)


def of_table(table: Tensor, curves: Tensor) -> float:
    """Return Σ −log p(interval) where everyone in a bin of the risk has the same curve S."""
    tiny = torch.finfo(torch.float64).tiny
    whole = torch.cat([torch.ones_like(curves[:, :1]), curves], -1).mT  # (K + 1, 256)
    events = torch.cat([whole[:-1] - whole[1:], whole[-1:]])
    logs = torch.stack([whole, events]).clamp(min=tiny).log()
    return -float((table.double() * logs).sum())
