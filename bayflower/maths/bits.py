"""Masks as bits, eight entries a byte: how FedBPS, MetaVD and SNIP send them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def pack_bits(mask: Tensor) -> Tensor:
    """Return a bool tensor as bytes, the first entry in the highest bit; the last byte is filled
    with zeros.
    """
    whole = functional.pad(mask.reshape(-1).to(torch.uint8), (0, -mask.numel() % 8)).reshape(-1, 8)
    return (whole << torch.arange(7, -1, -1, dtype=torch.uint8, device=mask.device)).sum(
        1, dtype=torch.uint8
    )


def unpack_bits(packed: Tensor, size: int) -> Tensor:
    """Return the first `size` bits as a bool vector."""
    bits = packed[:, None] >> torch.arange(7, -1, -1, dtype=torch.uint8, device=packed.device)
    return (bits & 1).reshape(-1)[:size].bool()
