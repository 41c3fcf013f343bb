"""Clients of arrays put together into one `Source`: shapes, labels, and what a network sees."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import data as torch_data

from ..errors import ConfigError
from . import cells, doors, images, labels, loaders, npz, outcomes
from .source import Names, Source
from .tables import is_frame

TWICE = 4  # samples that are read twice, to see whether they change


class Part(NamedTuple):
    """Samples of one client."""

    x: np.ndarray
    y: np.ndarray
    classes: tuple[str, ...] = ()  # names of the classes, where the data have them


class Reading(NamedTuple):
    """How objects are to be read."""

    options: npz.Options = npz.PLAIN
    num_classes: int = 0  # 0 = those that occur
    standardise: bool = False  # rows (N, D) are standardised by each client, NaN is missing
    whole: bool = False  # whole numbers stay so: the network is one's own


def who(name: str) -> str:
    """Return what errors call a client's data."""
    return f"the data of client {name!r}"


def is_array(given: Any) -> bool:
    """Return whether an object is an array, a tensor or a column."""
    return isinstance(given, (Tensor, np.ndarray)) or hasattr(given, "to_numpy")


def shown(names: Iterable[str]) -> str:
    """Return some names as text."""
    return doors.shown(map(str, names))


def array(given: Any, what: str) -> np.ndarray:
    """Return an array of what may be a tensor, a column or a table of numbers."""
    if isinstance(given, Tensor):
        found = given.detach().cpu()
        return (found.float() if found.dtype in (torch.bfloat16, torch.float16) else found).numpy()
    if is_frame(given):
        try:
            return np.asarray(given.to_numpy(), dtype=np.float64)
        except (TypeError, ValueError):
            raise ConfigError(
                f"{what} has a table with columns that are no numbers; give one data frame with "
                "the labels as a column, and target=COLUMN"
            ) from None
    return np.asarray(given.to_numpy() if hasattr(given, "to_numpy") else given)


def same_each_time(given: Any, what: str) -> Any:
    """Return a data set, or a loader's, that gives the same samples whenever it is read; raise if
    it draws them.
    """
    if isinstance(given, torch_data.DataLoader):
        sampler, inner = given.sampler, given.dataset
        if isinstance(inner, torch_data.IterableDataset) or given.batch_size is None:
            return given
        if isinstance(sampler, torch_data.SubsetRandomSampler):
            inner = torch_data.Subset(inner, sorted(int(one) for one in sampler.indices))
        elif not isinstance(
            sampler, (torch_data.SequentialSampler, torch_data.RandomSampler)
        ) or getattr(sampler, "replacement", False):
            raise ConfigError(
                f"{what} is a DataLoader with a {type(sampler).__name__}, which decides what is "
                "drawn; give its data set, as rounds draw their own batches (class_weights can "
                "balance classes)"
            )
        check_still(inner, what)
        return torch_data.DataLoader(inner, batch_size=loaders.AT_ONCE, collate_fn=given.collate_fn)
    check_still(given, what)
    return given


def check_still(data: Any, what: str) -> None:
    """Raise if a data set gives other values when it is read again: random augmentation."""
    if isinstance(data, torch_data.IterableDataset) or not hasattr(data, "__len__"):
        return
    for place in range(min(TWICE, len(data))):
        first, again = data[place], data[place]
        pairs = zip(leaves(first), leaves(again), strict=True)
        if not all(np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in pairs):
            raise ConfigError(
                f"{what} gives other values each time it is read, so it augments at random; give "
                "it without augmentation and use the settings of docs/recipes.md, e.g. flip=true"
            )


def leaves(item: Any) -> list[np.ndarray]:
    """Return the arrays of one sample."""
    if isinstance(item, Mapping):
        return [leaf for key in item for leaf in leaves(item[key])]
    if isinstance(item, (tuple, list)):
        return [leaf for one in item for leaf in leaves(one)]
    return [np.asarray(item.detach().cpu() if isinstance(item, Tensor) else item)]


