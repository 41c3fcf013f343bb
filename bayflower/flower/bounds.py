"""Bounds on an update: a well-formed update beyond them is rejected.

A weighted mean is not robust: one extreme count, precision or value lets a single client set the
result. These bounds keep an update within what training can give. They do not protect against a
client that lies within them (`SECURITY.md`). A method declares the fields of its update in
`ServerHalf.update_fields`, and its own bounds in `bounds`, `claims` and `reduced`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ..config import Limits
from ..contract import ServerHalf
from ..files.journal import Journal
from ..tree import Tensors, flatten

WHOLE = 2**53  # bound on whole numbers in an update


def problem(
    half: ServerHalf,
    state: Any,
    client: int,
    update: Any,
    declared: int,
    limits: Limits,
    training: Any,
) -> str | None:
    """Return why an update is out of bounds, or None. `declared` is the number of samples that the
    client reported when it joined.
    """
    count = int(update.num_examples)
    if count > limits.max_examples:
        return f"num_examples must be at most max_examples = {limits.max_examples}, got {count}"
    if count > 2 * declared:
        return (
            f"num_examples is {count}, more than twice the {declared} that the client reported "
            "when it joined"
        )
    return (
        too_large(half, update, limits.max_value)
        or too_precise(half, update, limits.max_precision)
        or too_far(half, state, update, limits.max_change)
        or negative_variance(half, update)
        or half.bounds(state, client, update, limits, training)
    )


def kind_of(half: ServerHalf, name: str) -> str:
    """Return the declared kind of the leaf `name`, by the longest prefix in `update_fields`."""
    found = [one for one in half.update_fields if name == one or name.startswith(one + "/")]
    return half.update_fields[max(found, key=len)] if found else "other"


def too_large(half: ServerHalf, update: Any, most: float) -> str | None:
    """Return a text that names the tensor with a value above `most`, or None."""
    for name, leaf in flatten(update).items():
        if leaf.numel() == 0 or leaf.dtype == torch.bool:
            continue
        low, high = (float(value) for value in leaf.aminmax())
        bound: float = WHOLE
        if leaf.is_floating_point():
            bound = math.sqrt(most) if kind_of(half, name) == "root" else most
        if max(-low, high) > bound:
            return (
                f"{name!r} has a value of magnitude {max(-low, high):.3g}, more than {bound:.3g} "
                "(max_value)"
            )
    return None


def too_precise(half: ServerHalf, update: Any, most: float) -> str | None:
    """Return a text that names a precision above `most`, or None: a client that claims a huge one
    sets the mean.
    """
    for field, tensors in fields(half, update, "precision"):
        largest = max((float(value.max()) for value in tensors.values()), default=0.0)
        if largest > most:
            return f"{field} must be at most max_precision = {most:g}, got {largest:.3g}"
    return None


def too_far(half: ServerHalf, state: Any, update: Any, most: float) -> str | None:
    """Return a text that names the part of an update too far from the model sent, or None."""
    shared, known = half.shared(state), state._asdict()
    for field, tensors in [*fields(half, update, "model"), *fields(half, update, "slope")]:
        is_model = half.update_fields[field] == "model"
        own = known.get(field)
        same = is_model and isinstance(own, dict) and tensors.keys() <= own.keys()
        old: Mapping[str, torch.Tensor] = own if same else shared
        size = away = 0.0
        for (
            name,
            tensor,
        ) in tensors.items():  # one tensor at a time: all at once need four models' memory
            change = tensor.double()
            if name in old:
                before = old[name].double()
                size += float(before.square().sum())
                change = change - before if is_model else change
            away += float(change.square().sum())
        bound = most * (1 + math.sqrt(size))
        if math.sqrt(away) > bound:
            return (
                f"{field!r} changed by {math.sqrt(away):.3g}, more than {bound:.3g} "
                f"(max_change = {most:g})"
            )
    return None


def negative_variance(half: ServerHalf, update: Any) -> str | None:
    """Return a text that names a normalisation layer's negative running variance, or None: its
    square root would be NaN on every client.
    """
    for _, buffers in fields(half, update, "buffers"):
        for name, value in buffers.items():
            variance = name.rpartition(".")[2] == "running_var" and value.numel()
            if variance and float(value.min()) < 0:
                return (
                    f"{name!r} is a variance and must not be negative, got {float(value.min()):.3g}"
                )
    return None


def fields(half: ServerHalf, update: Any, kind: str) -> list[tuple[str, Tensors]]:
    """Return the non-empty fields of an update that are declared as `kind`."""
    held = update._asdict()
    return [
        (name, held[name])
        for name, declared in half.update_fields.items()
        if declared == kind and held.get(name)
    ]


def level(sizes: Iterable[float], share: float) -> float:
    """Return the highest cap on sizes that gives no client more than `share` of the sum."""
    ordered = sorted(sizes, reverse=True)
    most = ordered[-1]  # with 1/share clients or fewer, equal weights come closest
    if share * len(ordered) > 1:
        for cut in range(len(ordered)):  # the `cut` largest clients are capped
            if cut * share >= 1:
                break
            most = share * math.fsum(ordered[cut:]) / (1 - share * cut)
            if ordered[cut] <= most:
                break
    return most


def caps(sizes: Mapping[int, int], share: float) -> dict[int, int]:
    """Return the capped sample counts of a round's clients, so that none has more than `share` of
    all samples. Clients below the cap are not listed.
    """
    most = max(int(level(sizes.values(), share)), 1) if sizes else 0
    return {client: most for client, size in sizes.items() if size > most}


class Cut(NamedTuple):
    """A capped claim: its client, its name, and the factor by which it was reduced."""

    client: int
    name: str
    factor: float


def reduce(
    half: ServerHalf, state: Any, updates: Mapping[int, Any], share: float
) -> tuple[dict[int, Any], list[Cut]]:
    """Return the updates of a round with each claim capped at `share` of all claims of that name,
    and the capped claims.
    """
    found = {client: half.claims(state, update) for client, update in sorted(updates.items())}
    most = {
        name: level([claims[name] for claims in found.values() if name in claims], share)
        for name in {name for claims in found.values() for name in claims}
    }
    kept, cuts = {}, []
    for client, claims in found.items():
        factors = {name: most[name] / size for name, size in claims.items() if size > most[name]}
        cuts += [Cut(client, name, factor) for name, factor in factors.items()]
        kept[client] = half.reduced(state, updates[client], factors) if factors else updates[client]
    return kept, cuts


def moderate(
    half: ServerHalf,
    state: Any,
    updates: Mapping[int, Any],
    share: float,
    told: set[tuple[int, str]],
    journal: Journal,
) -> dict[int, Any]:
    """Return the updates of a round with every claim capped at `share` of the total; report each
    capped claim, a pair of client and name, once: those in `told` were reported before.
    """
    if not updates:
        return {}
    kept, cuts = reduce(half, state, updates, share)
    for client in sorted({cut.client for cut in cuts}):
        new = [cut for cut in cuts if cut.client == client and (client, cut.name) not in told]
        told |= {(client, cut.name) for cut in new}
        if new:
            least = min(cut.factor for cut in new)
            journal.fault(
                f"client {client}: its claims on {', '.join(cut.name for cut in new)} are "
                f"capped, at the least to {least:.2g} of what it claimed (max_share is {share:g})"
            )
    return kept
