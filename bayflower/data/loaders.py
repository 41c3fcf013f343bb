"""A user's data as tensors: pairs of tensors or arrays, torch data sets, and loaders of either."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ..errors import ConfigError

LABELS = ("label", "labels", "y", "target", "targets", "fine_label")
AT_ONCE = 256


Inputs = Tensor | Mapping[str, Tensor] | tuple[Tensor, ...]


def pair(source: Any, what: str) -> tuple[Tensor, Tensor]:
    """Return (x, y) of `source`: floats in torch's default dtype (whole numbers, such as tokens, as
    they are) and class numbers.

    A loader is read once, in the order of its data set. The batches of training are drawn from the
    seed instead.
    """
    x, y = inputs_and_labels(source, what)
    if not isinstance(x, Tensor):
        names = ", ".join(map(str, x)) if isinstance(x, Mapping) else f"{len(x)} inputs"
        raise ConfigError(f"{what} has several inputs ({names}); one is needed here")
    return x, y


def inputs_and_labels(source: Any, what: str) -> tuple[Inputs, Tensor]:
    """Return (inputs, y) of `source` as `pair` does; several inputs are a dict by keyword, or a
    tuple.
    """
    if isinstance(source, (tuple, list)) and len(source) == 2 and is_inputs(source[0]):
        x, y = as_inputs(source[0], what), as_tensor(source[1], "label", what)
    elif isinstance(source, (DataLoader, Dataset)):
        x, y = read(source, what)
    else:
        raise ConfigError(
            f"{what} must be a pair (x, y) of tensors or arrays, a torch Dataset or a DataLoader, "
            f"got {type(source).__name__}"
        )
    parts = [x] if isinstance(x, Tensor) else list(x.values() if isinstance(x, Mapping) else x)
    for part in parts:
        if len(part) != len(y):
            raise ConfigError(
                f"{what} has {len(part)} samples and {len(y)} labels; it needs one label for each "
                "sample"
            )
        if part.dtype == torch.uint8:
            raise ConfigError(
                f"{what} has samples of type uint8; turn them into floats, e.g. x.float() / 255"
            )
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.dtype == torch.bool or (y.is_floating_point() and bool((y == y.round()).all())):
        y = y.long()
    return each(x, usual), (y if y.is_floating_point() else y.long())


def usual(x: Tensor) -> Tensor:
    """Return floats in torch's default dtype; other numbers as they are."""
    return x.to(torch.get_default_dtype()) if x.is_floating_point() else x


def each(x: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """Return inputs with each of them changed."""
    if isinstance(x, Mapping):
        return {name: change(part) for name, part in x.items()}
    return tuple(change(part) for part in x) if isinstance(x, tuple) else change(x)


def is_inputs(x: Any) -> bool:
    """Return whether x can be the inputs of many samples: arrays, or several of them."""
    if isinstance(x, Mapping):
        return bool(x) and all(is_inputs(part) for part in x.values())
    if isinstance(x, (tuple, list)):
        return bool(x) and all(isinstance(part, (Tensor, np.ndarray)) for part in x)
    return isinstance(x, (Tensor, np.ndarray))


def as_inputs(x: Any, what: str) -> Inputs:
    """Return inputs as tensors; one input alone is a tensor."""
    if isinstance(x, Mapping):
        named = {str(name): as_tensor(part, str(name), what) for name, part in x.items()}
        return named if len(named) > 1 else next(iter(named.values()))
    if isinstance(x, (tuple, list)):
        listed = tuple(as_tensor(part, "input", what) for part in x)
        return listed if len(listed) > 1 else listed[0]
    return as_tensor(x, "input", what)


def as_tensor(value: Any, name: str, what: str) -> Tensor:
    """Return numbers as a tensor; raise if they are none."""
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(
            f"{what} has {name!r} of type {type(value).__name__}, which are not numbers of one "
            "shape; leave it out, or turn it into a tensor"
        ) from None


def read(source: Any, what: str) -> tuple[Inputs, Tensor]:
    """Return all samples of a data set or loader."""
    loader = source
    if isinstance(source, Dataset):
        loader = DataLoader(source, batch_size=AT_ONCE)
    elif not isinstance(source.dataset, IterableDataset) and source.batch_size is not None:
        loader = DataLoader(source.dataset, batch_size=AT_ONCE, collate_fn=source.collate_fn)
    parts = [split(batch, what) for batch in loader]
    if not parts:
        raise ConfigError(f"{what} has no samples; every client needs at least one")
    return joined([x for x, _ in parts], what), torch.cat([y for _, y in parts])


def joined(parts: Sequence[Inputs], what: str) -> Inputs:
    """Return the inputs of several batches as one."""
    first = parts[0]
    try:
        if isinstance(first, Mapping):
            return {name: torch.cat([part[name] for part in parts]) for name in first}  # type: ignore[index, call-overload]
        if isinstance(first, tuple):
            return tuple(torch.cat(column) for column in zip(*parts, strict=True))
        return torch.cat(parts)  # type: ignore[arg-type]
    except RuntimeError:
        raise ConfigError(
            f"{what} gives batches whose samples have different shapes; give all samples the same "
            "shape, e.g. padding='max_length'"
        ) from None


def split(batch: Any, what: str) -> tuple[Inputs, Tensor]:
    """Return (inputs, y) of a batch: (x, y), (x, …, y), or a dict with a label."""
    if isinstance(batch, Mapping):
        label = next((key for key in LABELS if key in batch), None)
        others = {key: value for key, value in batch.items() if key != label}
        if label is None or not others:
            raise ConfigError(
                f"{what} gives batches with keys {', '.join(map(str, batch))}; they need a label "
                f"({', '.join(LABELS)}) and an input"
            )
        return as_inputs(others, what), as_tensor(batch[label], str(label), what)
    if isinstance(batch, (tuple, list)) and len(batch) > 1:
        x = batch[0] if len(batch) == 2 else tuple(batch[:-1])
        return as_inputs(x, what), as_tensor(batch[-1], "label", what)
    raise ConfigError(
        f"{what} gives batches of type {type(batch).__name__}; they must be pairs (x, y), or "
        "dicts with a label"
    )
