"""The front door for a user's data: a path, several paths, a folder of images or a data frame, read
into one pooled `Source`.

Nothing is guessed twice: what a column or an array is follows from stated rules (`cells`,
`columns`, `images`, `photos`), and what they leave open is refused in one line.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError
from . import cells, columns, labels, outcomes
from .checks import names_in
from .npz import Options, is_share, ordered, read_npz, read_several
from .photos import of_photos
from .source import Names, Source
from .tables import Table, frame, is_frame, is_table, read_table, stacked

State = tuple[tuple[str, int, int], ...]  # of files: name, time and size
TARGETS = ("target", "label", "class", "outcome", "diagnosis", "y")
SITES = ("site", "client", "hospital", "centre", "center", "clinic")
MARKS = ("test", "split")
NOT_ASKED_FOR = "it marks test rows"


def read(
    data: Any,
    *,
    target: str = "",
    site: str = "",
    test: str = "",
    categorical: str = "",
    drop: str = "",
    layout: str = "auto",
    white: float | None = None,
    image_side: int = 0,
    kind: str = "classes",
) -> Source:
    """Return a user's data as a pooled `Source`.

    data         path of a .csv, .parquet or .npz file or of a folder of images; several paths
                 (a list, a glob pattern, or separated by commas), one a site; or a data frame
    target       column of the labels; without it a column called target, label, class, outcome,
                 diagnosis or y
    site         column of the sites; without it a column called site, client, hospital, centre,
                 center or clinic; "off" = there are none. For a folder CLASS/FILE: a .csv file with
                 columns file and site
    test         column that marks test samples, or a file (or folder) of test samples
    categorical  columns of numbers that are categories, separated by commas
    drop         columns to leave out, separated by commas
    layout       of images: auto, NHW, NHWC, NCHW or flat
    white        value of a white pixel; 0 = images are taken as they are
    image_side   side in pixels that images of a folder are brought to
    kind         what targets are: classes, numbers, times (target="TIME,EVENT") or labels
                 (target="a,b,c")
    """
    given = (target, site, str(test), categorical, drop, layout, white, image_side)
    options = Options(*given, kind=kind)
    if is_frame(data):
        return of_tables([frame(data)], "table", options)
    if isinstance(data, (str, Path)):
        return read_path(str(data), options)
    return read_path(",".join(str(path) for path in data), options)


def read_path(dataset: str, options: Options) -> Source:
    """Return the data set at a path; read once for each state of the files."""
    return _read_path(dataset, options, state_of(dataset, options))


def state_of(dataset: str, options: Options) -> State:
    """Return what changes when the files at a path change."""
    others = [Path(text) for text in (options.test, options.site) if text and Path(text).is_file()]
    return stamps([*paths_of(dataset), *others])


def stamps(paths: Sequence[Path]) -> State:
    """Return name, time and size of the files that exist."""
    return tuple(
        (str(path), info.st_mtime_ns, info.st_size)
        for path in paths
        if path.exists() and (info := path.stat())
    )


@lru_cache(maxsize=2)
def _read_path(dataset: str, options: Options, state: State) -> Source:
    paths, name = paths_of(dataset), name_of(dataset)
    if len(paths) > 1 and is_table(options.test):  # the file of test rows is no site
        paths = [path for path in paths if path.resolve() != Path(options.test).resolve()]
    if len(paths) == 1 and paths[0].is_dir():
        return of_photos(paths[0], options)
    kinds = {"npz" if path.suffix == ".npz" else "table" for path in paths}
    if len(kinds) > 1:
        raise ConfigError(f"{dataset} has tables and .npz files; give files of one kind")
    if kinds == {"npz"}:
        return (
            read_npz(paths[0], options) if len(paths) == 1 else read_several(paths, name, options)
        )
    return of_tables([read_table(path) for path in paths], name, options)


def paths_of(dataset: str) -> list[Path]:
    """Return the files of a data set: one path, several separated by commas, or a glob pattern. A
    folder of tables or .npz files is its files.
    """
    whole = Path(dataset)
    if whole.is_dir():
        inside = sorted(p for p in whole.iterdir() if is_table(p) or p.suffix == ".npz")
        pictures = any(p.is_dir() and not p.name.startswith(".") for p in whole.iterdir())
        return inside if inside and not pictures else [whole]
    if whole.exists():
        return [whole]
    found: list[Path] = []
    for part in dataset.split(","):
        some = [Path(part)]
        if any(mark in part for mark in "*?["):
            some = sorted(Path(one) for one in glob.glob(part.strip()))
            if not some:
                raise ConfigError(f"no file matches {part.strip()!r}; check the path")
        found += some
    for path in found:
        if not (path.suffix == ".npz" or is_table(path)):
            raise ConfigError(
                f"{path} was not found, or is no .csv, .parquet or .npz file or folder of images"
            )
    return found


def name_of(dataset: str) -> str:
    """Return what to call a data set: the file's name, or that of the folder of several files."""
    first = Path(dataset.split(",")[0].strip())
    several = "," in dataset or any(mark in dataset for mark in "*?[")
    if several and not Path(dataset).exists():
        return first.parent.name or "files"
    return first.name.removesuffix(".gz").rpartition(".")[0] or first.name or first.resolve().name


