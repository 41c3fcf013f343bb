"""Rules that look at all updates of a round together: median, trimmed and krum.

    median    every coordinate of every client becomes the median over clients
    trimmed   every coordinate is kept within the middle clients': the f lowest and the f highest
              count as the next one (a winsorised mean)
    krum      the f clients that are farthest from the others are left out (multi-Krum, Blanchard et
              al. 2017, NeurIPS)

f is the largest number of malicious clients that these rules bear, a third of all: (K − 1) // 3.
Coordinates are those of floating-point tensors that have one shape in all updates; a method then
adds up what is left as it always does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..contract import ServerHalf
from ..tree import flatten, map_tree


def ordered(how: str, half: ServerHalf, state: Any, updates: dict[int, Any]) -> dict[int, Any]:
    """Return the updates after the rule `how`."""
    bad = (len(updates) - 1) // 3
    if how == "krum":
        return {client: updates[client] for client in nearest(half, updates, bad)}
    rows = list(updates.values())

    def join(*leaves: Tensor) -> tuple[Tensor, ...]:
        alike = all(leaf.shape == leaves[0].shape for leaf in leaves)
        if not (alike and leaves[0].is_floating_point() and leaves[0].numel()):
            return leaves
        values = torch.stack(leaves).double()
        ranked = values.sort(0).values
        if how == "median":
            middle = (ranked[(len(leaves) - 1) // 2] + ranked[len(leaves) // 2]) / 2
            return (middle.to(leaves[0].dtype),) * len(leaves)
        kept = torch.minimum(torch.maximum(values, ranked[bad]), ranked[len(leaves) - 1 - bad])
        return tuple(kept.to(leaves[0].dtype).unbind())

    found: list[list[Tensor]] = [[] for _ in rows]
    for leaves in zip(*(flatten(update).values() for update in rows), strict=True):
        for place, leaf in enumerate(join(*leaves)):
            found[place].append(leaf)
    each = [iter(leaves) for leaves in found]
    return {
        client: map_tree(lambda _, own=own: next(own), update)
        for (client, update), own in zip(updates.items(), each, strict=True)
    }


def nearest(half: ServerHalf, updates: dict[int, Any], bad: int) -> list[int]:
    """Return the clients but for the `bad` ones that are farthest from their neighbours."""
    clients = list(updates)
    fields = [name for name, kind in half.update_fields.items() if kind in ("model", "slope")]
    flat = torch.stack(
        [
            torch.cat(
                [
                    leaf.double().reshape(-1)
                    for field in fields
                    for leaf in flatten(updates[client]._asdict().get(field) or {}).values()
                ]
                or [torch.zeros(1, dtype=torch.float64)]
            )
            for client in clients
        ]
    )
    apart = torch.cdist(flat, flat).square().sort(1).values[:, 1:]  # without itself
    scores = apart[:, : max(len(clients) - bad - 2, 1)].sum(1)
    kept = scores.argsort(stable=True)[: len(clients) - bad].tolist()
    return sorted(clients[place] for place in kept)
