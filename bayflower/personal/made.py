"""From a client's state to files: the network that predicts, its calibrated uncertainty, its card,
and formats that load without Bayflower.

model.safetensors    the network's state_dict, by your network's own names
extras.safetensors   how inputs are prepared, the posterior in use, its calibration, thresholds
                     (names in network.py), if there are any
card.json            method, data in summary, metrics, uncertainty, how to load
model.pt2            torch.export: inputs to calibrated probabilities, sets and measures of doubt,
                     any number of samples (where asked for and possible)
model.onnx           the same for ONNX
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import __version__, methods, metrics
from ..contract import ClientHalf
from ..data import Scaling
from ..errors import ConfigError
from ..files.atomic import save_tensors
from ..files.texts import write_json
from ..maths.laplace import Classes
from ..maths.tops import INSIDE
from ..networks.check import alone
from ..networks.model import Batch
from ..rounds import solo
from ..rounds.calibrated import TEST, Taken
from ..rounds.solo import numbers, personal_model
from ..rounds.spread import Taken as SpreadTaken
from ..rounds.spread import take_home
from ..rounds.uncertain import affine
from ..tasks import Task
from ..tasks.saved import from_json, to_json
from ..tree import Tensors, to
from . import card as cards
from . import events, spreadcard
from .events import ReadyEvents
from .network import NARROW, Ready
from .program import Program, exported
from .spreading import ReadyNumbers

log = logging.getLogger("bayflower")
FORMAT, FIRST = "bayflower-personal-2", "bayflower-personal-1"
FORMATS = ("safetensors", "pt2", "onnx")
# samples with which an exported file is tested; a number that is unlikely among a network's shapes
TRY = 5
LEVEL = 0.9  # of intervals of a model without calibration
STATE_DICT = "net.load_state_dict(safetensors.torch.load_file('model.safetensors')); net.eval()"
ANOTHER_HEAD = (
    "torch.export.load('model.pt2').module()(x), or model.onnx; the network has another head"
)


class Kept(NamedTuple):
    """A client after the last round: everything that determines its personal model. `state` is the
    adapted state used for predictions.
    """

    method: str
    half: ClientHalf
    state: Any
    broadcast: Any
    data: solo.Samples
    client: int
    round: int
    seed: int
    new: bool = False
    scaling: Scaling | None = None
    dataset: str = ""
    taken: Any = None  # its calibrated uncertainty; None if calibration is off
    tally: Any = None  # of the personal model on the test data, where it is known
    baseline: Tensor | None = None  # of Cox's model, everyone's; None = the client's own
    pixels: bool = False  # whether training images were uint8, scaled to (x/255 − 0.5)/0.5
    columns: tuple[str, ...] = ()  # names of a table's input columns, where they are known
    reading: dict[str, Any] | None = None  # how the data were read (`Source.reading`)
    classes: tuple[str, ...] = ()  # names of the classes, where they are known
    site: str = ""  # the client's name, where the data have one
    remark: str = ""  # what to know about the data
    privacy: dict[str, Any] | None = None  # what was spent of a privacy budget, if there was one


def keep(folder: Path, kept: Kept, formats: Sequence[str] = ("safetensors",)) -> dict[str, Any]:
    """Write the personal model of a client to `folder`; return its card."""
    for name in formats:
        if name not in FORMATS:
            raise ConfigError(f"format must be one of {', '.join(FORMATS)}, got {name!r}")
    half, train = kept.half, kept.data.train
    with alone(half.model):
        params, buffers = numbers(half, kept.state, kept.broadcast, train.x[:1])
    network = personal_model(half).module(params, buffers).eval().cpu()
    if half.model.task.events:
        kept = kept._replace(tally=tally_of(kept))
    if not half.model.task.classes and kept.taken is None:  # a client's own spread, uncalibrated
        known = (kept.state, kept.broadcast, kept.data, None, "off", LEVEL)
        kept = kept._replace(taken=take_home(half, *known))
    extras, uncertainty = surroundings(kept, network)
    made = card(kept, network, uncertainty)
    # the card is written last: with it the model is complete
    for stale in ("card.json", "extras.safetensors", "model.pt2", "model.onnx"):
        (folder / stale).unlink(missing_ok=True)
    save_tensors(
        folder / "model.safetensors",
        dict(network.state_dict()),
        {"format": FORMAT, "method": kept.method},
        sealed=True,
    )
    if extras:
        save_tensors(folder / "extras.safetensors", extras, {"format": FORMAT}, sealed=True)
    ready = assembled(network, extras, made)
    example = (kept.data.test.x[:TRY] if len(kept.data.test.y) >= TRY else train.x[:TRY]).cpu()
    program = Program(ready).eval()
    for name in formats:
        if name != "safetensors":
            made["files"][name] = exported(folder / f"model.{name}", program, example, name)
    write_json(folder / "card.json", made, private=True)
    return made


def assembled(network: nn.Module, extras: Tensors, card: dict[str, Any]) -> Ready:
    """Return the network with what the files have about it."""
    found = card["uncertainty"]
    if said := card.get("task"):
        task, known = from_json(said), found["posterior"]
        kind, layer = known["kind"] if known else "", card["network"]["last_layer"]
        if task.events:
            return ReadyEvents(network, extras, kind, layer, task)
        return ReadyNumbers(network, extras, kind, layer, task, found["intervals"]["level"])
    kind = found["posterior"]["kind"] if found["posterior"] else ""
    return Ready(network, extras, kind, card["network"]["last_layer"], tuple(found["alarms"]))


def surroundings(kept: Kept, network: nn.Module) -> tuple[Tensors, dict[str, Any]]:
    """Return what surrounds the network, by the names of network.py, and the card's part about
    uncertainty.
    """
    extras: Tensors = {}
    if kept.scaling:
        extras = {f"input/{n}": torch.as_tensor(v) for n, v in kept.scaling._asdict().items()}
    task = kept.half.model.task
    if not task.classes:
        assert isinstance(kept.taken, SpreadTaken)
        extras |= spreadcard.extras_of(kept.taken, task)
        if task.events:
            extras |= (own := events.extras_of(task, kept.tally, kept.baseline))
            return extras, events.block(kept.taken, task, own.get(events.BASELINE))
        return extras, spreadcard.block(kept.taken, task, kept.client)
    if kept.taken is None:
        missed = kept.data.held is not None
        return extras, cards.point_only(cards.NOT_REACHED if missed else cards.NOT_CALIBRATED)
    taken: Taken = kept.taken._replace(
        fitted=to(kept.taken.fitted, "cpu"), choice=to(kept.taken.choice, "cpu")
    )
    chosen, choice, fitted = taken.one.chosen, taken.choice, taken.fitted
    kind = ""
    if chosen.posterior:
        kind = taken.kinds[chosen.posterior][0]
        found = {f"posterior/{n}": v for n, v in fitted.posteriors[chosen.posterior].items()}
        extras |= {n: v.float() if n in NARROW else v for n, v in found.items()}
        extras["posterior/scale"] = choice.scales[chosen.posterior]
    extras["affine/temperature"], extras["affine/bias"] = affine(fitted, choice)
    extras["affine/floor"] = fitted.floor
    extras["sets/lowest"] = choice.lowest
    if chosen.plain:
        extras["doubt/plain"] = torch.ones((), dtype=torch.int64)
    if isinstance(fitted.classes, Classes):
        extras |= {f"classes/{n}": v for n, v in fitted.classes._asdict().items()}
    held, y = None, torch.zeros(0, dtype=torch.int64)
    if kept.data.held is not None:
        y = kept.data.held.y.cpu()
        trial = Ready(
            network, {**extras, **thresholds(taken)}, kind, layer(taken), ("information",)
        )
        with torch.no_grad():
            parts = [trial.outputs(part.cpu()) for part in kept.data.held.x.split(256)]
        held = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        seen = cards.right_or_wrong(held, y)
        extras |= {"held/right": seen.right, "held/wrong": seen.wrong}
    made = cards.block(kept.client, taken, held, y, kept.classes)
    if (top := kept.half.top()) is not None:
        made["why"] = INSIDE.get(top.kind, made["why"])
    extras |= {n: v for n, v in thresholds(taken).items() if n.split("/")[1] in made["alarms"]}
    return extras, made


def thresholds(taken: Taken) -> Tensors:
    """Return the thresholds of alarms by their names in extras.safetensors."""
    return {f"alarms/{name}": value.double() for name, value in taken.choice.alarms.items()}


def layer(taken: Any) -> str | None:
    """Return the last layer, None if what it gets is not the features of the uncertainty."""
    if isinstance(taken, SpreadTaken):
        return taken.layer if taken.one.choice.posterior else None
    return taken.layer if taken is not None and taken.fitted.classes else None


def card(kept: Kept, network: nn.Module, uncertainty: dict[str, Any]) -> dict[str, Any]:
    """Return the model card, for readers and for `load_personal`; it contains no samples."""
    half, train, test = kept.half, kept.data.train, kept.data.test
    row = methods.get(kept.method)
    summary = tested(kept)
    classes = half.model.num_classes
    task = half.model.task
    ours = ("num_examples", "accuracy", "balanced_accuracy", "nll")
    result = {key: summary[key] for key in ours} if summary and task.classes else None
    if task.events:
        own = events.extras_of(task, kept.tally, kept.baseline).get(events.BASELINE)
        result = events.metrics_of(task, kept.taken.one.judged["calibrated"], own)
    elif not task.classes:
        result = spreadcard.metrics_of(summary)
    theirs = ("ece", "ece_allclass", "mce", "reliability")
    calibration = {key: summary[key] for key in theirs} if summary and task.classes else None
    held = 0 if kept.data.held is None else len(kept.data.held.y)
    return {
        "format": FORMAT,
        "bayflower": __version__,
        "method": kept.method,
        "title": row.title,
        "paper": row.paper,
        "client": kept.client,
        "site": kept.site or None,
        "round": kept.round,
        "seed": kept.seed,
        "never_trained": kept.new,
        "model": half.views()["personal"],
        **({} if task.classes else {"task": to_json(task), "units": units(kept)}),
        "network": {
            "name": half.model.name,
            "recipe": half.model.recipe or None,
            "num_classes": classes,
            "state": {name: list(value.shape) for name, value in network.state_dict().items()},
            "last_layer": layer(kept.taken),
            "input_shape": list(train.x.shape[1:]),
            "input_dtype": str(train.x.dtype).removeprefix("torch."),
            "input_range": vocabulary(network, train.x),
            "pixels": kept.pixels,
            "normalise": channels(kept),
            "columns": list(kept.columns) or None,
            **({"layout": half.model.layout.text} if half.model.layout else {}),
            **topped(half),
        },
        "inputs": inputs(kept),
        "reading": kept.reading,
        # NaN is a missing value in a table
        "prepared": kept.scaling is not None and train.x.ndim == 2,
        "data": {
            "dataset": kept.dataset or None,
            **({"remark": kept.remark} if kept.remark else {}),
            "classes": list(kept.classes) or None,
            "num_train": len(train.y),
            "num_held_out": held,
            "num_test": len(test.y),
            **(
                {"train_per_class": torch.bincount(train.y, minlength=classes).tolist()}
                if task.whole
                else {"targets": targets_of(task, train.y)}
            ),
        },
        "metrics": result,
        "calibration": calibration,
        "uncertainty": uncertainty,
        **({"privacy": kept.privacy} if kept.privacy else {}),
        "load": {
            "with bayflower": "bayflower.load_personal(folder)  # model=Net for a network of your "
            "own",
            "without": ANOTHER_HEAD if half.top() else STATE_DICT,
        },
        "files": {"safetensors": "model.safetensors"},
    }


def topped(half: ClientHalf) -> dict[str, Any]:
    """Return what stands in the place of the head, and where; nothing if it is the head itself."""
    top = half.top()
    if top is None:
        return {}
    return {"top": {"kind": top.kind, "head": half.model.head, "settings": dict(top.settings)}}


def tested(kept: Kept) -> dict[str, Any] | None:
    """Return the numbers on the client's test samples of the model as it is delivered: calibrated,
    or the point if calibration is off.
    """
    if not len(kept.data.test.y):
        return None
    task = kept.half.model.task
    if task.events:
        return None  # `events.metrics_of` has them
    if not task.classes:
        return task.summarise({kept.client: kept.taken.one.judged["calibrated"]})
    if kept.taken is not None and TEST in kept.taken.one.judged:
        return cards.delivered(kept.client, kept.taken)
    return metrics.summarise({kept.client: tally_of(kept)})


def tally_of(kept: Kept) -> Any:
    """Return the tally of the personal model on the client's samples."""
    if kept.tally is not None:
        return kept.tally
    keys: dict[str, int] = {"seed": kept.seed, "client": kept.client, "round": kept.round}
    test, train = kept.data.test, kept.data.train
    return solo.test(kept.half, kept.state, kept.broadcast, test, train, **keys)["personal"]


