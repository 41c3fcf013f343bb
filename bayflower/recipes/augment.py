"""What is done to the samples of a training batch, anew in every step.

Functions of one client's batch, run alone or under `torch.func.vmap`. Random numbers come from
`stacked/chance.py`: whole numbers hashed from (seed, client, round, step, batch, place of the
sample), so all engines draw the same, and padding changes nothing. In this order:

    resized_crop  a rectangle of share U(a, 1) of the area and ratio e^U(log 3/4, log 4/3) of its
                  sides, at a uniform place, resized to the whole image (bilinear); ten draws are
                  made and the first that fits is taken, else the middle of the image
    crop_padding  the image with p pixels of border on each side, cropped to its size at a uniform
                  place
    flip          mirrored left to right
    cutout        a square of L × L pixels around a uniform pixel is blank, less what lies outside
    mixup         x_i ← λ x_i + (1 − λ) x_j, the labels alike; one λ ~ Beta(a, a) a batch, and j
                  a uniform permutation of the batch's real samples

Borders and blanks are 0. Every recipe has random numbers of its own: switching one on does not
change another's.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ConfigError
from ..networks.model import Batch
from ..stacked import chance
from ..stacked.shaped import shares

TRIES = 10  # draws of a rectangle
RATIO = (3 / 4, 4 / 3)
ROUNDS = 16  # draws of a Gamma number; all are refused with probability below 1e-20
LAST = 2**63 - 1


class Augmentation(NamedTuple):
    """What is done; 0 = off."""

    resized_crop: float = 0.0
    crop_padding: int = 0
    flip: float = 0.0
    cutout: int = 0
    mixup: float = 0.0

    @property
    def images(self) -> tuple[str, ...]:
        """Return the recipes in use that need images."""
        named = ("resized_crop", "crop_padding", "flip", "cutout")
        return tuple(name for name in named if getattr(self, name))

    @property
    def on(self) -> bool:
        """Return whether anything is done."""
        return bool(self.images or self.mixup)


def augmented(plan: Augmentation, batch: Batch, classes: int) -> Batch:
    """Return the batch augmented, with the random numbers of the step that runs; y becomes shares
    of classes (B, K) where samples are mixed.
    """
    x, y = batch.x, batch.y
    if not x.is_floating_point():
        raise ConfigError(
            "inputs of whole numbers, such as tokens, cannot be mixed or cropped; switch "
            "augmentation off for these data"
        )
    with chance.one_pass():
        if plan.resized_crop:
            x = resized(x, *rectangles(x, plan.resized_crop))
    with chance.one_pass():
        if plan.crop_padding:
            x = shifted(x, *(offsets(x, 2 * plan.crop_padding + 1, 2) - plan.crop_padding))
    with chance.one_pass():
        if plan.flip:
            mirrored = chance.uniform((len(x),), x.device) < plan.flip
            x = torch.where(mirrored[:, None, None, None], x.flip(-1), x)
    with chance.one_pass():
        if plan.cutout:
            x = blanked(x, plan.cutout, *centres(x))
    with chance.one_pass():
        if plan.mixup:
            share, other = beta(plan.mixup, x.device), partners(batch.mask)
            x, y = mixed(x, share, other), mixed(shares(y, classes, x.dtype), share, other)
    return Batch(x, y, batch.mask)


# -- places ----------------------------------------------------------------------------------------
def whole(u: Tensor, number: Tensor | int) -> Tensor:
    """Return whole numbers 0 … number − 1 from uniform ones."""
    most = number - 1
    drawn = (u * number).floor().long()
    return torch.minimum(drawn, most) if isinstance(most, Tensor) else drawn.clamp(max=most)


def offsets(x: Tensor, number: int, axes: int) -> Tensor:
    """Return (axes, B) whole numbers below `number`."""
    return whole(chance.uniform((len(x), axes), x.device), number).T


def shifted(x: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Return images (B, C, H, W) whose pixel (i, j) is x's (i + down, j + right), 0 outside."""
    height, width = x.shape[-2:]
    rows = torch.arange(height, device=x.device) + down[:, None]
    columns = torch.arange(width, device=x.device) + right[:, None]
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[
        :, None
    ]
    places = rows.clamp(0, height - 1)[:, :, None] * width + columns.clamp(0, width - 1)[:, None]
    found = x.flatten(2).gather(2, places.flatten(1)[:, None].expand(-1, x.shape[1], -1))
    return found.reshape(x.shape) * inside[:, None].to(x.dtype)


