"""A server half whose sums are differentially private: each client's change is clipped, the sum of
the changes gets noise, and the method goes on from their noisy mean.

    u_k     what a client sends; b the same fields as they were broadcast (0 where they were not)
    Δ_k     u_k − b, over all real fields together; weights of clients are public: each counts 1
    C       dp_clip:  Δ_k is shortened to the norm C
    z       noise multiplier
    m       expected number of clients of a round: public, so that no count needs noise

    ū = b + (Σ_k clip(Δ_k) + N(0, z²C²)) / m                                            [eq. 1]
    the method is handed  m · statistic(ū)                                              [eq. 2]

A method's `statistic` is affine in real fields while weights are fixed. Then [eq. 2] without
noise and clipping is the sum of the clients' statistics, whatever `finalise` does with it: means,
natural parameters, masks and control variates are all clipped and hidden in the same way.
A method whose sums are something else declares *portions* (`maths/portions.py`): what a client adds
instead of some fields, each with a norm and a share of the noise.

Changes are counted in whole units, so that their sum has no rounding and the noise is exactly
discrete Gaussian (`discrete.py`). One unit is zC/(√s·2^BITS); s is the least number of clients that
add a share of the noise (secure sums; 1 where the server adds it). The norm is cut by half a unit
in every coordinate, which rounding may add.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..contract import ServerHalf, Statistic, Sum
from ..errors import BayflowerError, ConfigError
from ..maths import portions
from ..maths.exact import Scaled
from ..tree import Tensors, flatten, unflatten
from .discrete import BITS, Entropy, gaussian

CHANGE = "change"  # the one entry of a private statistic
WEIGHTS = ("log_weight", "claimed")  # kinds of fields that weigh a client: all clients weigh 1
POSITIVE = ("precision", "certainty")  # kinds of fields that noise must not make negative


class Mechanism(NamedTuple):
    """How sums are made private."""

    clip: float
    noise: float
    people: float  # m
    shares: int = 1  # s

    @property
    def unit(self) -> float:
        """Return the unit in which changes are counted."""
        return self.clip * self.noise / (math.sqrt(self.shares) * 2**BITS)

    def longest(self, size: int) -> float:
        """Return the norm to which a change of so many numbers is cut, before rounding."""
        found = self.clip - self.unit * math.sqrt(size) / 2
        if found < self.clip / 2:
            raise ConfigError(
                f"dp: {size} numbers are too many for noise {self.noise:g}; use a smaller network"
            )
        return found


class Layout(NamedTuple):
    """Which fields of an update are noisy, and what was sent in their place."""

    names: tuple[str, ...]
    sent: Tensors  # by name, for noisy fields and others
    entries: Tensors  # by name which entries count, where a method with portions sends only some


def private_half(half: ServerHalf, mechanism: Mechanism, entropy: Entropy | None) -> ServerHalf:
    """Return a server half with private sums. With `entropy` it adds the noise; None: the clients
    do.
    """
    made = private_kind(type(half))(half.config, half.anatomy)
    made.mechanism, made.entropy = mechanism, entropy
    return made


@lru_cache(maxsize=64)
def private_kind(kind: type[ServerHalf]) -> Any:
    """Return the half `kind` with private sums."""

    class Noisy(kind):  # type: ignore[valid-type, misc]
        mechanism: Mechanism
        entropy: Entropy | None
        has_claims = False

        def layout(self, state: Any, update: Any) -> Layout:
            """Return which fields are noisy; `state` may be the broadcast."""
            known = isinstance(state, self.broadcast_type)
            sent = flatten(state if known else self.broadcast(state, 0))
            names = [
                name
                for name, leaf in flatten(update).items()
                if leaf.is_floating_point()
                and kind_of(self, name) not in WEIGHTS
                and name.split("/")[0] not in self.replaced
            ]
            some = self.sent_entries(state) if self.portions else {}
            entries = {f"params/{name}": mask.reshape(-1) for name, mask in some.items()}
            return Layout(tuple(sorted(names)), sent, entries)

        def counted(self, state: Any, update: Any, stacked: bool) -> Tensor:
            """Return the clipped changes of stacked updates (clients, numbers) in whole units."""
            layout, flat = self.layout(state, update), flatten(update)
            rows = []
            for name in layout.names:
                leaf = flat[name].double() if stacked else flat[name].double()[None]
                if name in layout.sent:
                    leaf = leaf - layout.sent[name].to(leaf)
                row = leaf.reshape(len(leaf), -1)
                rows.append(row[:, layout.entries[name]] if name in layout.entries else row)
            every = torch.cat(rows, 1)
            if self.portions:  # of one client
                parts = self.portion(state, update)
                every = portions.joined(every[0], parts, self.portions, self.mechanism.clip)[None]
            return in_units(every, self.mechanism)

        def statistic(self, state: Any, client: int, update: Any) -> Statistic:
            """Return the clipped change in whole units."""
            return {CHANGE: self.counted(state, update, stacked=False)[0]}

        summand = statistic

        def total(self, state: Any, clients: tuple[int, ...], updates: Any) -> Sum | None:
            """Return the sum of the clipped changes of stacked updates."""
            if self.portions:  # made of updates as they travel, one by one
                return None
            return {CHANGE: self.counted(state, updates, stacked=True).sum(0)}

        def negligible(self, names: Any) -> set[str]:
            return set()

        def finalise(self, state: Any, total: Sum) -> Any:
            """Return the method's next state from the noisy mean of the changes [eq. 1] [eq. 2].
            A round without clients gets noise as well: that nobody took part is secret, too.
            """
            expected = self.expects(state)
            layout, flat = self.layout(state, expected), flatten(expected)
            blank = self.portion(state, expected) if self.portions else {}
            sizes = {name: one.numel() for name, one in blank.items()}
            size = sum(self.numbers(layout, flat, name) for name in layout.names)
            size += sum(sizes.values())
            some = flat[layout.names[0]]
            found = total[CHANGE].cpu() if CHANGE in total else torch.zeros(size).long()
            if self.entropy is not None:
                found = found + torch.from_numpy(gaussian(self.entropy, size))
            people = self.mechanism.people
            mean = (found.double() * (self.mechanism.unit / people)).to(some.device)
            sums: Tensors = {}
            if self.portions:
                mean, sums = portions.parted(mean, sizes, self.portions)
                sums = self.restored(state, times_all(sums, people), self.spreads())
            made = self.joined(layout, flat, mean)
            one = super().statistic(state, 0, unflatten(type(expected), made))
            whole = {name: times(v, people) for name, v in one.items()}
            return super().finalise(state, {**whole, **sums})

        def numbers(self, layout: Layout, flat: Tensors, name: str) -> int:
            """Return how many numbers of a field are noisy."""
            if name in layout.entries:
                return int(layout.entries[name].sum())
            return flat[name].numel()

        def spreads(self) -> dict[str, float]:
            """Return the standard deviation of the noise in the sum of each portion."""
            size = self.mechanism.clip * self.mechanism.noise
            return {name: size / math.sqrt(share) for name, share in self.portions.items()}

        def joined(self, layout: Layout, flat: Tensors, mean: Tensor) -> Tensors:
            """Return the update b + mean, by name."""
            made, at = {}, 0
            for name, leaf in flat.items():
                if name.split("/")[0] in self.replaced:
                    made[name] = leaf
                elif name not in layout.names:
                    weight = kind_of(self, name) in WEIGHTS
                    usual = torch.zeros_like(leaf) if weight else torch.ones_like(leaf)
                    made[name] = layout.sent.get(name, usual)
            for name in layout.names:
                leaf, count = flat[name], self.numbers(layout, flat, name)
                part = mean[at : at + count]
                at += count
                if name in layout.entries:  # the others stay as the server has them
                    whole, there = leaf.reshape(-1).to(part), layout.entries[name]
                    part = torch.zeros_like(whole).masked_scatter(there, part)
                    part = torch.where(there, layout.sent[name].reshape(-1).to(part) + part, whole)
                part = part.reshape(leaf.shape)
                if name in layout.sent and name not in layout.entries:
                    part = part + layout.sent[name].to(part)
                if kind_of(self, name) in POSITIVE or name.endswith("running_var"):
                    part = part.clamp(min=1e-6)
                made[name] = part.to(leaf.dtype)
            return made

        def noised(self, state: Any, update: Any) -> Any:
            """Return what a client sends that trusts nobody: its own clipped change with all of
            the noise, and the weight 1 (dp=local).
            """
            entropy = self.entropy or Entropy()
            layout, flat = self.layout(state, update), flatten(update)
            found = self.counted(state, update, stacked=False)[0].cpu()
            found = found + torch.from_numpy(gaussian(entropy, found.numel()))
            change = (found.double() * self.mechanism.unit).to(flat[layout.names[0]].device)
            return unflatten(type(update), self.joined(layout, flat, change))

    Noisy.__name__ = Noisy.__qualname__ = kind.__name__
    Noisy.__module__ = kind.__module__
    return Noisy


def local_half(half: ServerHalf, mechanism: Mechanism, entropy: Entropy | None) -> ServerHalf:
    """Return the server half for clients that send noisy updates. With `entropy` it adds their
    noise, for an engine without clients.
    """
    made = local_kind(type(half))(half.config, half.anatomy)
    made.noisy = private_half(half, mechanism, entropy)
    return made


@lru_cache(maxsize=64)
def local_kind(kind: type[ServerHalf]) -> Any:
    """Return the half `kind` for updates of which each is noisy."""

    class Locally(kind):  # type: ignore[valid-type, misc]
        noisy: Any

        def bounds(
            self, state: Any, client: int, update: Any, limits: Any, training: Any
        ) -> str | None:
            return None  # noise is far beyond what an honest update would claim

        def statistic(self, state: Any, client: int, update: Any) -> Statistic:
            """Return the method's statistic of a noisy update."""
            noisy = self.noisy.noised(state, update) if self.noisy.entropy else update
            return super().statistic(state, client, noisy)

        def total(self, state: Any, clients: tuple[int, ...], updates: Any) -> Sum | None:
            return None if self.noisy.entropy else super().total(state, clients, updates)

    Locally.__name__ = Locally.__qualname__ = kind.__name__
    Locally.__module__ = kind.__module__
    return Locally


