"""Which of three ways a convolution of a stack takes on a GPU. The rules come from measurements on
an H200 (`benchmarks/results/convolutions.md`), not from a clock: two runs take the same way.

    patches   a matrix of patches and one product for all clients: numbers without tensor cores,
              and wide layers, where the product outweighs the copy
    direct    Triton kernels that read pixels where they are: at most 32 channels
    grouped   cuDNN's grouped convolution, clients and channels side by side in memory: padded
              layers of 16 to 128 channels with large batches
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

MOST_PIXELS = 64  # of the square that the four places of a window see
FEW = 32  # channels up to which patches cost more than their product
MANY = 32  # samples from which cuDNN's grouped convolutions are fast
BLOCKS = 264  # programs that fill the device twice
MORE = 75  # fewer programs than this share their sums with others
MOST_SAMPLES = 64  # of a linear layer, that are in one block
MOST_INPUTS = 2048  # of a linear layer that is not too wide for one sum
SOME = 32  # up to so many programs a convolution that pools at once is slower than in two kernels


class Tile(NamedTuple):
    """The block of a product that a program computes: rows, columns, and how much of the sum at
    once; warps and stages of the pipeline.
    """

    rows: int
    columns: int
    depth: int
    warps: int = 4
    stages: int = 3

    def blocks(self, rows: int, columns: int) -> int:
        """Return how many of them a product of one client has."""
        return -(-rows // self.rows) * -(-columns // self.columns)

    def options(self) -> dict[str, Any]:
        """Return them as a launch takes them."""
        return {
            "BM": self.rows,
            "BN": self.columns,
            "BK": self.depth,
            "PRECISION": precision(),
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


def has_kernels(x: Tensor) -> bool:
    """Return whether Triton kernels can be used for `x`."""
    return x.is_cuda and importlib.util.find_spec("triton") is not None


@lru_cache(maxsize=8)
def is_made_for(device: torch.device) -> bool:
    """Return whether the device is of the kind that layers' own kernels were measured on: NVIDIA's,
    with tensor cores for TF32 and bfloat16. Others take torch's products.
    """
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def has_cores(x: Tensor) -> bool:
    """Return whether products of such numbers are made by tensor cores."""
    if x.dtype == torch.float32:
        return torch.backends.cuda.matmul.allow_tf32
    return x.dtype == torch.bfloat16


def direct(x: Tensor, outputs: int, size: tuple[int, ...]) -> bool:
    """Return whether a convolution of x (B, C, H, W) takes the Triton kernels."""
    if not (has_kernels(x) and has_cores(x)) or x.shape[-3] > FEW:
        return False
    # the gradient of few weights is slow there in TF32
    few = x.shape[-3] * size[0] * size[1] < 64 and size[0] <= 3 and outputs < 64
    return not few or x.dtype == torch.bfloat16


def implicit_input(size: tuple[int, int]) -> bool:
    """Return whether the gradient of the input does so too: with large windows most of what its
    kernel multiplies would be padding.
    """
    return max(size) <= 3


def in_turn(x: Tensor) -> bool:
    """Return whether a convolution that pools goes through the places of a window in turn; with
    float32 that takes more registers than there are.
    """
    return x.dtype == torch.bfloat16


def at_once(outputs: int, columns: int, clients: int, used: int) -> bool:
    """Return whether a convolution in float32 pools in its own kernel. Its sum of `used` terms is
    not split there, so a long one wants some programs.
    """
    tile = once_tile(outputs, used)
    return used <= tile.depth or clients * tile.blocks(outputs, columns) > SOME


def grouped(x: Tensor, outputs: int, size: tuple[int, ...], pad: int) -> bool:
    """Return whether a convolution of x (B, C, H, W) takes cuDNN's grouped one."""
    fine = (16, 32, 64, 128)
    small = x.shape[-3] in fine and outputs in fine and size[0] == size[1] == 3
    return small and pad == 1 and x.shape[0] >= MANY and has_kernels(x) and has_cores(x)


def likes_last(samples: int, outputs: int) -> bool:
    """Return whether the next layer probably takes the grouped convolution."""
    return samples >= MANY and outputs >= 64


def wide_tile(rows: int, columns: int, clients: int, length: int) -> tuple[Tile, int]:
    """Return the block of a product with many columns, images, and into how many parts its sum of
    `length` terms is split.
    """
    high = 32 if rows <= 32 else 64
    tile = Tile(high, 128, 32)
    if clients * tile.blocks(rows, columns) < BLOCKS:
        tile = Tile(high, 64, 32)
    if clients * tile.blocks(rows, columns) < BLOCKS:
        tile = Tile(high, 32, 32)
    return tile, parts(clients * tile.blocks(rows, columns), MORE, length, 3 * tile.depth)


def pool_tile(outputs: int) -> Tile:
    """Return the block of a convolution that pools place by place: it keeps two of its kind."""
    return Tile(32 if outputs <= 32 else 64, 64, 32)


def once_tile(outputs: int, used: int, columns: int = 0) -> Tile:
    """Return the block of a convolution that pools at once; it has four columns a window. `columns`
    are those of all clients.
    """
    if outputs <= 32:
        return Tile(32, 128, 32, stages=1 if used <= 32 else 3)
    return Tile(64, 128 if columns >= 4 * BLOCKS * 128 else 64, 32)