# -- tables --------------------------------------------------------------------------------------
def of_tables(tables: list[Table], name: str, options: Options) -> Source:
    """Return the data set in some tables; each is a site if there are several and no column says
    otherwise.
    """
    several = len(tables) > 1
    table = stacked(tables, f"the {len(tables)} files of {name}") if several else tables[0]
    rows, tested = [one.rows for one in tables], None
    kind, several_columns = options.kind, options.kind in ("times", "labels")
    target: str | None
    if several_columns:
        goals = outcomes.columns_of(options.target, list(table.columns), kind, table.where)
        target = goals[0]
    else:
        target = named(table, options.target, TARGETS, "target")
        goals = [target or ""]
    if target is None:
        raise ConfigError(
            f"{table.where} has no column called {', '.join(TARGETS)}; name the column of the "
            f"labels with --target, one of {shown(table.columns)}"
        )
    if (path := Path(options.test)) and options.test not in ("", *table.columns):
        if is_table(path):
            extra = read_table(path)
            tested = np.arange(table.rows + extra.rows) >= table.rows
            table = stacked([table, extra], table.where)
            rows.append(extra.rows)
        elif not is_share(options.test):
            raise ConfigError(
                f"{table.where} has no column {options.test!r} to mark test samples, and there is "
                "no such table; give a column, a file or a share"
            )
    if (site := site_of(table, options, several, target)) in goals:
        raise ConfigError(f"target and site are both {target!r}; give two columns")
    lines = []
    where = f"column {target!r} of {table.where}"
    names: tuple[str, ...] = ()
    if several_columns:
        y, there = outcomes.of_columns(
            {one: table.columns[one] for one in goals}, kind, table.where
        )
        names = tuple(goals) if kind == "labels" else ()
    elif kind == "numbers":
        y = labels.measured(table.columns[target], where)
        there = np.flatnonzero(~np.isnan(y))
    else:
        y, names = labels.classes(table.columns[target], where)
        there = np.flatnonzero(y >= 0)
    if len(there) < len(y):
        lines.append(f"{len(y) - len(there)} rows without a label in {target!r} left out")
    owners: np.ndarray | None = None
    sites: tuple[str, ...] = ()
    if site is not None:
        owners, sites = labels.numbered(table.columns[site])
        if (owners[there] < 0).any():
            lost = int((owners[there] < 0).sum())
            lines.append(f"{lost} rows without a value in {site!r} belong to no site")
    elif several and options.site != "off":
        stems = [name_of(one.where) for one in tables]
        if len(set(stems)) < len(stems):
            raise ConfigError(f"two files of {name} have the same name; rename one: it is its site")
        owners, sites = np.repeat(np.arange(len(tables)), rows[: len(tables)]), tuple(stems)
        if tested is not None and len(owners) < table.rows:
            raise ConfigError(
                f"the rows of {options.test} belong to no site; give all files a column of sites"
            )
    time = None
    if options.time:
        column = table.columns[str(named(table, options.time, (), "set time="))]
        texts = np.array([str(one) for one in column.texts])
        numeric = bool((column.kinds == cells.IS_NUMBER).all())
        time = ordered(column.numbers if numeric else texts, table.where)
    marks, mark = (tested, None) if tested is not None else marked(table, options, lines)
    ignored = [one for one in (*goals, site, mark) if one is not None]
    silent = unseen(owners, sites, marks, options)
    deciding = there if silent is None else there[~silent[there]]
    encoder, more = encoded(table, owners, deciding, ignored, options)
    x = encoder.encode({n: c.at(there) for n, c in table.columns.items()}, table.where)
    with np.errstate(over="ignore"):
        x = x.astype(np.float32)
    if np.isinf(x).any():
        at = encoder.columns()[int(np.flatnonzero(np.isinf(x).any(axis=0))[0])]
        raise ConfigError(f"column {at!r} of {table.where} has values too large for float32")
    owners = owners if owners is None else owners[there]
    if owners is not None:  # sites of which no row is left do not count
        used = np.unique(owners[owners >= 0])
        sites = tuple(sites[one] for one in used)
        owners = np.where(owners < 0, -1, np.searchsorted(used, owners)).astype(np.int64)
    return Source(
        name,
        x,
        y[there],
        len(names) or 1,
        owners if sites else None,
        marks if marks is None else marks[there],
        names=Names(sites, names, encoder.columns()),
        encoder=encoder,
        lines=(*lines, *more),
        kind=options.kind,
        time=time if time is None else time[there],
    )