def kind_of(half: ServerHalf, name: str) -> str:
    """Return the kind of a field of an update."""
    return half.update_fields.get(name.split("/")[0], "other")


def in_units(every: Tensor, mechanism: Mechanism) -> Tensor:
    """Return rows of numbers, cut to the clipping norm, in whole units (int64)."""
    norms = every.square().sum(1).sqrt()
    if not bool(norms.isfinite().all()):
        raise BayflowerError("the update has a number that is not finite")
    most = mechanism.longest(every.shape[1])
    scale = (most / norms.clamp(min=most)) / mechanism.unit
    return (every * scale[:, None]).round().to(torch.int64)


def times(value: Any, people: float) -> Tensor:
    """Return the statistic of one client as that of `people` clients."""
    if isinstance(value, Scaled):
        return value.tensor.double() * (value.weight * people)
    return value.double() * people


def times_all(tensors: Tensors, by: float) -> Tensors:
    """Return tensors by name, multiplied by a number."""
    return {name: value * by for name, value in tensors.items()}


def with_share(statistic: Statistic, entropy: Entropy) -> Statistic:
    """Return a client's private statistic with its share of the noise."""
    change: Any = statistic[CHANGE]
    noise = torch.from_numpy(np.ascontiguousarray(gaussian(entropy, change.numel())))
    return {**statistic, CHANGE: change + noise.to(change.device)}
