"""From a client's state to files: the network that `predict` uses, its card, and formats that load
without Bayflower.

model.safetensors    the network's state_dict, by your network's own names
extras.safetensors   how inputs are prepared (input/median, input/mean, input/std) and deviations of
                     weights (std/NAME), if there are any
card.json            method, data in summary, metrics, calibration, how to load
model.pt2            torch.export: inputs to class probabilities, any number of samples (where asked
                     for and possible)
model.onnx           the same for ONNX
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import __version__, methods, metrics
from ..contract import ClientHalf
from ..data import Scaling
from ..errors import BayflowerError, ConfigError
from ..files.atomic import save_tensors, write_json
from ..networks.model import Batch
from ..rounds import solo
from ..rounds.calibrated import Taken
from ..rounds.uncertain import numbers
from ..tree import Tensors

log = logging.getLogger("bayflower")
FORMAT = "bayflower-personal-1"
FORMATS = ("safetensors", "pt2", "onnx")
# samples with which an exported file is tested; a number that is unlikely among a network's shapes
TRY = 5


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
    taken: Taken | None = None  # its calibrated uncertainty; None if calibration is off
    tally: metrics.Tally | None = None  # of the personal model on the test data, where it is known


class Ready(nn.Module):
    """The network with its inputs' preparation: raw inputs to class probabilities."""

    def __init__(self, network: nn.Module, scaling: Tensors | None = None) -> None:
        super().__init__()
        self.network = network
        for name, value in (scaling or {}).items():
            self.register_buffer(f"input_{name}", value)
        self.scaled = bool(scaling)

    def forward(self, x: Tensor) -> Tensor:
        return as_probabilities(self.network(self.prepared(x)))

    def prepared(self, x: Tensor) -> Tensor:
        """Return the inputs as the network was trained on them."""
        if not self.scaled:
            return x
        wide = x.to(torch.float64)
        known: Any = self
        wide = torch.where(torch.isnan(wide), known.input_median, wide)
        return ((wide - known.input_mean) / known.input_std).to(x.dtype)


def as_probabilities(logits: Tensor) -> Tensor:
    """Return class probabilities from logits; a single logit means two classes."""
    if logits.shape[-1] == 1:
        return torch.cat([torch.sigmoid(-logits), torch.sigmoid(logits)], dim=-1)
    return torch.softmax(logits, dim=-1)


def keep(folder: Path, kept: Kept, formats: Sequence[str] = ("safetensors",)) -> dict[str, Any]:
    """Write the personal model of a client to `folder`; return its card."""
    for name in formats:
        if name not in FORMATS:
            raise ConfigError(f"format must be one of {', '.join(FORMATS)}, got {name!r}")
    half, train = kept.half, kept.data.train
    params, buffers = numbers(half, kept.state, kept.broadcast, train.x[:1])
    network = half.model.module(params, buffers).eval().cpu()
    scaling = (
        {name: torch.as_tensor(value) for name, value in kept.scaling._asdict().items()}
        if kept.scaling
        else {}
    )
    made = card(kept, {name: list(value.shape) for name, value in network.state_dict().items()})
    save_tensors(
        folder / "model.safetensors",
        dict(network.state_dict()),
        {"format": FORMAT, "method": kept.method},
    )
    extras = {f"input/{name}": value for name, value in scaling.items()}
    (folder / "extras.safetensors").unlink(missing_ok=True)
    if extras:
        save_tensors(folder / "extras.safetensors", extras, {"format": FORMAT})
    ready = Ready(network, scaling)
    example = (kept.data.test.x[:TRY] if len(kept.data.test.y) >= TRY else train.x[:TRY]).cpu()
    for name in formats:
        if name != "safetensors":
            made["files"][name] = exported(folder / f"model.{name}", ready, example, name)
    write_json(folder / "card.json", made)
    return made


