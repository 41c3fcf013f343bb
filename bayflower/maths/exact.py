"""Exact sums: adding statistics gives the same bits in any order and in any tree of aggregators.

Floating-point addition is commutative but not associative, so a plain sum over clients depends on
who answers first. Here a sum is kept without any error and rounded once, when it is read: `value()`
is the float64 nearest to the exact sum (ties to even). Being a function of the exact sum alone, it
cannot depend on the order.

How. The range of float64 is cut into windows of 46 bits; window w counts units of 2^(46w − 25). An
element is the sum of its windows, and each window is a float64 tensor holding MAGIC + (an integer
below 2^51), MAGIC = 1.5·2^52. Adding x to such a number rounds x to a whole number of units, and
float64 subtraction then tells exactly what was taken:

    new = limb + x/unit      taken = new − limb      rest = x − taken·unit      (each without error)

`rest`, at most half a unit, goes to the next window below, until nothing is left. One addition puts
at most 2^45 into a window, so carries must be passed up at the latest every 63 additions. Windows
exist only where a chunk of 65,536 elements needs them: two (16 bytes an element) for values below
2^20 whose last bit is worth at least 2^-71, which is where n·θ of a float32 model lives.

Integers are added as int64, with an error instead of an overflow. Everything is a torch operation,
so a total may live on any device. The sign of zero is not kept (the identity of + is 0.0), and
`torch.set_flush_denormal(True)` would break the lowest windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .accumulator import CHUNK, Accumulator, Buffers, magnitude


class Place(NamedTuple):
    """Where elements [start, start + size) of a tensor are kept: from `at` on in `chunk`."""

    chunk: Accumulator
    at: int
    start: int
    size: int


class Scaled(NamedTuple):
    """The product weight·tensor in float64, formed piece by piece when it is added: it never exists
    as a whole.
    """

    tensor: Tensor
    weight: float

    @property
    def shape(self) -> torch.Size:
        """Return the tensor's shape."""
        return self.tensor.shape

    def is_floating_point(self) -> bool:
        """Return True: the product is real whatever the tensor is."""
        return True


class Packed(NamedTuple):
    """A total in arrays: shapes, integers, the windows of each chunk, and what lies where."""

    shapes: dict[str, tuple[int, ...]]
    integers: dict[str, np.ndarray]
    chunks: list[tuple[int, dict[int, np.ndarray]]]
    places: dict[str, list[tuple[int, ...]]]


