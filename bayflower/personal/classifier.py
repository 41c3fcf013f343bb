"""A personal model as a classifier as in scikit-learn, with calibrated probabilities, prediction
sets, alarms and abstention; also a torch module.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import BayflowerError, ConfigError, in_one_line
from ..files.atomic import below
from ..tree import Tensors
from . import classes, inputs
from .doubt import Drift, answered, drift
from .network import Ready

AT_ONCE = 256  # samples in one pass


class Prediction(NamedTuple):
    """What a model says of N samples with K classes; arrays."""

    label: np.ndarray  # (N,) the likeliest class, as the data have it
    probabilities: np.ndarray  # (N, K) calibrated
    point: np.ndarray  # (N, K) of the network itself
    # (N,) 1 − the largest probability: calibrated where that finds errors better, else point
    doubt: np.ndarray
    entropy: np.ndarray  # (N,) in nats, before even probabilities are mixed in
    # (N,) the part of it due to uncertain weights; None unless it finds errors as well as doubt
    information: np.ndarray | None
    distance: np.ndarray | None  # (N,) to the nearest class of the training data
    sets: np.ndarray | None  # (N, K) which classes each set holds
    promise: str  # of the sets
    alarms: dict[str, np.ndarray]  # by measure: (N,) whether it is above its threshold
    abstains: np.ndarray  # (N,)
    classes: np.ndarray  # (K,) in the order of probabilities

    def set_labels(self) -> list[list[Any]]:
        """Return the classes of each set; every class where there are no sets."""
        inside = np.ones_like(self.probabilities, bool) if self.sets is None else self.sets
        return [self.classes[row].tolist() for row in inside]


class Personal(nn.Module):
    """One client's own model.

    `predict`, `predict_proba`, `score` and `classes_` are those of a scikit-learn classifier.
    They take arrays, lists, tensors and data frames, of several samples or of one. `uncertainty`
    returns everything the model says. As a torch module, it maps a tensor to calibrated
    log-probabilities (N, K); `network` is the plain module inside.
    """

    _estimator_type = "classifier"

    def __init__(self, ready: nn.Module, card: dict[str, Any], extras: Tensors) -> None:
        super().__init__()
        self.ready, self.card, self.held = ready, card, below(extras, "held")
        self.moments = below(extras, "input")  # of the training data: median, mean, std

    # -- a torch module ----------------------------------------------------------------------------
    @property
    def network(self) -> nn.Module:
        """Return the network, from prepared inputs to logits; if loaded without its factory, the
        exported program.
        """
        return self.ready.network if isinstance(self.ready, Ready) else self.ready

    def train(self, mode: bool = True) -> Personal:
        """Set the mode of the network; an exported program has only one."""
        if isinstance(self.ready, Ready):
            super().train(mode)
        self.training = mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.ready, Ready):
            found = self.ready.log_probabilities(self.ready.prepared(x))
            return found.to(next(self.network.parameters()).dtype)
        shown = named(self.ready(x))["probabilities"]
        return shown.clamp(min=torch.finfo(torch.float32).tiny).log()

    # -- a classifier ------------------------------------------------------------------------------
    @property
    def classes_(self) -> np.ndarray:
        """Return the classes, in the order of probabilities, as the data have them: words where
        labels were words.
        """
        return classes.values(self.card)

    @property
    def n_features_in_(self) -> int:
        """Return the number of values of one sample."""
        return math.prod(self.card["network"]["input_shape"])

    def predict(self, X: Any) -> np.ndarray:  # noqa: N803 (scikit-learn's name)
        """Return the likeliest class of each sample (N,)."""
        return np.asarray(self.classes_[self._said(X)["probabilities"].argmax(1)])

    def predict_proba(self, X: Any) -> np.ndarray:  # noqa: N803
        """Return calibrated class probabilities (N, K)."""
        return self._said(X)["probabilities"]

    def score(self, X: Any, y: Any) -> float:  # noqa: N803
        """Return the accuracy on samples X with labels y."""
        found, wanted = self.predict(X), np.asarray(y).reshape(-1)
        if len(found) != len(wanted):
            raise ConfigError(
                f"there are {len(found)} samples and {len(wanted)} labels; give one for each"
            )
        classes.check_labels(wanted, self.classes_)
        return float((found == wanted).mean())

    def fit(self, X: Any, y: Any) -> Personal:  # noqa: N803
        """Refuse: scikit-learn's tools want the name, but a federation trained the model."""
        raise BayflowerError(
            "a personal model is trained in a federation; `bayflower personalise` makes one from "
            "new data"
        )

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import ClassifierTags, InputTags, Tags, TargetTags

        return Tags(
            estimator_type="classifier",
            target_tags=TargetTags(required=True),
            classifier_tags=ClassifierTags(),
            input_tags=InputTags(allow_nan=bool(self.card.get("prepared"))),
        )

    # -- uncertainty -------------------------------------------------------------------------------
    def uncertainty(self, X: Any, abstain: float | None = None) -> Prediction:  # noqa: N803
        """Return everything the model says of some samples.

        abstain  None: the model abstains where the set does not hold exactly one class; a number:
                 it answers where held-out samples had at most this share of errors
        """
        said, found = self._said(X), self.card["uncertainty"]
        sets = said.get("sets")
        if abstain is not None:
            if not self.held:
                raise ConfigError(
                    "this model has no held-out samples to hold errors to a level of risk; leave "
                    "abstain out, or train with calibration on"
                )
            held = (self.held["right"].cpu(), self.held["wrong"].cpu())
            abstains = ~answered(said["doubt"], *held, float(abstain))
        elif sets is not None:
            abstains = sets.sum(1) != 1
        else:
            abstains = np.zeros(len(said["doubt"]), bool)
        return Prediction(
            label=self.classes_[said["probabilities"].argmax(1)],
            probabilities=said["probabilities"],
            point=said["point"],
            doubt=said["doubt"],
            entropy=said["entropy"],
            information=said.get("information"),
            distance=said.get("distance"),
            sets=sets,
            promise=found["sets"]["promise"] if found["sets"] else found["why"],
            alarms={name: said["alarms"][:, place] for place, name in enumerate(found["alarms"])},
            abstains=abstains,
            classes=self.classes_,
        )

    def drift(self, X: Any) -> Drift:  # noqa: N803
        """Return whether alarms sound more often on these samples than on held-out ones."""
        return drift(self.uncertainty(X).alarms, self.card["uncertainty"]["alarms"])

    def _said(self, given: Any) -> dict[str, np.ndarray]:
        """Return the outputs for inputs of any kind, as arrays."""
        x = inputs.tensor(given, self.card)
        some = next(iter([*self.parameters(), *self.buffers()]), x)
        try:
            with torch.no_grad():
                parts = [named(self.ready(part.to(some.device))) for part in x.split(AT_ONCE)]
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            reason = in_one_line(error, 200)
            raise BayflowerError(
                f"the network failed on inputs of shape {tuple(x.shape)}, {x.dtype} ({reason}); "
                "prepare them as in training"
            ) from None
        found = {}
        for name in parts[0]:
            value = torch.cat([part[name] for part in parts]).cpu()
            found[name] = (value.double() if value.is_floating_point() else value).numpy()
        return found


def named(found: Tensors | Tensor) -> Tensors:
    """Return a program's outputs by name; programs of the first format give probabilities only."""
    if isinstance(found, dict):
        return found
    entropy = -torch.special.xlogy(found, found).sum(-1)
    doubt = 1 - found.amax(-1)
    return {"probabilities": found, "point": found, "doubt": doubt, "entropy": entropy}
