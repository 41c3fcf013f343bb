"""Inverses of many triangular matrices by products.

A GPU solves a triangular system row block by row block, which for matrices of a few hundred rows is
a chain of dozens of small kernels. Blocks of BLOCK rows are inverted all at once, and pairs of
blocks are joined until one is left:

    ⎡A 0⎤⁻¹   ⎡    A⁻¹      0 ⎤
    ⎣B C⎦   = ⎣−C⁻¹ B A⁻¹  C⁻¹⎦
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 64


def inverse_of_lower(factor: Tensor) -> Tensor:
    """Return the inverses of lower triangular matrices (G, S, S); what is above the diagonal is not
    looked at.
    """
    groups, size = factor.shape[:2]
    block = min(BLOCK, 1 << max(size - 1, 0).bit_length())
    number = 1 << max(-(-size // block) - 1, 0).bit_length()
    more = number * block - size
    if more:  # ones on the diagonal
        factor = functional.pad(factor, (0, more, 0, more))
        factor.diagonal(dim1=1, dim2=2)[:, size:] = 1
    apart = factor.reshape(groups, number, block, number, block)
    some = apart.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)  # (G, blocks, rows, columns)
    one = torch.eye(block, dtype=factor.dtype, device=factor.device).expand(some.shape)
    found = torch.linalg.solve_triangular(some, one, upper=False)
    while number > 1:
        apart = factor.reshape(groups, number, block, number, block)
        below = apart[:, 1::2, :, 0::2].diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
        before, after = found[:, 0::2], found[:, 1::2]
        number, block = number // 2, 2 * block
        joined = found.new_zeros(groups, number, block, block)
        half = block // 2
        joined[..., :half, :half], joined[..., half:, half:] = before, after
        joined[..., half:, :half] = -(after @ below @ before)
        found = joined
    return found[:, 0, :size, :size]
