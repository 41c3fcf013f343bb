"""Secure sums without a federation: the fused engine rounds and adds statistics as clients and
server of a secure sum do, checks the sum, and counts the bytes. Nothing is masked: one process
trains all clients and could see everything anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..config import Run
from ..contract import Sum
from ..errors import BayflowerError
from ..maths.exact import Total
from ..maths.window import Window, agree, decode, encode
from ..privacy.budget import Budget
from ..privacy.noisy import local_half, private_half
from ..recipes.secrecy import Privacy
from ..rounds.halves import Halves
from ..rounds.ownnoise import client_half
from ..rounds.robust import Limiter
from ..rounds.unseen import kept
from ..tree import take, to
from .totals import Totals

REMARK = (
    "secure=sum: the fused engine masks nothing; it rounds, adds and counts bytes as a federation "
    "does"
)
# bytes of JSON: a card, a ticket, shares sealed for one holder, one share, a signature
CARD, TICKET, SEALED, SHARE, SIGNED = 268, 360, 304, 140, 160


class SecureTotals(Totals):
    """The sum of a round's statistics in a window of integers modulo 2^64."""

    def __init__(
        self, halves: Halves, privacy: Privacy, sizes: Mapping[int, int], limiter: Limiter
    ) -> None:
        super().__init__(halves, False, limiter)
        self.privacy, self.sizes = privacy, sizes
        self.window: Window | None = None
        self.sum = torch.zeros(0, dtype=torch.int64)

    def add(self, state: Any, chunk: list[int], updates: Any) -> None:
        """Add the stacked updates of some clients."""
        home, there = to(state, "cpu"), to(updates, "cpu")
        for place, client in enumerate(chunk):
            update = self.server.unpack(home, self.client.pack(take(there, place)))
            told = self.limiter.told(len(self.sizes))
            update = kept(self.server, self.server.broadcast(home, client), update, told)
            statistic = self.server.summand(home, client, update)
            if self.window is None:
                largest = self.privacy.secure_range * max(1, *self.sizes.values())
                limbs = self.privacy.secure_limbs
                self.window = agree(statistic, len(self.sizes), largest, limbs)
                self.sum = torch.zeros(self.window.size, dtype=torch.int64)
            self.sum += encode(statistic, self.window)
            self.exact.add(statistic)

    def value(self, device: torch.device) -> Sum:
        """Return the sum, on the device; it is checked against the exact one."""
        if self.window is None:
            return {}
        total = Total()
        rounded = decode(self.sum, self.window, total)
        found, plain = total.value(), self.exact.value()
        if not rounded and any(not torch.equal(found[name], plain[name]) for name in plain):
            raise BayflowerError("the secure sum differs from the exact sum; report this as a bug")
        return {name: value.to(device) for name, value in found.items()}


def totals_for(
    run: Run, halves: Halves, fast: bool, sizes: Mapping[int, int], limiter: Limiter
) -> Totals:
    """Return what adds the statistics of a round; `sizes` are its clients' samples."""
    if run.privacy.on:
        return SecureTotals(halves, run.privacy, sizes, limiter)
    return Totals(halves, fast, limiter)


def private_halves(budget: Budget, halves: Halves, members: int) -> Halves:
    """Return the halves with private sums over so many training clients. In secure sums every
    client adds a share of the noise, such that fewer would do; here all shares are drawn at once.
    """
    if not budget.privacy.hides_clients:
        half = halves.client
        training = budget.training(half.training)
        return halves._replace(client=client_half(type(half), half.config, training, halves.model))
    if budget.secret:
        return halves._replace(server=budget.server_half(halves.server, members))
    if budget.local:
        made = local_half(halves.server, budget.mechanism(1.0), budget.entropy)
        return halves._replace(server=made)
    clients = max(1, int(budget.fraction * members + 1e-9))
    least = budget.least(clients)
    mechanism = budget.mechanism(clients)
    mechanism = mechanism._replace(noise=mechanism.noise * (clients / least) ** 0.5)
    return halves._replace(server=private_half(halves.server, mechanism, budget.entropy))


def masked_size(form: Mapping[str, Tensor | Any], limbs: int) -> int:
    """Return the numbers of a masked vector with a statistic of this form and a training loss."""
    return agree(form, 1, 1.0, limbs).size + limbs


def further_bytes(clients: int, holders: int) -> tuple[int, int]:
    """Return (bytes down, bytes up) of keys and shares in a round without drop-outs, about: the
    session with every request, the next ticket with every reply, and one message to unmask.
    """
    session = CARD * holders + TICKET * clients + 200
    down = session * clients + (session + SEALED * clients + 8 * clients) * holders
    up = (TICKET + SEALED * holders) * clients + (SHARE * clients + SIGNED) * holders
    return down, up
