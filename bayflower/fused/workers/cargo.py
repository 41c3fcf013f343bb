"""What travels between the processes of a run: trees as arrays, sums, and what the limits of a run
have seen of the clients of a round.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...contract import ServerHalf
from ...maths.exact import Packed, Total
from ...rounds.robust import Limiter
from ...rounds.suspects import Suspects, Why
from ..totals import Totals

Pair = tuple[Packed, Packed]


def frozen(tree: Any) -> Any:
    """Return a tree, list or map with arrays in place of tensors; they are not copied again."""
    if isinstance(tree, Tensor):
        return tree.detach().cpu().contiguous().numpy()
    return walked(frozen, tree)


def thawed(tree: Any) -> Any:
    """Return what `frozen` was given; tensors have memory of their own."""
    if isinstance(tree, np.ndarray):
        return torch.tensor(tree)
    return walked(thawed, tree)


def walked(fn: Any, tree: Any) -> Any:
    """Return fn applied to the parts of a tree; anything else as it is."""
    if isinstance(tree, Mapping):
        return {key: fn(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [fn(part) for part in tree]
    if isinstance(tree, tuple):
        parts = [fn(part) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    return tree


class Sums(NamedTuple):
    """A part of a round's sum: of clients that count for sure, and by reason of suspects, with and
    without them.
    """

    sure: Packed
    apart: dict[Why, Pair]


def folded(totals: Totals) -> None:
    """Move the fast sums of a block to the exact ones, which can be added in any order."""
    if totals.fast:
        totals.exact.add(totals.fast)
        totals.exact.drop(totals.server.negligible(totals.exact.names()))
        totals.fast = {}
    for why, both in totals.apart.items():
        pair = totals.suspects.sums.setdefault(why, (Total(), Total()))
        for total, part in zip(pair, both, strict=True):
            total.add(part)
            total.drop(totals.server.negligible(total.names()))
    totals.apart = {}


def sums_of(totals: Totals) -> Sums:
    """Return the exact sums as they travel."""
    apart = {why: (a.packed(), b.packed()) for why, (a, b) in totals.suspects.sums.items()}
    return Sums(totals.exact.packed(), apart)


def merge_into(totals: Totals, sums: Sums) -> None:
    """Add sums that have travelled."""
    totals.exact.merge(Total.unpacked(sums.sure))
    for why, packed in sums.apart.items():
        pair = totals.suspects.sums.setdefault(why, (Total(), Total()))
        for total, part in zip(pair, packed, strict=True):
            total.merge(Total.unpacked(part))


def merged(first: Sums, second: Sums) -> Sums:
    """Return the sum of two: one node of the tree in which a round is added up."""
    apart = dict(first.apart)
    for why, pair in second.apart.items():
        known = apart.get(why)
        apart[why] = (
            pair if known is None else (joined(known[0], pair[0]), joined(known[1], pair[1]))
        )
    return Sums(joined(first.sure, second.sure), apart)


def joined(first: Packed, second: Packed) -> Packed:
    """Return the exact sum of two totals."""
    total = Total.unpacked(first)
    total.merge(Total.unpacked(second))
    return total.packed()


# -- the limits of a run (`robust`) ----------------------------------------------------------------
class Seen(NamedTuple):
    """What the limits have seen of some clients in a round."""

    now: dict[str, list[Tensor]]
    factors: dict[str, float]
    suspects: Suspects
    sketches: tuple[dict[int, Any], dict[int, float], dict[int, float]] | None


def without_half(limiter: Limiter) -> Limiter:
    """Return the limits as they travel to a worker: arrays, and of earlier rounds only whether
    there were any.
    """
    made = with_half(limiter, None)
    made.past = {"": []} if limiter.past else {}
    made.limits = frozen(limiter.limits)
    return made


def with_half(limiter: Limiter, half: ServerHalf | None, signs: Any = None) -> Limiter:
    """Return limits that see the clients of one block in a round."""
    made = copy(limiter)
    made.half = half  # type: ignore[assignment]
    made.now, made.factors, made.suspects, made.known = {}, {}, Suspects(), set()
    made.limits = thawed(limiter.limits)
    if limiter.gate is not None:
        made.gate = copy(limiter.gate)
        made.gate.undo()
        made.gate.signs = {} if signs is None else signs
    return made


def seen_by(limiter: Limiter) -> Seen:
    """Return what limits have seen of a block."""
    gate = limiter.gate
    now = {name: [value.cpu() for value in values] for name, values in limiter.now.items()}
    sketches = None if gate is None else (gate.now, gate.itself, gate.turned)
    suspects = limiter.suspects
    suspects.cuts = [
        (clients, {name: value.cpu() for name, value in cuts.items()})
        for clients, cuts in suspects.cuts
    ]
    return Seen(now, limiter.factors, suspects, sketches)


def shipped(seen: Seen) -> Seen:
    """Return what was seen as it travels: with arrays, which are packed faster than tensors."""
    suspects = copy(seen.suspects)
    suspects.cuts = frozen(suspects.cuts)
    return seen._replace(now=frozen(seen.now), suspects=suspects)


def received(seen: Seen) -> Seen:
    """Return what `shipped` was given."""
    seen.suspects.cuts = thawed(seen.suspects.cuts)
    return seen._replace(now=thawed(seen.now))


def add_seen(limiter: Limiter, seen: Seen) -> None:
    """Add what was seen of a block to the limits of the run."""
    for name, values in seen.now.items():
        limiter.now.setdefault(name, []).extend(values)
    limiter.factors |= seen.factors
    limiter.suspects.clients |= seen.suspects.clients
    limiter.suspects.cuts += seen.suspects.cuts
    for reason, some in seen.suspects.of.items():
        limiter.suspects.of[reason] |= some
    if limiter.gate is not None and seen.sketches is not None:
        mine: tuple[dict, ...] = (limiter.gate.now, limiter.gate.itself, limiter.gate.turned)
        for known, new in zip(mine, seen.sketches, strict=True):
            known.update(new)
