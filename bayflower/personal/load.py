"""A personal model loaded from its files: a classifier as in scikit-learn, with calibrated
probabilities, prediction sets, alarms and abstention; also a torch module.
"""

from __future__ import annotations

import json
import logging
import math
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ..errors import BayflowerError, ConfigError
from ..files.atomic import below
from ..networks.own import is_own, made
from ..networks.papers import build
from ..networks.several import Layout, one_tensor
from ..tree import Tensors
from . import classes, inputs
from .card import OLD, point_only
from .doubt import Drift, answered, drift
from .made import FIRST, FORMAT, assembled
from .network import Ready

log = logging.getLogger("bayflower")
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
            reason = " ".join(str(error).split())[:200]
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


def load_personal(path: Path | str, model: Callable[[], nn.Module] | None = None) -> Personal:
    """Return the personal model in a folder, in evaluation mode.

    Bayflower's networks are built by name; your own by `model`, the factory it was trained with.
    Without `model`, the exported program (model.pt2) is loaded if it exists: it says the same, in
    single precision.
    """
    folder = Path(path)
    if folder.name == "card.json":
        folder = folder.parent
    card = read_card(folder)
    extras = (
        tensors(folder / "extras.safetensors") if (folder / "extras.safetensors").exists() else {}
    )
    # deviations of weights of the first format are not used
    extras = {name: value for name, value in extras.items() if not name.startswith("std/")}
    recipe = card["network"]["recipe"]
    # a card may come from anywhere: what it names is never imported
    if model is None and (recipe is None or is_own(recipe["name"])):
        return Personal(program(folder), card, extras).eval()
    shape, number = tuple(card["network"]["input_shape"]), card["network"]["num_classes"]
    built = (
        partial(made, model, shape, number)
        if model is not None
        else build(
            recipe["name"], tuple(recipe["input_shape"]), recipe["num_classes"], recipe["features"]
        ).factory
    )
    with torch.random.fork_rng(devices=[]):
        network = built()
    if model is not None:
        layout = card["network"].get("layout")
        network = one_tensor(network, Layout.read(layout) if layout else None)
    state = tensors(folder / "model.safetensors")
    network.to(
        next((value.dtype for value in state.values() if value.is_floating_point()), torch.float32)
    )
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"the network does not fit {folder / 'model.safetensors'}: {reason}; give the factory "
            "it was trained with"
        ) from None
    return Personal(assembled(network.eval(), extras, card), card, extras).eval()


def read_card(folder: Path) -> dict[str, Any]:
    """Return the card of a personal model; one of the first format as today's has it."""
    path = folder / "card.json"
    try:
        card = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}); give the folder that `bayflower export` wrote"
        ) from None
    known = card.get("format") if isinstance(card, dict) else None
    if known == FIRST:
        log.warning("%s: %s", folder, OLD)
        card |= {"uncertainty": point_only(OLD), "posterior": None}
        card["network"] = {**card["network"], "last_layer": None}
        return card
    if known != FORMAT:
        raise ConfigError(
            f"{path} is not the card of a personal model of this version ({FORMAT}); export it "
            "again"
        )
    return card


def tensors(path: Path) -> Tensors:
    """Return the tensors of a safetensors file."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); export the model again") from None


def program(folder: Path) -> nn.Module:
    """Return the exported program as a module."""
    path = folder / "model.pt2"
    if not path.exists():
        raise ConfigError(
            f"{folder} holds a network of your own; load it with load_personal(path, model=Net), "
            "where Net is its class"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its own future
        return torch.export.load(path).module()  # type: ignore[no-any-return]
