"""Messages about classes: which arrays travel from a client that made `classwise` factors, and
every check of what arrives.

Only classes a client sends are in a message, each in the smaller of two forms: its vectors and
weights, rank·(D + 1) numbers, or the packed triangle of an upper triangular R with RᵀR = V
diag(weight) Vᵀ, D(D+1)/2 numbers. (R, not the matrix itself: rounded to float32, a matrix need not
stay positive semi-definite.) So the shapes depend on the values; `blank` gives them from counts and
ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import WireError
from ..tree import Shapes, Tensors, matching, shapes
from .classwise import from_triangle, to_triangle
from .window import on_grid

ROUNDING = 1e-3  # how far a vector's length may be from 1


class ClassMessage(NamedTuple):
    """What travels of an update: P classes with counts > 0, in order.

    `spread` for precision: "ranks" (K,); "basis" (R, D), "weight" (R,) of classes with 2·rank ≤ D;
    "triangle" (T, D(D+1)/2) of others.
    """

    num_examples: Tensor
    params: Tensors
    buffers: Tensors
    counts: Tensor  # (K,)
    means: Tensor  # (P, D)
    spread: Tensors


def ranks(weight: Tensor, label: Tensor, num_classes: int) -> Tensor:
    """Return how many directions each class has, (…, K) int64, of weight
    (…, N) and label (…, N).
    """
    group = torch.where((weight != 0) & (label >= 0) & (label < num_classes), label, num_classes)
    found = torch.zeros(*label.shape[:-1], num_classes + 1, dtype=torch.int64, device=label.device)
    return found.scatter_add_(-1, group, torch.ones_like(group))[..., :num_classes]


def dense_ranks(rank: Tensor, dim: int) -> Tensor:
    """Return for which ranks a packed triangle, D(D+1)/2 numbers, is smaller than vectors and
    weights, rank·(D+1).
    """
    return 2 * rank > dim


def pack_factors(basis: Tensor, weight: Tensor, label: Tensor, num_classes: int) -> Tensors:
    """Return the factors of one client without empty rows, in the order of classes, each class in
    the smaller form.

    "ranks" (K,); "basis" (R, D) and "weight" (R,), or a row of "triangle" (T, D(D+1)/2): R, upper
    triangular, with RᵀR = V diag(weight) Vᵀ.
    """
    dim, rank = basis.shape[1], ranks(weight, label, num_classes)
    dense, ends = dense_ranks(rank, dim), rank.cumsum(0)
    order = torch.where(weight != 0, label, num_classes).argsort(stable=True)[: int(ends[-1])]
    triangles = [basis.new_zeros(0, dim * (dim + 1) // 2)]
    for k in dense.nonzero()[:, 0].tolist():
        mine = order[int(ends[k] - rank[k]) : int(ends[k])]
        square = basis.new_zeros(dim, dim, dtype=torch.float64)
        square[: len(mine)] = torch.linalg.qr(
            basis[mine].double() * weight[mine].double().sqrt()[:, None]
        ).R
        triangles.append(to_triangle(square)[None].to(basis.dtype))
    low = order[~dense[label[order]]]
    return {
        "ranks": rank,
        "basis": basis[low],
        "weight": weight[low],
        "triangle": torch.cat(triangles),
    }


def roots(packed: Tensors, present: list[int]) -> Iterator[Tensor]:
    """Yield, for each class in `present`, A (r, D) in float64 with AᵀA = V diag(weight) Vᵀ, from
    what `pack_factors` made.
    """
    basis, dim = packed["basis"], packed["basis"].shape[1]
    rank, row, triangle = packed["ranks"].tolist(), 0, 0
    for k in present:
        if dense_ranks(packed["ranks"][k], dim):
            yield from_triangle(packed["triangle"][triangle].double()[None], dim)[0].triu()
            triangle += 1
        else:
            part = slice(row, row + rank[k])
            yield basis[part].double() * packed["weight"][part].double().sqrt()[:, None]
            row += rank[k]


def filled(
    centroid: str,
    statistic: Mapping[str, Any],
    counts: Tensor,
    dim: int,
    scale: float | None = None,
) -> dict[str, Any]:
    """Return a statistic by class ("precision/k", "shift/k", "count/k" of some classes) with zeros
    for the other classes and one vector of counts: its form tells nothing of the classes. With
    `scale`, matrices are rounded far below it (`window.on_grid`): they have entries of any size.
    """
    shape = {"precision": (dim * (dim + 1) // 2,), "diag": (dim,)}.get(centroid, ())
    found = {name: one for name, one in statistic.items() if not name.startswith("count/")}
    for k in range(len(counts)):
        for name, size in ((f"precision/{k}", shape), (f"shift/{k}", (dim,))):
            if name not in found:
                found[name] = torch.zeros(size, dtype=torch.float64)
            elif scale is not None:
                found[name] = on_grid(found[name], scale)
    return {**found, "counts": counts}


def sizes(centroid: str, message: ClassMessage) -> list[float]:
    """Return by how much a message counts for each class it has: the trace of its precision,
    without alpha; or its samples.
    """
    present = message.counts.nonzero()[:, 0].tolist()
    if centroid == "precision":
        return [float(root.square().sum()) for root in roots(message.spread, present)]
    weight = (
        message.spread["precision"].double().sum(1)
        if centroid == "diag"
        else message.counts[present]
    )
    return [float(value) for value in weight]


def all_sizes(spread: Tensors, num_classes: int) -> Tensor:
    """Return `sizes` of stacked updates with basis (C, N, D), weight and label (C, N): the traces
    of the classes' precisions (C, K).
    """
    # one pass over the rows, without a copy of them in float64
    norms = torch.linalg.vector_norm(spread["basis"], dim=2, dtype=torch.float64)
    each = spread["weight"].double() * norms.square()
    wide = each.new_zeros(len(each), num_classes + 1)
    return wide.scatter_add(1, spread["label"].long(), each)[:, :-1]


def shrunk(centroid: str, message: ClassMessage, factors: list[float]) -> ClassMessage:
    """Return the message with the size of each class it has multiplied by its factor, at most 1; of
    samples, at least one is left.
    """
    present, spread, by = (
        message.counts > 0,
        message.spread,
        torch.tensor(factors, dtype=torch.float64),
    )
    if centroid == "diag":
        return message._replace(spread={"precision": shortened(spread["precision"], by[:, None])})
    if centroid != "precision":
        counts = message.counts.clone()
        counts[present] = (counts[present] * by).floor().to(counts.dtype).clamp(min=1)
        return message._replace(counts=counts)
    dense, rank = (
        dense_ranks(spread["ranks"][present], message.means.shape[1]),
        spread["ranks"][present],
    )
    rows = by[~dense].repeat_interleave(rank[~dense])
    return message._replace(
        spread={
            **spread,
            "weight": shortened(spread["weight"], rows),
            "triangle": shortened(spread["triangle"], by[dense].sqrt()[:, None]),
        }
    )


def all_shrunk(centroid: str, updates: Any, by: Tensor) -> dict[str, Any]:
    """Return the fields of stacked updates that `shrunk` changes, for factors `by` (clients, K)."""
    if centroid == "count_mean":
        fewer = (updates.counts * by).floor().to(updates.counts.dtype)
        return {"counts": torch.where(by < 1, fewer.clamp(min=1), updates.counts)}
    if centroid == "diag":
        key, wide = "precision", by[..., None]
    else:
        rest = torch.cat([by, by.new_ones(len(by), 1)], 1)
        key, wide = "weight", rest.gather(1, updates.spread["label"].long())
    old = updates.spread[key]
    new = torch.where(wide < 1, (old.double() * wide).to(old.dtype), old)
    return {"spread": {**updates.spread, key: new}}


def shortened(value: Tensor, factor: Tensor) -> Tensor:
    """Return value * factor as `value` is stored."""
    return (value.double() * factor).to(value.dtype)


def blank(
    centroid: str, like: Any, dim: int, present: int = 0, rows: int = 0, triangles: int = 0
) -> ClassMessage:
    """Return a message with the base, counts and dtype of `like` and these many classes, rows and
    triangles; values mean nothing.
    """

    def shaped(*shape: int) -> Tensor:
        return like.means.new_zeros(()).expand(shape)

    spread = {"precision": shaped(present, dim)} if centroid == "diag" else {}
    if centroid == "precision":
        spread = {
            "ranks": like.counts,
            "basis": shaped(rows, dim),
            "weight": shaped(rows),
            "triangle": shaped(triangles, dim * (dim + 1) // 2),
        }
    return ClassMessage(
        like.num_examples, like.params, like.buffers, like.counts, shaped(present, dim), spread
    )


def blank_shapes(
    centroid: str, like: Any, dim: int, sizes: Iterable[tuple[int, int, int]]
) -> list[Shapes]:
    """Return `shapes` of `blank` for the (classes, rows, triangles) of several clients, without
    making their tensors: what all have in common is looked at once.
    """
    known = shapes(blank(centroid, like, dim))
    begin = [name for name, _, _ in known].index("means")
    base, rest = known[:begin], [(name, dtype) for name, _, dtype in known[begin:]]
    found = []
    for present, rows, triangles in sizes:
        own: dict[str, tuple[int, ...]] = {
            "means": (present, dim),
            "spread/precision": (present, dim),
            "spread/ranks": tuple(like.counts.shape),
            "spread/basis": (rows, dim),
            "spread/weight": (rows,),
            "spread/triangle": (triangles, dim * (dim + 1) // 2),
        }
        found.append((*base, *((name, own[name], dtype) for name, dtype in rest)))
    return found


def received(centroid: str, like: Any, flat: Tensors) -> ClassMessage:
    """Return the message in `flat`, whose base, classes and features must be those of `like`; raise
    with the reason otherwise.
    """
    number, counts = (whole(flat, name, getattr(like, name)) for name in ("num_examples", "counts"))
    rank = (
        whole(flat, "spread/ranks", counts) if centroid == "precision" else torch.zeros_like(counts)
    )
    if bool((counts > number).any()) or int(counts.sum()) > int(number):
        raise WireError(
            f"'counts' add up to {int(counts.sum())}, more than num_examples, {int(number)}"
        )
    dim = like.means.shape[1]
    if bool((wrong := rank > (counts - 1).clamp(0, dim)).any()):
        k = int(wrong.nonzero()[0])
        raise WireError(
            f"'spread/ranks' has {int(rank[k])} for class {k}, more than {int(counts[k])} samples "
            "can have"
        )
    dense = dense_ranks(rank, dim)
    message: ClassMessage = matching(
        flat,
        blank(
            centroid, like, dim, int((counts > 0).sum()), int(rank[~dense].sum()), int(dense.sum())
        ),
    )
    for name in ("weight", "precision"):
        if name in message.spread and not bool((message.spread[name] > 0).all()):
            raise WireError(f"'spread/{name}' has values that are not positive")
    if "basis" in message.spread and not bool(
        ((message.spread["basis"].double().norm(dim=1) - 1).abs() < ROUNDING).all()
    ):
        raise WireError("'spread/basis' has rows that are not of length 1")
    return message


def whole(flat: Tensors, name: str, like: Tensor) -> Tensor:
    """Return the whole, non-negative numbers called `name`, one for each element of `like`."""
    if name not in flat:
        raise WireError(f"key {name!r} is missing")
    if flat[name].shape != like.shape or flat[name].dtype != torch.int64:
        got = f"{str(flat[name].dtype).removeprefix('torch.')} {tuple(flat[name].shape)}"
        raise WireError(f"{name!r} must be int64 of shape {tuple(like.shape)}, got {got}")
    if bool((flat[name] < 0).any()):
        raise WireError(f"{name!r} has negative values")
    return flat[name]