def of_parts(clients: Mapping[str, tuple[Part, Part | None]], how: Reading) -> Source:
    """Return the pooled data set of clients with their parts; one client called "" is a data set
    without sites.
    """
    sites = tuple(clients) if set(clients) != {""} else ()
    tested = [name for name, (_, test) in clients.items() if test is not None]
    if tested and len(tested) < len(clients):
        left = next(name for name in clients if name not in tested)
        raise ConfigError(
            f"{who(left)} has no test part, but that of client {tested[0]!r} has; give all of them "
            "one, or none of them"
        )
    parts, owners, marks, names = [], [], [], []
    for place, (name, both) in enumerate(clients.items()):
        for test, part in enumerate(both):
            if part is not None:
                parts.append(part)
                names.append(name)
                owners.append(np.full(len(part.y), place, np.int64))
                marks.append(np.full(len(part.y), bool(test)))
    for name, part in zip(names, parts, strict=True):
        if part.x.shape[1:] != parts[0].x.shape[1:]:
            raise ConfigError(
                f"{who(name)} has samples of shape {part.x.shape[1:]}, that of client {names[0]!r} "
                f"{parts[0].x.shape[1:]}; give all clients the same inputs"
            )
    classes: tuple[str, ...] = ()
    if (kind := how.options.kind) in ("times", "labels"):
        whole = np.concatenate([part.y for part in parts])
        y = outcomes.of_array(whole, kind, "the data")
    elif how.options.measured:
        y = measured(parts, names)
    else:
        y, classes = numbered(parts, names, how.num_classes)
    x, plain, found = inputs([part.x for part in parts], how)
    return Source(
        "data",
        x,
        y,
        len(classes) or (y.shape[1] if kind == "labels" else 1),
        np.concatenate(owners) if sites else None,
        np.concatenate(marks) if tested else None,
        names=Names(sites, classes),
        images=found,
        plain=plain,
        kind=how.options.kind,
    )


def measured(parts: Sequence[Part], names: Sequence[str]) -> np.ndarray:
    """Return the targets of all samples as numbers, float64."""
    for name, part in zip(names, parts, strict=True):
        if part.y.dtype.kind not in "iubf" or not np.isfinite(part.y.astype(np.float64)).all():
            raise ConfigError(
                f"{who(name)} has targets that are missing or no numbers; leave those samples out, "
                "or set task='classification'"
            )
    return np.concatenate([part.y.astype(np.float64) for part in parts])


def inputs(parts: Sequence[np.ndarray], how: Reading) -> tuple[Any, bool, images.Images | None]:
    """Return (samples as they are stored, whether they are plain, how images were read)."""
    x = np.concatenate(parts)
    if x.ndim == 1:
        x = x[:, None]
    if x.dtype == np.uint8 and x.ndim > 2:
        stored, found = images.read(x, how.options.layout, how.options.white, "x")
        return stored, False, found
    if how.standardise:
        if x.ndim != 2:
            raise ConfigError(
                f"standardise is for rows (N, D), got samples of shape {x.shape[1:]}; leave it out"
            )
        return npz.samples(x, "data", how.options)[0], False, None
    if x.dtype.kind == "f" and np.isnan(x).any():
        raise ConfigError(
            "x has missing values (NaN); fill them in, give a data frame, or standardise=True for "
            "rows (N, D), which replaces them by each client's median"
        )
    if x.dtype.kind in "iub" and not how.whole:
        x = x.astype(np.float32)
    return npz.as_they_are(x, "x"), True, None


def numbered(
    parts: Sequence[Part], names: Sequence[str], wanted: int
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return (class numbers of all samples, names of the classes). Class numbers from 0 stay as
    they are; other labels are numbered in their order.
    """
    for name, part in zip(names, parts, strict=True):
        missing = part.y.dtype.kind == "f" and np.isnan(part.y).any()
        if missing or (part.y.dtype.kind in "if" and (part.y < 0).any()):
            raise ConfigError(
                f"{who(name)} has labels that are missing or below 0; leave those samples out"
            )
    kinds = {"number" if part.y.dtype.kind in "iubf" else "text" for part in parts}
    if len(kinds) > 1:
        raise ConfigError("some clients have numbers as labels and others texts; give all the same")
    y = np.concatenate([part.y for part in parts])
    if y.dtype.kind == "f":
        if not (y == np.round(y)).all():
            raise ConfigError(
                f"labels must be classes, got numbers such as {y[y != np.round(y)][0]:g}; cut them "
                "into classes"
            )
        y = y.astype(np.int64)
    known = next((part.classes for part in parts if part.classes), ())
    if y.dtype.kind in "iub":
        y = y.astype(np.int64)
        number = wanted or len(known) or (int(y.max()) + 1 if same_as_numbers(y) else 0)
        if number and int(y.max()) >= number:
            raise ConfigError(
                f"label {int(y.max())} is not in 0…{number - 1} for num_classes {number}; number "
                "the classes from 0"
            )
        if number == 1:
            raise ConfigError("all labels are 0; data need at least two classes")
        if number:
            return y, known or tuple(map(str, range(number)))
    found, texts = labels.classes(cells.read(y, "the labels"), "y", counted=True)
    if (found < 0).any():
        raise ConfigError(f"{int((found < 0).sum())} labels are missing; leave those samples out")
    if wanted and wanted != len(texts):
        raise ConfigError(
            f"num_classes is {wanted}, but {len(texts)} labels occur; number the classes from 0 if "
            "some do not occur"
        )
    return found, texts


def same_as_numbers(y: np.ndarray) -> bool:
    """Return whether every class number from 0 occurs."""
    return bool(len(np.unique(y)) == int(y.max()) + 1)
