"""A recipe and the data: whether it suits them, and what it takes from all clients' labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..data import DataSettings
from ..data.checks import measured
from ..data.moments import together as together_inputs
from ..data.outcomes import kind_of
from ..errors import ConfigError
from ..tasks.numbers import standardising
from ..tasks.times import quantiles
from .labels import FEDERATION, balanced, given
from .settings import Training

CALIBRATED = ("classification", "regression")  # tasks whose models can be calibrated
SUMS = ("target_sums", "input_sums")  # what clients report of targets and inputs, if asked


def checked(training: Training, input_shape: Sequence[int], classes: int) -> Training:
    """Return the settings; raise if a recipe cannot be used on inputs of this shape."""
    listed = given(training.class_weights)
    if listed and len(listed) != classes:
        raise ConfigError(
            f"class_weights lists {len(listed)} numbers, but there are {classes} classes; give "
            "one number a class"
        )
    plan = training.augmentation
    if plan.images and len(input_shape) != 3:
        raise ConfigError(
            f"{', '.join(plan.images)} needs images of shape (channels, height, width), but inputs "
            f"have shape {tuple(input_shape)}; switch it off for these data"
        )
    side = min(input_shape[-2:], default=0)
    for name in ("crop_padding", "cutout"):
        if getattr(plan, name) > side > 0 and plan.images:
            raise ConfigError(
                f"{name} must be at most {side}, the smaller side of the images, got "
                f"{getattr(plan, name)}"
            )
    return training


def reading_for(training: Training, given: Mapping[str, Any]) -> DataSettings:
    """Return how data are read for the task, from the settings of data that were given."""
    known, task = {**given, "scaling": training.scaling}, training.task
    if given.get("scaling", training.scaling) != training.scaling:
        raise ConfigError("scaling follows from input_scale; set input_scale instead")
    measured(str(given.get("dataset", "")), task)
    if task == "classification":
        return DataSettings(**known)
    if task != "ordinal":
        known["targets"] = kind_of(task)
        known.setdefault("min_size", 1)
    if task not in CALIBRATED:
        check_calibrated(task, known.get("calibration", "off"))
        known["calibration"] = "off"
    return DataSettings(**known)


def check_calibrated(task: str, calibration: str) -> None:
    """Raise if models of a task cannot be calibrated, and are to be."""
    if calibration != "off" and task not in CALIBRATED:
        raise ConfigError(
            f"calibration is for task={' and '.join(CALIBRATED)}, got task={task}; set "
            "calibration=off"
        )


def questions(training: Training | None) -> dict[str, bool]:
    """Return what clients are asked besides the usual: counts of labels, sums of targets, sums of
    inputs.
    """
    if training is None:
        return {}
    wanted = {
        "labels": training.class_weights == FEDERATION,
        "sums": training.standardises,
        "inputs": training.scaling == "federation" and not training.scales_by_numbers,
    }
    return {name: True for name, asked in wanted.items() if asked}


def standardised(training: Training, sums: Sequence[Sequence[float]]) -> Training:
    """Return the settings with everyone's mean and standard deviation of the targets, from each
    client's sums (n, Σ y, Σ y²), or with quantiles of everyone's event times, from histograms.
    """
    if not training.standardises:
        return training
    if training.task == "survival":
        if not sums or not all(len(one) % 2 for one in sums):
            raise ConfigError(
                "edges=federation needs every client's histogram of event times, and not all "
                "reported it; install the same version of Bayflower on all, or give times"
            )
        edges = quantiles(sums, training.num_intervals)
        text = ",".join(repr(edge) for edge in edges)
        return replace(training, edges=text, intervals=0)
    if not sums or not all(len(one) == 3 for one in sums):
        raise ConfigError(
            "target_scale=federation needs every client's sums of targets, and not all reported "
            "them; install the same version of Bayflower on all, or give MEAN,STD"
        )
    mean, std = standardising(sums)
    return replace(training, target_scale=f"{mean!r},{std!r}")


def scaled(training: Training, sums: Sequence[Sequence[float]]) -> Training:
    """Return the settings with everyone's means and standard deviations of a table's columns, from
    each client's sums (n, …, Σ x, …, Σ x², …). Clients that report none have no table.
    """
    if training.scaling != "federation" or training.scales_by_numbers:
        return training
    if not any(len(one) for one in sums):
        return replace(training, input_scale="none")
    if len({len(one) for one in sums}) > 1:
        raise ConfigError(
            "input_scale=federation needs every client's sums of inputs, and not all reported "
            "them; install the same version of Bayflower on all, or set input_scale=none"
        )
    return replace(training, input_scale=together_inputs(sums))


def sums_of(facts: Sequence[Any]) -> dict[str, list[Any]]:
    """Return what clients reported of targets and inputs, by name."""
    every = [one._asdict() for one in facts]
    return {name: [one[name] for one in every] for name in SUMS}


def told(training: Training, sums: Mapping[str, Sequence[Sequence[float]]]) -> Training:
    """Return the settings with everyone's numbers, from what clients reported (`SUMS`)."""
    return scaled(standardised(training, sums["target_sums"]), sums["input_sums"])


def resolved(training: Training, counts: Sequence[int] | None) -> Training:
    """Return the settings with the federation's weights as numbers, from everyone's counts."""
    if training.class_weights != FEDERATION:
        return training
    if not counts:
        raise ConfigError(
            "class_weights=federation needs every client's counts of labels, and no client "
            "reported them; install the same version of Bayflower on all, or list the weights"
        )
    weights = balanced(torch.tensor(list(counts))).tolist()
    return replace(training, class_weights=",".join(repr(weight) for weight in weights))
