"""A Gaussian as the product of a prior and one factor a client, by a ledger of the factors.

The ledger has "k/precision" and "k/shift" of every client k that ever sent a factor, in float64.
"""

from __future__ import annotations

import torch

from ..tree import Tensors
from .gaussian import Diagonal, product


def prior(size: int, device: torch.device) -> Diagonal:
    """Return N(0, I): precision 1, shift 0."""
    return Diagonal(
        torch.ones(size, dtype=torch.float64, device=device),
        torch.zeros(size, dtype=torch.float64, device=device),
    )


def entry(ledger: Tensors, client: int | str) -> Diagonal:
    """Return a client's factor in the ledger."""
    return Diagonal(ledger[f"{client}/precision"], ledger[f"{client}/shift"])


def multiplied(ledger: Tensors, size: int, device: torch.device) -> tuple[Tensors, Diagonal]:
    """Return the ledger with lines in the order of clients, and prior × all factors, multiplied in
    that order; on a GPU at once, so that the last bits differ.
    """
    found = {name: ledger[name] for name in sorted(ledger)}
    clients = sorted({name.split("/")[0] for name in found})
    factors = (prior(size, device), *(entry(found, client) for client in clients))
    if device.type == "cuda":  # a kernel a client takes longer than all of them
        return found, Diagonal(*(torch.stack(each).sum(0) for each in zip(*factors, strict=True)))
    return found, product(*factors)
