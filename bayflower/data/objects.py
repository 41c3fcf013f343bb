"""Clients' data as people have them in Python: arrays, tensors, torch data sets and loaders, data
frames, Hugging Face data sets and Flower's partitioners, read into one pooled `Source`.

Arrays are what the network sees: nothing is scaled, and whole numbers such as tokens stay whole for
a network of one's own. Images of type uint8 are read as a file of them would be. Data frames are
read as tables (`doors`). The other libraries are not imported: what an object can do decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import data as torch_data

from ..errors import ConfigError
from . import cells, doors, loaders, outcomes
from .checks import is_path
from .hugging import (
    as_tables,
    hugging_part,
    is_hugging,
    is_partitioner,
    of_hugging,
    of_partitioner,
    of_splits,
)
from .parts import Part, Reading, array, is_array, of_parts, same_each_time, who
from .source import Source
from .tables import Table, frame, is_frame, stacked

FORMS = (
    "a list or dict of clients, each (x, y), ((x, y), (x_test, y_test)), a torch Dataset, a "
    "DataLoader or a data frame; one data frame with a column of sites; a Hugging Face Dataset; a "
    "Flower partitioner; the path of a file; or the name of a data set"
)
VALIDATION = frozenset({"validation", "valid", "val", "dev"})


def is_text(given: Any) -> bool:
    """Return whether data are given by paths or a name, which are settings."""
    if isinstance(given, (list, tuple)):
        return bool(given) and all(is_text(one) and not isinstance(one, list) for one in given)
    return isinstance(given, str) or hasattr(given, "__fspath__")


def text_of(given: Any) -> str:
    """Return paths or a name as the setting `dataset` has it."""
    if isinstance(given, (list, tuple)):
        return ",".join(text_of(one) for one in given)
    text = str(given)
    return text if isinstance(given, str) or is_path(text) else f"./{text}"


def read_objects(given: Any, how: Reading) -> Source:
    """Return the pooled data of some clients; their names are the keys of a dict, or 0, 1, …"""
    if is_partitioner(given):
        given = of_partitioner(given)
    if is_frame(given):
        return doors.of_tables([frame(given)], "table", how.options)
    if is_hugging(given):
        return of_hugging(given, how)
    given = as_tables(given, how)
    if (
        isinstance(given, Mapping)
        and "train" in given
        and (more := sorted(VALIDATION & set(given)))
    ):
        raise ConfigError(
            f"data has a part {more[0]!r} besides train; give train and test alone: early "
            "stopping and calibration hold samples of the training part out"
        )
    if whole_set(given):
        if is_frame(given.get("train") if isinstance(given, Mapping) else None):
            return of_split_frames(given, how)
        if isinstance(given, Mapping) and all(map(is_hugging, given.values())):
            return of_splits(given, how) if "test" in given else of_hugging(given["train"], how)
        return of_parts({"": split_of(given, "the data", how)}, how)
    if not isinstance(given, (Mapping, list, tuple)):
        raise ConfigError(f"data of type {type(given).__name__} cannot be read; give {FORMS}")
    named = {str(k): v for k, v in given.items()} if isinstance(given, Mapping) else None
    clients = named or {str(place): one for place, one in enumerate(given)}
    if not clients:
        raise ConfigError("data has no clients; give at least one")
    if named is not None and len(named) < len(given):
        raise ConfigError("two clients have the same name; give each its own")
    if any(is_frame(train_of(one)) for one in clients.values()):
        return of_frames(clients, named is not None, how)
    return of_parts({name: split_of(one, who(name), how) for name, one in clients.items()}, how)


def whole_set(given: Any) -> bool:
    """Return whether an object is one data set of no sites: a pair (x, y) of arrays, a data set, a
    loader, or its training and test part.
    """
    if isinstance(given, Mapping):
        return set(given) in ({"train", "test"}, {"train"}, {"x", "y"})
    one_set = isinstance(given, (torch_data.Dataset, torch_data.DataLoader))
    return one_set or (isinstance(given, tuple) and is_pair(given))


def is_pair(given: Any) -> bool:
    """Return whether an object is (x, y)."""
    return (
        isinstance(given, (tuple, list))
        and len(given) == 2
        and all(map(is_array, given))
        and (not is_frame(given[1]))
    )


# -- clients of arrays ---------------------------------------------------------------------------
def parts_of(given: Any, what: str) -> tuple[Any, Any]:
    """Return (training part, test part or None) of a client."""
    if isinstance(given, Mapping):
        keys = set(given)
        if "train" in keys and keys <= {"train", "test"}:
            return given["train"], given.get("test")
        if {"x", "y"} <= keys <= {"x", "y", "x_test", "y_test"}:
            test = (given["x_test"], given["y_test"]) if "x_test" in keys else None
            return (given["x"], given["y"]), test
        raise ConfigError(
            f"{what} has keys {', '.join(map(str, given))}; give train and perhaps test, or x, y "
            "and perhaps x_test, y_test"
        )
    if isinstance(given, (tuple, list)) and not is_pair(given):
        if len(given) == 4 and all(map(is_array, given)):
            return tuple(given[:2]), tuple(given[2:])
        if len(given) == 2:
            return given[0], given[1]
        raise ConfigError(
            f"{what} is a {type(given).__name__} of {len(given)}; give (x, y), or a training and a "
            "test part"
        )
    return given, None


def train_of(given: Any) -> Any:
    """Return a client's training part, whatever it is."""
    if isinstance(given, Mapping):
        return given.get("train")
    return given[0] if isinstance(given, (tuple, list)) and given and not is_pair(given) else given


