"""A personal model of numbers, counts or ordered classes: a regressor as in scikit-learn, with
intervals, quantiles and draws.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..calibration import intervals
from ..errors import ConfigError
from ..tasks import Task
from ..tree import Tensors
from .classifier import Personal
from .spreading import ReadyNumbers, has_quantiles

USE = "use predict, predict_interval, predict_quantile or sample"


class Interval(NamedTuple):
    """What a model says of N samples: the mean, and an interval that holds the target with
    probability `level`.
    """

    mean: np.ndarray  # (N,)
    lower: np.ndarray  # (N,)
    upper: np.ndarray  # (N,)
    level: float
    promise: str


class PersonalNumbers(Personal):
    """One client's own model of numbers, counts or ordered classes.

    `predict` returns means (ordered classes: the likeliest), `predict_interval` and
    `predict_quantile` what the target lies in, noise and the uncertainty of the model included,
    `sample` draws. It has the methods of a scikit-learn regressor. As a torch module it maps a
    tensor to the parameters of the predictive distribution.
    """

    _estimator_type = "regressor"

    def __init__(self, ready: nn.Module, card: dict[str, Any], extras: Tensors, task: Task) -> None:
        super().__init__(ready, card, extras)
        self.task = task
        self.factors = extras.get("interval/factors")
        if task.whole:
            self._estimator_type = "classifier"

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.ready, ReadyNumbers):
            return self.ready.parameters_of(self.ready.prepared(x)).to(x.dtype)
        return self._distribution(self.ready(x))

    def _distribution(self, said: Any) -> Any:
        return said["probabilities" if self.task.whole else "parameters"]

    def _given(self, given: Any) -> Tensor:
        """Return the parameters of the predictive distribution for inputs of any kind."""
        return torch.as_tensor(self._distribution(self._said(given)))

    # -- predictions -------------------------------------------------------------------------------
    def predict(self, X: Any) -> np.ndarray:  # noqa: N803 (scikit-learn's name)
        """Return the mean of each sample (N,); of ordered classes the likeliest."""
        said = self._said(X)
        return said["probabilities"].argmax(1) if self.task.whole else said["mean"]

    def predict_proba(self, X: Any) -> np.ndarray:  # noqa: N803
        """Return probabilities (N, K) of ordered classes; other tasks have none."""
        if not self.task.whole:
            raise ConfigError(f"a model of {self.task.name} has no classes; {USE}")
        return self._said(X)["probabilities"]

    def predict_interval(self, X: Any, level: float = 0.9) -> np.ndarray:  # noqa: N803
        """Return the ends (N, 2) of intervals that hold the target with probability `level`."""
        check_share("level", level)
        self._need_quantiles()
        found = intervals.interval(self.task, self._given(X), level, self.factors)
        return np.stack([one.double().numpy() for one in found], -1)

    def predict_quantile(self, X: Any, shares: Any = (0.05, 0.5, 0.95)) -> np.ndarray:  # noqa: N803
        """Return the values (N, len(shares)) below which the target lies with each probability."""
        self._need_quantiles()
        parameters, found = self._given(X), []
        for share in np.atleast_1d(shares).tolist():
            check_share("a share", share)
            level = abs(2 * share - 1)
            if level and intervals.factor_at(self.task, self.factors, level) is not None:
                both = intervals.interval(self.task, parameters, level, self.factors)
                found.append(both[int(share > 0.5)])
            else:
                found.append(self.task.quantile(parameters, share))
        return np.stack([one.double().numpy() for one in found], -1)

    def sample(self, X: Any, number: int = 100, seed: int = 0) -> np.ndarray:  # noqa: N803
        """Return draws (number, N) from the predictive distribution."""
        parameters, draw = self._given(X), torch.Generator().manual_seed(seed)
        return np.stack([self.task.sample(parameters, draw).numpy() for _ in range(number)])

    def score(self, X: Any, y: Any) -> float:  # noqa: N803
        """Return R², one minus the squared error over that of the mean; of ordered classes the
        accuracy.
        """
        if self.task.whole:
            return super().score(X, y)
        found, wanted = self.predict(X), np.asarray(y, np.float64).reshape(-1)
        if len(found) != len(wanted):
            raise ConfigError(
                f"there are {len(found)} samples and {len(wanted)} targets; give one for each"
            )
        return float(1 - ((wanted - found) ** 2).sum() / ((wanted - wanted.mean()) ** 2).sum())

    def uncertainty(self, X: Any, level: Any = None) -> Any:  # noqa: N803
        """Return the mean and the interval of each sample."""
        share = self.card["uncertainty"]["intervals"]["level"] if level is None else float(level)
        ends = self.predict_interval(X, share)
        mean = np.asarray(self.predict(X), np.float64)
        promise = self.card["uncertainty"]["intervals"]["promise"]
        return Interval(mean, ends[:, 0], ends[:, 1], share, promise)

    def drift(self, X: Any) -> Any:  # noqa: N803
        """Refuse: alarms are measures of doubt about classes."""
        raise ConfigError(f"alarms and drift are for task=classification; {USE}")

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import RegressorTags

        tags = super().__sklearn_tags__()
        if not self.task.whole:
            tags.estimator_type, tags.classifier_tags = "regressor", None
            tags.regressor_tags = RegressorTags()
        return tags

    def _need_quantiles(self) -> None:
        if not has_quantiles(self.task):
            raise ConfigError(f"a model of {self.task.name} has no intervals; use predict")


def check_share(name: str, value: Any) -> None:
    """Raise unless a value is a share."""
    if not isinstance(value, (int, float)) or not 0 < value < 1:
        raise ConfigError(f"{name} must be in (0, 1), got {value!r}; 0.9 means 90 %")
