"""A recipe and the data: whether it suits them, and what it takes from all clients' labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..errors import ConfigError
from ..tasks.numbers import standardising
from .labels import FEDERATION, balanced, given
from .settings import Training


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


def questions(training: Training | None) -> dict[str, bool]:
    """Return what clients are asked besides the usual: counts of labels, or sums of targets."""
    if training is None:
        return {}
    wanted = {"labels": training.class_weights == FEDERATION, "sums": training.standardises}
    return {name: True for name, asked in wanted.items() if asked}


def standardised(training: Training, sums: Sequence[Sequence[float]]) -> Training:
    """Return the settings with everyone's mean and standard deviation of the targets, from each
    client's sums (n, Σ y, Σ y²).
    """
    if not training.standardises:
        return training
    if not sums or not all(len(one) == 3 for one in sums):
        raise ConfigError(
            "target_scale=federation needs every client's sums of targets, and not all reported "
            "them; install the same version of Bayflower on all, or give MEAN,STD"
        )
    mean, std = standardising(sums)
    return replace(training, target_scale=f"{mean!r},{std!r}")


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
