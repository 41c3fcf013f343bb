"""What a run knows of its clients' data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .source import Names


class ClientData(NamedTuple):
    """The samples of one client, in random order."""

    client: int  # partition id
    x_train: np.ndarray  # (n, ...) float32
    y_train: np.ndarray  # (n,) int64
    x_test: np.ndarray
    y_test: np.ndarray
    x_held: np.ndarray | None = None  # training samples held out for calibration; None = none
    y_held: np.ndarray | None = None


class Federation(NamedTuple):
    """All clients of a run. `partition` describes in JSON types how the data were split."""

    clients: Sequence[ClientData]  # those that train: ids 0..N-1; a tuple, or a `crowd.Crowd`
    new_clients: Sequence[ClientData]  # those that never train: ids N..N+M-1
    num_classes: int
    input_shape: tuple[int, ...]
    dataset: str
    partition: dict[str, Any]
    note: str  # a note to show beside the name of the data set; "" if there is none
    names: Names = Names()  # of the clients, by number, the classes and the input columns
    # which columns of a table are 0 or 1 by construction, if everyone's numbers are to standardise
    # the others (`moments`); None if inputs are ready
    table: np.ndarray | None = None
