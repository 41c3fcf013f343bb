"""Clients whose changes oppose those of the others, round after round.

A change with its sign turned round has the size of an honest one, so no limit on sizes sees it. Its
direction tells it: the others pull the model back, and the cosine between its change and the sum of
theirs is far below zero. Honest clients with rare data are sometimes below zero, too. So a client
is left out only if the mean of its last rounds is far below zero and far below that of most
clients.

    u_k   the client's change, of length 1
    a_k   cos(u_k, Σ_{j≠k} u_j), over the clients that count
    left out if mean of the last LAST a_k  <  min(AGAINST, median over clients − APART)
    counts again if that mean  >  min(AGAIN, median over clients − APART)

The server does not keep changes. It keeps a sketch of each, SIZE numbers: entry i is added to place
i mod SIZE with a random sign, so that products of sketches are those of changes but for an error of
1/√SIZE. One round's sketches are all that a round needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median_low
from typing import Any

import torch
from torch import Tensor

from .parts import TINY, Part, change

SIZE = 1024
LAST = 5  # rounds of a client that count
LEAST = 3  # rounds of a client before it is judged
MANY = 5  # fewer clients than this say nothing of what most do
AGAINST = -0.3
APART = 0.4
AGAIN = -0.15  # a client that was left out counts again above this


class Gate:
    """How far the clients of a run agree, and which of them are left out."""

    def __init__(self) -> None:
        self.past: dict[int, list[float]] = {}  # by client: the cosines of its last rounds
        self.now: dict[int, Tensor] = {}  # by client: the sketch of this round's change
        self.out: dict[int, float] = {}  # by client that is left out: its mean cosine
        self.middle = 0.0  # median of the clients' mean cosines
        self.signs: dict[tuple[int, torch.device], Tensor] = {}  # by number of entries

    def see(self, clients: Sequence[int], parts: Sequence[Part]) -> None:
        """Note the directions of stacked changes."""
        chosen = [part for part in parts if part.kind == "model" and not part.name.endswith(")")]
        chosen = chosen or [part for part in parts if part.rule == "step"]
        if not chosen:
            return
        whole = torch.stack([self.sketch(part) for part in chosen]).sum(0).cpu()
        unit = whole / whole.norm(dim=1, keepdim=True).clamp(min=TINY)
        self.now.update(zip(clients, unit.unbind(), strict=True))

    def sketch(self, part: Part) -> Tensor:
        """Return SIZE numbers of each client's change."""
        found: Any = 0.0
        for place, name in enumerate(sorted(part.leaves)):
            flat = change(part, name)
            flat = flat.reshape(len(flat), -1)
            flat = flat * self.sign(flat.shape[1], flat.device)
            flat = torch.nn.functional.pad(flat, (0, -flat.shape[1] % SIZE))
            found = found + flat.reshape(len(flat), -1, SIZE).sum(1).roll(place * 97, 1)
        return found

    def sign(self, number: int, device: torch.device) -> Tensor:
        """Return `number` signs, always the same."""
        key = (number, device)
        if key not in self.signs:
            drawn = torch.randint(2, (number,), generator=torch.Generator().manual_seed(number))
            self.signs[key] = (2 * drawn - 1).to(device)
        return self.signs[key]

    def close(self) -> None:
        """End a round: compare the changes, and say who is left out of the next one."""
        if len(self.now) >= MANY:
            counted = [one for client, one in self.now.items() if client not in self.out]
            total = torch.stack(counted).sum(0) if counted else torch.zeros(SIZE)
            for client, unit in self.now.items():
                others = total if client in self.out else total - unit
                agreed = float(unit @ others / others.norm().clamp(min=TINY))
                self.past[client] = [*self.past.get(client, []), agreed][-LAST:]
        self.now = {}
        self.judge()

    def judge(self) -> None:
        """Decide who is left out."""
        means = {c: fmean(values) for c, values in self.past.items() if len(values) >= LEAST}
        self.middle = median_low(means.values()) if means else 0.0
        apart = self.middle - APART
        self.out = {
            client: mean
            for client, mean in means.items()
            if len(means) >= MANY and mean < min(AGAIN if client in self.out else AGAINST, apart)
        }

    def why(self, client: int) -> str:
        """Return a line on a client that is left out."""
        return (
            f"client {client}: its changes oppose those of the others (mean cosine "
            f"{self.out[client]:.2f}, of most clients {self.middle:.2f}); left out of the sum "
            "until they agree (robust)"
        )

    def memory(self) -> dict[str, Any]:
        """Return what a resumed run needs, in JSON types."""
        past = {str(client): values for client, values in sorted(self.past.items())}
        return {"past": past, "out": sorted(self.out)}

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Go on from what `memory` returned."""
        self.past = {int(client): list(values) for client, values in memory.get("past", {}).items()}
        self.out = dict.fromkeys(memory.get("out", []), 0.0)
        self.judge()
