"""Inputs of a personal model: arrays, lists, tensors and data frames, checked against its card.

Each error is one line: what was given, what is expected, and the remedy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data import Source
from ..data.alike import rows
from ..data.cells import read
from ..data.columns import Encoder, from_json
from ..data.images import BRIGHT, Images
from ..data.tables import Table, frame, is_frame
from ..errors import ConfigError
from ..networks.several import Layout

MISSING = ("NoneType", "NAType", "NaTType")  # types of missing values in tables of objects


def tensor(given: Any, card: dict[str, Any]) -> Tensor:
    """Return inputs as a tensor (N, *input_shape) in the network's dtype."""
    network, reading = card["network"], card.get("reading") or {}
    if "layout" in network and isinstance(given, (Mapping, tuple)):
        return packed(given, Layout.read(network["layout"]))
    if reading.get("table"):
        x = encoded(given, from_json(reading["table"]), network)
    else:
        known = reading.get("images")
        x = array(given, network.get("columns"))
        x = pixels(x, network, Images(**known) if known else None)
    x = shaped(x, tuple(network["input_shape"]))
    if network["input_dtype"].startswith("int"):
        return whole(x, network)
    return numbers(x, network, card.get("prepared", card["inputs"].startswith("raw rows")))


def packed(given: Any, layout: Layout) -> Tensor:
    """Return several inputs, a dict by keyword or a tuple, as the one tensor of a model."""
    parts = given.values() if isinstance(given, Mapping) else given
    tensors = [torch.as_tensor(part) for part in parts]
    named = isinstance(given, Mapping)
    return layout.pack(dict(zip(given, tensors, strict=True)) if named else tensors, "the call")


def encoded(given: Any, encoder: Encoder, network: dict[str, Any]) -> np.ndarray:
    """Return rows of a table as inputs: a data frame or a table by its columns' names; an array
    with as many values as the table has columns, in their order; or rows that are encoded already.
    """
    if isinstance(given, Table):
        return rows(given, encoder)
    if is_frame(given):
        return rows(frame(given, "the table"), encoder)
    raw = given.to_numpy() if hasattr(given, "to_numpy") else given
    raw = np.asarray(raw.detach().cpu() if isinstance(raw, Tensor) else raw)
    number = len(encoder.inputs)
    if raw.ndim in (1, 2) and raw.shape[-1] == number != network["input_shape"][0]:
        cells = raw.reshape(-1, number)
        named = {one.name: cells[:, place] for place, one in enumerate(encoder.inputs)}
        return rows(
            Table("the array", {name: read(values, name) for name, values in named.items()}),
            encoder,
        )
    return array(given, None)


def array(given: Any, columns: list[str] | None) -> np.ndarray:
    """Return what was given as a NumPy array of numbers; a data frame's columns are put into the
    card's order where the card names them.
    """
    if isinstance(given, Tensor):
        given = given.detach().cpu()
        return (given.float() if given.dtype == torch.bfloat16 else given).numpy()
    if hasattr(given, "to_numpy"):
        if columns and hasattr(given, "columns"):
            given = given[in_order([str(name) for name in given.columns], columns)]
        given = given.to_numpy()
    try:
        x = np.asarray(given)
    except (ValueError, TypeError):
        raise ConfigError(
            f"inputs must be one block of numbers, got a {type(given).__name__} whose rows have "
            "different lengths; give every sample the same number of values"
        ) from None
    if x.dtype.kind in "biuf":
        return x
    if x.dtype.kind not in "OUS":
        raise ConfigError(
            f"inputs must be numbers, got {x.dtype}; turn them into the numbers the model was "
            "trained on"
        )
    flat = [number(value, place) for place, value in enumerate(x.reshape(-1).tolist())]
    return np.array(flat, dtype=np.float64).reshape(x.shape)


def in_order(names: list[str], columns: list[str]) -> list[str]:
    """Return the card's columns if a table has just these."""
    missing = [name for name in columns if name not in names]
    others = [name for name in names if name not in columns]
    if missing or others:
        said = [
            f"{word} {', '.join(part[:5])}"
            for word, part in (("lacks", missing), ("also has", others))
            if part
        ]
        raise ConfigError(
            f"the table {' and '.join(said)}; the model needs the {len(columns)} columns "
            f"{', '.join(columns[:8])}{', …' if len(columns) > 8 else ''}: rename or drop columns"
        )
    return columns


def number(value: Any, place: int) -> float:
    """Return one value of a table of objects; missing ones are NaN."""
    if type(value).__name__ in MISSING:
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(
            f"inputs must be numbers, got {value!r} (value {place} of the table); encode it as in "
            "training, or leave it empty if it is missing"
        ) from None


def pixels(x: np.ndarray, network: dict[str, Any], known: Images | None) -> np.ndarray:
    """Return images as the network was trained on them; other inputs as they are. `known` says how
    the training images were read.
    """
    shape = tuple(network["input_shape"])
    if len(shape) != 3:
        return x
    if network.get("pixels"):
        if x.dtype.kind not in "iub":
            return prepared_floats(x)
        return whole_pixels(x, shape, known is not None and known.layout == "NCHW")
    if known is not None:
        return as_trained(x, shape, known)
    if x.dtype == np.uint8:
        raise ConfigError(
            f"inputs are images of type uint8, but the model was trained on floating-point images "
            f"of shape {shape}; scale them as in training, e.g. x.astype('float32') / 255"
        )
    return x


