"""Several data sets in one federation, written with a plus: dataset=celeba+cifar100. Labels are
offset, so there is one output layer.

Images are brought to one shape when a client's samples are made: grey ones are repeated over three
channels if any domain has colours, and all are resized to 32×32 (bilinear, averaging where an image
shrinks). A client has samples of one domain. The clients that train, and the new ones, are divided
over the domains as evenly as possible, the first domains having one more. `partition` deals out
each domain by itself; `natural` means owners where a domain has them (of at least `min_size`
samples) and Dir(beta) elsewhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate

from ..errors import ConfigError
from . import partition
from .source import Source

SIDE = 32
AT_ONCE = 4096  # images resized together


class Mixed:
    """Images of several domains that look like one array (N, 32, 32[, 3]) of type uint8."""

    dtype = np.dtype(np.uint8)

    def __init__(self, arrays: list[Any]) -> None:
        self.arrays = arrays
        self.starts = np.cumsum([0, *(len(x) for x in arrays)])
        colour = any(x.ndim == 4 and x.shape[3] == 3 for x in arrays)
        self.shape = (int(self.starts[-1]), SIDE, SIDE, *((3,) if colour else ()))
        self.ndim = len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        found = np.zeros((len(indices), *self.shape[1:]), np.uint8)
        for number, x in enumerate(self.arrays):
            mine = np.flatnonzero(
                (indices >= self.starts[number]) & (indices < self.starts[number + 1])
            )
            for some in np.split(mine, range(AT_ONCE, len(mine), AT_ONCE)):
                if len(some):
                    found[some] = brought(x[indices[some] - self.starts[number]], self.ndim == 4)
        return found


def brought(x: np.ndarray, colour: bool) -> np.ndarray:
    """Return uint8 images (N, H, W[, C]) as (N, 32, 32, 3) or, without colour, (N, 32, 32)."""
    x = x[..., 0] if x.ndim == 4 and x.shape[3] == 1 else x
    if x.shape[1:3] != (SIDE, SIDE):
        planes = (
            torch.from_numpy(np.ascontiguousarray(x if x.ndim == 4 else x[..., None]))
            .permute(0, 3, 1, 2)
            .float()
        )
        planes = interpolate(
            planes, (SIDE, SIDE), mode="bilinear", antialias=True, align_corners=False
        )
        small = planes.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()
        x = small if x.ndim == 4 else small[..., 0]
    return np.repeat(x[..., None], 3, axis=3) if colour and x.ndim == 3 else x


def joined(sources: list[Source]) -> Source:
    """Return one data set of several: labels and owners offset, the domain of each sample beside
    it.
    """
    for one in sources:
        if (
            one.x.dtype != np.uint8
            or one.x.ndim not in (3, 4)
            or (one.x.ndim == 4 and one.x.shape[3] not in (1, 3))
        ):
            raise ConfigError(
                f"{one.name!r} cannot be a domain: its samples must be grey or RGB images of type "
                "uint8"
            )
    labels = np.cumsum([0, *(one.num_classes for one in sources)])
    domain = np.repeat(np.arange(len(sources)), [len(one.y) for one in sources])
    owners, first = [], 0
    for one in sources:
        own = (
            np.full(len(one.y), -1)
            if one.client is None
            else np.where(one.client >= 0, one.client + first, -1)
        )
        first = max(first, int(own.max()) + 1)
        owners.append(own)
    marks = (
        None
        if any(one.test is None for one in sources)
        else np.concatenate([one.test for one in sources if one.test is not None])
    )
    notes = [one.note for one in sources if one.note]
    return Source(
        name="+".join(one.name for one in sources),
        x=Mixed([one.x for one in sources]),
        y=np.concatenate([one.y + start for one, start in zip(sources, labels, strict=False)]),
        num_classes=int(labels[-1]),
        client=np.concatenate(owners) if first else None,
        test=marks,
        note="; ".join([*notes, f"{len(sources)} domains, all images brought to {SIDE}x{SIDE}"]),
        domain=domain,
    )


def shares(total: int, domains: int) -> list[int]:
    """Return how many of `total` clients each domain has."""
    return [total // domains + int(number < total % domains) for number in range(domains)]


def deal(
    source: Source,
    kept: np.ndarray,
    settings: Any,
    draw: np.random.Generator,
    order: np.random.Generator,
) -> Any:
    """Return (positions in `kept` of each part, the part of each client id, the numbers that made
    them).

    Ids count the training clients of the first domain, those of the second, …, then the new ones
    likewise.
    """
    assert source.domain is not None
    names, place = source.name.split("+"), source.domain[kept]
    parts: list[np.ndarray] = []
    members: tuple[list[int], list[int]] = ([], [])
    described = []
    counts = [shares(number, len(names)) for number in (settings.num_clients, settings.new_clients)]
    for number, name in enumerate(names):
        mine, wanted = np.flatnonzero(place == number), [count[number] for count in counts]
        owners = None if source.client is None else source.client[kept[mine]]
        by_owner = (
            settings.partition == "natural" and owners is not None and bool((owners >= 0).any())
        )
        if by_owner and owners is not None:
            dealt = [part for part in partition.natural(owners) if len(part) >= settings.min_size]
        elif settings.partition == "iid":
            dealt = partition.iid(source.y[kept[mine]], sum(wanted), draw)
        else:
            labels = np.unique(source.y[kept[mine]], return_inverse=True)[1]
            dealt = (
                partition.dirichlet(labels, sum(wanted), settings.beta, settings.min_size, draw)
                if sum(wanted)
                else []
            )
        if len(dealt) < sum(wanted):
            raise ConfigError(
                f"{name!r} has {len(dealt)} owners of at least min_size {settings.min_size} "
                "samples, fewer than the "
                f"{sum(wanted)} clients it should have; lower num_clients or new_clients"
            )
        chosen = order.permutation(len(dealt))
        for who, some in zip(
            members, (chosen[: wanted[0]], chosen[wanted[0] : sum(wanted)]), strict=True
        ):
            who += [len(parts) + int(one) for one in np.sort(some)]
        parts += [mine[part] for part in dealt]
        described.append(
            {"name": name, "num_clients": wanted[0], "new_clients": wanted[1], "owners": by_owner}
        )
    return parts, [*members[0], *members[1]], {"domains": described, "beta": settings.beta}
