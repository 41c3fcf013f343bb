"""Labels of any values as class numbers 0 to K−1, with the name of each class."""

from __future__ import annotations

import numpy as np

from ..errors import ConfigError
from .cells import EXACT, IS_DATE, IS_MISSING, IS_NUMBER, IS_TEXT, Column, in_text

FEWEST_ROWS = 2  # rows of a class, on average; below it the labels are no classes
MANY = 20  # whole numbers with more values than this, and few rows of each, are a measurement
FEW_ROWS = 10
YES = frozenset({"test", "testing", "true", "1", "yes"})
NO = frozenset({"train", "training", "val", "valid", "validation", "false", "0", "no"})


def classes(
    column: Column, where: str, counted: bool = False
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return (class number of each row, −1 where the label is missing; names of the classes).

    Whole numbers are ordered by value, texts by the alphabet. `counted` says that the labels are
    known to be classes, however many values they have.
    """
    there = column.kinds != IS_MISSING
    if not there.any():
        raise ConfigError(f"{where} has no label; name another column with --target")
    kinds, texts = column.kinds[there], column.texts[there]
    if (kinds == IS_NUMBER).all():
        values = column.numbers[there]
        many = len(np.unique(values))
        if not (np.isfinite(values) & (values == np.round(values))).all():
            odd = values[~(np.isfinite(values) & (values == np.round(values)))][0]
            raise ConfigError(
                f"{where} must hold classes, got numbers such as {odd:g}; name a column of "
                "classes with --target, or cut the numbers into classes"
            )
        if not counted and many > MANY and FEW_ROWS * many > len(values):
            raise ConfigError(
                f"{where} has {many} different whole numbers in {len(values)} rows; that "
                "looks like a measurement or an id: name a column of classes with --target"
            )
    elif (kinds == IS_DATE).all():
        raise ConfigError(
            f"{where} must hold classes, got dates such as {texts[0]!r}; name a column of "
            "classes with --target"
        )
    y, names = numbered(column)
    if len(names) == 1:
        raise ConfigError(f"{where} has one class only ({names[0]!r}); it needs at least two")
    if not counted and FEWEST_ROWS * len(names) > max(len(texts), 2 * FEWEST_ROWS):
        raise ConfigError(
            f"{where} has {len(names)} different values in {len(texts)} rows, which are no "
            "classes; name a column of classes with --target"
        )
    return y, names


def measured(column: Column, where: str) -> np.ndarray:
    """Return the number of each row (float64), NaN where it is missing."""
    there = column.kinds != IS_MISSING
    if not there.any():
        raise ConfigError(f"{where} has no target; name another column with --target")
    wrong = np.flatnonzero(there & ~((column.kinds == IS_NUMBER) & np.isfinite(column.numbers)))
    if len(wrong):
        raise ConfigError(
            f"{where} must hold numbers, got {column.texts[wrong[0]]!r}; name a column of numbers "
            "with --target, or set task=classification"
        )
    return np.where(there, column.numbers, np.nan).astype(np.float64)


def numbered(column: Column) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return (the number of each cell's value, −1 where it is missing; the values as texts):
    numbers ordered by value, if all are, else texts by the alphabet.
    """
    there = column.kinds != IS_MISSING
    whole = (column.kinds[there] == IS_NUMBER).all()
    if whole and (np.abs(column.numbers[there]) < EXACT).all():
        values, place = np.unique(column.numbers[there], return_inverse=True)
        names = tuple(in_text(float(one)) for one in values)
    else:
        texts, place = np.unique(column.categories()[there].astype(str), return_inverse=True)
        names = tuple(str(one) for one in texts)
    found = np.full(len(there), -1, np.int64)
    found[there] = place.reshape(-1)
    return found, names


def of_names(texts: list[str]) -> Column:
    """Return names, such as those of folders, as a column; whole numbers are ordered by value."""
    whole = all(text.isdigit() and text == str(int(text)) for text in texts)
    values = np.array([float(text) if whole else np.nan for text in texts])
    kinds = np.full(len(texts), IS_NUMBER if whole else IS_TEXT, np.uint8)
    return Column(kinds, values, np.array(texts, object))


def are_marks(column: Column) -> bool:
    """Return whether every cell of a column marks its row as test or as training."""
    return {str(text).lower() for text in column.texts} <= YES | NO


def marks(column: Column, where: str) -> np.ndarray:
    """Return which rows a column marks as test."""
    words = [str(text).lower() for text in column.texts]
    if wrong := [word for word in words if word not in YES and word not in NO]:
        raise ConfigError(
            f"{where} must mark test rows by test and train, true and false or 1 and 0, got "
            f"{wrong[0]!r}"
        )
    return np.array([word in YES for word in words])