def whole_pixels(x: np.ndarray, shape: tuple[int, ...], first: bool = False) -> np.ndarray:
    """Return images of whole numbers 0…255, the channels last or first, as in training; `first`
    decides where the shape does not.
    """
    if x.dtype == bool:
        x = x.astype(np.uint8) * np.uint8(255)
    elif x.dtype != np.uint8:
        if x.size and (int(x.min()) < 0 or int(x.max()) > 255):
            raise ConfigError(
                f"inputs are whole numbers from {int(x.min())} to {int(x.max())}, but pixels go "
                "from 0 to 255; scale them as in training"
            )
        x = x.astype(np.uint8)
    single = (*shape[1:], shape[0])
    if x.shape in (single, shape[1:], shape):
        x = x[None]
    if x.shape[1:] == shape and (first or shape != single):
        x = x.transpose(0, 2, 3, 1)
    if x.shape[1:] != single and not (shape[0] == 1 and x.shape[1:] == shape[1:]):
        raise ConfigError(
            f"inputs of type uint8 must have shape {('N', *single)}, got {x.shape}; put the "
            "channels last"
        )
    return Source("", x, np.zeros(len(x), np.int64), 1).samples(np.arange(len(x)))


def prepared_floats(x: np.ndarray) -> np.ndarray:
    """Return floats that are scaled already; raise if they are pixels 0…255."""
    if x.dtype.kind == "f" and x.size and float(x.min()) >= 0 and float(x.max()) > BRIGHT:
        raise ConfigError(
            f"inputs are floats up to {float(x.max()):g}, which look like pixels 0…255; give them "
            "as whole numbers (x.astype('uint8')), or scaled to (x/255 − 0.5)/0.5"
        )
    return x


def as_trained(x: np.ndarray, shape: tuple[int, ...], known: Images) -> np.ndarray:
    """Return images laid out and scaled as those in the training file; prepared ones, which have
    the network's shape and negative values, as they are.
    """
    raw = {"NHW": shape[1:], "NHWC": (*shape[1:], shape[0]), "NCHW": shape}[known.layout]
    if x.shape == raw:
        x = x[None]
    ready = x.shape[1:] == shape and (raw != shape or (x.size and float(x.min()) < 0))
    return x if x.shape[1:] != raw or (ready and known.white) else known.apply(x)


def shaped(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return the samples as (N, *shape); a single sample is a batch of one."""
    if x.shape == shape:
        x = x[None]
    elif shape[:1] == (1,) and len(shape) == 3 and x.shape[-2:] == shape[1:] and x.ndim in (2, 3):
        x = x.reshape(-1, *shape)  # one channel, left out
    if x.shape[1:] != shape:
        wanted = "(" + ", ".join(["N", *map(str, shape)]) + ")"
        raise ConfigError(f"inputs must have shape {wanted}, got {x.shape}; {remedy(x, shape)}")
    if not len(x):
        raise ConfigError("inputs have no samples; give at least one")
    return x


def remedy(x: np.ndarray, shape: tuple[int, ...]) -> str:
    """Return what to do about inputs of another shape."""
    if len(shape) == 1 and x.ndim in (1, 2):
        given = x.shape[-1] if x.ndim else 0
        return f"a sample has {shape[0]} features here, yours has {given}"
    if x.ndim == 4 and len(shape) == 3 and (x.shape[3], *x.shape[1:3]) == shape:
        return "put the channels first: x.transpose(0, 3, 1, 2)"
    if x.ndim == 2 and x.shape[1] == math.prod(shape):
        return f"reshape the rows: x.reshape(-1, {', '.join(map(str, shape))})"
    return "prepare the samples as in training"


def whole(x: np.ndarray, network: dict[str, Any]) -> Tensor:
    """Return whole numbers, such as tokens."""
    if x.dtype.kind == "f":
        if not bool((np.isfinite(x) & (x == np.round(x))).all()):
            raise ConfigError(
                f"inputs must be whole numbers ({network['input_dtype']}), got {x.dtype} with "
                "fractions or missing values; give tokens as integers"
            )
        x = x.astype(np.int64)
    known = network.get("input_range")
    if known and (int(x.min()) < known[0] or int(x.max()) > known[1]):
        raise ConfigError(
            f"inputs must be in [{known[0]}, {known[1]}], got {int(x.min())} to {int(x.max())}; "
            "use the same vocabulary as in training"
        )
    return torch.as_tensor(x.astype(network["input_dtype"]))


def numbers(x: np.ndarray, network: dict[str, Any], prepared: bool) -> Tensor:
    """Return floating-point inputs; NaN means missing, where the model prepares its inputs."""
    with np.errstate(over="ignore", invalid="ignore"):
        x = np.ascontiguousarray(x, dtype=network["input_dtype"])
    bad = ~np.isfinite(x) if not prepared else np.isinf(x)
    if bad.any():
        row, *rest = (int(place) for place in np.argwhere(bad)[0])
        where = f"sample {row}, place {', '.join(map(str, rest))}" if rest else f"sample {row}"
        why = (
            "mark missing values with NaN"
            if prepared
            else "this model has no rule for missing values: fill them in as in training"
        )
        raise ConfigError(
            f"inputs must be finite, got {int(bad.sum())} values that are not (first: {where}); "
            f"{why}"
        )
    return torch.as_tensor(x)