def centres(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a uniform pixel of each image."""
    u = chance.uniform((len(x), 2), x.device)
    return whole(u[:, 0], x.shape[-2]), whole(u[:, 1], x.shape[-1])


def blanked(x: Tensor, side: int, row: Tensor, column: Tensor) -> Tensor:
    """Return the images with a blank square whose middle is at (row, column)."""
    rows = torch.arange(x.shape[-2], device=x.device) - (row[:, None] - side // 2)
    columns = torch.arange(x.shape[-1], device=x.device) - (column[:, None] - side // 2)
    inside = ((rows >= 0) & (rows < side))[:, :, None] & ((columns >= 0) & (columns < side))[
        :, None
    ]
    return x * (~inside)[:, None].to(x.dtype)


# -- rectangles ------------------------------------------------------------------------------------
def rectangles(x: Tensor, least: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return top, left, height and width (B,) of a rectangle of each image."""
    height, width = x.shape[-2:]
    u = chance.uniform((len(x), TRIES, 2), x.device)
    area = height * width * (least + (1 - least) * u[..., 0])
    low, high = (math.log(ratio) for ratio in RATIO)
    ratio = torch.exp(low + (high - low) * u[..., 1])
    across, down = (area * ratio).sqrt().round().long(), (area / ratio).sqrt().round().long()
    fits = (across > 0) & (across <= width) & (down > 0) & (down <= height)
    first = fits.long().argmax(1, keepdim=True)
    found, any_fits = (one.gather(1, first)[:, 0] for one in (down, across)), fits.any(1)
    middle = middle_of(height, width)
    h, w = (torch.where(any_fits, a, b) for a, b in zip(found, middle, strict=True))
    place = chance.uniform((len(x), 2), x.device)
    top = torch.where(any_fits, whole(place[:, 0], height - h + 1), (height - h) // 2)
    left = torch.where(any_fits, whole(place[:, 1], width - w + 1), (width - w) // 2)
    return top, left, h, w


def middle_of(height: int, width: int) -> tuple[int, int]:
    """Return height and width of the largest rectangle whose ratio is allowed."""
    if width / height < RATIO[0]:
        return round(width / RATIO[0]), width
    if width / height > RATIO[1]:
        return height, round(height * RATIO[1])
    return height, width


def resized(x: Tensor, top: Tensor, left: Tensor, height: Tensor, width: Tensor) -> Tensor:
    """Return a rectangle of each image at the size of the whole image, bilinear as in
    torch.nn.functional.interpolate(align_corners=False).
    """
    for axis, start, length in ((-2, top, height), (-1, left, width)):
        size = x.shape[axis]
        scale = length[:, None].double() / size
        place = ((torch.arange(size, device=x.device) + 0.5) * scale - 0.5).clamp(min=0)
        below = torch.minimum(place.floor().long(), length[:, None] - 1)
        above = torch.minimum(below + 1, length[:, None] - 1)
        part = (place - below).to(x.dtype)
        x = lines(x, start[:, None] + below, axis) * along(1 - part, axis) + lines(
            x, start[:, None] + above, axis
        ) * along(part, axis)
    return x


def along(values: Tensor, axis: int) -> Tensor:
    """Return (B, S) as (B, 1, S, 1) or (B, 1, 1, S)."""
    return values[:, None, :, None] if axis == -2 else values[:, None, None, :]


def lines(x: Tensor, places: Tensor, axis: int) -> Tensor:
    """Return the rows or columns (B, S) of the images."""
    return x.gather(axis, along(places, axis).expand(x.shape))


# -- mixing ----------------------------------------------------------------------------------------
def partners(mask: Tensor) -> Tensor:
    """Return a permutation of the real samples, which come first; padding stays where it is."""
    keys = chance.shifted(chance.bits((len(mask),), mask.device), 1)
    return torch.where(mask > 0, keys, LAST).argsort(stable=True)


def mixed(x: Tensor, share: Tensor, other: Tensor) -> Tensor:
    """Return share · x + (1 − share) · x[other]."""
    share = share.to(x.dtype)
    return share * x + (1 - share) * x[other]


def beta(shape: float, device: torch.device) -> Tensor:
    """Return one number from Beta(shape, shape), float64: G / (G + G') of two Gamma numbers."""
    one, two = log_gammas(shape, 2, device)
    return torch.sigmoid(one - two)


def log_gammas(shape: float, number: int, device: torch.device) -> Tensor:
    """Return the logarithms of numbers from Gamma(shape): those of Gamma(shape + 1) by Marsaglia
    and Tsang (2000), times U^(1/shape).
    """
    d = shape + 1 - 1 / 3
    c = 1 / math.sqrt(9 * d)
    z = chance.normal((number, ROUNDS), device)
    u, last = chance.uniform((number, ROUNDS), device), chance.uniform((number,), device)
    v = (1 + c * z) ** 3
    safe = v.clamp(min=1e-300)
    good = (v > 0) & ((1 - u).log() < z * z / 2 + d - d * v + d * safe.log())
    first = good.long().argmax(1, keepdim=True)
    return (d * safe.gather(1, first)[:, 0]).log() + (1 - last).log() / shape
