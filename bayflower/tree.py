"""States as trees of tensors: flattened to names for files and messages, stacked over clients for
the fused engine.

A tree is a tensor, a dict of trees, a NamedTuple or tuple of trees, or None. Flat names join the
levels with "/": `State(params={"fc.weight": w}, count=c)` becomes `{"params/fc.weight": w, "count":
c}`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from .errors import BayflowerError, WireError, field_types

Tensors = dict[str, Tensor]
T = TypeVar("T")


def map_tree(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Return the tree of fn(leaf, *corresponding leaves)."""
    if tree is None:
        return None
    if isinstance(tree, Tensor):
        return fn(tree, *rest)
    if isinstance(tree, Mapping):
        return {
            key: map_tree(fn, value, *(other[key] for other in rest)) for key, value in tree.items()
        }
    if isinstance(tree, tuple):
        parts = [map_tree(fn, *leaves) for leaves in zip(tree, *rest, strict=True)]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    raise TypeError(f"a tree holds tensors, dicts and tuples, got {type(tree).__name__}")


def stack(trees: Sequence[T]) -> T:
    """Return one tree whose leaves have a leading axis over `trees`."""
    first, *others = trees
    return map_tree(lambda *leaves: torch.stack(leaves), first, *others)


def upload(values: Any, device: torch.device) -> Tensor:
    """Return a list or an array of numbers as a tensor on the device, copied asynchronously to a
    GPU.
    """
    tensor = torch.as_tensor(values)
    return (
        tensor.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else tensor.to(device)
    )


class Rows:
    """Which row of a stack each client has, and the rows of some clients on the device, uploaded
    once while they stay the same.
    """

    def __init__(self, clients: Sequence[int], device: torch.device) -> None:
        self.of = {client: row for row, client in enumerate(clients)}
        self.device = device
        self._last: tuple[tuple[int, ...], Tensor] | None = None

    def index(self, chosen: Sequence[int]) -> Tensor:
        """Return the rows of some clients."""
        key = tuple(chosen)
        if self._last is None or self._last[0] != key:
            self._last = key, upload([self.of[client] for client in key], self.device)
        return self._last[1]


def take(tree: T, index: Tensor | int) -> T:
    """Return the tree of leaf[index] along the leading axis; of a list of trees that entry."""
    if isinstance(tree, list):
        return tree[int(index)]  # type: ignore[no-any-return]
    return map_tree(lambda leaf: leaf[index], tree)


def put(tree: T, index: Tensor, values: T) -> T:
    """Return the tree with leaf[index] replaced by the leaves of `values`; the input is left as it
    was.
    """
    return map_tree(lambda leaf, value: leaf.index_copy(0, index, value), tree, values)