def unseen(
    owners: np.ndarray | None,
    sites: tuple[str, ...],
    marks: np.ndarray | None,
    options: Options,
) -> np.ndarray | None:
    """Return the rows that must not decide how columns are encoded: those marked as test, and those
    of sites that are new or left out; None if there are none.
    """
    away = [place for place, name in enumerate(sites) if name in names_in(options.unseen)]
    if owners is None or not away or len(away) == len(sites):
        return marks
    elsewhere = np.isin(owners, away)
    return elsewhere if marks is None else elsewhere | marks


def encoded(
    table: Table,
    owners: np.ndarray | None,
    rows: np.ndarray,
    ignored: list[str],
    options: Options,
) -> tuple[columns.Encoder, list[str]]:
    """Return (how the table's rows become inputs, lines on what is left out). It follows from the
    sum of each site's counts over some rows.
    """
    dropped = listed(options.drop, table, "drop")
    asked = listed(options.categorical, table, "categorical")
    if not len(rows):
        raise ConfigError(f"{table.where} has no row to train on: all are marked as test")
    sites = np.zeros(table.rows, np.int64) if owners is None else owners
    groups = [rows[sites[rows] == one] for one in np.unique(sites[rows])]
    surveys = {
        name: columns.add(columns.survey(column.at(some), name in asked) for some in groups)
        for name, column in table.columns.items()
        if name not in ignored and name not in dropped
    }
    inputs, left = columns.plan(surveys, asked, table.where)
    lines = [
        f"column {name!r} left out: {why}"
        for name, why in {**{one: "as asked" for one in dropped}, **left}.items()
    ]
    return columns.Encoder(inputs, (*ignored, *dropped, *left), ignored[0]), lines


def site_of(table: Table, options: Options, several: bool, target: str) -> str | None:
    """Return the column of the sites."""
    if options.site == "off":
        return None
    if several and not options.site:
        return None
    found = named(table, options.site, SITES, "site")
    return None if found == target and not options.site else found


def named(table: Table, given: str, usual: tuple[str, ...], what: str) -> str | None:
    """Return the column that was named, or the one with a usual name; None if there is none."""
    if given:
        if given not in table.columns:
            raise ConfigError(
                f"{table.where} has no column {given!r} for --{what}; it has {shown(table.columns)}"
            )
        return given
    found = [name for name in table.columns if name.lower() in usual]
    if len(found) > 1:
        raise ConfigError(
            f"{table.where} has columns {', '.join(map(repr, found))}; say which one with --{what}"
        )
    return found[0] if found else None


def marked(
    table: Table, options: Options, lines: list[str]
) -> tuple[np.ndarray | None, str | None]:
    """Return (which rows are test, the column that marks them). A column called test or split is
    no input, even if it is not asked for.
    """
    if (name := options.test) in table.columns:
        return labels.marks(table.columns[name], f"column {name!r} of {table.where}"), name
    for name in [one for one in table.columns if one.lower() in MARKS][:1]:
        if labels.are_marks(table.columns[name]):
            lines.append(f"column {name!r} left out: {NOT_ASKED_FOR} (use it with --test {name})")
            return labels.marks(table.columns[name], name), name
    return None, None


def listed(text: str, table: Table, what: str) -> list[str]:
    """Return the columns of a list, checked."""
    names = [text] if text in table.columns else [one.strip() for one in text.split(",") if one]
    if unknown := [one for one in names if one not in table.columns]:
        raise ConfigError(
            f"{table.where} has no column {unknown[0]!r} for {what}; it has {shown(table.columns)}"
        )
    return names


def shown(names: Iterable[str]) -> str:
    """Return some names as text."""
    known = list(names)
    return ", ".join(known[:10]) + (", …" if len(known) > 10 else "")


# -- files of ours -------------------------------------------------------------------------------
def save(source: Source, path: Path | str) -> None:
    """Write a data set to an .npz file, with its names and how it was read: the file then trains
    the same models as the data it was made from.
    """
    x = source.x if isinstance(source.x, np.ndarray) else source.x[np.arange(len(source.y))]
    arrays: dict[str, Any] = {"x": x, "y": source.y, "num_classes": np.array(source.num_classes)}
    if source.class_names():
        arrays["class_names"] = np.array(source.class_names())
    if source.time is not None:
        arrays["time"] = source.time
    if source.client is not None:
        arrays |= {"client": source.client, "site_names": np.array(source.site_names())}
    if source.test is not None:
        arrays["test"] = source.test
    if source.names.columns:
        arrays["columns"] = np.array(source.names.columns)
    if source.encoder is not None:
        arrays["encoding"] = np.array(json.dumps(source.encoder.to_json()))
    if source.images is not None:
        arrays["images"] = np.array(json.dumps(source.images._asdict()))
    if source.plain:
        arrays["plain"] = np.array(True)
    np.savez(path, **arrays)
