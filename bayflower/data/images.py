"""Arrays of images: which axis is which, and how pixels are scaled.

Layout. (N, H, W) is grey. In (N, a, b, c) the channels are the axis of length 1, 3 or 4 for which
the other two are sides of at least 4 pixels: (N, H, W, C) or (N, C, H, W). If both would do, the
array is refused, and `layout` decides. If neither would, a square of at least 16 pixels beside a
shorter axis decides. Arrays of type uint8 with channels last need no minimum.

Scale. Whole numbers 0…255 of any type, and floats in 0…255 that reach above 128, are pixels: black
0 becomes −1 and white 255 becomes 1. Floats within −1…1 (so 0…1 too) are taken as they are, and so
are floats with negative values of at most 20, which are normalised already. True is white. The rest
is refused; `white` decides: the value of a white pixel, or 0 for "as they are".
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..errors import ConfigError

LAYOUTS = ("auto", "NHW", "NHWC", "NCHW", "flat")
CHANNELS = (1, 3, 4)
SIDE = 4  # pixels; a shorter axis is no side of an image
SQUARE = 16  # pixels of a square image with another number of channels
LONG = 8  # a grey image whose one side is more times as long as the other is rather a series
NORMALISED = 20  # floats around 0 that reach further are no normalised pixels
BRIGHT = 128  # floats from 0 that reach above it are pixels of 0…255


class Images(NamedTuple):
    """How an array of images was read: part of a personal model's card."""

    layout: str  # of the array: NHW, NHWC or NCHW
    white: float  # value of a white pixel; 0 = taken as they are

    def apply(self, x: np.ndarray) -> np.ndarray:
        """Return the images as (N, C, H, W) float32, scaled."""
        return scaled(first(x, self.layout), self.white)


def read(
    x: np.ndarray, layout: str, white: float | None, where: str
) -> tuple[np.ndarray, Images | None]:
    """Return (what is stored, how it was read). Pixels 0…255 are stored as uint8, (N, H, W) or
    (N, H, W, C); other images as float32 (N, C, H, W). Layout flat: the values as they are, None.
    """
    if x.dtype.kind == "f" and np.isnan(x).any():
        raise ConfigError(
            f"{where} must not have NaN unless it is a table (N, D), got shape {x.shape}"
        )
    if layout == "flat":
        return finite(x.astype(np.float32), where), None
    found = layout_of(x, layout, where)
    factor = white_of(x, white, where)
    if factor == 255 and x.dtype.kind in "iu" and x.min() >= 0 and x.max() <= 255:
        return channels_last(x, found).astype(np.uint8), Images(found, 255.0)
    if x.dtype.kind == "b":  # True is white
        return channels_last(x, found).astype(np.uint8) * np.uint8(255), Images(found, 255.0)
    return finite(Images(found, factor).apply(x), where), Images(found, factor)


def layout_of(x: np.ndarray, layout: str, where: str) -> str:
    """Return NHW, NHWC or NCHW."""
    shape = x.shape
    wanted = {"NHW": 3, "NHWC": 4, "NCHW": 4}
    if layout != "auto":
        if len(shape) != wanted[layout]:
            raise ConfigError(
                f"layout={layout} needs {wanted[layout]} axes, but {where} has shape {shape}; "
                "choose another layout, or auto"
            )
        return layout
    if len(shape) == 3:
        if x.dtype == np.uint8:
            return "NHW"
        short, long = min(shape[1:]), max(shape[1:])
        if short >= SIDE and min(shape[1:]) not in CHANNELS and long <= LONG * short:
            return "NHW"
        raise ConfigError(
            f"{where} has shape {shape}, which may be grey images or series; set layout=NHW for "
            "images of that many pixels, or layout=flat for plain values"
        )
    if len(shape) == 4:
        if x.dtype == np.uint8 and shape[3] in CHANNELS and shape[1] not in CHANNELS:
            return "NHWC"
        last = shape[3] in CHANNELS and min(shape[1:3]) >= SIDE
        second = shape[1] in CHANNELS and min(shape[2:]) >= SIDE
        if not last and not second:
            last = shape[1] == shape[2] >= SQUARE > shape[3]
            second = shape[2] == shape[3] >= SQUARE > shape[1]
        if last != second:
            return "NHWC" if last else "NCHW"
        why = "may have its channels first or last" if last else "has no axis of 1, 3 or 4 channels"
        raise ConfigError(
            f"{where} has shape {shape}, which {why}; set layout=NHWC (channels last), "
            "layout=NCHW (channels first) or layout=flat"
        )
    raise ConfigError(
        f"{where} has shape {shape}; images have 3 or 4 axes with the samples first: reshape it, "
        "or set layout=flat for plain values"
    )


def white_of(x: np.ndarray, white: float | None, where: str) -> float:
    """Return the value of a white pixel; 0 = as they are."""
    if white is not None:
        return float(white)
    if x.dtype == np.uint8:
        return 255.0
    if x.dtype.kind == "b":
        return 255.0
    low, high = float(x.min()), float(x.max())
    if x.dtype.kind in "iu":
        if low >= 0 and 1 < high <= 255:
            return 255.0
        raise ConfigError(
            f"{where} has whole numbers from {low:g} to {high:g}, where pixels go from 0 to 255; "
            f"set white to the value of a white pixel, e.g. white={max(high, 1):g}, or white=0 to "
            "take them as they are"
        )
    if not np.isfinite(low + high):
        raise ConfigError(f"{where} must be finite, got infinite entries")
    if high <= 1 if low >= 0 else max(-low, high) <= NORMALISED:
        return 0.0
    if low >= 0 and BRIGHT < high <= 255:
        return 255.0
    raise ConfigError(
        f"{where} has numbers from {low:g} to {high:g}, neither within −1…1 nor pixels of 0…255; "
        f"set white to the value of a white pixel, e.g. white={high:g}, or white=0 to take them "
        "as they are"
    )


def first(x: np.ndarray, layout: str) -> np.ndarray:
    """Return images with the channels first."""
    if layout == "NHW":
        return x[:, None]
    return x if layout == "NCHW" else x.transpose(0, 3, 1, 2)


def channels_last(x: np.ndarray, layout: str) -> np.ndarray:
    """Return images as (N, H, W) or (N, H, W, C)."""
    return x.transpose(0, 2, 3, 1) if layout == "NCHW" else x


def scaled(x: np.ndarray, white: float) -> np.ndarray:
    """Return pixels as float32, black −1 and white 1; as they are if white is 0."""
    with np.errstate(over="ignore"):
        x = np.ascontiguousarray(x).astype(np.float32)
    if not white:
        return x
    found: np.ndarray = (x / np.float32(white) - np.float32(0.5)) / np.float32(0.5)
    return found


def finite(x: np.ndarray, where: str) -> np.ndarray:
    """Return x if it is finite."""
    if not np.isfinite(x).all():
        raise ConfigError(f"{where} must be finite in float32 and without NaN")
    return x


def in_words(found: Images, shape: tuple[int, ...]) -> str:
    """Return how images were read; `shape` is (C, H, W)."""
    channels, height, width = shape
    colour = {1: "grey", 3: "RGB", 4: "RGBA"}.get(channels, f"{channels} channels")
    scale = f"0…{found.white:g} scaled to −1…1" if found.white else "values taken as they are"
    return f"images {height}×{width} {colour} ({found.layout}), {scale}"