def choose(condition: Tensor, yes: T, no: T) -> T:
    """Return the tree of where(condition, yes, no), `condition` along the leading axis of every
    leaf (or 0-d).
    """

    def pick(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(
            condition.reshape(condition.shape + (1,) * (a.ndim - condition.ndim)), a, b
        )

    return map_tree(pick, yes, no)


def to(tree: T, device: torch.device | str) -> T:
    """Return the tree on `device`."""
    return map_tree(lambda leaf: leaf.to(device), tree)


def recast(values: Tensors, like: Tensors | None = None) -> Tensors:
    """Return the values in float64, or in the dtypes of `like`; a GPU converts all at once."""
    kinds = {name: like[name].dtype if like else torch.float64 for name in values}
    if all(values[name].dtype == kind for name, kind in kinds.items()):
        return values
    found = {name: torch.empty_like(values[name], dtype=kind) for name, kind in kinds.items()}
    torch._foreach_copy_(list(found.values()), list(values.values()))
    return found


def flatten(tree: Any, prefix: str = "") -> Tensors:
    """Return the leaves by name."""
    if tree is None:
        return {}
    if isinstance(tree, Tensor):
        return {prefix: tree}
    items = tree.items() if isinstance(tree, Mapping) else zip(tree._fields, tree, strict=True)
    flat: Tensors = {}
    for name, value in items:
        flat.update(flatten(value, f"{prefix}/{name}" if prefix else str(name)))
    return flat


def unflatten(kind: type[T], flat: Mapping[str, Tensor], prefix: str = "") -> T:
    """Return the NamedTuple `kind` whose leaves are `flat`; dict fields take every name under them,
    so they may be empty.
    """
    known = set()
    fields: dict[str, Any] = {}
    for field, hint in field_types(kind).items():
        name = prefix + field
        if hint is Tensor:
            if name not in flat:
                raise BayflowerError(
                    f"{kind.__qualname__} needs {name!r}, which is missing; it was written by "
                    "another version or method"
                )
            fields[field] = flat[name]
            known.add(name)
        elif hasattr(hint, "_fields"):
            inner = {key: value for key, value in flat.items() if key.startswith(name + "/")}
            fields[field] = unflatten(hint, inner, name + "/")
            known.update(inner)
        else:
            inner = {key: value for key, value in flat.items() if key.startswith(name + "/")}
            # sums over names must not depend on their order
            fields[field] = {key[len(name) + 1 :]: inner[key] for key in sorted(inner)}
            known.update(inner)
    if unknown := sorted(set(flat) - known):
        raise BayflowerError(
            f"{kind.__qualname__} has no field {unknown[0]!r}; another version or method wrote it"
        )
    return kind(**fields)


def digest(tree: Any) -> str:
    """Return a SHA-256 over names, dtypes, shapes and bytes of the
    leaves, in the order of names.
    """
    seal = hashlib.sha256()
    for name, leaf in sorted(flatten(tree).items()):
        seal.update(f"{name}|{leaf.dtype}|{tuple(leaf.shape)}|".encode())
        seal.update(
            leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            if leaf.numel()
            else b""
        )
    return seal.hexdigest()


Shapes = tuple[tuple[str, tuple[int, ...], str], ...]  # name, shape and dtype of each array


def shapes(tree: Any) -> Shapes:
    """Return name, shape and dtype of a tree's leaves."""
    return tuple(
        (name, tuple(leaf.shape), str(leaf.dtype).removeprefix("torch."))
        for name, leaf in flatten(tree).items()
    )


def matching(flat: Mapping[str, Tensor], template: Any) -> Any:
    """Return the tree shaped like `template` with the values of `flat`; names, shapes and dtypes
    must agree and be finite.
    """
    expected = flatten(template)
    if missing := sorted(set(expected) - set(flat)):
        raise WireError(f"key {missing[0]!r} is missing")
    if unknown := sorted(set(flat) - set(expected)):
        raise WireError(f"key {unknown[0]!r} is not expected")
    for name, want in expected.items():
        got = flat[name]
        if got.shape != want.shape:
            raise WireError(f"{name!r} has shape {tuple(got.shape)}, expected {tuple(want.shape)}")
        if got.dtype != want.dtype:
            raise WireError(f"{name!r} has dtype {dtype_name(got)}, expected {dtype_name(want)}")
        if got.is_floating_point() and not bool(torch.isfinite(got).all()):
            raise WireError(
                f"{name!r} has values that are not finite; if training diverged, lower lr or set "
                "clip_norm"
            )
    return unflatten(type(template), flat)


def dtype_name(tensor: Tensor) -> str:
    """Return e.g. "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def worst_difference(a: Any, b: Any, zero: float = 0.0) -> float:
    """Return the largest over tensors of ‖a − b‖ / ‖b‖, without those below `zero`, by themselves
    and next to the rest of their field.

    A bias before BatchNorm has no gradient but for rounding, so its part of a control variate has
    no digits that could agree.
    """
    left, right = (
        {name: tensor.cpu().double() for name, tensor in flatten(tree).items()} for tree in (a, b)
    )
    assert left.keys() == right.keys()
    # all of params/ is one field, all of drift/ another
    fields = {name: name.rpartition("/")[0] for name in right}
    scale = {
        field: max(float(right[name].norm()) for name in right if fields[name] == field)
        for field in set(fields.values())
    }
    worst = 0.0
    for name, y in right.items():
        x = left[name]
        assert x.shape == y.shape, name
        if max(float(x.norm()), float(y.norm())) >= zero * min(1.0, scale[fields[name]]):
            worst = max(worst, float((x - y).norm() / y.norm().clamp(min=1e-12)))
    return worst
