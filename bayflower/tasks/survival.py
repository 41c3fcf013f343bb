"""Times to an event, some of them censored: y = (time, event), event 1 if it was seen at `time` and
0 if only that it had not happened by then.

    edges e_1 < … < e_K of intervals (e_{k−1}, e_k], e_0 = 0; h_k the probability of an event in
    interval k if there was none before; S_k = Π_{i≤k} (1 − h_i)
    h_k = σ(f_k + c), c such that f = 0 means S_K = ½ and equal hazards

    discrete    −log p = −event · log h_j − Σ_{i<j} log(1 − h_i),  j the interval of the time;
                I = diag(h_i (1 − h_i)) over the intervals at risk
    Cox         −event · (f − log Σ_{l at risk} e^{f_l}), Breslow's form of ties, within a batch;
                I_jj = Σ_i event_i p_ij (1 − p_ij),  p_ij = e^{f_j} / Σ_{l at risk at t_i} e^{f_l}
    Breslow     H_k = Σ_{j≤k} d_j / R_j,  S_k = exp(−H_k e^f);  d_j everyone's events in interval j,
                R_j = Σ_l e^{f_l} × (the share of interval j for which l is at risk)

Who is at risk at t: those with time ≥ t. A censored time counts the intervals it has completed. Cox
needs batches of many samples (the loss couples them): risk sets are those of a client's batch. Its
networks have no bias in the last layer, which no loss would see. d and R are sums over training
samples, which clients add for a common baseline; for times on the edges it is Breslow's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..metrics import GRID, LARGEST_NLL, add, on_grid
from . import censored
from .censored import NEAR, SCORES, Parts
from .task import Task, over_gaussian

LARGEST_SCORE = 13.0  # of Cox's model, where e^score is summed


class Events(NamedTuple):
    """What is counted on test samples (`censored.py`)."""

    num_examples: Tensor
    nll: Tensor
    table: Tensor
    early: Tensor
    late: Tensor
    near: Tensor
    said: Tensor
    whole: Tensor


class Scores(NamedTuple):
    """What is counted for Cox's model: the table of test samples, and d and R of training ones."""

    num_examples: Tensor
    table: Tensor
    events: Tensor  # (K,)
    at_risk: Tensor  # (K,)