def parts(blocks: int, enough: int, length: int, least: int) -> int:
    """Return into how many parts a sum of `length` terms is split: until there are enough programs,
    but none with fewer than `least` terms.
    """
    splits = 1
    while blocks * splits < enough and length // (2 * splits) >= least:
        splits *= 2
    return splits


def weights_tile(outputs: int, rows: int, places: int, clients: int) -> tuple[Tile, int]:
    """Return the block of a product that gives the gradient of weights, and into how many parts its
    long sum is split.
    """
    small = outputs <= 32 and rows <= 32
    tile = Tile(32, 32, 32, 2) if small else Tile(64, 64, 64, stages=2 if rows > 64 else 3)
    blocks = clients * tile.blocks(outputs, rows)
    if small:  # a device holds many of these
        return tile, parts(blocks, 2 * BLOCKS, places, 4 * tile.depth)
    long = parts(blocks, BLOCKS, places, 8 * tile.depth)
    return tile, max(long, parts(blocks, MORE, places, tile.depth))


class LinearTile(NamedTuple):
    """The block of a linear layer that a program computes, or goes through at once; warps and
    stages of the pipeline.
    """

    samples: int
    outputs: int
    inputs: int
    warps: int = 4
    stages: int = 3

    def options(self) -> dict[str, Any]:
        """Return them as a launch takes them."""
        return {
            "BB": self.samples,
            "BO": self.outputs,
            "BK": self.inputs,
            "PRECISION": precision(),
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


def pixels_of(channels: int, size: tuple[int, int]) -> int:
    """Return how many pixels a block has for the square of a window."""
    return channels * (size[0] + 1) * pitch(size[1])


def pitch(wide: int) -> int:
    """Return how long a row of the square is in a block: a power of two, so that a compiler knows
    the places of its pixels.
    """
    return 1 << wide.bit_length()


def fits(channels: int, size: tuple[int, int], stride: int) -> bool:
    """Return whether the square of a window is small enough (`convsquarekernels.py`)."""
    return stride == 1 and pixels_of(channels, size) <= MOST_PIXELS


def square(x: Tensor, weight: Tensor, stride: int) -> bool:
    """Return whether a convolution of x (B, C, H, W) that pools reads each pixel once per window of
    the pooling.
    """
    fine = x.dtype in (torch.float32, torch.bfloat16) and weight.dtype == torch.float32
    size = (weight.shape[-2], weight.shape[-1])
    return fine and has_kernels(x) and is_made_for(x.device) and fits(x.shape[-3], size, stride)


def linear(x: Tensor, weight: Tensor) -> bool:
    """Return whether a linear layer of x (B, K) has a form of its own: small batches."""
    kinds = (torch.float32, torch.bfloat16)
    fine = x.ndim == 2 and x.dtype in kinds and weight.dtype == torch.float32
    return fine and x.shape[0] <= MOST_SAMPLES and has_kernels(x) and is_made_for(x.device)


def narrow(weight: Tensor, low: bool) -> bool:
    """Return whether a layer with weight (A, O, K) takes the Triton kernels, ahead and for the
    gradient of its input; torch's products split the long sums of a wide one.
    """
    return has_kernels(weight) and (low or weight.shape[2] <= MOST_INPUTS)


def precision() -> str:
    """Return how products of float32 are made by tensor cores: in TF32, or by three such products
    that have float32's digits.
    """
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


def power(number: int, least: int, most: int) -> int:
    """Return the next power of two, within limits."""
    return min(max(1 << max(number - 1, 0).bit_length(), least), most)


def narrowed(block: int, length: int, others: int) -> int:
    """Return the block of an axis of `length`: half and half again until the device is filled by
    `others` times as many programs as the axis has blocks.
    """
    while block > 16 and -(-length // block) * others < BLOCKS:
        block //= 2
    return block


def linear_ahead(clients: int, samples: int, outputs: int, inputs: int) -> LinearTile:
    """Return the block of a linear layer's output."""
    rows = power(samples, 16, 64)
    wide = narrowed(power(outputs, 16, 64), outputs, clients * -(-samples // rows))
    return LinearTile(rows, wide, power(inputs, 16, 64))


def linear_weights(
    clients: int, samples: int, outputs: int, inputs: int, step: bool
) -> tuple[LinearTile, int]:
    """Return the block of a linear layer's gradient of the weights, or of a `step` down it, and how
    many blocks of inputs a program goes through.
    """
    rows, high, wide = power(samples, 16, MOST_SAMPLES), power(outputs, 16, 32), 128 if step else 64
    wide = power(inputs, 16, wide)
    blocks = clients * -(-outputs // 16) * -(-inputs // wide)
    if samples > MOST_SAMPLES:
        return LinearTile(rows, high, wide), 1
    if not step:
        return LinearTile(rows, high, wide, warps=2), 4 if blocks > 8 * BLOCKS else 2
    many = blocks > 16 * BLOCKS and samples <= 32
    return LinearTile(rows, 16 if many else high, wide), 4 if many else 2


def linear_input(clients: int, samples: int, outputs: int, inputs: int) -> LinearTile:
    """Return the block of a linear layer's gradient of the input."""
    rows = power(samples, 16, 64)
    wide = narrowed(power(inputs, 16, 64), inputs, clients * -(-samples // rows))
    return LinearTile(rows, power(outputs, 16, 64), wide)
