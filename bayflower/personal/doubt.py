"""When not to rely on predictions: abstention at a level of risk, and drift of the inputs.

Abstention. Held-out predictions are counted by doubt, right and wrong. A model answers up to the
largest doubt at which (errors + 1) / (answers + 1) of the held-out samples stays within the risk.

Drift. A measure sounds its alarm on j of n held-out samples. If new samples are like them, the
number of alarms among m new ones is at most beta-binomial(m, j + 1, n − j), whatever the measure's
distribution. Fewer than 1 in 100 batches get a warning by chance, all measures together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..calibration.trust import doubt_bin
from ..errors import ConfigError

LEVEL = 0.01  # of the test for drift


class Drift(NamedTuple):
    """How alarms sound on a batch: `warning` is a line, None if nothing is unusual."""

    warning: str | None
    rates: dict[str, float]  # share of samples with an alarm, by measure
    expected: dict[str, float]  # on samples like the held-out ones
    p_values: dict[str, float]


def drift(alarms: Mapping[str, np.ndarray], card: Mapping[str, Mapping[str, Any]]) -> Drift:
    """Return whether alarms sound more often than chance allows; `card` has the counts on held-out
    samples.
    """
    rates, expected, found = {}, {}, {}
    for name, above in alarms.items():
        fired, held = int(card[name]["held_out"]), int(card[name]["num_held_out"])
        rates[name] = float(above.mean())
        expected[name] = (fired + 1) / (held + 1)
        found[name] = tail(int(above.sum()), len(above), fired + 1, held - fired)
    unusual = [name for name, p in found.items() if p < LEVEL / len(found)]
    if not unusual:
        return Drift(None, rates, expected, found)
    said = ", ".join(
        f"{name} on {rates[name]:.0%} (expected {expected[name]:.0%})" for name in unusual
    )
    size = len(next(iter(alarms.values())))
    return Drift(
        f"these {size} samples are unlike the held-out ones: alarms sound more often than chance "
        f"allows, {said}; check the inputs before relying on probabilities and sets",
        rates,
        expected,
        found,
    )


def tail(count: int, number: int, a: float, b: float) -> float:
    """Return P(X ≥ count) for X beta-binomial(number, a, b)."""
    if count <= 0 or b <= 0:
        return 1.0
    k = torch.arange(count, number + 1, dtype=torch.float64)
    n, lg = float(number), torch.lgamma
    logs = (
        math.lgamma(n + 1)
        - lg(k + 1)
        - lg(n - k + 1)
        + lg(k + a)
        + lg(n - k + b)
        - math.lgamma(n + a + b)
        + math.lgamma(a + b)
        - math.lgamma(a)
        - math.lgamma(b)
    )
    return min(float(logs.logsumexp(0).exp()), 1.0)


def answered(doubt: np.ndarray, right: Tensor, wrong: Tensor, risk: float) -> np.ndarray:
    """Return which samples are answered at a level of risk, bool (N,)."""
    if not 0 < risk < 1:
        raise ConfigError(
            f"abstain must be a share of errors in (0, 1), got {risk}; 0.05 means at most 5 % "
            "errors among the answers"
        )
    number, errors = (right + wrong).cumsum(0).double(), wrong.cumsum(0).double()
    fine = (errors + 1) / (number + 1) <= risk
    last = int(fine.nonzero().max()) if bool(fine.any()) else -1
    return np.asarray(doubt_bin(torch.as_tensor(doubt)) <= last)
