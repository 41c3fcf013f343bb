"""A personal model of times to an event or of several labels.

Beside `input/…` and `posterior/…` (network.py), extras.safetensors of Cox's model has

    baseline/hazard     H at the ends of the intervals: S(t|x) = exp(−H(t) e^score)

Programs (pt2, ONNX) give `survival` (N, K) at the ends of the intervals, `risk` and `median` (N,),
the first end by which half are expected to have had the event, ∞ if there is none; or
`probabilities` (N, L) of the labels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..rounds.spread import Taken
from ..tasks import Task
from ..tasks.survival import Cox, Hazards, breslow
from ..tree import Tensors
from .card import point_only
from .classifier import Personal
from .numbers import check_share
from .spreadcard import why
from .spreading import ReadyNumbers

KEYS = (
    *("num_examples", "events", "nll", "c_index", "c_index_uno", "integrated_brier", "brier"),
    *("horizon", "calibration_error", "label_accuracy", "macro_auroc", "macro_auprc"),
    *("micro_auroc", "micro_auprc"),
)
BASELINE = "baseline/hazard"


class ReadyEvents(ReadyNumbers):
    """The network with its inputs' preparation and its curves, or its labels' probabilities; their
    mean where the last layer's weights are uncertain.
    """

    def __init__(
        self,
        network: nn.Module,
        extras: Tensors | None,
        kind: str,
        layer: str | None,
        task: Task,
    ) -> None:
        super().__init__(network, extras, kind, layer, task, 0.0)
        if isinstance(task, Hazards):
            ends = torch.tensor((*task.edges, float("inf")), dtype=torch.float64)
            self.register_buffer("ends", ends, persistent=False)

    def outputs(self, x: Tensor) -> Tensors:
        """Return what the model says of prepared inputs, by name."""
        found = self.parameters_of(x)
        if not isinstance(self.task, Hazards):
            return {"probabilities": found}
        curves, risk = found, None
        if isinstance(self.task, Cox):
            risk = found[:, 0]
            spread = found[:, 1] if found.shape[1] > 1 else None
            curves = self.task.curves(risk, self.extras()[BASELINE], spread)
        known: Any = self.ends
        return {
            "survival": curves,
            "risk": self.task.risk(curves) if risk is None else risk,
            "median": known[(curves > 0.5).sum(-1)],
        }


class PersonalSurvival(Personal):
    """One client's own model of the time to an event.

    `predict` returns a risk for each sample, as estimators of scikit-survival do: the higher, the
    earlier. `predict_survival` returns S(t), `predict_median` times. As a torch module it maps a
    tensor to the curves (N, K) at `times`.
    """

    _estimator_type = "survival"

    @property
    def times(self) -> np.ndarray:
        """Return the ends of the intervals (K,)."""
        return np.array(self.card["task"]["edges"])

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.ready(x)["survival"]
        return found.to(x.dtype)

    def predict(self, X: Any) -> np.ndarray:  # noqa: N803 (scikit-learn's name)
        """Return the risk of each sample (N,): Cox's score, or one minus the mean of S."""
        return self._said(X)["risk"]

    def predict_survival(self, X: Any, times: Any = None) -> np.ndarray:  # noqa: N803
        """Return S(t) (N, len(times)); without `times` at the ends of the intervals. Between two
        ends the curve is that of the earlier one, as in Kaplan and Meier's.
        """
        curves = self._said(X)["survival"]
        if times is None:
            return curves
        asked = np.atleast_1d(np.asarray(times, np.float64))
        if not (asked >= 0).all():
            raise ConfigError("times must be numbers from 0")
        whole = np.concatenate([np.ones((len(curves), 1)), curves], 1)
        return whole[:, np.searchsorted(self.times, asked, side="right")]

    def predict_median(self, X: Any) -> np.ndarray:  # noqa: N803
        """Return the first end by which half are expected to have had the event, ∞ if none."""
        return self._said(X)["median"]

    def predict_quantile(self, X: Any, shares: Any = (0.1, 0.5, 0.9)) -> np.ndarray:  # noqa: N803
        """Return the first ends (N, len(shares)) by which the event has happened with each
        probability, ∞ if none.
        """
        asked = np.atleast_1d(np.asarray(shares, np.float64))
        for share in asked.tolist():
            check_share("a share", share)
        curves, ends = self._said(X)["survival"], np.append(self.times, np.inf)
        return np.stack([ends[(curves > 1 - share).sum(-1)] for share in asked], -1)

    def predict_proba(self, X: Any) -> np.ndarray:  # noqa: N803
        """Refuse: there are no classes."""
        raise ConfigError("a model of survival has no classes; use predict_survival")

    def score(self, X: Any, y: Any) -> float:  # noqa: N803
        """Return Harrell's C-index on samples X with targets y (N, 2), time and event."""
        risk, (time, event) = self.predict(X), np.asarray(y, np.float64).T
        right = pairs = 0.0
        for i in np.flatnonzero(event):
            later = (time > time[i]) | ((time == time[i]) & (event == 0))
            right += (risk[later] < risk[i]).sum() + 0.5 * (risk[later] == risk[i]).sum()
            pairs += later.sum()
        return float(right / pairs) if pairs else float("nan")

    def uncertainty(self, X: Any, abstain: float | None = None) -> Any:  # noqa: N803
        """Refuse: sets are of classes."""
        raise ConfigError("a model of survival has no sets; use predict_survival")

    def drift(self, X: Any) -> Any:  # noqa: N803
        """Refuse: alarms are measures of doubt about classes."""
        raise ConfigError("alarms and drift are for task=classification; use predict_survival")


