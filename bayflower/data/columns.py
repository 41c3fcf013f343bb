"""The columns of a table as inputs of a network: which are used, and how each is encoded.

What all clients must share (which columns are numbers, the categories, which columns have missing
values) follows from counts alone: those of each site are added. `survey` counts one site's rows,
`add` adds, `plan` decides. No row and no measurement leaves a site for this. Medians, means and
standard deviations are each client's own, from its training part (`federation.Scaling`).

    number      as it is; standardised later. Missing: the client's median, and an indicator column
    category    one column (0 or 1) a category, one for other values, one for missing ones
    left out    dates, ids, free text, columns without a value
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..errors import ConfigError
from .cells import IS_DATE, IS_MISSING, IS_NUMBER, IS_TEXT, THOUSANDS, Column

MOST = 30  # categories of a column; the rarer ones are "other"
FREE = 10  # a text column with more distinct values, most of them once, is an id or free text
IDS = ("id", "uid", "uuid", "index", "idx", "row", "nr", "no", "number", "key", "mrn", "ssn")
FORMAT = "bayflower-table-1"


class Survey(NamedTuple):
    """Counts of one column at one site; those of several sites are added."""

    missing: int
    numbers: int
    dates: int
    texts: int
    repeated: int  # values that occur again at the same site
    infinite: int
    values: Counter[str]  # how often each text occurs; numbers only if the column is categorical


class Input(NamedTuple):
    """A column that is used."""

    name: str
    kind: str  # "number" or "category"
    values: tuple[str, ...]  # the categories
    missing: bool  # whether there is a column that marks missing values

    def labels(self) -> list[str]:
        """Return the names of the input columns it becomes."""
        last = [f"{self.name} missing"] if self.missing else []
        if self.kind == "number":
            return [self.name, *last]
        return [*(f"{self.name}={value}" for value in self.values), f"{self.name}=other", *last]

    def encoded(self, column: Column) -> np.ndarray:
        """Return its input columns (N, ...), float64; a missing number is NaN."""
        gone = column.kinds == IS_MISSING
        last = [gone.astype(np.float64)] if self.missing else []
        if self.kind == "number":
            return np.stack([column.numbers, *last], axis=1)
        place = {value: number for number, value in enumerate(self.values)}
        rows = np.array([place.get(text, len(place)) for text in column.categories()], np.int64)
        hot = np.zeros((len(rows), len(place) + 1))
        hot[np.arange(len(rows)), rows] = 1.0
        if self.missing:
            hot[gone] = 0.0
        return np.concatenate([hot, *(one[:, None] for one in last)], axis=1)


class Encoder(NamedTuple):
    """How rows of a table become inputs. It is part of a personal model's card."""

    inputs: tuple[Input, ...]
    ignored: tuple[str, ...] = ()  # columns that are no inputs, such as the label, the site, dates
    target: str = ""  # the column of the labels

    def columns(self) -> tuple[str, ...]:
        """Return the names of the network's input columns."""
        return tuple(label for one in self.inputs for label in one.labels())

    def flags(self) -> np.ndarray:
        """Return which of them are 0 or 1 by construction, and stay so."""
        return np.array(
            [
                one.kind == "category" or place > 0
                for one in self.inputs
                for place in range(len(one.labels()))
            ],
            bool,
        )

    def encode(self, table: Mapping[str, Column], where: str) -> np.ndarray:
        """Return the inputs (N, D) of a table's rows, float64; NaN = missing."""
        if missing := [one.name for one in self.inputs if one.name not in table]:
            raise ConfigError(
                f"{where} has no column {', '.join(map(repr, missing[:5]))}; it needs the columns "
                f"{', '.join(one.name for one in self.inputs)}"
            )
        for one in self.inputs:
            if one.kind == "number":
                check_numbers(table[one.name], f"column {one.name!r} of {where}")
        return np.concatenate([one.encoded(table[one.name]) for one in self.inputs], axis=1)

    def unseen(self, table: Mapping[str, Column]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return (which rows have a value that is no category, all values) of each column with
        categories that has such rows. A column with MOST categories has rare values that are in
        none, so nothing is said of it.
        """
        found = {}
        for one in self.inputs:
            if one.kind == "category" and len(one.values) < MOST:
                column = table[one.name]
                texts = column.categories()
                new = ~np.isin(texts, one.values) & (column.kinds != IS_MISSING)
                if new.any():
                    found[one.name] = new, texts
        return found

    def to_json(self) -> dict[str, Any]:
        """Return it in JSON types."""
        inputs = [{**one._asdict(), "values": list(one.values)} for one in self.inputs]
        return {
            "format": FORMAT,
            "inputs": inputs,
            "ignored": list(self.ignored),
            "target": self.target,
        }


def from_json(content: Mapping[str, Any]) -> Encoder:
    """Return the encoder that `to_json` wrote."""
    if content.get("format") != FORMAT:
        raise ConfigError(f"the table's encoding is not of this version ({FORMAT}); make it again")
    inputs = tuple(
        Input(str(one["name"]), str(one["kind"]), tuple(one["values"]), bool(one["missing"]))
        for one in content["inputs"]
    )
    return Encoder(inputs, tuple(content["ignored"]), str(content["target"]))


# -- counts --------------------------------------------------------------------------------------
def survey(column: Column, categorical: bool) -> Survey:
    """Return the counts of one site's cells."""
    kinds, counts = column.kinds, np.bincount(column.kinds, minlength=4)
    there = kinds != IS_MISSING
    counted = there if categorical else there & (kinds != IS_NUMBER)
    texts = column.categories() if categorical else column.texts
    known = column.texts[there]
    return Survey(
        missing=int(counts[IS_MISSING]),
        numbers=int(counts[IS_NUMBER]),
        dates=int(counts[IS_DATE]),
        texts=int(counts[IS_TEXT]),
        repeated=len(known) - len(set(known)),
        infinite=int(np.isinf(column.numbers).sum()),
        values=Counter(texts[counted]),
    )


def add(some: Iterable[Survey]) -> Survey:
    """Return the counts of several sites together."""
    parts = list(some)
    values: Counter[str] = Counter()
    for one in parts:
        values.update(one.values)
    return Survey(
        missing=sum(one.missing for one in parts),
        numbers=sum(one.numbers for one in parts),
        dates=sum(one.dates for one in parts),
        texts=sum(one.texts for one in parts),
        repeated=sum(one.repeated for one in parts),
        infinite=sum(one.infinite for one in parts),
        values=values,
    )


# -- what each column is -------------------------------------------------------------------------
def plan(
    surveys: Mapping[str, Survey], categorical: Iterable[str], where: str
) -> tuple[tuple[Input, ...], dict[str, str]]:
    """Return (the columns that are used, why each of the others is not), from counts alone."""
    used, left = [], {}
    asked = set(categorical)
    for name, one in surveys.items():
        found = kind_of(name, one, name in asked, where)
        if found == "category":
            by_count = sorted(one.values.items(), key=lambda pair: (-pair[1], pair[0]))[:MOST]
            values = tuple(sorted(value for value, _ in by_count))
            used.append(Input(name, "category", values, one.missing > 0))
        elif found == "number":
            used.append(Input(name, "number", (), one.missing > 0))
        else:
            left[name] = found
    if not used:
        said = "; ".join(f"{name}: {why}" for name, why in left.items())
        raise ConfigError(f"{where} has no column to learn from ({said or 'no other column'})")
    return tuple(used), left


def kind_of(name: str, one: Survey, categorical: bool, where: str) -> str:
    """Return "number", "category", or why the column is left out; raise where it is unclear."""
    there = one.numbers + one.dates + one.texts
    if not there:
        return "no value"
    if categorical:
        return "category"
    if one.infinite:
        raise ConfigError(
            f"column {name!r} of {where} has {one.infinite} infinite values; leave missing ones "
            "empty"
        )
    if one.dates == there:
        return "dates"
    if one.numbers == there:
        return "an id" if is_id(name) and not one.repeated else "number"
    if one.numbers:
        texts = sorted(one.values)
        if any(THOUSANDS.fullmatch(text) for text in texts):
            raise ConfigError(
                f"column {name!r} of {where} has numbers with thousands separators, such as "
                f"{next(text for text in texts if THOUSANDS.fullmatch(text))!r}; write them "
                "without"
            )
        raise ConfigError(
            f"column {name!r} of {where} has {one.numbers} numbers and "
            f"{there - one.numbers} other values, such as {texts[0]!r}; leave missing values "
            f"empty, or set categorical={name} (each value a category) or drop={name}"
        )
    if all(THOUSANDS.fullmatch(text) for text in one.values):
        raise ConfigError(
            f"column {name!r} of {where} has numbers with thousands separators, such as "
            f"{min(one.values)!r}; write them without"
        )
    if len(one.values) > FREE and 2 * len(one.values) > there:
        return "an id or free text"
    return "category"


def is_id(name: str) -> bool:
    """Return whether a column is called like an id: id, patient_id, PatientID, row number."""
    words = name.lower().replace("-", "_").replace(" ", "_").split("_")
    return words[-1] in IDS or name.endswith(("Id", "ID")) or name.lower().startswith("unnamed")


def check_numbers(column: Column, where: str) -> None:
    """Raise unless every cell is a finite number or missing."""
    wrong = np.flatnonzero((column.kinds != IS_NUMBER) & (column.kinds != IS_MISSING))
    if len(wrong):
        raise ConfigError(
            f"{where} must hold numbers, got {column.texts[wrong[0]]!r} in row {wrong[0] + 1}; "
            "encode it as in training, or leave it empty if it is missing"
        )
    if np.isinf(column.numbers).any():
        row = int(np.flatnonzero(np.isinf(column.numbers))[0])
        raise ConfigError(
            f"{where} has an infinite value in row {row + 1}; leave missing values empty"
        )
