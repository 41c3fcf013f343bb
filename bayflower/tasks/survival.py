"""Times to an event, some of them censored: y = (time, event), event 1 if it was seen at `time` and
0 if only that it had not happened by then.

    edges e_1 < … < e_K of intervals (e_{k−1}, e_k], e_0 = 0; h_k the probability of an event in
    interval k if there was none before; S_k = Π_{i≤k} (1 − h_i)

    discrete    −log p = −event · log h_j − Σ_{i<j} log(1 − h_i),  j the interval of the time;
                I = diag(h_i (1 − h_i)) over the intervals at risk
    Cox         −event · (f − log Σ_{l at risk} e^{f_l}), Breslow's form of ties, within a batch;
                I_jj = Σ_i event_i p_ij (1 − p_ij),  p_ij = e^{f_j} / Σ_{l at risk at t_i} e^{f_l}

Who is at risk at t: those with time ≥ t. A censored time counts the intervals it has completed. Cox
needs batches of many samples (the loss couples them) and clients that differ in their baselines
keep their own: the risk sets are a client's. `breslow` gives the baseline from additive sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..metrics import GRID, LARGEST_NLL, add, on_grid
from .labels import rate
from .task import Task

SCORES = 64  # bins of the risk, for the concordance


class Events(NamedTuple):
    """What is counted on test samples."""

    num_examples: Tensor
    nll: Tensor
    table: Tensor  # (2, K + 1, 64) samples by event, interval of the time, and bin of the risk


@dataclass(frozen=True)
class Hazards(Task):
    """Discrete times with a logit of the hazard in every interval. Prediction: S_1, …, S_K."""

    edges: tuple[float, ...]

    name = "survival"
    target = (2,)
    curve = ("nll", "c_index")

    @property
    def network(self) -> int:
        """Return one logit an interval."""
        return len(self.edges)

    def interval(self, y: Tensor) -> Tensor:
        """Return the number of the interval of each time; K beyond the last edge."""
        edges = torch.tensor(self.edges, dtype=torch.float64, device=y.device)
        return (y[..., 0, None].double() > edges).sum(-1)

    def at_risk(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return (intervals survived, the interval of the event), as 0 and 1 (B, K)."""
        place, every = self.interval(y)[..., None], torch.arange(len(self.edges), device=y.device)
        return every < place, (every == place) & (y[..., 1, None] > 0)

    def nll(self, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """Return −log p(y)."""
        survived, event = self.at_risk(y)
        logs = nn.functional.logsigmoid
        return -(logs(-out) * survived + logs(out) * event).sum(-1)

    def curvature(self, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """Return I."""
        survived, event = self.at_risk(y)
        return torch.diag_embed(torch.sigmoid(out) * torch.sigmoid(-out) * (survived | event))

    def predict(self, out: Tensor) -> Tensor:
        """Return the survival function at the edges."""
        return torch.exp(nn.functional.logsigmoid(-out).cumsum(-1))

    def mean(self, prediction: Tensor) -> Tensor:
        """Return the expected time within the last edge: Σ_k S_{k−1} (e_k − e_{k−1})."""
        edges = prediction.new_tensor((0.0, *self.edges)).diff()
        before = torch.cat([torch.ones_like(prediction[..., :1]), prediction[..., :-1]], -1)
        return (before * edges).sum(-1)

    def quantile(self, prediction: Tensor, share: float) -> Tensor:
        """Return the first edge by which an event has happened with probability `share`; ∞ if
        there is none.
        """
        ends = prediction.new_tensor((*self.edges, float("inf")))
        return ends[(prediction > 1 - share).sum(-1)]

    def sample(self, prediction: Tensor, generator: torch.Generator) -> Tensor:
        """Return a time, the end of its interval, for each prediction."""
        share = torch.rand(prediction.shape[:-1], generator=generator, dtype=prediction.dtype)
        ends = prediction.new_tensor((*self.edges, float("inf")))
        return ends[(prediction > share[..., None]).sum(-1)]

    # -- metrics -----------------------------------------------------------------------------------
    def risk(self, prediction: Tensor) -> Tensor:
        """Return the risk in [0, 1] that orders samples: 1 − the mean of S."""
        return 1 - prediction.mean(-1)

    def test_nll(self, prediction: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """Return −log p(y) from the survival function."""
        tiny = torch.finfo(prediction.dtype).tiny
        curve = torch.cat([torch.ones_like(prediction[..., :1]), prediction], -1)
        place = self.interval(y)
        here = curve.gather(-1, place[..., None])[..., 0]
        after = curve.gather(-1, (place + 1).clamp(max=len(self.edges))[..., None])[..., 0]
        event = (y[..., 1] > 0) & (place < len(self.edges))
        return -torch.where(event, here - after, here).clamp(min=tiny).log()

    def zero(self) -> Events:
        """Return the tally of no samples."""
        n = torch.zeros((), dtype=torch.int64)
        return Events(n, n.double(), torch.zeros(2, len(self.edges) + 1, SCORES).long())

    def tally(self, prediction: Tensor, y: Tensor, mask: Tensor) -> Events:
        """Return the tally."""
        used = mask != 0
        known = torch.nan_to_num(prediction.double(), nan=0.5)
        nll = self.test_nll(known, y, mask).clamp(max=LARGEST_NLL)
        place = self.interval(y)
        risk = (self.risk(known) * SCORES).long().clamp(0, SCORES - 1)
        cell = (y[..., 1] > 0).long() * (len(self.edges) + 1) * SCORES + place * SCORES + risk
        every = torch.arange(2 * (len(self.edges) + 1) * SCORES, device=y.device)
        table = ((cell[:, None] == every) & used[:, None]).sum(0)
        return Events(
            used.sum(),
            (on_grid(nll) * used).sum().double() / GRID,
            table.reshape(2, len(self.edges) + 1, SCORES),
        )

    def possible(self, tally: Any) -> bool:
        """Return whether a tally can have come from samples."""
        number = int(tally.num_examples)
        return (
            0 <= number < 2**40
            and bool((tally.table >= 0).all())
            and int(tally.table.sum()) == number
            and abs(float(tally.nll)) <= LARGEST_NLL * number
        )

    def summarise(self, tallies: Mapping[int, Any]) -> dict[str, Any]:
        """Return the block METRICS of a result; `c_index` compares all samples, of whatever
        client, `c_index_within` only those of the same client.
        """
        clients = [(client, tallies[client]) for client in sorted(tallies)]
        seen = [(client, t) for client, t in clients if int(t.num_examples) > 0]
        pooled = reduce(add, (t for _, t in seen)) if seen else self.zero()
        pairs = [concordance(t.table) for _, t in seen]
        within = sum(pair[1] for pair in pairs)
        return {
            "num_clients": len(seen),
            **shown(pooled),
            "c_index_within": sum(pair[0] for pair in pairs) / within if within else None,
            "per_client": [{"client": int(client), **shown(t)} for client, t in clients],
        }


def shown(t: Events) -> dict[str, Any]:
    """Return the metrics of some samples."""
    right, pairs = concordance(t.table)
    return {
        "num_examples": int(t.num_examples),
        "events": int(t.table[1].sum()),
        "nll": rate(float(t.nll), int(t.num_examples)),
        "c_index": right / pairs if pairs else None,
    }


def concordance(table: Tensor) -> tuple[float, float]:
    """Return (concordant, comparable) pairs of Harrell's C: an event, and a sample with a later
    interval, or censored in the same one. The same bin of the risk counts half.
    """
    known = table.double()
    both = known.sum(0)
    later = both.flip(0).cumsum(0).flip(0) - both + known[0]  # (K + 1, bins)
    lower = later.cumsum(-1) - 0.5 * later
    events = known[1, :-1]
    right = float((events * lower[:-1]).sum())
    return right, float((events.sum(-1) * later[:-1].sum(-1)).sum())


@dataclass(frozen=True)
class Cox(Hazards):
    """Proportional hazards: one score a sample. Prediction: the score. `edges` are only those of
    the concordance's intervals.
    """

    coupled = True

    @property
    def network(self) -> int:
        """Return one score."""
        return 1

    def shares(self, out: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (log Σ at risk (B,), log p (B, B), events (B,)); row i is for the time of i."""
        time, used = y[..., 0], mask != 0
        risky = (time[..., None, :] >= time[..., :, None]) & used[..., None, :]
        scores = out[..., 0]
        low = torch.finfo(out.dtype).min / 4
        rows = torch.where(risky, scores[..., None, :], low)
        total = torch.logsumexp(rows, -1)
        event = (y[..., 1] > 0) & used
        return total, rows - total[..., None], event

    def nll(self, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """Return each sample's term of Cox's partial likelihood."""
        total, _, event = self.shares(out, y, mask)
        return torch.where(event, total - out[..., 0], 0.0)

    def curvature(self, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """Return the diagonal of the second derivative of the batch's sum."""
        _, logs, event = self.shares(out, y, mask)
        p = logs.exp()
        return (p * (1 - p) * event[..., None]).sum(-2)[..., None, None]

    def predict(self, out: Tensor) -> Tensor:
        """Return the score."""
        return out

    def mean(self, prediction: Tensor) -> Tensor:
        """Return the score: a time needs a baseline (`breslow`)."""
        return prediction[..., 0]

    def quantile(self, prediction: Tensor, share: float) -> Tensor:
        """Raise: a score alone has no quantiles."""
        raise NotImplementedError("Cox's model needs a baseline for quantiles; see `breslow`")

    def sample(self, prediction: Tensor, generator: torch.Generator) -> Tensor:
        """Raise: a score alone has no times."""
        raise NotImplementedError("Cox's model needs a baseline for times; see `breslow`")

    def risk(self, prediction: Tensor) -> Tensor:
        """Return σ(score)."""
        return torch.sigmoid(prediction[..., 0])

    def test_nll(self, prediction: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """Return each sample's term of the partial likelihood of these samples."""
        return self.nll(prediction, y, mask)


def at_times(scores: Tensor, y: Tensor, mask: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
    """Return (events at each of `times`, Σ e^score of those at risk at it): sums that clients may
    add for a common baseline.
    """
    used = mask != 0
    events = ((y[:, :1] == times) & (y[:, 1:] > 0) & used[:, None]).sum(0).double()
    risky = (y[:, :1] >= times) & used[:, None]
    return events, (scores.double().exp()[:, None] * risky).sum(0)


def breslow(events: Tensor, at_risk: Tensor) -> Tensor:
    """Return the cumulative baseline hazard at the times of `at_times` (Breslow):
    S(t|x) = exp(−H(t) e^score).
    """
    return torch.where(events > 0, events / at_risk.clamp(min=1e-300), 0.0).cumsum(0)
