"""Tables as columns of cells: CSV files, Parquet files and data frames."""

from __future__ import annotations

import csv
import gzip
import io
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import ConfigError, in_one_line
from . import cells
from .cells import Column

CSV = (".csv", ".tsv", ".csv.gz")
PARQUET = (".parquet", ".pq")


class Table(NamedTuple):
    """A table, and what to call it in errors."""

    where: str
    columns: dict[str, Column]

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return len(next(iter(self.columns.values())).kinds)


def is_table(path: Path | str) -> bool:
    """Return whether a file name is that of a table."""
    return str(path).lower().endswith((*CSV, *PARQUET))


def read_table(path: Path) -> Table:
    """Return the table in a file."""
    if not path.is_file():
        raise ConfigError(f"no file {path}; give the path of a .csv or .parquet file")
    if str(path).lower().endswith(PARQUET):
        return parquet(path)
    return read_csv(path)


def read_csv(path: Path) -> Table:
    """Return the table in a CSV file with a header row, separated by commas, semicolons or tabs."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = raw.decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        reason = in_one_line(error, 120)
        raise ConfigError(
            f"{path} cannot be read as a table ({reason}); save it as CSV in UTF-8"
        ) from None
    first = text.lstrip("\r\n").split("\n", 1)[0]
    mark = max(",;\t", key=first.count)
    try:
        lines = list(csv.reader(io.StringIO(text, newline=""), delimiter=mark, strict=True))
    except csv.Error as error:
        raise ConfigError(f"{path} cannot be read as a table ({error}); save it as CSV") from None
    lines = [line for line in lines if line]
    if not lines:
        raise ConfigError(f"{path} has no samples; it needs a header row and a row for each sample")
    head, *rows = lines
    names = header(head, str(path))
    if not rows:
        raise ConfigError(f"{path} has no samples; it needs a header row and a row for each sample")
    for place, row in enumerate(rows):
        if len(row) != len(names):
            raise ConfigError(
                f"row {place + 1} of {path} has {len(row)} values, the header {len(names)}; a "
                "missing value is empty, between its commas"
            )
    found = {
        name: cells.read(values, f"column {name!r} of {path}", comma=mark != ",")
        for name, values in zip(names, zip(*rows, strict=True), strict=True)
    }
    return Table(str(path), found)


def header(head: list[str], where: str) -> list[str]:
    """Return the names of the columns, checked."""
    names = [name.strip() for name in head]
    if names[0] == "":
        names[0] = "index"  # an index that was saved with the table
    shown = ", ".join(names[:5])
    if all(cells.NUMBER.fullmatch(name) for name in names):
        raise ConfigError(f"the first row of {where} must name the columns, each once, got {shown}")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"the first row of {where} must name the columns, each once, got {twice[0]!r} twice; "
            "rename or drop one"
        )
    return names


def parquet(path: Path) -> Table:
    """Return the table in a Parquet file; pyarrow reads it, or pandas."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(
            f"{path} is a Parquet file, which pyarrow reads; install it with: pip install "
            "'bayflower[parquet]', or save the table as CSV"
        ) from None
    try:
        found = pyarrow.parquet.read_table(path)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        reason = in_one_line(error, 120)
        raise ConfigError(f"{path} cannot be read as Parquet ({reason})") from None
    names = header([str(name) for name in found.column_names], str(path))
    if not found.num_rows:
        raise ConfigError(f"{path} has no samples; it needs a row for each sample")
    columns = {}
    for name, column in zip(names, found.columns, strict=True):
        if not name.startswith("__index_level_"):  # an index that pandas saved with the table
            columns[name] = cells.read(arrow_values(column), f"column {name!r} of {path}")
    return Table(str(path), columns)


def arrow_values(column: Any) -> Any:
    """Return the values of an Arrow column: numbers as an array, others as Python objects."""
    import pyarrow

    kind = column.type
    if pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind):
        return column.cast(pyarrow.float64(), safe=False).to_numpy()
    return column.to_pylist()


def is_frame(given: Any) -> bool:
    """Return whether an object is a data frame, of pandas or with the same names."""
    return all(hasattr(given, name) for name in ("columns", "dtypes", "to_numpy", "__getitem__"))


def frame(given: Any, where: str = "the data frame") -> Table:
    """Return a data frame as a table."""
    names = header([str(name) for name in given.columns], where)
    if not len(given):
        raise ConfigError(f"{where} has no samples; it needs a row for each sample")
    columns = {}
    for name, label in zip(names, given.columns, strict=True):
        values = given[label]
        values = values.to_numpy() if hasattr(values, "to_numpy") else np.asarray(values)
        columns[name] = cells.read(values, f"column {name!r} of {where}")
    return Table(where, columns)


def stacked(tables: list[Table], where: str) -> Table:
    """Return one table with the rows of several, which have the same columns."""
    first = tables[0]
    for one in tables[1:]:
        missing = [name for name in first.columns if name not in one.columns]
        more = [name for name in one.columns if name not in first.columns]
        if missing or more:
            said = f"lacks column {missing[0]!r}" if missing else f"also has column {more[0]!r}"
            raise ConfigError(
                f"{one.where} {said}, unlike {first.where}; give all files the same columns"
            )
    return Table(
        where,
        {name: cells.one_of([one.columns[name] for one in tables]) for name in first.columns},
    )
