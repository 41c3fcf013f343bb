"""Eigenvectors of many symmetric matrices at once.

On a GPU `torch.linalg.eigh` takes matrices larger than 32×32 one after another. NVIDIA's solver
library has had a batched routine since CUDA 12.6, which is some fifty times faster for hundreds of
matrices of a few dozen rows; it is called here directly, from the copy of the library that torch
has loaded. Where it is not there, torch's own routine is used.
"""

from __future__ import annotations

import ctypes
import logging
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .triangles import inverse_of_lower

log = logging.getLogger("bayflower")
LARGE = 256  # up to here NVIDIA's batched routine is faster than one after another
# after which the largest eigenvalue is known to 1e-4, so that the cut is known to CLOSE
SQUARINGS = 11
CLOSE = 1e-9  # eigenvalues nearer than this (times the largest) to the cut may fall on either side
KINDS = {torch.float32: 0, torch.float64: 1}  # cudaDataType
VECTORS, LOWER = 1, 0


def eigh(batch: Tensor, spoil: bool = False) -> tuple[Tensor, Tensor]:
    """Return (eigenvalues (G, S), ascending; eigenvectors (G, S, S), as columns) of symmetric
    matrices. With `spoil` the matrices may be overwritten.

    Many on a GPU are not waited for: a matrix without eigenvectors, because it holds NaN, gets NaN.
    """
    if batch.is_cuda and batch.shape[-1] <= LARGE and len(batch) > 1 and batch.dtype in KINDS:
        # a handle has memory of its own, which two streams must not share
        solver = batched_solver(torch.cuda.current_stream(batch.device).cuda_stream)
        if solver is not None:
            return solver(batch, spoil)
    values, vectors = torch.linalg.eigh(batch)
    return values, vectors


def pseudo_inverse(batch: Tensor, cut: float, floor: Tensor) -> tuple[Tensor, Tensor]:
    """Return (the pseudo-inverses (G, S, S), their ranks (G,)) of positive semi-definite matrices,
    by products and Cholesky alone.

    Eigenvalues count if they are larger than `cut` times the largest and than `floor` (G,). A GPU
    has no fast way to find the eigenvectors of matrices of a few hundred rows; this needs none. The
    projector on what counts is (1 + sign(A − c))/2, and the sign of a symmetric matrix is the limit
    of X ← X(3 − X²)/2, here with the scaling of Chen and Chow (2014) that makes the smallest
    eigenvalue grow 2.6-fold a step. With what does not count replaced by the largest eigenvalue,
    the rest is a well-conditioned inverse.
    """
    size = batch.shape[-1]
    one = torch.eye(size, dtype=batch.dtype, device=batch.device)
    top = largest(batch)[:, None, None]
    least = torch.maximum(cut * top, floor[:, None, None])
    x = (batch - least * one) / torch.maximum(top - least, least)
    low = CLOSE
    even = torch.empty_like(x)
    while low < 1 - 1e-13:
        scale = (3 / (1 + low + low * low)) ** 0.5 if low < 0.99 else 1.0
        # x (1.5 s − 0.5 s³ x²) in two products and a diagonal: no copy of a matrix
        even.baddbmm_(x, x, beta=0, alpha=-0.5 * scale**3)
        even.diagonal(dim1=1, dim2=2).add_(1.5 * scale)
        x = x @ even
        low = min(scale * low * (3 - (scale * low) ** 2) / 2, 1.0)
    onto = (x + x.mT) / 4 + one / 2
    rank = onto.diagonal(dim1=1, dim2=2).sum(1).round()
    full = onto @ batch @ onto + top.clamp(min=torch.finfo(batch.dtype).tiny) * (one - onto)
    factor, _ = torch.linalg.cholesky_ex((full + full.mT) / 2)
    # torch.cholesky_inverse would wait for the device
    root = inverse_of_lower(factor) @ onto
    return torch.where((rank == 0)[:, None, None], 0.0, root.mT @ root), rank


