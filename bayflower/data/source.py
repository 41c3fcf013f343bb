"""A pooled data set in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .columns import Encoder
from .images import Images


class Names(NamedTuple):
    """What the data call their sites, classes and columns. Texts, in order.

    In a `Source`, `sites` has the name of each natural owner, in the order of their numbers. In a
    `Federation`, it has the name of each client, by its number: those that train, then the new
    ones. It is empty if clients were drawn by a partition or generated: then client 3 of one seed
    is not client 3 of another.
    """

    sites: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()  # one for each class; its number where the data have no name
    columns: tuple[str, ...] = ()  # one for each input column of a table; () if they are not known


UNNAMED = Names()


@dataclass(frozen=True, eq=False)
class Source:
    """A pooled data set. `x` is as stored (images of type uint8 stay so: a quarter of the memory);
    `samples` gives what a network sees.
    """

    name: str
    x: Any  # (N, ...): an array, or an object that can be indexed like one
    y: np.ndarray  # (N,) int64, or float64 if they are numbers
    num_classes: int
    client: np.ndarray | None = None  # (N,) int64 natural owner, negative = none
    test: np.ndarray | None = None  # (N,) bool
    note: str = ""  # a note to show beside the name, such as "stand-in for ..."
    # (N,) the data set that each sample comes from, if several were joined
    domain: np.ndarray | None = None
    names: Names = UNNAMED  # sites and classes may be empty here: see `site_names`, `class_names`
    encoder: Encoder | None = None  # how rows of a table with named columns became x
    images: Images | None = None  # how an array of images became x
    lines: tuple[str, ...] = ()  # what else was done while reading, a sentence each
    # x is what a network sees, float32 or int64: it is neither scaled nor standardised
    plain: bool = False
    kind: str = "classes"  # what the targets are (`outcomes.KINDS`)
    time: np.ndarray | None = None  # (N,) float64 that orders a client's samples

    @property
    def measured(self) -> bool:
        """Return whether targets are no classes."""
        return self.kind != "classes"

    def flags(self) -> np.ndarray | None:
        """Return which columns of a table are 0 or 1 by construction and are not standardised;
        None if there are none.
        """
        return None if self.encoder is None else self.encoder.flags()

    def reading(self) -> dict[str, Any]:
        """Return how the data were read, in JSON types: what a personal model needs to read new
        samples the same way, and to name the classes.
        """
        return {
            "table": None if self.encoder is None else self.encoder.to_json(),
            "images": None if self.images is None else dict(self.images._asdict()),
            "classes": list(self.class_names()),
        }

    def class_names(self) -> tuple[str, ...]:
        """Return the name of each class; its number where the data have no name; () of numbers."""
        if self.kind not in ("classes", "labels"):
            return ()
        return self.names.classes or tuple(map(str, range(self.num_classes)))

    def owners(self) -> list[int]:
        """Return the numbers of the natural owners."""
        if self.client is None:
            return []
        return [int(owner) for owner in np.unique(self.client[self.client >= 0])]

    def site_names(self) -> tuple[str, ...]:
        """Return the name of each natural owner, in the order of their numbers; () if there are
        none.
        """
        return self.names.sites or tuple(map(str, self.owners()))

    @property
    def pixels(self) -> bool:
        """Return whether these are images of type uint8, which `samples` scales."""
        return bool(self.x.dtype == np.uint8 and self.x.ndim > 2)

    def samples(self, indices: np.ndarray) -> np.ndarray:
        """Return samples, float32 unless they are plain: uint8 images as (x/255 - 0.5)/0.5 in NCHW,
        everything else as it is.
        """
        x: np.ndarray = self.x[indices]
        if self.plain:
            return x
        if x.dtype != np.uint8 or x.ndim == 2:
            return np.asarray(x, dtype=np.float32)
        x = (x.astype(np.float32) / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
        return x[:, None] if x.ndim == 3 else np.ascontiguousarray(x.transpose(0, 3, 1, 2))