def targets_of(task: Task, y: Tensor) -> dict[str, Any]:
    """Return what training targets are like."""
    return events.targets_of(task, y) if task.events else spreadcard.targets_of(y)


def units(kept: Kept) -> str:
    """Return in words what predictions are measured in."""
    table = (kept.reading or {}).get("table") or {}
    name = table.get("target")
    column = f" (column {name!r})" if name else ""
    if kept.half.model.task.name == "labels":
        named = f" {', '.join(kept.classes)}" if kept.classes else ""
        return f"predictions are probabilities of the labels{named}"
    if kept.half.model.task.name == "survival":
        return f"times are in the units of the training times{column}"
    return f"predictions and intervals are in the units of the training targets{column}"


def inputs(kept: Kept) -> str:
    """Return in words what inputs the model takes."""
    if table := (kept.reading or {}).get("table"):
        names = ", ".join(one["name"] for one in table["inputs"])
        return (
            f"raw rows with the columns {names}; missing values are empty. Programs (pt2, ONNX) "
            "take the encoded rows, with the columns of `network`"
        )
    if kept.scaling and kept.data.train.x.ndim == 2:
        return "raw rows; missing values are NaN"
    after = "; the model normalises them" if kept.scaling else ""
    if kept.pixels:
        return f"images: pixels 0…255 of type uint8, or scaled to (x/255 − 0.5)/0.5{after}"
    return f"images, not normalised{after}" if after else "as the network was trained on them"


def channels(kept: Kept) -> dict[str, list[float]] | None:
    """Return mean and standard deviation by which the model normalises the channels of images."""
    known = kept.scaling
    if known is None or kept.data.train.x.ndim == 2:
        return None
    return {name: getattr(known, name).reshape(-1).tolist() for name in ("mean", "std")}


def vocabulary(network: nn.Module, x: Tensor) -> list[int] | None:
    """Return the smallest and the largest whole number that an embedding network takes; None for
    other inputs.
    """
    tables = [module for module in network.modules() if isinstance(module, nn.Embedding)]
    if x.is_floating_point() or len(tables) != 1:
        return None
    return [0, tables[0].num_embeddings - 1]


def batch_of(x: Tensor, y: Tensor) -> Batch:
    """Return samples as a batch."""
    dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
    return Batch(x, y, torch.ones(len(y), dtype=dtype))
