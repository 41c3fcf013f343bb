"""Messages about classes in a private sum: a portion of which each client has a bounded part, and
natural parameters that are well defined whatever the noise.

    Λ, μ      a client's precision and mean of a class; Λ̂ = Λ/‖Λ‖ (1 where it is a number)
    c         the centroid that clients were sent, 0 without one
    R         reach: √D, the unit in which the distance of a mean from c is counted
    x_k       (Λ̂, Λ̂ (μ − c)/R) of class k, zeros of a class that is not sent            [eq. 1]
    s         standard deviation of the noise on each number of Σ x_k

Every client counts the same, so samples are not counted, and a class with few of them does not
outweigh the others. Off-diagonal entries of a matrix are multiplied by √2, so that the norm of its
triangle is that of the matrix. Of the noisy sums (A, h) the server makes

    a class is heard    if tr A > 2 s √D (A a number: A > 2 s) and ‖h‖² > D s²           [eq. 2]
    Λ_k                 A with eigenvalues of at least s √(2 D), the edge of those of noise alone;
                        a diagonal with entries of at least 2 s                           [eq. 3]
    Λ_k μ_k             Λ_k c + R h · (1 − D s²/‖h‖²), James and Stein's shorter step     [eq. 4]

A class that is not heard keeps its centroid.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..tree import Tensors
from .classmessages import ClassMessage, roots
from .classwise import from_triangle, to_triangle


def width(centroid: str, dim: int) -> int:
    """Return how many numbers the precision of a class has."""
    return {"precision": dim * (dim + 1) // 2, "diag": dim}.get(centroid, 1)


def isometry(dim: int) -> Tensor:
    """Return 1 for diagonal entries of a triangle and √2 for the others."""
    return to_triangle(torch.full((dim, dim), math.sqrt(2)).double().fill_diagonal_(1))


def class_portion(centroid: str, alpha: float, message: ClassMessage, sent: Tensor) -> Tensor:
    """Return a client's portion [eq. 1], (K · (width + D),) in float64; `sent` are centroids."""
    classes, dim = sent.shape
    found = sent.new_zeros(classes, width(centroid, dim) + dim, dtype=torch.float64)
    present = (message.counts > 0).nonzero()[:, 0].tolist()
    each: Any = roots(message.spread, present) if centroid == "precision" else iter(())
    for position, k in enumerate(present):
        apart = (message.means[position].double() - sent[k].double()) / math.sqrt(dim)
        if centroid == "precision":
            root = next(each)
            matrix = root.mT @ root
            matrix.diagonal().add_(alpha)
            matrix = matrix / matrix.norm()
            found[k] = torch.cat([to_triangle(matrix) * isometry(dim), matrix @ apart])
        elif centroid == "diag":
            precision = message.spread["precision"][position].double()
            precision = precision / precision.norm()
            found[k] = torch.cat([precision, precision * apart])
        else:
            found[k] = torch.cat([torch.ones(1).to(apart), apart])
    return found.reshape(-1)


def restored_classes(centroid: str, noisy: Tensor, noise: float, sent: Tensor) -> Tensors:
    """Return "precision/k", "shift/k", "count/k" of the classes that are heard [eq. 2]."""
    classes, dim = sent.shape
    found: dict[str, Tensor] = {}
    for k, row in enumerate(noisy.reshape(classes, -1)):
        weight, step = row[:-dim], row[-dim:]
        left = 1 - dim * noise**2 / float(step.square().sum().clamp(min=1e-300))
        if left <= 0 or not loud(centroid, weight, noise, dim):
            continue
        centre, step = sent[k].double(), step * (left * math.sqrt(dim))
        if centroid == "precision":
            matrix = floored(weight / isometry(dim).to(weight), noise * math.sqrt(2 * dim), dim)
            precision, shift = to_triangle(matrix), matrix @ centre + step
        else:
            precision = weight.clamp(min=2 * noise) if centroid == "diag" else weight[0]
            shift = precision * centre + step
        count = torch.ones((), dtype=torch.int64, device=row.device)
        found |= {f"precision/{k}": precision, f"shift/{k}": shift, f"count/{k}": count}
    return found


def loud(centroid: str, weight: Tensor, noise: float, dim: int) -> bool:
    """Return whether the trace of a noisy precision is more than twice its noise [eq. 2]."""
    if centroid == "precision":
        trace = weight[isometry(dim).to(weight) == 1].sum()
        return float(trace) > 2 * noise * math.sqrt(dim)
    return float(weight.sum()) > 2 * noise * math.sqrt(weight.numel())


def floored(triangle: Tensor, least: float, dim: int) -> Tensor:
    """Return the symmetric matrix with no eigenvalue below `least` [eq. 3]."""
    values, vectors = torch.linalg.eigh(from_triangle(triangle[None], dim)[0])
    return (vectors * values.clamp(min=least)) @ vectors.mT
