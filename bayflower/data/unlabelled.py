"""Samples without labels that the server has (`server_data`): a file, or what `keep` leaves out of
the data set. Their inputs are prepared as a client prepares its own; labels are never read.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..errors import ConfigError
from . import moments
from .federation import kept_of
from .known import GENERATED
from .npz import content, of_arrays
from .scaling import preparation
from .settings import REST, DataSettings
from .source import Source
from .sources import load_source


def unlabelled(
    settings: DataSettings, seed: int, shape: tuple[int, ...], input_scale: str
) -> np.ndarray:
    """Return the server's inputs (N, *shape), prepared. `input_scale` is how clients standardise a
    table: everyone's numbers as MEAN,…/STD,…, or a rule.
    """
    source, rows = read(settings, seed)
    x = source.samples(rows)
    where = "server_data"
    if x.shape[1:] != tuple(shape):
        raise ConfigError(
            f"{where} has samples of shape {x.shape[1:]}, clients have {tuple(shape)}; give "
            "inputs as the clients have them"
        )
    known = preparation(settings, source, x)
    if known is not None:
        return known.apply(x)
    return moments.apply(input_scale, x) if "/" in input_scale and x.ndim == 2 else x


def read(settings: DataSettings, seed: int) -> tuple[Source, np.ndarray]:
    """Return where the server's samples are, and which they are."""
    if settings.server_data != REST:
        path = Path(settings.server_data)
        if not path.is_file():
            raise ConfigError(
                f"server_data: no file {path}; give the path of an .npz file with an array x, or "
                f"{REST!r}"
            )
        arrays = content(path, {"x", "plain"})
        if "x" not in arrays or not arrays["x"].shape or not len(arrays["x"]):
            raise ConfigError(
                f"server_data={path} has no samples in an array x; write it with "
                "numpy.savez(path, x=...)"
            )
        number = len(arrays["x"])
        arrays |= {"y": np.zeros(number, np.int64), "num_classes": np.array(1)}
        options = settings.options()._replace(site="off", target="", test="", kind="classes")
        return of_arrays(arrays, path.stem, str(path), options, True), np.arange(number)
    if settings.dataset in GENERATED:
        raise ConfigError(
            f"server_data=rest needs a data set, got dataset={settings.dataset}; give a file"
        )
    source = load_source(settings)
    kept = kept_of(len(source.y), settings.keep, seed)
    rows = np.setdiff1d(np.arange(len(source.y)), kept)
    if not len(rows):
        raise ConfigError(f"server_data=rest: keep={settings.keep} leaves no sample out; lower it")
    return source, rows
