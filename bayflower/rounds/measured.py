"""How far each client's update is from what was sent: sizes and sketches of the parts of stacked
updates.

On a GPU one pass over a part gives both (`stacked/measurekernels.py`). Elsewhere, and for parts of
which only some entries count, the changes are written as rows first (`parts.flat`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..stacked.routes import has_kernels
from ..tree import Tensors
from .gate import SIZE, Gate, Sketches, added
from .parts import Part, flat, size_of, starts

FULL = 924  # programs that run at once
FEW = 16  # blocks of a client up to which a second launch takes longer than one program
GROUPS = 64  # programs a client, at most
COLUMNS = 2**31 - 2**16  # of a client at most: columns are 32-bit numbers


class Launch(NamedTuple):
    """Tensors that are measured at once: the first of them, how many there are, the column of a
    client's row at which they begin, and how many programs share a client.
    """

    first: int
    number: int
    begin: int
    groups: int


def measure(parts: Sequence[Part], gate: Gate | None) -> tuple[Tensors, Sketches | None]:
    """Return the sizes of parts by name, and the sketches that a gate wants; a GPU is not waited
    for.
    """
    wanted, models = ([], False) if gate is None else gate.wanted(parts)
    sizes, sketches = {}, {}
    for part in parts:
        sizes[part.name], sketch = measured(part, gate if part.name in wanted else None)
        if sketch is not None:
            sketches[part.name] = sketch
    return sizes, added([sketches[name] for name in wanted], models)


def measured(part: Part, gate: Gate | None) -> tuple[Tensor, Tensor | None]:
    """Return the size of a part of each client, and with a gate the sketch of its change."""
    stepped = part.rule in ("step", "exact")
    if stepped and not part.only:
        names = sorted(part.leaves)
        leaves, sent = [part.leaves[name] for name in names], starts(part, names)
        if fits(leaves, sent):
            one = leaves[0]
            columns = sum(leaf.numel() for leaf in leaves) // len(one)
            # one byte each: they are read again for every client
            signs = None if gate is None else gate.sign(columns, torch.int8, one.device)
            return in_one_pass(leaves, sent, signs)
    if gate is None and not stepped:
        return size_of(part), None
    rows = flat(part)
    return size_of(part, rows), None if gate is None else gate.sketch(rows)


def norms(leaves: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return for each client norms that are finite if all numbers of some leaves are, and the
    leaves that no kernel is for.
    """
    some = [leaf for leaf in leaves if leaf.dtype == torch.float32 and leaf.is_contiguous()]
    if not some or not fits(some):
        return [], list(leaves)
    rest = [leaf for leaf in leaves if leaf.dtype != torch.float32 or not leaf.is_contiguous()]
    return [in_one_pass(some, [], None)[0]], rest


def fits(leaves: Sequence[Tensor], sent: Sequence[Tensor] = ()) -> bool:
    """Return whether there is a kernel for leaves with one row a client and what was sent of each,
    or of none.
    """
    one = leaves[0]
    if one.dtype not in (torch.float32, torch.float64) or not has_kernels(one):
        return False
    kind, device, clients = one.dtype, one.device, len(one)
    if sum(leaf.numel() for leaf in leaves) // clients > COLUMNS:
        return False
    if not all(
        leaf.dtype == kind and leaf.device == device and leaf.is_contiguous() for leaf in leaves
    ):
        return False
    return all(
        start.is_floating_point()
        and start.device == device
        and start.is_contiguous()
        and start.numel() * clients == leaf.numel()
        for start, leaf in zip(sent, leaves, strict=bool(sent))
    )


def in_one_pass(
    leaves: Sequence[Tensor], sent: Sequence[Tensor], signs: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the norm of each client's change, and with signs its sketch, by the kernels."""
    from ..stacked import measurekernels

    clients = len(leaves[0])
    lengths = [leaf.numel() // clients for leaf in leaves]
    launches = plan(lengths, clients, measurekernels.MOST)
    return measurekernels.measured(leaves, sent, signs, launches, SIZE)


def plan(lengths: Sequence[int], clients: int, most: int) -> list[Launch]:
    """Return which tensors, at most `most`, are measured at once, and by how many programs a
    client, which take turns by blocks of SIZE columns.
    """
    found, begin = [], 0
    for first in range(0, len(lengths), most):
        some = lengths[first : first + most]
        blocks = -(-(begin + sum(some)) // SIZE) - begin // SIZE
        groups = min(blocks, GROUPS, max(FULL // clients, 1))
        if blocks <= FEW:
            groups = 1
        turns = -(-blocks // groups)
        found.append(Launch(first, len(some), begin, -(-blocks // turns)))
        begin += sum(some)
    return found
