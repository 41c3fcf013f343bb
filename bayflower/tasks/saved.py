"""A task in JSON types, for results and personal models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from ..errors import ConfigError
from .classes import Classification, Ordinal
from .counts import NegativeBinomial, Poisson
from .labels import SeveralLabels
from .numbers import Gaussian, StudentT
from .survival import Cox, Hazards
from .task import Task

KINDS: dict[str, type[Task]] = {
    "softmax": Classification,
    "gaussian": Gaussian,
    "student-t": StudentT,
    "poisson": Poisson,
    "negative-binomial": NegativeBinomial,
    "cumulative": Ordinal,
    "bernoulli": SeveralLabels,
    "hazard": Hazards,
    "cox": Cox,
}


def likelihood_of(task: Task) -> str:
    """Return the name of a task's likelihood."""
    return next(name for name, kind in KINDS.items() if type(task) is kind)


def to_json(task: Task) -> dict[str, Any]:
    """Return a task with everything that it needs to be made again."""
    known = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(task).items()}
    return {"name": task.name, "likelihood": likelihood_of(task), **known}


def from_json(said: Mapping[str, Any]) -> Task:
    """Return the task that `to_json` described."""
    kind = KINDS.get(str(said.get("likelihood")))
    if kind is None:
        raise ConfigError(f"likelihood {said.get('likelihood')!r} is unknown; update Bayflower")
    names = {field.name for field in fields(kind)}
    known = {name: value for name, value in said.items() if name in names}
    return kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in known.items()})