@dataclass(frozen=True)
class Hazards(Task):
    """Discrete times with a logit of the hazard in every interval. Prediction: S_1, …, S_K."""

    edges: tuple[float, ...]
    horizon: float = 0.0  # time at which calibration is judged; 0 = the middle edge

    name = "survival"
    events = True
    target = (2,)
    curve = ("nll", "c_index")

    @property
    def network(self) -> int:
        """Return one logit an interval."""
        return len(self.edges)

    @property
    def start(self) -> float:
        """Return c: the logit of 1 − 2^(−1/K)."""
        return math.log(math.expm1(math.log(2) / len(self.edges)))

    def interval(self, y: Tensor) -> Tensor:
        """Return the number of the interval of each time; K beyond the last edge."""
        return (y[..., 0, None].double() > on_device(self.edges, y.device)).sum(-1)

    def at_risk(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return (intervals survived, the interval of the event), as 0 and 1 (B, K)."""
        place, every = self.interval(y)[..., None], torch.arange(len(self.edges), device=y.device)
        return every < place, (every == place) & (y[..., 1, None] > 0)

    def nll(self, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """Return −log p(y)."""
        survived, event = self.at_risk(y)
        logs, out = nn.functional.logsigmoid, out + self.start
        return -(logs(-out) * survived + logs(out) * event).sum(-1)

    def curvature(self, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """Return I."""
        survived, event = self.at_risk(y)
        out = out + self.start
        return torch.diag_embed(torch.sigmoid(out) * torch.sigmoid(-out) * (survived | event))

    def predict(self, out: Tensor) -> Tensor:
        """Return the survival function at the edges."""
        return torch.exp(nn.functional.logsigmoid(-out - self.start).cumsum(-1))

    def widened(self, out: Tensor, variance: Tensor) -> Tensor:
        """Return the mean of S over independent Gaussian logits: Π_{i≤k} E[1 − h_i]."""
        stays = over_gaussian(torch.sigmoid, -out - self.start, variance)
        tiny = torch.finfo(stays.dtype).tiny
        return torch.exp(stays.clamp(min=tiny).log().cumsum(-1))

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
    @property
    def judged_at(self) -> int:
        """Return the number of the edge that is nearest to the horizon."""
        if not self.horizon:
            return (len(self.edges) - 1) // 2
        return min(range(len(self.edges)), key=lambda k: abs(self.edges[k] - self.horizon))

    def risk(self, prediction: Tensor) -> Tensor:
        """Return the risk in [0, 1] that orders samples: 1 − the mean of S."""
        return 1 - prediction.mean(-1)

    def test_nll(self, prediction: Tensor, y: Tensor) -> Tensor:
        """Return −log p(y) from the survival function."""
        tiny = torch.finfo(prediction.dtype).tiny
        curve = torch.cat([torch.ones_like(prediction[..., :1]), prediction], -1)
        place = self.interval(y)
        here = curve.gather(-1, place[..., None])[..., 0]
        after = curve.gather(-1, (place + 1).clamp(max=len(self.edges))[..., None])[..., 0]
        event = (y[..., 1] > 0) & (place < len(self.edges))
        return -torch.where(event, here - after, here).clamp(min=tiny).log()

    def table(self, risk: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """Return samples by event, interval and bin of the risk."""
        bins = (risk * SCORES).long().clamp(0, SCORES - 1)
        shape = (2, len(self.edges) + 1, SCORES)
        return censored.counted(self.interval(y), y[..., 1] > 0, bins, mask != 0, shape)

    def zero(self) -> Any:
        """Return the tally of no samples."""
        n, k = torch.zeros((), dtype=torch.int64), len(self.edges)
        table, close = torch.zeros(2, k + 1, SCORES).long(), torch.zeros(2, k + 1, NEAR).long()
        squares = torch.zeros(k, k, dtype=torch.float64)
        none = squares.new_zeros(NEAR)
        return Events(n, n.double(), table, squares, squares[0], close, none, squares[0])

    def tally(self, prediction: Tensor, y: Tensor, mask: Tensor) -> Any:
        """Return the tally; what is not finite counts as a curve of ½."""
        used, known = mask != 0, torch.nan_to_num(prediction.double(), nan=0.5).clamp(0, 1)
        nll = self.test_nll(known, y).clamp(max=LARGEST_NLL)
        place, event = self.interval(y), y[..., 1] > 0
        every = torch.arange(len(self.edges), device=y.device)
        here = (place[:, None] == every) & (event & used)[:, None]
        squares, rest = (
            on_grid(part).double() / GRID for part in (known.square(), (1 - known).square())
        )
        risk = 1 - known[..., self.judged_at]
        bins, shape = censored.near(risk), (2, len(self.edges) + 1, NEAR)
        return Events(
            used.sum(),
            (on_grid(nll) * used).sum().double() / GRID,
            self.table(self.risk(known), y, mask),
            torch.triu(here.double().mT @ squares),
            (rest * ((place[:, None] > every) & used[:, None])).sum(0),
            censored.counted(place, event, bins, used, shape),
            censored.one_hot(bins, NEAR).mT @ (on_grid(risk).double() / GRID * used),
            (on_grid(known) * used[:, None]).sum(0).double() / GRID,
        )

    def possible(self, tally: Any) -> bool:
        """Return whether a tally can have come from samples."""
        number = int(tally.num_examples)
        sums = (tally.early, tally.late, tally.said, tally.whole)
        return (
            0 <= number < 2**40
            and all(bool((one >= 0).all()) for one in (tally.table, tally.near, *sums))
            and int(tally.table.sum()) == int(tally.near.sum()) == number
            and all(bool((one <= number).all()) for one in sums)
            and abs(float(tally.nll)) <= LARGEST_NLL * number
        )

    def parts(self, tally: Any, pooled: Any) -> tuple[Parts, float]:
        """Return (what is judged, Σ −log p) of some samples; `pooled` are those of everyone."""
        return Parts(*tally[2:]), float(tally.nll)

    def summarise(self, tallies: Mapping[int, Any]) -> dict[str, Any]:
        """Return the block METRICS of a result; `c_index` compares all samples, of whatever
        client, `c_index_within` only those of the same client.
        """
        clients = [(client, tallies[client]) for client in sorted(tallies)]
        pooled = reduce(add, (t for _, t in clients)) if clients else self.zero()

        def of(tally: Any) -> dict[str, Any]:
            return censored.shown(*self.parts(tally, pooled), self.edges, self.judged_at)

        parts, _ = self.parts(pooled, pooled)
        pairs = [censored.concordance(t.table) for _, t in clients]
        within = sum(pair[1] for pair in pairs)
        return {
            "num_clients": sum(int(t.num_examples) > 0 for _, t in clients),
            **of(pooled),
            "c_index_within": sum(pair[0] for pair in pairs) / within if within else None,
            "horizon": self.edges[self.judged_at],
            "calibration": censored.calibration(parts, self.judged_at),
            "calibration_groups": censored.grouped(parts, self.judged_at),
            "curve": censored.over_time(parts, self.edges),
            **self.also(pooled),
            "per_client": [{"client": int(client), **of(t)} for client, t in clients],
        }

    def also(self, pooled: Any) -> dict[str, Any]:
        """Return what else a result shows."""
        return {}


@dataclass(frozen=True)
class Cox(Hazards):
    """Proportional hazards: one score a sample. Prediction: the score, with its variance where
    there is a posterior. `edges` are the times of the baseline.
    """

    coupled = True
    shifts = True
    tallies_training = True

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

    def widened(self, out: Tensor, variance: Tensor) -> Tensor:
        """Return (score, variance): `curves` takes the mean over them."""
        return torch.cat([out, variance.to(out.dtype)], -1)

    def mixed(self, predictions: Tensor) -> Tensor:
        """Return the mean score."""
        return predictions[..., :1].mean(0)

    def mean(self, prediction: Tensor) -> Tensor:
        """Return the score: a time needs a baseline (`breslow`)."""
        return prediction[..., 0]

    def quantile(self, prediction: Tensor, share: float) -> Tensor:
        """Raise: a score alone has no quantiles."""
        raise NotImplementedError("Cox's model needs a baseline for quantiles; see `breslow`")

    def sample(self, prediction: Tensor, generator: torch.Generator) -> Tensor:
        """Raise: a score alone has no times."""
        raise NotImplementedError("Cox's model needs a baseline for times; see `breslow`")

    # -- metrics -----------------------------------------------------------------------------------
    def risk(self, prediction: Tensor) -> Tensor:
        """Return σ(score)."""
        return torch.sigmoid(prediction[..., 0])

    def zero(self) -> Any:
        """Return the tally of no samples."""
        n, k = torch.zeros((), dtype=torch.int64), len(self.edges)
        table, sums = torch.zeros(2, k + 1, SCORES).long(), torch.zeros(k, dtype=torch.float64)
        return Scores(n, table, torch.zeros(k, dtype=torch.int64), sums)

    def tally(self, prediction: Tensor, y: Tensor, mask: Tensor) -> Any:
        """Return the table of test samples; a score that is not finite counts as 0."""
        known = torch.nan_to_num(prediction.double(), nan=0.0)
        none = known.new_zeros(len(self.edges))
        return Scores((mask != 0).sum(), self.table(self.risk(known), y, mask), none.long(), none)

    def tally_training(self, prediction: Tensor, y: Tensor, mask: Tensor) -> Any:
        """Return d and R of training samples, as a tally."""
        scores = torch.nan_to_num(prediction[..., 0].double(), nan=0.0)
        ends = on_device((0.0, *self.edges), y.device)
        time = y[..., :1].double()
        at_risk = ((time - ends[:-1]) / ends.diff()).clamp(0, 1) * (mask != 0)[:, None]
        rates = scores.clamp(-LARGEST_SCORE, LARGEST_SCORE).exp()
        _, event = self.at_risk(y)
        empty = y.new_zeros((), dtype=torch.int64)
        return Scores(
            empty,
            empty.expand(2, len(self.edges) + 1, SCORES),
            (event & (mask != 0)[:, None]).sum(0),
            on_grid(rates[:, None] * at_risk).sum(0).double() / GRID,
        )

    def possible(self, tally: Any) -> bool:
        """Return whether a tally can have come from samples."""
        number = int(tally.num_examples)
        return (
            0 <= number < 2**40
            and all(bool((one >= 0).all()) for one in tally)
            and int(tally.table.sum()) == number
            and bool((tally.at_risk < 2.0**60).all())
            and bool((tally.events < 2**40).all())
        )

    def curves(self, scores: Tensor, hazard: Tensor, variance: Tensor | None = None) -> Tensor:
        """Return S at the edges (B, K) for a cumulative baseline hazard (K,); of a Gaussian score
        its mean.
        """

        def one(score: Tensor) -> Tensor:
            return torch.exp(-hazard * score.exp())

        if variance is None:
            return one(scores[:, None])
        return over_gaussian(one, scores[:, None], variance[:, None])

    def parts(self, tally: Any, pooled: Any) -> tuple[Parts, float]:
        """Return (what is judged, Σ −log p) under everyone's baseline."""
        middle = (torch.arange(SCORES, dtype=torch.float64) + 0.5) / SCORES
        curves = self.curves(torch.logit(middle), breslow(pooled.events, pooled.at_risk))
        parts = censored.of_curves(tally.table, curves, self.judged_at)
        return parts, censored.of_table(tally.table, curves)

    def under(self, tally: Any, hazard: Tensor) -> Any:
        """Return a tally whose baseline is a given one."""
        steps = hazard.double().diff(prepend=hazard.new_zeros(1).double())
        return tally._replace(events=(steps > 0).long(), at_risk=1 / steps.clamp(min=1e-300))

    def also(self, pooled: Any) -> dict[str, Any]:
        """Return the common baseline: S(t|x) = exp(−H(t) e^score) at these times."""
        hazard = breslow(pooled.events, pooled.at_risk)
        return {"baseline": {"times": list(self.edges), "cumulative_hazard": hazard.tolist()}}


def on_device(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return numbers as a tensor (float64); on a GPU without a copy from the host, which a
    recorded step must not make.
    """
    if device.type != "cuda":
        return torch.tensor(values, dtype=torch.float64, device=device)
    each = [torch.full((), one, dtype=torch.float64, device=device) for one in values]
    return torch.stack(each)


def breslow(events: Tensor, at_risk: Tensor) -> Tensor:
    """Return the cumulative baseline hazard H at the edges."""
    return torch.where(events > 0, events / at_risk.clamp(min=1e-300), 0.0).cumsum(0)
