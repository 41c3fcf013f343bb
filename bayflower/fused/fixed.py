"""Trees of tensors at fixed addresses, so that a recorded graph needs no arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..contract import Survey, Work
from ..tree import flatten, map_tree


class Fixed:
    """A tree of tensors at fixed addresses; a leaf that is the same tensor for every client is
    stored once.
    """

    def __init__(self, tree: Any, adopt: bool = False) -> None:
        self.tree = tree if adopt else map_tree(settled, tree)

    @classmethod
    def of_work(cls, work: Work) -> Fixed:
        """Return the work at fixed addresses. What a step changes is stored for each client;
        constants (memo) may be stored once.
        """
        own = map_tree(
            lambda leaf: leaf.clone(memory_format=torch.contiguous_format),
            work._replace(memo=None, survey=Survey({}, {})),
        )
        return cls(own._replace(memo=map_tree(settled, work.memo), survey=work.survey), adopt=True)

    def load(self, tree: Any) -> None:
        """Copy the values of `tree`."""
        here, there = leaves(self.tree), leaves(tree)
        pairs = [(a, b) for a, b in zip(here, there, strict=True) if a.numel() and not same(a, b)]
        for a, b in pairs:
            if repeated(a):
                if not repeated(b):
                    # our own invariant
                    raise ValueError("a tensor that was the same for every client no longer is")
                a[:1].copy_(b[:1])
        copy([a for a, _ in pairs if not repeated(a)], [b for a, b in pairs if not repeated(a)])

    def part(self, size: int) -> Any:
        """Return the tree of the first `size` clients."""
        return map_tree(lambda leaf: leaf[:size], self.tree)

    def unlike(self, tree: Any) -> bool:
        """Return whether `tree`, of the first clients, changes a leaf that is stored once for all
        clients.
        """
        return any(
            repeated(a) and a.data_ptr() != b.data_ptr()
            for a, b in zip(leaves(self.tree), leaves(tree), strict=True)
        )

    def spread(self) -> None:
        """Store every leaf for each client separately from now on."""
        self.tree = map_tree(
            lambda leaf: (
                leaf.clone(memory_format=torch.contiguous_format) if repeated(leaf) else leaf
            ),
            self.tree,
        )


def settled(leaf: Tensor) -> Tensor:
    """Return a copy in its own memory; a repeated tensor is stored once."""
    return (
        leaf[:1].clone().expand(leaf.shape)
        if repeated(leaf)
        else leaf.clone(memory_format=torch.contiguous_format)
    )


def repeated(leaf: Tensor) -> bool:
    """Return whether the leading axis repeats one tensor (its stride is 0)."""
    return leaf.ndim > 0 and leaf.shape[0] > 1 and leaf.stride(0) == 0


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether both are the same numbers in the same memory."""
    return (
        a.data_ptr() == b.data_ptr()
        and a.shape == b.shape
        and (a.stride() == b.stride() or a.numel() == 1)
    )


def leaves(tree: Any) -> list[Tensor]:
    """Return the leaves in order."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, tuple) and not hasattr(tree, "_fields"):
        return [leaf for part in tree for leaf in leaves(part)]
    return list(flatten(tree).values())


def copy(here: list[Tensor], there: list[Tensor]) -> None:
    """Copy tensors in few kernels."""
    by_kind: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for a, b in zip(here, there, strict=True):
        kind = by_kind.setdefault((a.dtype, b.dtype), ([], []))
        kind[0].append(a)
        kind[1].append(b)
    for mine, yours in by_kind.values():
        torch._foreach_copy_(mine, yours)
