"""The cells of a table's column: number, date, text or missing. One rule for CSV, Parquet and data
frames, in training and for new samples.

    missing  empty, na, n/a, nan, null, none, ? (any case), None, NaN, NaT
    number   12, -0.5, 1e3; 12,5 only in files separated by ; or tabs. A code with leading zeros
             (007) is a text
    date     2024-01-31, 2024-01-31 08:15, 31.01.2024, 1/31/2024, 31-Jan-2024, 08:15
    text     everything else; spaces around it do not count; True and False of a typed table too
"""

from __future__ import annotations

import datetime
import math
import numbers
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import ConfigError

EMPTY = frozenset({"", "na", "n/a", "nan", "null", "none", "?", "<na>", "nat"})
NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[+-]?inf(?:inity)?", re.I)
COMMA = re.compile(r"[+-]?\d+,\d+(?:[eE][+-]?\d+)?")
CODE = re.compile(r"[+-]?0\d+")
DATE = re.compile(
    r"\d{4}[-/]\d{1,2}[-/]\d{1,2}(?:[T ]\d{1,2}:\d{2}.*)?"
    r"|\d{1,2}[./]\d{1,2}[./](?:\d{4}|\d{2})(?: \d{1,2}:\d{2}.*)?"
    r"|\d{1,2}[- ][A-Za-z]{3,9}[- ]\d{2,4}"
    r"|\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?"
)
THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
EXACT = 2.0**53  # whole numbers from here on are not told apart as floats
IS_MISSING, IS_NUMBER, IS_DATE, IS_TEXT = range(4)


class Column(NamedTuple):
    """One column of a table."""

    kinds: np.ndarray  # (N,) IS_MISSING, IS_NUMBER, IS_DATE or IS_TEXT
    numbers: np.ndarray  # (N,) float64, NaN where there is no number
    texts: np.ndarray  # (N,) objects: each cell as it is written, "" where it is missing

    def categories(self) -> np.ndarray:
        """Return each cell as a category (N,), "" where it is missing: 3 for 3.0, so that a code is
        the same in every kind of file.
        """
        exact = (self.kinds == IS_NUMBER) & (np.abs(self.numbers) < EXACT)
        values, place = np.unique(self.numbers[exact], return_inverse=True)
        found = self.texts.copy()
        found[exact] = np.array([in_text(float(one)) for one in values], object)[place.reshape(-1)]
        return found

    def at(self, rows: np.ndarray) -> Column:
        """Return some of its cells."""
        return Column(*(part[rows] for part in self))


def read(cells: Iterable[Any], where: str, comma: bool = False) -> Column:
    """Return a column of cells: texts of a file, or values of a typed table. `comma` allows a
    decimal comma; `where` names the column in errors.
    """
    if isinstance(cells, np.ndarray) and cells.dtype.kind in "iuf":
        return of_numbers(cells.astype(np.float64))
    known: dict[Any, tuple[int, float, str]] = {}
    found = []
    for cell in cells:
        key = (type(cell), cell)  # 1 and True are equal, but not the same
        try:
            one = known.get(key)
        except TypeError:
            raise ConfigError(
                f"{where} holds values of type {type(cell).__name__}; give numbers or texts, or "
                "leave the column out (drop=COLUMN)"
            ) from None
        if one is None:
            one = known[key] = cell_of(cell, where, comma)
        found.append(one)
    kinds = np.array([one[0] for one in found], np.uint8)
    values = np.array([one[1] for one in found], np.float64)
    texts = np.array([one[2] for one in found], object)
    return Column(kinds, values, texts)


def of_numbers(values: np.ndarray) -> Column:
    """Return a column of numbers, NaN = missing."""
    missing = np.isnan(values)
    distinct, place = np.unique(values, return_inverse=True)
    texts = np.array(["" if math.isnan(one) else in_text(float(one)) for one in distinct], object)
    kinds = np.where(missing, IS_MISSING, IS_NUMBER).astype(np.uint8)
    return Column(kinds, values, texts[place.reshape(-1)])


def cell_of(cell: Any, where: str, comma: bool) -> tuple[int, float, str]:
    """Return (kind, number, text) of one cell."""
    if cell is None or type(cell).__name__ in ("NAType", "NaTType"):
        return IS_MISSING, math.nan, ""
    if isinstance(cell, np.datetime64) and np.isnat(cell):
        return IS_MISSING, math.nan, ""
    if isinstance(cell, (bool, np.bool_)):
        return IS_TEXT, math.nan, str(bool(cell))
    if isinstance(cell, (datetime.date, datetime.time, np.datetime64)):
        return IS_DATE, math.nan, str(cell)
    if isinstance(cell, numbers.Number) and not isinstance(cell, complex):
        value = float(cell)  # type: ignore[arg-type]
        if math.isnan(value):
            return IS_MISSING, math.nan, ""
        return IS_NUMBER, value, in_text(value)
    if not isinstance(cell, str):
        raise ConfigError(
            f"{where} holds values of type {type(cell).__name__}; give numbers or texts, or leave "
            "the column out (drop=COLUMN)"
        )
    text = cell.strip()
    if text.lower() in EMPTY:
        return IS_MISSING, math.nan, ""
    if not CODE.fullmatch(text):
        if NUMBER.fullmatch(text):
            return IS_NUMBER, float(text), text
        if comma and COMMA.fullmatch(text):
            return IS_NUMBER, float(text.replace(",", ".")), text
    return (IS_DATE if DATE.fullmatch(text) else IS_TEXT), math.nan, text


def in_text(value: float) -> str:
    """Return a number as text: 3 for 3.0."""
    return str(int(value)) if value.is_integer() and abs(value) < EXACT else repr(value)


def one_of(columns: Sequence[Column]) -> Column:
    """Return one column of the cells of several."""
    return Column(*(np.concatenate(parts) for parts in zip(*columns, strict=True)))
