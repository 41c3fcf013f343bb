"""The settings of local training: one frozen dataclass, checked before a run starts."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Literal

from ..contract import Phase
from ..data.moments import read_scaling
from ..errors import ConfigError, check_choices, check_least
from ..maths.optim import Optimizer, OptimizerName
from ..settings import setting
from ..tasks import Task, make
from .augment import Augmentation
from .labels import given
from .rates import Kind, Schedule

Predicted = Literal["classification", "regression", "counts", "ordinal", "survival", "labels"]
Noise = Literal["known", "global", "client", "input"]
RECIPE_OFF = {"mixup": 0.0, "label_smoothing": 0.0, "class_weights": "none"}


@dataclass(frozen=True)
class Training:
    """Local training of a client in one round. All methods of a comparison share these settings."""

    optimizer: OptimizerName = setting(
        "adam", "sgd, adam, adamw or rmsprop; its state is reset in every round"
    )
    lr: float = setting(0.001, "learning rate")
    momentum: float = setting(0.0, "momentum of the optimiser; sgd and rmsprop only")
    weight_decay: float = setting(
        0.0,
        "L2 penalty: weight_decay × parameter joins the gradient; adamw: lr × weight_decay × "
        "parameter is taken off the parameter instead",
    )
    clip_norm: float = setting(0.0, "gradients with a larger norm are clipped; 0 = no clipping")
    batch_size: int = setting(64, "samples in one training step")
    local_epochs: int = setting(5, "passes over a client's training data in one round")
    local_steps: int = setting(0, "training steps in one round, instead of epochs; 0 = use epochs")
    new_client_epochs: int = setting(
        50, "passes over its data when a new client, which took part in no round, adapts"
    )
    # -- from here on the recipe, all of it off ----------------------------------------------------
    nesterov: bool = setting(False, "Nesterov's momentum; optimizer=sgd with momentum only")
    schedule: Kind = setting(
        "constant", "learning rate over the rounds of a run: constant, step or cosine"
    )
    schedule_rounds: int = setting(
        0, "rounds in which schedule=cosine falls to lr_floor; 0 = the rounds of the run"
    )
    drop_rounds: int = setting(0, "schedule=step: rounds between two drops of the learning rate")
    warmup_rounds: int = setting(
        0, "first rounds in which the learning rate rises to lr in equal steps; 0 = none"
    )
    local_schedule: Kind = setting(
        "constant", "learning rate over the steps of a client's round: constant, step or cosine"
    )
    drop_steps: int = setting(0, "local_schedule=step: steps between two drops")
    warmup_steps: int = setting(
        0, "first steps of a client's round in which the learning rate rises; 0 = none"
    )
    drop_factor: float = setting(0.1, "a drop multiplies the learning rate by this")
    lr_floor: float = setting(0.0, "share of lr at which a cosine ends")
    label_smoothing: float = setting(
        0.0, "share of each label that training spreads evenly over all classes; 0 = none"
    )
    class_weights: str = setting(
        "none",
        "what a sample of each class counts in training: none (1), client (all classes alike, by "
        "the client's own labels), federation (by everyone's), or one number a class, as 1,2,0.5",
    )
    crop_padding: int = setting(
        0, "images: pixels of border before a random crop to the image's size; 0 = no crop"
    )
    flip: float = setting(0.0, "images: probability that one is mirrored left to right")
    resized_crop: float = setting(
        0.0,
        "images: a random rectangle of at least this share of the area is resized to the whole "
        "image; 0 = off, 0.08 is usual",
    )
    cutout: int = setting(0, "images: side in pixels of a square blanked at random; 0 = off")
    mixup: float = setting(
        0.0, "a of the Beta(a, a) distribution with which pairs of samples are mixed; 0 = off"
    )

    # -- what is predicted -------------------------------------------------------------------------
    task: Predicted = setting(
        "classification",
        "what is predicted: classification, regression (a number), counts, ordinal (classes in an "
        "order), survival (the time to an event), or labels (several, each true or not)",
    )
    likelihood: str = setting(
        "auto",
        "regression: gaussian or student-t; counts: poisson or negative-binomial; survival: hazard "
        "(discrete times) or cox; auto = the first",
    )
    noise: Noise = setting(
        "global",
        "regression: known (noise_std), global (one learned number), client (one of each client, "
        "from its own residuals; it never leaves it), input (an output of the network)",
    )
    noise_std: float = setting(1.0, "noise=known: standard deviation, in the target's units")
    dof: int = setting(4, "likelihood=student-t: degrees of freedom, a whole number from 3")
    target_scale: str = setting(
        "federation",
        "regression: networks see (y − mean)/std, of everyone's training targets (federation), of "
        "numbers given as MEAN,STD, or none",
    )
    input_scale: str = setting(
        "auto",
        "tables: columns are standardised by each client's own training rows (client), by "
        "everyone's (federation: clients send sums, no rows), by numbers given as "
        "MEAN,…/STD,…, or not (none); auto = client for classes, else federation",
    )

    intervals: int = setting(
        0, "survival: number of intervals of time; 0 = 20 for likelihood=hazard, 50 for cox"
    )
    edges: str = setting(
        "federation",
        "survival: ends of the intervals: quantiles of everyone's event times (federation), or "
        "rising times as 365,730,1825",
    )
    horizon: float = setting(
        0.0, "survival: time at which calibration is judged, by the nearest end; 0 = the middle end"
    )
    sample_clip: float = setting(0.0, "set by dp=sample: norm to which a sample's gradient is cut")
    sample_noise: float = setting(0.0, "set by dp=sample: noise of a step, in units of sample_clip")

    def __post_init__(self) -> None:
        self.make_optimizer()
        check_choices(self)
        self.make_task(2)
        if self.scales_by_numbers:
            read_scaling(self.input_scale)
        if self.intervals and self.edges != "federation":
            raise ConfigError(f"give intervals or edges, not both; got intervals={self.intervals}")
        if self.task != "classification":
            for name in ("mixup", "label_smoothing", "class_weights"):
                if getattr(self, name) != RECIPE_OFF[name]:
                    raise ConfigError(f"{name} is for task=classification, got task={self.task}")
        check_least(
            self,
            batch_size=1,
            local_epochs=1,
            local_steps=0,
            new_client_epochs=1,
            schedule_rounds=0,
            drop_rounds=0,
            warmup_rounds=0,
            drop_steps=0,
            warmup_steps=0,
            crop_padding=0,
            cutout=0,
            intervals=0,
        )
        if not 0 < self.drop_factor <= 1:
            raise ConfigError(f"drop_factor must be in (0, 1], got {self.drop_factor}")
        if not 0 <= self.lr_floor <= 1:
            raise ConfigError(f"lr_floor must be in [0, 1], got {self.lr_floor}")
        for name in ("flip", "resized_crop"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} must be in [0, 1], got {getattr(self, name)}")
        if not 0 <= self.mixup < math.inf:
            raise ConfigError(f"mixup must be finite and not negative, got {self.mixup}")
        if not 0 <= self.label_smoothing < 1:
            raise ConfigError(f"label_smoothing must be in [0, 1), got {self.label_smoothing}")
        given(self.class_weights)
        for kind, every in (("schedule", "drop_rounds"), ("local_schedule", "drop_steps")):
            if (getattr(self, kind) == "step") != (getattr(self, every) > 0):
                raise ConfigError(
                    f"{every} says how often {kind}=step drops the learning rate, got {kind}="
                    f"{getattr(self, kind)} {every}={getattr(self, every)}; set both or neither"
                )

    # -- targets -----------------------------------------------------------------------------------
    @property
    def standardises(self) -> bool:
        """Return whether the task waits for sums of everyone's targets: their mean and standard
        deviation, or quantiles of event times.
        """
        if self.task == "survival":
            return self.edges == "federation"
        return self.task == "regression" and self.target_scale == "federation"

    @property
    def num_intervals(self) -> int:
        """Return the number of intervals of time."""
        return self.intervals or (50 if self.likelihood == "cox" else 20)

    @property
    def scaling(self) -> str:
        """Return who standardises a table's columns: client, federation or none; numbers that are
        given stand for the federation.
        """
        if self.input_scale == "auto":
            return "client" if self.task == "classification" else "federation"
        return "federation" if self.scales_by_numbers else self.input_scale

    @property
    def scales_by_numbers(self) -> bool:
        """Return whether the columns' means and standard deviations are known."""
        return self.input_scale not in ("auto", "client", "federation", "none")

    def make_task(self, size: int) -> Task:
        """Return the task for `size` classes; before everyone's moments are known, without them."""
        location, scale = given_scale(self.target_scale)
        return make(
            self.task,
            self.likelihood,
            size=size,
            noise=self.noise,
            noise_std=self.noise_std,
            dof=self.dof,
            location=location,
            scale=scale,
            edges=given_edges(self.edges, self.num_intervals),
            horizon=self.horizon,
        )

    # -- samples -----------------------------------------------------------------------------------
    @property
    def augmentation(self) -> Augmentation:
        """Return what is done to the samples of a batch."""
        return Augmentation(
            self.resized_crop, self.crop_padding, self.flip, self.cutout, self.mixup
        )

    # -- learning rate -----------------------------------------------------------------------------
    @property
    def over_rounds(self) -> Schedule:
        """Return the learning rate's factor over rounds."""
        return Schedule(
            self.schedule,
            self.warmup_rounds,
            self.drop_rounds,
            self.drop_factor,
            self.lr_floor,
            self.schedule_rounds,
        )

    @property
    def over_steps(self) -> Schedule:
        """Return the learning rate's factor over the steps of a phase."""
        return Schedule(
            self.local_schedule,
            self.warmup_steps,
            self.drop_steps,
            self.drop_factor,
            self.lr_floor,
        )

    def lasting(self, rounds: int) -> Training:
        """Return these settings for a run of `rounds`: a cosine without a length gets this one."""
        needed = self.schedule == "cosine" and not self.schedule_rounds
        return replace(self, schedule_rounds=rounds) if needed else self

    @property
    def scheduled(self) -> bool:
        """Return whether the learning rate changes within a run."""
        return self.over_rounds.changes or self.over_steps.changes

    def make_optimizer(self) -> Optimizer:
        """Return the optimiser of local training."""
        return Optimizer(
            self.optimizer,
            self.lr,
            self.momentum,
            self.weight_decay,
            self.clip_norm,
            nesterov=self.nesterov,
            scheduled=self.scheduled,
        )

    def phase(
        self, name: str, epochs: int | None = None, trainable: tuple[str, ...] | None = None
    ) -> Phase:
        """Return a phase of local training with `epochs`; without it, as long as a round."""
        steps = self.local_steps if epochs is None else 0
        return Phase(
            name,
            self.make_optimizer(),
            self.batch_size,
            0 if steps else (epochs or self.local_epochs),
            steps,
            trainable,
        )


