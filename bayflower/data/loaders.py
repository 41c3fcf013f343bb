"""A user's data as tensors: pairs of tensors or arrays, torch data sets, and loaders of either."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ..errors import ConfigError

LABELS = ("label", "labels", "y", "target", "targets", "fine_label")
AT_ONCE = 256


def pair(source: Any, what: str) -> tuple[Tensor, Tensor]:
    """Return (x, y) of `source`: floats in torch's default dtype (whole numbers, such as tokens, as
    they are) and class numbers.

    A loader is read once, in the order of its data set. The batches of training are drawn from the
    seed instead.
    """
    if (
        isinstance(source, (tuple, list))
        and len(source) == 2
        and all(isinstance(part, (Tensor, np.ndarray)) for part in source)
    ):
        x, y = (torch.as_tensor(part) for part in source)
    elif isinstance(source, (DataLoader, Dataset)):
        x, y = read(source, what)
    else:
        raise ConfigError(
            f"{what} must be a pair (x, y) of tensors or arrays, a torch Dataset or a DataLoader, "
            f"got {type(source).__name__}"
        )
    if len(x) != len(y):
        raise ConfigError(
            f"{what} has {len(x)} samples and {len(y)} labels; it needs one label for each sample"
        )
    if x.dtype == torch.uint8:
        raise ConfigError(
            f"{what} has samples of type uint8; turn them into floats, e.g. x.float() / 255"
        )
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.dtype == torch.bool or (y.is_floating_point() and bool((y == y.round()).all())):
        y = y.long()
    return (x.to(torch.get_default_dtype()) if x.is_floating_point() else x), (
        y if y.is_floating_point() else y.long()
    )


def read(source: Any, what: str) -> tuple[Tensor, Tensor]:
    """Return all samples of a data set or loader."""
    loader = source
    if isinstance(source, Dataset):
        loader = DataLoader(source, batch_size=AT_ONCE)
    elif not isinstance(source.dataset, IterableDataset) and source.batch_size is not None:
        loader = DataLoader(source.dataset, batch_size=AT_ONCE, collate_fn=source.collate_fn)
    parts = [split(batch, what) for batch in loader]
    if not parts:
        raise ConfigError(f"{what} has no samples; every client needs at least one")
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def split(batch: Any, what: str) -> tuple[Tensor, Tensor]:
    """Return (x, y) of a batch: a pair, or a dict with one label and one other entry."""
    if isinstance(batch, Mapping):
        label = next((key for key in LABELS if key in batch), None)
        others = [key for key in batch if key != label]
        if label is None or len(others) != 1:
            raise ConfigError(
                f"{what} gives batches with keys {', '.join(map(str, batch))}; they need a label "
                "and one other entry"
            )
        return torch.as_tensor(batch[others[0]]), torch.as_tensor(batch[label])
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return torch.as_tensor(batch[0]), torch.as_tensor(batch[1])
    raise ConfigError(
        f"{what} gives batches of type {type(batch).__name__}; they must be pairs (x, y), or "
        "dicts with a label"
    )
