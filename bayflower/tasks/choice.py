"""From settings to a task."""

from __future__ import annotations

import math
from typing import Any

from ..errors import ConfigError
from .classes import Classification, Ordinal
from .counts import NegativeBinomial, Poisson
from .labels import SeveralLabels
from .numbers import Gaussian, Noise, StudentT, moments
from .survival import Cox, Hazards
from .task import Task
from .times import histogram

# task: (what it is, its likelihoods, the usual one first)
TASKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "classification": ("one of some classes", ("softmax",)),
    "regression": ("a number", ("gaussian", "student-t")),
    "counts": ("how often something happened", ("poisson", "negative-binomial")),
    "ordinal": ("one of some classes that have an order", ("cumulative",)),
    "labels": ("several labels, each true or not", ("bernoulli",)),
    "survival": ("the time to an event that may not have been seen", ("hazard", "cox")),
}


def likelihood_of(task: str, likelihood: str) -> str:
    """Return the likelihood of a task; "auto" is its usual one."""
    if task not in TASKS:
        raise ConfigError(f"task must be one of {', '.join(TASKS)}, got {task!r}")
    known = TASKS[task][1]
    if likelihood == "auto":
        return known[0]
    if likelihood not in known:
        raise ConfigError(
            f"likelihood must be auto, {' or '.join(known)} for task={task}, got {likelihood!r}"
        )
    return likelihood


def make(
    task: str,
    likelihood: str = "auto",
    *,
    size: int = 1,
    noise: Noise = "global",
    noise_std: float = 1.0,
    dof: int = 4,
    location: float = 0.0,
    scale: float = 1.0,
    edges: tuple[float, ...] = (),
    horizon: float = 0.0,
) -> Task:
    """Return the task of these settings; `size` is the number of classes or labels."""
    kind = likelihood_of(task, likelihood)
    if kind in ("gaussian", "student-t"):
        if not (0 < noise_std < math.inf):
            raise ConfigError(f"noise_std must be positive and finite, got {noise_std}")
        if dof < 3:
            raise ConfigError(f"dof must be a whole number from 3, got {dof}")
        if kind == "gaussian":
            return Gaussian(noise, noise_std, location, scale)
        return StudentT(noise, noise_std, location, scale, dof)
    if kind in ("hazard", "cox"):
        if not 0 <= horizon < math.inf:
            raise ConfigError(f"horizon must be a time from 0, got {horizon}")
        if not edges or any(b <= a for a, b in zip((0.0, *edges), edges, strict=False)):
            raise ConfigError(f"edges must be rising times above 0, got {edges}")
        return Hazards(edges, horizon) if kind == "hazard" else Cox(edges, horizon)
    if kind in ("cumulative", "bernoulli", "softmax") and size < 1:
        raise ConfigError(f"task={task} needs at least one class or label, got {size}")
    return {
        "softmax": lambda: Classification(size),
        "cumulative": lambda: Ordinal(size),
        "bernoulli": lambda: SeveralLabels(size),
        "poisson": Poisson,
        "negative-binomial": NegativeBinomial,
    }[kind]()


def target_sums(task: str, y: Any) -> tuple[float, ...]:
    """Return the sums of one client's training targets that everyone's settings may need: moments
    of numbers, or a histogram of event times.
    """
    return histogram(y.tolist()) if task == "survival" else moments(y.tolist())
