"""How far one client may move what all share: bounds on a well-formed update, beyond which it is
not used.

A weighted mean has no defence of its own: one count, one precision or one enormous number can make
it anybody's. These bounds keep an update within what training can give; they do not make the mean
robust against a client that lies within them (`SECURITY.md`). What only one method can say is in
optional functions of its server half: bounds(state, client, update, limits, training), the reason
or None; and, for what counts by its size next to that of others, claims(state, update), sizes by
name, with reduced(state, update, factors), the update with some of them cut down.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ..config import Limits
from ..contract import ServerHalf
from ..tree import Tensors, flatten

WHOLE = 2**53  # whole numbers in an update are below this
MODELS = ("params", "extra")  # fields that are a model, or a part of one, like the state's
SLOPES = ("control_change", "pace")  # fields that are a gradient of the model


def problem(
    half: ServerHalf,
    state: Any,
    client: int,
    update: Any,
    declared: int,
    limits: Limits,
    training: Any,
) -> str | None:
    """Return why an update goes beyond what a client may claim, or None; `declared` is its number
    of samples when it joined.
    """
    count = int(update.num_examples)
    if count > limits.max_examples:
        return f"num_examples must be at most max_examples = {limits.max_examples}, got {count}"
    if count > 2 * declared:
        return (
            f"num_examples is {count}, more than twice the {declared} that the client had when "
            "it joined"
        )
    found = (
        too_large(update, limits.max_value)
        or too_far(half, state, update, limits.max_change)
        or negative_variance(update)
    )
    own = getattr(half, "bounds", None)
    return found or (None if own is None else own(state, client, update, limits, training))


def too_large(update: Any, most: float) -> str | None:
    """Return which tensor has a number beyond what any may be."""
    for name, leaf in flatten(update).items():
        if leaf.numel() == 0 or leaf.dtype == torch.bool:
            continue
        low, high = (float(value) for value in leaf.aminmax())
        bound = (
            WHOLE
            if not leaf.is_floating_point()
            else math.sqrt(most)
            if name.endswith("triangle")
            else most
        )  # its square is what counts
        if max(-low, high) > bound:
            return (
                f"{name!r} has a number of size {max(-low, high):.3g}, more than {bound:.3g} "
                "(max_value)"
            )
    return None


def too_far(half: ServerHalf, state: Any, update: Any, most: float) -> str | None:
    """Return which part of an update is too far from the model that was sent."""
    shared = half.shared(state)
    for field in (*MODELS, *SLOPES):
        tensors: Tensors = getattr(update, field, {})
        if not tensors:
            continue
        own = getattr(state, field, None)
        old: Mapping[str, torch.Tensor] = (
            own
            if isinstance(own, dict) and tensors.keys() <= own.keys() and field in MODELS
            else shared
        )
        size = away = 0.0
        # one at a time: together they would take four models' memory
        for name, tensor in tensors.items():
            change = tensor.double()
            if name in old:
                before = old[name].double()
                size += float(before.square().sum())
                change = change - before if field in MODELS else change
            away += float(change.square().sum())
        bound = most * (1 + math.sqrt(size))
        if math.sqrt(away) > bound:
            return (
                f"{field!r} changed by {math.sqrt(away):.3g}, more than {bound:.3g} "
                f"(max_change = {most:g})"
            )
    return None


def negative_variance(update: Any) -> str | None:
    """Return which running variance of a normalisation layer is negative: its root would be no
    number on every client.
    """
    buffers: Tensors = getattr(update, "buffers", {})
    for name, value in buffers.items():
        if name.rpartition(".")[2] == "running_var" and value.numel() and float(value.min()) < 0:
            return f"{name!r} is a variance and must not be negative, got {float(value.min()):.3g}"
    return None


def level(sizes: Iterable[float], share: float) -> float:
    """Return the largest size to which larger ones can be cut so that none has more than `share` of
    the sum.
    """
    ordered = sorted(sizes, reverse=True)
    most = ordered[-1]  # with 1/share clients or fewer, equal weights are the best there is
    if share * len(ordered) > 1:
        for cut in range(len(ordered)):  # the largest `cut` clients are cut off
            if cut * share >= 1:
                break
            most = share * math.fsum(ordered[cut:]) / (1 - share * cut)
            if ordered[cut] <= most:
                break
    return most


def caps(sizes: Mapping[int, int], share: float) -> dict[int, int]:
    """Return how many samples each client of a round may count for, so that none has more than
    `share` of all; only those cut off.
    """
    most = max(int(level(sizes.values(), share)), 1) if sizes else 0
    return {client: most for client, size in sizes.items() if size > most}


class Cut(NamedTuple):
    """A claim that was cut down: whose, of what, and what is left of it."""

    client: int
    name: str
    factor: float


def reduce(
    half: ServerHalf, state: Any, updates: Mapping[int, Any], share: float
) -> tuple[dict[int, Any], list[Cut]]:
    """Return the updates of a round with nobody's claim above `share` of what all claim under that
    name, and what was cut down.
    """
    found = {client: half.claims(state, update) for client, update in sorted(updates.items())}  # type: ignore[attr-defined]
    most = {
        name: level([claims[name] for claims in found.values() if name in claims], share)
        for name in {name for claims in found.values() for name in claims}
    }
    kept, cuts = {}, []
    for client, claims in found.items():
        factors = {name: most[name] / size for name, size in claims.items() if size > most[name]}
        cuts += [Cut(client, name, factor) for name, factor in factors.items()]
        kept[client] = half.reduced(state, updates[client], factors) if factors else updates[client]  # type: ignore[attr-defined]
    return kept, cuts
