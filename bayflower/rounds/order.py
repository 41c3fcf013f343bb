"""Rules that look at all updates of a round together: median, trimmed and krum.

    median    every coordinate of every client becomes the median over clients
    trimmed   every coordinate is kept within the middle clients': the f lowest and the f highest
              count as the next one (a winsorised mean)
    krum      the f clients that are farthest from the others are left out (multi-Krum, Blanchard et
              al. 2017, NeurIPS)

f is the largest number of malicious clients that these rules bear, a third of all: (K − 1) // 3.
Coordinates are those of floating-point tensors that have one shape in all updates; a method then
adds up what is left as it always does. Entries that a client did not send (`ServerHalf.present`)
count as unchanged, and stay as they are in its own update. Fields of kind `exact` are left alone:
the client keeps the same number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..contract import ServerHalf
from ..tree import Tensors, flatten, map_tree
from .parts import flat_name, named, sent_with


def ordered(how: str, half: ServerHalf, state: Any, updates: dict[int, Any]) -> dict[int, Any]:
    """Return the updates after the rule `how`."""
    bad = (len(updates) - 1) // 3
    if how == "krum":
        return {client: updates[client] for client in nearest(half, state, updates, bad)}
    rows = [flatten(update) for update in updates.values()]
    there = [travelled(half, state, update) for update in updates.values()]
    sent = unchanged(half, state, next(iter(updates.values())))
    exact = tuple(name for name, kind in half.update_fields.items() if kind == "exact")

    def join(name: str) -> tuple[Tensor, ...]:
        leaves = tuple(row[name] for row in rows)
        alike = all(leaf.shape == leaves[0].shape for leaf in leaves)
        if not (alike and leaves[0].is_floating_point() and leaves[0].numel()):
            return leaves
        masks = [one.get(name) for one in there]
        values = torch.stack(
            [whole(leaf, mask, sent.get(name)) for leaf, mask in zip(leaves, masks, strict=True)]
        )
        ranked = values.sort(0).values
        if how == "median":
            middle = (ranked[(len(leaves) - 1) // 2] + ranked[len(leaves) // 2]) / 2
            kept = middle.expand_as(values)
        else:
            kept = torch.minimum(torch.maximum(values, ranked[bad]), ranked[len(leaves) - 1 - bad])
        new = kept.to(leaves[0].dtype).unbind()
        return tuple(
            one if mask is None else torch.where(mask, one, leaf)
            for one, mask, leaf in zip(new, masks, leaves, strict=True)
        )

    found: list[list[Tensor]] = [[] for _ in rows]
    for name in rows[0]:
        kept = name.split("/")[0] in exact
        for place, leaf in enumerate([row[name] for row in rows] if kept else join(name)):
            found[place].append(leaf)
    each = [iter(leaves) for leaves in found]
    return {
        client: map_tree(lambda _, own=own: next(own), update)
        for (client, update), own in zip(updates.items(), each, strict=True)
    }


def travelled(half: ServerHalf, state: Any, update: Any) -> Tensors:
    """Return by flat name which entries of one update travelled; a missing name: all did."""
    many = half.present(state, map_tree(lambda leaf: leaf[None], update))
    return {name: mask[0] for name, mask in many.items()}


def unchanged(half: ServerHalf, state: Any, update: Any) -> Tensors:
    """Return by flat name what an update holds where its client changed nothing; missing: 0."""
    found: Tensors = {}
    for field, value in update._asdict().items():
        leaves = named(value) if value is not None else {}
        known = sent_with(half, state, field, leaves)
        found |= {flat_name(field, name): known[name] for name in leaves if name in known}
    return found


def whole(leaf: Tensor, mask: Tensor | None, sent: Tensor | None) -> Tensor:
    """Return a tensor in float64, with what was sent in the entries that did not travel."""
    leaf = leaf.double()
    if mask is None:
        return leaf
    return torch.where(mask, leaf, torch.zeros_like(leaf) if sent is None else sent.to(leaf))


def nearest(half: ServerHalf, state: Any, updates: dict[int, Any], bad: int) -> list[int]:
    """Return the clients but for the `bad` ones that are farthest from their neighbours."""
    clients = list(updates)
    kinds = ("model", "slope", "factor")
    fields = tuple(name for name, kind in half.update_fields.items() if kind in kinds)
    sent = unchanged(half, state, updates[clients[0]])

    def row(update: Any) -> Tensor:
        there = travelled(half, state, update)
        parts = [
            whole(leaf, there.get(name), sent.get(name)).reshape(-1)
            for name, leaf in flatten(update).items()
            if name.split("/")[0] in fields
        ]
        return torch.cat(parts or [torch.zeros(1, dtype=torch.float64)])

    flat = torch.stack([row(updates[client]) for client in clients])
    apart = torch.cdist(flat, flat).square().sort(1).values[:, 1:]  # without itself
    scores = apart[:, : max(len(clients) - bad - 2, 1)].sum(1)
    kept = scores.argsort(stable=True)[: len(clients) - bad].tolist()
    return sorted(clients[place] for place in kept)
