"""What is unusual about new rows of a table: values and numbers that the training data do not have.

Alarms and drift (`doubt.py`) look at what the network makes of a sample. These lines look at the
table itself, name the column, and need no held-out data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..data.cells import Column
from ..data.columns import Encoder
from ..tree import Tensors

FAR = 6.0  # standard deviations of the training data


def new_values(encoder: Encoder, table: Mapping[str, Column]) -> list[str]:
    """Return a line for each column with categories that training did not see."""
    lines = []
    for name, (unseen, values) in encoder.unseen(table).items():
        lines.append(
            f"column {name!r}: {unseen.sum()} of {len(unseen)} samples have a value that the "
            f"training data do not have, such as {values[unseen][0]!r}; it counts as other"
        )
    return lines


def far_numbers(
    x: np.ndarray, names: Sequence[str], fixed: np.ndarray, moments: Tensors
) -> list[str]:
    """Return a line for each column with numbers far from the training data's; `fixed` marks the
    columns that are 0 or 1; the moments are empty where a model takes its inputs as they are.
    """
    if not moments or x.ndim != 2 or len(names) != x.shape[1]:
        return []
    mean, std = (moments[name].reshape(-1).numpy() for name in ("mean", "std"))
    with np.errstate(invalid="ignore"):
        far = (np.abs(x - mean) > FAR * std) & ~fixed
    return [
        f"column {name!r}: {far[:, place].sum()} of {len(x)} samples are more than {FAR:g} "
        "standard deviations away from the training data's mean, such as "
        f"{x[far[:, place], place][0]:g}"
        for place, name in enumerate(names)
        if far[:, place].any()
    ]
