"""`torch.func.vmap` over the leading axis, for functions of trees (`tree.py`).

vmap finds out the kinds of its arguments and results anew in every call. For a client's state and
work that takes half a millisecond and more, longer than what most methods do there. Here the trees
are known, and only their leaves are handed to PyTorch, by the four functions that vmap itself
calls. Where they are missing, vmap does it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from ..tree import map_tree

NAMES = (
    "_add_batch_dim",
    "_remove_batch_dim",
    "_vmap_increment_nesting",
    "_vmap_decrement_nesting",
)


def mapped(fn: Callable[..., Any], in_dims: Sequence[int | None] = ()) -> Callable[..., Any]:
    """Return fn for stacks: axis 0 of each argument, or None for those that all share."""
    if not available():
        return vmap(fn, in_dims=tuple(in_dims) or 0)
    return partial(run, fn, in_dims)


def run(fn: Callable[..., Any], in_dims: Sequence[int | None], *trees: Any) -> Any:
    """Return fn of stacked trees, stacked."""
    own = torch._C._functorch
    stacked = [not in_dims or in_dims[place] == 0 for place in range(len(trees))]
    size = len(leaf_of([tree for tree, there in zip(trees, stacked, strict=True) if there]))
    level = own._vmap_increment_nesting(size, "error")
    try:
        parts = [
            map_tree(lambda leaf: own._add_batch_dim(leaf, 0, level), tree) if there else tree
            for tree, there in zip(trees, stacked, strict=True)
        ]
        return map_tree(lambda leaf: own._remove_batch_dim(leaf, level, size, 0), fn(*parts))
    finally:
        own._vmap_decrement_nesting()


def leaf_of(trees: Sequence[Any]) -> Tensor:
    """Return the first leaf of some trees."""
    found: list[Tensor] = []
    for tree in trees:
        map_tree(found.append, tree)
        if found:
            return found[0]
    raise ValueError("a stack needs an argument with a leading axis")


@lru_cache(maxsize=1)
def available() -> bool:
    """Return whether PyTorch has the functions that are called here; they are its own."""
    if not all(hasattr(torch._C._functorch, name) for name in NAMES):
        return False
    vmap(torch.clone)(torch.zeros(1))  # makes PyTorch load its rules
    return True