class PersonalLabels(Personal):
    """One client's own model of several labels: `predict_proba` returns the probability of each
    (N, L), `predict` whether it is likelier than not.
    """

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.ready(x)["probabilities"]
        return found.to(x.dtype)

    def predict(self, X: Any) -> np.ndarray:  # noqa: N803
        """Return 0 and 1 (N, L)."""
        return (self.predict_proba(X) >= 0.5).astype(np.int64)

    def score(self, X: Any, y: Any) -> float:  # noqa: N803
        """Return the share of known labels that are predicted right."""
        known = np.asarray(y, np.float64)
        there = np.nan_to_num(known, nan=-1) >= 0
        return float((self.predict(X) == known)[there].mean())

    def uncertainty(self, X: Any, abstain: float | None = None) -> Any:  # noqa: N803
        """Refuse: sets are of classes."""
        raise ConfigError("a model of several labels has no sets; use predict_proba")

    def drift(self, X: Any) -> Any:  # noqa: N803
        """Refuse: alarms are measures of doubt about classes."""
        raise ConfigError("alarms and drift are for task=classification; use predict_proba")


def model_of(ready: nn.Module, card: dict[str, Any], extras: Tensors) -> Personal:
    """Return the model of a card whose task is survival or labels."""
    kind = PersonalLabels if card["task"]["name"] == "labels" else PersonalSurvival
    return kind(ready, card, extras).eval()


# -- what a client keeps -------------------------------------------------------------------------
def extras_of(task: Task, tally: Any, baseline: Tensor | None) -> Tensors:
    """Return what surrounds the network: the baseline of everyone, or without it the client's own
    from what its test counted.
    """
    if not isinstance(task, Cox):
        return {}
    own = breslow(tally.events, tally.at_risk) if baseline is None else baseline
    return {BASELINE: own.double().cpu()}


def block(taken: Taken, task: Task, baseline: Tensor | None) -> dict[str, Any]:
    """Return the block "uncertainty" of a card."""
    name = taken.one.choice.posterior
    kind, origin = taken.kinds.get(name, ("", ""))
    forms = {form: metrics_of(task, one, baseline) for form, one in taken.one.judged.items()}
    return {
        **point_only(why(taken)),
        "used": "posterior" if name else "point",
        "posterior": {"name": name, "kind": kind, "origin": origin} if name else None,
        "doubt": "It is in the probabilities: curves and labels are means over the posterior.",
        "tests": {"test": forms} if forms["point"] else None,
        "information": {"offered": False, "why": "It is a measure of classes."},
    }


def metrics_of(task: Task, tally: Any, baseline: Tensor | None) -> dict[str, Any] | None:
    """Return the metrics of a card, under the baseline that the model has."""
    if isinstance(task, Cox) and baseline is not None:
        tally = task.under(tally, baseline)
    found = task.summarise({0: tally})
    return {key: found[key] for key in KEYS if key in found} if found["num_examples"] else None


def targets_of(task: Task, y: Tensor) -> dict[str, Any]:
    """Return what training targets are like."""
    if not isinstance(task, Hazards):
        return {"true": (y > 0).sum(0).tolist(), "known": (y >= 0).sum(0).tolist()}
    return {"events": int((y[:, 1] > 0).sum()), "longest": float(y[:, 0].max())}