class Total:
    """A sum of statistics: the commutative monoid of maps from names to tensors, where a missing
    name is zero.

    Small tensors that are first seen together share a chunk, so that a network of many layers costs
    no more than one long vector.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = device
        self._shapes: dict[str, torch.Size] = {}
        self._places: dict[str, list[Place]] = {}  # real numbers
        self._integers: dict[str, Tensor] = {}
        self._buffers: dict[int, Buffers] = {}  # by size of chunk

    def names(self) -> list[str]:
        """Return the names seen so far (and not dropped), sorted."""
        return sorted(self._shapes)

    def add(self, statistic: Mapping[str, Tensor | Scaled]) -> None:
        """Add a statistic, or raise and change nothing."""
        for name, x in statistic.items():
            self._check(
                name, x.tensor if isinstance(x, Scaled) else x, isinstance(x, Scaled) or None
            )
        reals = {
            name: flat(x, self.device) for name, x in statistic.items() if x.is_floating_point()
        }
        fresh = self._lay_out({name: statistic[name].shape for name in reals})
        try:
            work = by_chunk({name: self._places[name] for name in reals})
            # Each chunk is put together twice, to look and to add: cheaper than looking at many
            # small tensors, smaller than keeping it.
            bounds = [magnitude(self._gather(reals, chunk, parts)) for chunk, parts in work]
            for bound, (_, parts) in zip(bounds, work, strict=True):
                if not bound < float("inf"):
                    bad = next(
                        name
                        for name, _ in parts
                        if not magnitude(piece(reals[name], slice(None))) < float("inf")
                    )
                    raise ValueError(
                        f"{bad} has a value that is not finite ({bound}); only finite numbers can "
                        "be added"
                    )
            self._add_integers(
                {
                    name: x.detach()
                    for name, x in statistic.items()
                    if not isinstance(x, Scaled) and name not in reals
                }
            )
        except Exception:
            self.drop(fresh)
            raise
        for bound, (chunk, parts) in zip(bounds, work, strict=True):
            chunk.add(self._gather(reals, chunk, parts), bound, self._buffers[chunk.size])

    def merge(self, other: Total) -> None:
        """Add another total, or raise and change nothing."""
        for name, shape in other._shapes.items():
            self._compare(name, shape, name in other._places)
        self._add_integers(other._integers)
        self._lay_out({name: other._shapes[name] for name in other._places})
        ready: set[Accumulator] = set()
        for source in {place.chunk for places in other._places.values() for place in places}:
            source.carry()
        for name, sources in other._places.items():
            for there in sources:
                for here in self._places[name]:
                    start, stop = (
                        max(here.start, there.start),
                        min(here.start + here.size, there.start + there.size),
                    )
                    if start >= stop:
                        continue
                    if here.chunk not in ready:
                        ready.add(here.chunk)
                        here.chunk.reserve()
                    a, b = here.at - here.start, there.at - there.start
                    here.chunk.merge(
                        there.chunk, slice(a + start, a + stop), slice(b + start, b + stop)
                    )

    def packed(self) -> Packed:
        """Return the sum in arrays, for another process; nothing of it is rounded."""
        chunks = list({place.chunk: None for places in self._places.values() for place in places})
        number = {chunk: index for index, chunk in enumerate(chunks)}
        for chunk in chunks:
            chunk.carry()
        return Packed(
            {name: tuple(shape) for name, shape in self._shapes.items()},
            {name: tensor.cpu().numpy() for name, tensor in self._integers.items()},
            [
                (chunk.size, {w: x.cpu().numpy() for w, x in chunk.limbs.items()})
                for chunk in chunks
            ],
            {
                name: [(number[place.chunk], *place[1:]) for place in places]
                for name, places in self._places.items()
            },
        )

    @classmethod
    def unpacked(cls, packed: Packed, device: torch.device | str = "cpu") -> Total:
        """Return the sum that `packed` was made of."""
        made, chunks = cls(device), []
        for size, limbs in packed.chunks:
            chunk = Accumulator(size, device)
            chunk.limbs = {w: torch.tensor(x, device=device) for w, x in limbs.items()}
            chunk.adds = 1
            chunks.append(chunk)
        made._shapes = {name: torch.Size(shape) for name, shape in packed.shapes.items()}
        made._integers = {
            name: torch.tensor(x, device=device) for name, x in packed.integers.items()
        }
        made._places = {
            name: [Place(chunks[number], *place) for number, *place in places]
            for name, places in packed.places.items()
        }
        return made

    def drop(self, names: Iterable[str]) -> None:
        """Forget these names; their memory is freed with the last name that shares a chunk."""
        for name in names:
            self._shapes.pop(name, None)
            self._places.pop(name, None)
            self._integers.pop(name, None)

    def value(self) -> dict[str, Tensor]:
        """Return the sum, names sorted: float64 tensors, correctly rounded, and int64 tensors."""
        out = {
            name: self._integers[name].clone()
            if name in self._integers
            else torch.empty(self._shapes[name], dtype=torch.float64, device=self.device)
            for name in self.names()
        }
        for chunk, parts in by_chunk(self._places):
            x = chunk.value()
            for name, place in parts:
                part = x[place.at : place.at + place.size]
                if not bool(part.isfinite().all()):
                    raise OverflowError(f"the sum of {name} is beyond the largest float64")
                out[name].view(-1)[place.start : place.start + place.size] = part
        return out

    # -- inside -----------------------------------------------------------------------------------
    def _check(self, name: str, x: Tensor, real: bool | None = None) -> None:
        """Raise if `x` cannot be added under `name`."""
        if not isinstance(x, Tensor) or x.is_complex():
            kind = getattr(x, "dtype", type(x).__name__)
            raise ValueError(
                f"{name} must be a tensor of real numbers, integers or booleans, got {kind}"
            )
        self._compare(name, x.shape, x.is_floating_point() if real is None else real)

    def _compare(self, name: str, shape: torch.Size, real: bool) -> None:
        """Raise if what is kept under `name` has another shape or kind."""
        if name not in self._shapes:
            return
        if shape != self._shapes[name]:
            raise ValueError(
                f"{name} has shape {tuple(shape)}, but {tuple(self._shapes[name])} in the "
                "statistics before"
            )
        if real != (name in self._places):
            kinds = ("real numbers", "integers") if real else ("integers", "real numbers")
            raise ValueError(f"{name} holds {kinds[0]}, but {kinds[1]} in the statistics before")

    def _add_integers(self, integers: Mapping[str, Tensor]) -> None:
        """Add integer tensors, all or none."""
        sums: dict[str, Tensor] = {}
        for name, term in integers.items():
            old, x = self._integers.get(name), term.to(self.device, torch.int64)
            new = x.clone() if old is None else old + x
            # the sign differs from that of both terms
            if old is not None and bool((((old ^ new) & (x ^ new)) < 0).any()):
                raise OverflowError(f"the sum of {name} does not fit into int64")
            sums[name] = new
        self._integers.update(sums)
        self._shapes.update({name: x.shape for name, x in sums.items()})

    def _lay_out(self, shapes: Mapping[str, torch.Size]) -> list[str]:
        """Return the names that are new, after giving them places, end to end in fresh chunks."""
        fresh = {name: shape for name, shape in shapes.items() if name not in self._shapes}
        left = sum(shape.numel() for shape in fresh.values())
        chunk, used = Accumulator(0), 0
        for name in sorted(fresh):
            places: list[Place] = []
            start = 0
            while start < fresh[name].numel():
                if used == chunk.size:
                    chunk, used = Accumulator(min(left, CHUNK), self.device), 0
                size = min(fresh[name].numel() - start, chunk.size - used)
                places.append(Place(chunk, used, start, size))
                start, used, left = start + size, used + size, left - size
            self._places[name] = places
        self._shapes.update(fresh)
        return sorted(fresh)

    def _gather(
        self,
        reals: Mapping[str, Tensor | Scaled],
        chunk: Accumulator,
        parts: list[tuple[str, Place]],
    ) -> Tensor:
        """Return the chunk's part of a statistic as one float64 vector, 0 where the statistic has
        no such name.
        """
        if chunk.size not in self._buffers:
            self._buffers[chunk.size] = Buffers(chunk.size, self.device)
        x = self._buffers[chunk.size].rest
        pieces = [
            piece(reals[name], slice(place.start, place.start + place.size))
            for name, place in parts
        ]
        whole = sum(place.size for _, place in parts) == chunk.size
        if whole and len(pieces) == 1 and pieces[0].dtype == x.dtype:
            return pieces[0]
        if whole and len(pieces) > 1:
            return torch.cat(pieces, out=x)
        if not whole:
            x.zero_()
        for (_, place), part in zip(parts, pieces, strict=True):
            x[place.at : place.at + place.size] = part
        return x


def flat(x: Tensor | Scaled, device: torch.device | str) -> Tensor | Scaled:
    """Return `x` as a vector on `device`."""
    vector = (x.tensor if isinstance(x, Scaled) else x).detach().reshape(-1).to(device)
    return Scaled(vector, float(x.weight)) if isinstance(x, Scaled) else vector


def piece(x: Tensor | Scaled, part: slice) -> Tensor:
    """Return a part of a vector; of a product, formed now, in float64."""
    return (
        x.tensor[part].to(torch.float64, copy=True).mul_(x.weight)
        if isinstance(x, Scaled)
        else x[part]
    )


def by_chunk(
    places: Mapping[str, list[Place]],
) -> list[tuple[Accumulator, list[tuple[str, Place]]]]:
    """Return the chunks that hold these names, each with what is in it, in the order in which it is
    kept.
    """
    chunks: dict[Accumulator, list[tuple[str, Place]]] = {}
    for name in sorted(places):  # chunks were filled in sorted order, see `_lay_out`
        for place in places[name]:
            chunks.setdefault(place.chunk, []).append((name, place))
    return list(chunks.items())
