"""New samples read as a data set was read: the same columns, categories, classes and pixels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..errors import ConfigError
from . import cells, labels, npz, outcomes, photos
from .cells import IS_MISSING, Column
from .columns import Encoder
from .source import Names, Source
from .tables import Table, is_table, read_table


def read_alike(path: Path, like: Source, test: str = "", target: str = "") -> Source:
    """Return labelled samples of a new client, read as `like` was: a table with the same columns, a
    folder CLASS/FILE, or an .npz file. `test` is the column that marks test samples, if any, and
    `target` names the columns of several targets.
    """
    if path.is_dir():
        return of_folder(path, like)
    if is_table(path):
        return of_table(read_table(path), path.stem, like, test, target)
    options = npz.Options(kind=like.kind)
    if like.images is not None:
        options = options._replace(layout=like.images.layout, white=like.images.white)
    arrays = npz.arrays_of(path, options)
    if like.measured:
        arrays.pop("num_classes", None)
    elif "y" in arrays and "num_classes" not in arrays and arrays["y"].ndim == 1:
        found = cells.read(arrays["y"], f"y in {path}")
        arrays["y"] = matched(found, like.class_names(), f"y in {path}")
        arrays["num_classes"] = np.array(like.num_classes)
    if like.x.ndim == 2 or arrays.get("x", np.zeros(0)).dtype == np.uint8:
        options = npz.Options(kind=like.kind)
    if like.plain:
        arrays["plain"] = np.array(True)
    return npz.of_arrays(arrays, path.stem, str(path), options, True)


def of_table(table: Table, name: str, like: Source, test: str, target: str = "") -> Source:
    """Return the labelled rows of a table."""
    encoder = like.encoder
    if encoder is None:
        raise ConfigError(
            f"{table.where} is a table with named columns, but the federation was trained on "
            "arrays; give an .npz file with x and y"
        )
    if encoder.target not in table.columns:
        raise ConfigError(f"{table.where} has no column {encoder.target!r} with the labels")
    where = f"column {encoder.target!r} of {table.where}"
    if like.kind in ("times", "labels"):
        named = ",".join(like.class_names()) if like.kind == "labels" else target
        usual = outcomes.columns_of(named, [*table.columns], like.kind, table.where)
        columns = {one: table.columns[one] for one in usual}
        y, there = outcomes.of_columns(columns, like.kind, table.where)
        if len(there) < len(y):
            raise ConfigError(f"{where} has missing targets; leave those rows out")
    elif like.measured:
        y = labels.measured(table.columns[encoder.target], where)
        if np.isnan(y).any():
            raise ConfigError(f"{where} has missing targets; leave those rows out")
    else:
        y = matched(table.columns[encoder.target], like.class_names(), where)
    marks = None
    if test in table.columns:
        marks = labels.marks(table.columns[test], f"column {test!r} of {table.where}")
    return Source(
        name,
        rows(table, encoder).astype(np.float32),
        y,
        like.num_classes,
        None,
        marks,
        names=Names((), like.class_names(), encoder.columns()),
        encoder=encoder,
        kind=like.kind,
    )


def rows(table: Table, encoder: Encoder, keep: Sequence[str] | None = None) -> np.ndarray:
    """Return the inputs (N, D) of a table's rows, float64. Columns that were no inputs in training
    are ignored; columns that training did not know must be named in `keep`, None in Python.
    """
    known = {*(one.name for one in encoder.inputs), *encoder.ignored, *(keep or ())}
    others = [name for name in table.columns if name not in known]
    missing = [one.name for one in encoder.inputs if one.name not in table.columns]
    if missing or others:
        said = [
            f"{word} {', '.join(part[:5])}"
            for word, part in (("lacks", missing), ("also has", others))
            if part
        ]
        names = ", ".join(one.name for one in encoder.inputs[:8])
        raise ConfigError(
            f"{table.where} {' and '.join(said)}; the model needs the {len(encoder.inputs)} "
            f"columns {names}{', …' if len(encoder.inputs) > 8 else ''}: rename or drop columns"
            + ("" if keep is None else ", or name those that are no inputs with --keep")
        )
    return encoder.encode(table.columns, table.where)


def of_folder(root: Path, like: Source) -> Source:
    """Return the images of a folder CLASS/FILE, brought to the size of those in training."""
    if not isinstance(like.x, photos.Files):
        raise ConfigError(
            f"{root} is a folder of images, but the federation was trained on arrays; give an "
            ".npz file with x and y"
        )
    found = photos.survey(root)
    y = matched(labels.of_names(found.labels), like.class_names(), f"the folders of {root}")
    paths = [root / file for file in found.files]
    size = (like.x.shape[1], like.x.shape[2])
    x = photos.Files(paths, size, like.x.colour)
    return Source(root.name, x, y, like.num_classes, None, found.test, images=like.images)


def matched(column: Column, classes: Sequence[str], where: str) -> np.ndarray:
    """Return the class number of each label, by the names of the classes."""
    place = {name: number for number, name in enumerate(classes)}
    if (column.kinds == IS_MISSING).any():
        row = int(np.flatnonzero(column.kinds == IS_MISSING)[0])
        raise ConfigError(f"{where} has no label in row {row + 1}; leave the row out")
    texts = column.categories()
    for text in texts:
        if str(text) not in place:
            raise ConfigError(
                f"{where} has label {str(text)!r}; the federation's models know {len(classes)} "
                f"classes: {', '.join(classes[:10])}"
            )
    return np.array([place[str(text)] for text in texts], np.int64)