def split_of(given: Any, what: str, how: Reading) -> tuple[Part, Part | None]:
    """Return the training and the test part of a client as arrays."""
    train, test = parts_of(given, what)
    return part_of(train, what, how), None if test is None else part_of(test, what, how)


def part_of(given: Any, what: str, how: Reading) -> Part:
    """Return samples and labels as arrays."""
    if is_hugging(given):
        return hugging_part(given, what, how)[0]
    if is_pair(given):
        x, y = (array(one, what) for one in given)
    elif isinstance(given, (torch_data.Dataset, torch_data.DataLoader)):
        inputs, labels = loaders.read(same_each_time(given, what), what)
        if not isinstance(inputs, torch.Tensor):
            raise ConfigError(
                f"{what} has several inputs a sample; from Python give one tensor, or use "
                "make_client_app, which takes networks with several inputs"
            )
        x, y = inputs.numpy(), labels.numpy()
    else:
        raise ConfigError(f"{what} of type {type(given).__name__} cannot be read; give {FORMS}")
    if x.ndim == 0 or y.ndim == 0 or len(x) != len(y):
        raise ConfigError(
            f"{what} has samples of shape {x.shape} and labels of shape {y.shape}; it needs one "
            "label for each sample"
        )
    if not len(y):
        raise ConfigError(f"{what} has no samples; every client needs some, or leave it out")
    if x.dtype.kind not in "fiub":
        raise ConfigError(f"{what} has samples of type {x.dtype}; give numbers")
    if (kind := how.options.kind) in ("times", "labels"):
        return Part(x, outcomes.of_array(y, kind, what))
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1:
        raise ConfigError(
            f"{what} has labels of shape {y.shape}; give one class number or name for each sample, "
            "e.g. y.argmax(1) of one-hot labels"
        )
    return Part(x, y)


# -- data frames ---------------------------------------------------------------------------------
def of_split_frames(given: Mapping[str, Any], how: Reading) -> Source:
    """Return the data set of a training and perhaps a test data frame, with their own sites."""
    tables = [frame(one, f"the part {name!r}") for name, one in given.items()]
    table = stacked(tables, "the data frames")
    marks = [
        int(name == "test")
        for name, one in zip(given, tables, strict=True)
        for _ in range(one.rows)
    ]
    if "test" not in given:
        return doors.of_tables([table], "table", how.options)
    tests = free(table, "test_rows")
    more = {tests: cells.read(marks, tests)}
    options = how.options._replace(test=tests)
    return doors.of_tables([Table(table.where, {**table.columns, **more})], "table", options)


def of_frames(clients: Mapping[str, Any], named: bool, how: Reading) -> Source:
    """Return the data set of some data frames, one a client, each perhaps with its test rows."""
    tables, sites, marks = [], [], []
    for name, given in clients.items():
        for test, one in enumerate(parts_of(given, who(name))):
            if one is None:
                continue
            if not is_frame(one):
                raise ConfigError(
                    f"{who(name)} is a {type(one).__name__}, that of others a data frame; give all "
                    "clients the same"
                )
            tables.append(frame(one, who(name)))
            sites += [name if named else int(name)] * tables[-1].rows
            marks += [bool(test)] * tables[-1].rows
    table = stacked(tables, "the data frames")
    site, tests = free(table, "site"), free(table, "test_rows")
    more = {} if how.options.site else {site: cells.read(sites, site)}
    if any(marks):
        more[tests] = cells.read([int(mark) for mark in marks], tests)
    options = how.options._replace(
        site=how.options.site or site, test=tests if any(marks) else how.options.test
    )
    return doors.of_tables([Table(table.where, {**table.columns, **more})], "table", options)


def free(table: Table, name: str) -> str:
    """Return a name that no column has."""
    while name in table.columns:
        name = f"{name}_"
    return name