def card(kept: Kept, shapes: dict[str, list[int]]) -> dict[str, Any]:
    """Return the model card, for readers and for `load_personal`; it contains no samples."""
    half, train, test = kept.half, kept.data.train, kept.data.test
    row = methods.get(kept.method)
    tally = kept.tally
    if tally is None and len(test.y):
        tally = solo.test(
            half,
            kept.state,
            kept.broadcast,
            test,
            seed=kept.seed,
            client=kept.client,
            round=kept.round,
        )["personal"]
    summary = metrics.summarise({kept.client: tally}) if tally is not None else None
    classes = half.model.num_classes
    result = (
        {key: summary[key] for key in ("num_examples", "accuracy", "balanced_accuracy", "nll")}
        if summary
        else None
    )
    calibration = (
        {key: summary[key] for key in ("ece", "ece_allclass", "mce", "reliability")}
        if summary
        else None
    )
    return {
        "format": FORMAT,
        "bayflower": __version__,
        "method": kept.method,
        "title": row.title,
        "paper": row.paper,
        "client": kept.client,
        "round": kept.round,
        "seed": kept.seed,
        "never_trained": kept.new,
        "model": half.views()["personal"],
        "network": {
            "name": half.model.name,
            "recipe": half.model.recipe or None,
            "num_classes": classes,
            "state": shapes,
            "input_shape": list(train.x.shape[1:]),
            "input_dtype": str(train.x.dtype).removeprefix("torch."),
        },
        "inputs": "raw rows; missing values are NaN"
        if kept.scaling
        else "as the network was trained on them",
        "data": {
            "dataset": kept.dataset or None,
            "num_train": len(train.y),
            "num_test": len(test.y),
            "train_per_class": torch.bincount(train.y, minlength=classes).tolist(),
        },
        "metrics": result,
        "calibration": calibration,
        "posterior": None,
        "load": {
            "with bayflower": "bayflower.load_personal(folder)  # model=Net for a network of your "
            "own",
            "without": "net.load_state_dict(safetensors.torch.load_file('model.safetensors')); "
            "net.eval()",
        },
        "files": {"safetensors": "model.safetensors"},
    }


def exported(path: Path, ready: Ready, example: Tensor, kind: str) -> str:
    """Write and test an exported file; return its name, or the reason if it fails or gives other
    probabilities.
    """
    ready = ready.eval()
    if len(example) < 2:
        return "not written: it takes two samples to make one"
    batch = torch.export.Dim("batch", min=1)
    part = path.with_name(f".{os.getpid()}.{path.name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # torch's own, about its own future
            program = torch.export.export(ready, (example,), dynamic_shapes=({0: batch},))
            if kind == "pt2":
                torch.export.save(program, part)
                got = torch.export.load(part).module()(example[:1])
            else:
                got = torch.as_tensor(to_onnx(part, program, example))
            want = ready(example[:1])
        if not torch.allclose(got, want, atol=1e-5):
            raise BayflowerError(
                f"its probabilities differ by up to {float((got - want).abs().max()):.1e}"
            )
        part.replace(path)
    except ImportError as error:
        return f"not written: {error.name} is not installed; pip install 'bayflower[onnx]'"
    # a network that cannot be exported does not affect the other files
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        log.warning("%s was not written: %s", path, reason)
        return f"not written: {type(error).__name__}: {reason}"
    finally:
        part.unlink(missing_ok=True)
    return path.name


def to_onnx(path: Path, program: Any, example: Tensor) -> Any:
    """Write the program as ONNX and return what onnxruntime gives for the first sample."""
    import onnxruntime
    import onnxscript  # noqa: F401 (torch's exporter needs it, and says so less clearly)

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    torch.onnx.export(
        program,
        (),
        str(path),
        input_names=["x"],
        output_names=["probabilities"],
        dynamo=True,
        external_data=False,
        verbose=False,
    )
    session = onnxruntime.InferenceSession(str(path))
    return session.run(None, {session.get_inputs()[0].name: example[:1].numpy()})[0]


def batch_of(x: Tensor, y: Tensor) -> Batch:
    """Return samples as a batch."""
    dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
    return Batch(x, y, torch.ones(len(y), dtype=dtype))