def largest(batch: Tensor, squarings: int = SQUARINGS) -> Tensor:
    """Return the largest eigenvalues (G,) of positive semi-definite matrices: the Rayleigh quotient
    of a column of A^(2^squarings).

    With the second largest r times the largest it is low by at most a share (1 − r) r^(2^(squarings
    + 1)): below 0.37 / 2^(squarings + 1).
    """
    power = batch
    for step in range(squarings):
        if step % 4 == 0:  # between two of these an eigenvalue of 1/S falls to S^-16 at worst
            power = (
                power
                / power.diagonal(dim1=1, dim2=2)
                .sum(1)
                .clamp(min=torch.finfo(batch.dtype).tiny)[:, None, None]
            )
        power = power @ power
    column = power.diagonal(dim1=1, dim2=2).argmax(1)
    vector = power.gather(2, column[:, None, None].expand(-1, power.shape[1], 1))
    vector = batch @ (vector / vector.norm(dim=1, keepdim=True).clamp(min=1e-150))
    vector = vector / vector.norm(dim=1, keepdim=True).clamp(min=1e-150)
    return (vector * (batch @ vector)).sum((1, 2))


class BatchedSolver:
    """cuSOLVER's XsyevBatched."""

    def __init__(self, path: str) -> None:
        self.library: Any = ctypes.CDLL(path)
        self.handle, self.params = ctypes.c_void_p(), ctypes.c_void_p()
        self.check(self.library.cusolverDnCreate(ctypes.byref(self.handle)))
        self.check(self.library.cusolverDnCreateParams(ctypes.byref(self.params)))
        _ = self.library.cusolverDnXsyevBatched  # AttributeError if this CUDA is too old

    @staticmethod
    def check(status: int) -> None:
        """Raise if a call failed."""
        if status != 0:
            raise RuntimeError(f"cuSOLVER answered with status {status}")

    def __call__(self, batch: Tensor, spoil: bool = False) -> tuple[Tensor, Tensor]:
        """Return eigenvalues and eigenvectors; the matrices are symmetric, so rows and columns may
        change places. With `spoil` they are overwritten.
        """
        count, size = batch.shape[:2]
        own = spoil and batch.is_contiguous()
        work = batch if own else batch.clone(memory_format=torch.contiguous_format)
        values = work.new_empty(count, size)
        info = torch.zeros(count, dtype=torch.int32, device=batch.device)
        self.check(
            self.library.cusolverDnSetStream(
                self.handle, ctypes.c_void_p(torch.cuda.current_stream(batch.device).cuda_stream)
            )
        )
        kind, long = KINDS[batch.dtype], ctypes.c_int64
        arguments = (
            self.handle,
            self.params,
            VECTORS,
            LOWER,
            long(size),
            kind,
            pointer(work),
            long(size),
            kind,
            pointer(values),
            kind,
        )
        there, here = ctypes.c_size_t(), ctypes.c_size_t()
        self.check(
            self.library.cusolverDnXsyevBatched_bufferSize(
                *arguments, ctypes.byref(there), ctypes.byref(here), long(count)
            )
        )
        device = torch.empty(max(there.value, 1), dtype=torch.uint8, device=batch.device)
        host = (ctypes.c_char * max(here.value, 1))()
        self.check(
            self.library.cusolverDnXsyevBatched(
                *arguments, pointer(device), there, host, here, pointer(info), long(count)
            )
        )
        return torch.where(info[:, None] == 0, values, torch.nan), work.mT


def pointer(tensor: Tensor) -> ctypes.c_void_p:
    """Return the address of a tensor's memory."""
    return ctypes.c_void_p(tensor.data_ptr())


@lru_cache(maxsize=16)
def batched_solver(stream: int) -> BatchedSolver | None:
    """Return the batched routine of the library torch has loaded, with a handle for calls in one
    stream; or None.
    """
    torch.linalg.eigh(torch.eye(2, device="cuda"))  # loads the library
    maps = Path("/proc/self/maps")
    found = (
        sorted(set(re.findall(r"/\S*libcusolver\.so\S*", maps.read_text())))
        if maps.exists()
        else []
    )
    try:
        return BatchedSolver(found[0]) if found else None
    except (AttributeError, OSError, RuntimeError) as error:
        log.debug("no batched eigenvectors: %s", error)
        return None
