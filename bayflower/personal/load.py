"""A personal model loaded from its files."""

from __future__ import annotations

import json
import logging
import warnings
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import nn

from ..errors import ConfigError, in_one_line
from ..files import vault
from ..files.atomic import damaged, head_of
from ..maths.tops import Top, derive, put, samples_of
from ..networks.own import is_own, made, num_outputs
from ..networks.papers import build
from ..networks.parts import converted
from ..networks.several import Layout, one_tensor
from ..tasks import EXTRA
from ..tasks.saved import from_json
from ..tree import Tensors
from .card import OLD, point_only
from .classifier import Personal as Personal
from .classifier import Prediction as Prediction
from .events import model_of
from .made import FIRST, FORMAT, assembled
from .numbers import PersonalNumbers

log = logging.getLogger("bayflower")


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
        return made_of(program(folder), card, extras)
    task = from_json(card["task"]) if "task" in card else None
    shape, number = tuple(card["network"]["input_shape"]), card["network"]["num_classes"]
    built = (
        partial(made, model, shape, num_outputs(number, task))
        if model is not None
        else build(
            recipe["name"],
            tuple(recipe["input_shape"]),
            recipe["num_classes"],
            recipe["features"],
            task=task,
        ).factory
    )
    with torch.random.fork_rng(devices=[]):
        network = built()
    if task is not None and (extra := task.extra()):
        network.register_parameter(EXTRA, nn.Parameter(torch.tensor(extra)))
    if model is not None:
        layout = card["network"].get("layout")
        network = one_tensor(network, Layout.read(layout) if layout else None)
    state = tensors(folder / "model.safetensors")
    if top := card["network"].get("top"):
        known = Top(top["kind"], top["settings"])
        network = put(network, top["head"], known, samples_of(state, top["head"]))
    numbers = (value for value in state.values() if value.is_floating_point())
    network = converted(network, next(numbers, torch.zeros(())))
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        reason = in_one_line(error, 300)
        raise ConfigError(
            f"the network does not fit {folder / 'model.safetensors'}: {reason}; give the factory "
            "it was trained with"
        ) from None
    return made_of(assembled(derive(network.eval()), extras, card), card, extras)


def made_of(ready: nn.Module, card: dict[str, Any], extras: Tensors) -> Personal:
    """Return the model for what its card says of the task; a card without one is of classes."""
    if "task" not in card:
        return Personal(ready, card, extras).eval()
    if from_json(card["task"]).events:
        return model_of(ready, card, extras)
    return PersonalNumbers(ready, card, extras, from_json(card["task"])).eval()


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
        content = vault.opened(path.read_bytes(), str(path))
        found = load(content)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); export the model again") from None
    if damaged(found, head_of(content)):
        raise ConfigError(f"{path} is damaged (its checksum is wrong); export the model again")
    return found


def program(folder: Path) -> nn.Module:
    """Return the exported program as a module."""
    path = folder / "model.pt2"
    if not path.exists():
        raise ConfigError(
            f"{folder} holds a network of your own; load it with load_personal(path, model=Net), "
            "where Net is its class"
        )
    try:
        with zipfile.ZipFile(path) as parts:
            if broken := parts.testzip():
                raise zipfile.BadZipFile(f"wrong checksum of {broken}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, about its own future
            return torch.export.load(path).module()  # type: ignore[no-any-return]
    except Exception as error:  # torch has no kind of its own for a file it cannot read
        raise ConfigError(
            f"{path} is damaged, or of another version of torch ({in_one_line(error, 100)}); "
            "export the model again, or load it with load_personal(path, model=Net)"
        ) from None
