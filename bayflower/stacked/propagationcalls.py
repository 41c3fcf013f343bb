"""The calls of the kernels in `propagationkernels.py`: tensors, programs and blocks. Only imported
where a CUDA device and Triton are there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from .propagationkernels import _front, _slopes, _value

MOST_TILE = 2**13  # nodes of a client's moments that a program holds
MOST_WEIGHTS = 2**10  # weights of the last layer that a program holds


def fits(dim: int, hidden: int, nodes: int) -> bool:
    """Return whether a program can hold what a client has of the first layer and its moments."""
    d, h, n = (triton.next_power_of_2(size) for size in (dim, hidden, nodes))
    return d * n <= MOST_TILE and d * h <= MOST_TILE // 2 and h <= 64


class Room(NamedTuple):
    """What the first kernel writes for the others: moments (A, 4, D), hidden layer (A, 6, H), and
    how many programs of a client have ended (A,).
    """

    moments: Tensor
    hidden: Tensor
    ended: Tensor


def room(inputs: tuple[Tensor, ...]) -> Room:
    """Return the room for some inputs."""
    (clients, dim), wide = inputs[0].shape, inputs[3].shape[2]
    empty = inputs[0].new_empty
    ended = empty(clients, dtype=torch.int32)
    return Room(empty(clients, 4, dim), empty(clients, 6, wide), ended)


def values(
    inputs: tuple[Tensor, ...], epsilon: float, strength: float, nodes: int
) -> tuple[Tensor, ...]:
    """Return the regulariser (A,) and its slope in f (A, D), and what other slopes need: moments,
    hidden layer, slopes in it (A, J, 2, H). A is in front of every tensor.
    """
    inputs = tuple(one.contiguous() for one in inputs)
    own = room(inputs)
    _front[(len(inputs[0]),)](*inputs[:7], *own, **first_tile(inputs, nodes))
    return whole_values(inputs, own, epsilon, strength)


def first_tile(inputs: tuple[Tensor, ...], nodes: int) -> dict[str, int]:
    """Return the sizes of the first kernel, and what it is compiled for."""
    (dim, wide, *_), tile = shape_of(inputs)
    return {
        "dim": dim,
        "wide": wide,
        "NODES": nodes,
        "WIDE": triton.next_power_of_2(nodes),
        "D": tile["D"],
        "H": tile["H"],
        "num_warps": 8,
    }


def whole_values(
    inputs: tuple[Tensor, ...], own: Room, epsilon: float, strength: float
) -> tuple[Tensor, ...]:
    """Return what `values` does after the first kernel."""
    (dim, wide, outputs, blocks), tile = shape_of(inputs)
    clients, empty = len(inputs[0]), inputs[0].new_empty
    shares, parts = empty(clients, blocks), empty(clients, blocks, 2, wide)
    found, to_f = empty(clients), torch.empty_like(inputs[0])
    _value[(clients * blocks,)](
        *inputs[3:5],
        *inputs[7:],
        *(*own, shares, parts, found, to_f),
        *(dim, wide, outputs, blocks),
        EPSILON=epsilon,
        STRENGTH=strength,
        **tile,
        num_warps=warps(tile),
    )
    return found, to_f, own.moments, own.hidden, parts


def slopes(
    g: Tensor,
    inputs: tuple[Tensor, ...],
    saved: tuple[Tensor, ...],
    epsilon: float,
    strength: float,
) -> tuple[Tensor, ...]:
    """Return the slopes in f, the layers and the target, times g (A,); `saved` is what `values`
    found besides.
    """
    inputs = tuple(one.contiguous() for one in inputs)
    found = tuple(torch.empty_like(one) for one in inputs[3:])
    run_slopes(g, inputs, saved, found, epsilon, strength)
    return slope_of_f(g, saved), *found


def slope_of_f(g: Tensor, saved: tuple[Tensor, ...]) -> Tensor:
    """Return the slope in f alone, times g (A,)."""
    return g[:, None] * saved[0]


def descend(
    g: Tensor,
    inputs: tuple[Tensor, ...],
    saved: tuple[Tensor, ...],
    epsilon: float,
    strength: float,
    rate: float,
) -> None:
    """Take a step down the slopes in the layers and the target, in place."""
    run_slopes(g, inputs, saved, inputs[3:], epsilon, strength, rate)


def run_slopes(
    g: Tensor,
    inputs: tuple[Tensor, ...],
    saved: tuple[Tensor, ...],
    found: tuple[Tensor, ...],
    epsilon: float,
    strength: float,
    rate: float | None = None,
) -> None:
    """Write slopes to `found`, or with a rate subtract them there."""
    sizes, tile = shape_of(inputs)
    f, _, _, w1m, w1r, _, b1r, *last = inputs
    _slopes[(len(f) * (sizes[-1] + 1),)](
        g.contiguous(),
        *(w1m, w1r, b1r, *last),
        *(one.contiguous() for one in saved[1:]),
        *found,
        *sizes,
        0.0 if rate is None else rate,
        EPSILON=epsilon,
        STRENGTH=strength,
        DESCEND=rate is not None,
        **tile,
        num_warps=warps(tile),
    )


def warps(tile: dict[str, int]) -> int:
    """Return how many warps a program has. Two take less than half as long as eight for the sums of
    a small tile: 18 and 45 µs on an H200 for 47 clients and 5,120 weights.
    """
    return 2 if tile["D"] * tile["H"] <= MOST_WEIGHTS else 8


def shape_of(inputs: tuple[Tensor, ...]) -> tuple[tuple[int, ...], dict[str, int]]:
    """Return (D, H, P and the number of programs a client for the last layer), and the sizes that
    kernels are compiled for.
    """
    dim, wide, outputs = inputs[0].shape[1], inputs[3].shape[2], inputs[-1].shape[1]
    h = triton.next_power_of_2(wide)
    p = min(MOST_WEIGHTS // h, 512, triton.next_power_of_2(outputs))
    blocks = -(-outputs // p)
    rows = min(64, triton.next_power_of_2(blocks))
    tile = {"D": triton.next_power_of_2(dim), "H": h, "P": p, "ROWS": rows}
    return (dim, wide, outputs, blocks), tile