def given_scale(text: str) -> tuple[float, float]:
    """Return the (mean, std) that a setting gives; (0, 1) where it names a rule."""
    if text in ("federation", "none"):
        return 0.0, 1.0
    try:
        mean, std = (float(part) for part in text.split(","))
    except ValueError:
        mean, std = math.nan, 0.0
    if not (math.isfinite(mean) and 0 < std < math.inf):
        raise ConfigError(
            f"target_scale must be federation, none or MEAN,STD with a positive STD, got {text!r}"
        )
    return mean, std


def given_edges(text: str, number: int) -> tuple[float, ...]:
    """Return the times that a setting gives; 1, …, number where it names the rule."""
    if text == "federation":
        return tuple(float(place) for place in range(1, number + 1))
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = (math.nan,)
    rising = all(a < b for a, b in zip((0.0, *found), found, strict=False))
    if not rising or not math.isfinite(found[-1]):
        raise ConfigError(f"edges must be federation or rising times above 0, got {text!r}")
    return found


PLAIN = ("optimizer", "lr", "momentum", "weight_decay", "clip_norm", "batch_size")
# settings that came with recipes, by name, and their defaults: a message or a checkpoint without
# one means its default
RECIPE = {
    field.name: field.default
    for field in fields(Training)
    if field.name not in (*PLAIN, "local_epochs", "local_steps", "new_client_epochs")
}
