"""Eigenvectors of many symmetric matrices at once.

On a GPU `torch.linalg.eigh` takes matrices larger than 32×32 one after another. NVIDIA's solver library has had a batched routine since
CUDA 12.6, which is some fifty times faster for hundreds of matrices of a few dozen rows; it is called here directly, from the copy of the
library that torch has loaded. Where it is not there, torch's own routine is used.
"""

from __future__ import annotations

import ctypes
import logging
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("bayflower")
SMALL = 32  # up to here torch has a batched routine of its own
LARGE = 256  # up to here NVIDIA's batched routine is faster than one after another
KINDS = {torch.float32: 0, torch.float64: 1}  # cudaDataType
VECTORS, LOWER = 1, 0


def eigh_many(batches: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return `eigh` of each batch. On a GPU large matrices, which keep it waiting rather than busy, are done beside the others."""
    large = [i for i, batch in enumerate(batches) if batch.is_cuda and batch.shape[-1] > LARGE]
    if not large:
        return [eigh(batch) for batch in batches]
    device = batches[large[0]].device
    batched_solver()  # so that torch has loaded its library: two threads must not begin that together
    ready = torch.cuda.Event()
    ready.record()

    def beside(matrix: Tensor) -> tuple[Tensor, Tensor, torch.cuda.Event]:
        with torch.cuda.device(device), torch.cuda.stream(stream()):
            ready.wait()
            values, vectors = torch.linalg.eigh(matrix)
            done = torch.cuda.Event()
            done.record()
        return values, vectors, done

    waiting = {i: [helpers().submit(beside, matrix) for matrix in batches[i]] for i in large}
    found = {i: eigh(batch) for i, batch in enumerate(batches) if i not in waiting}
    for i, parts in waiting.items():
        results = [part.result() for part in parts]
        for *tensors, done in results:
            done.wait()
            for tensor in tensors:
                tensor.record_stream(torch.cuda.current_stream(device))
        found[i] = torch.stack([values for values, _, _ in results]), torch.stack([vectors for _, vectors, _ in results])
    return [found[i] for i in range(len(batches))]


_threads = threading.local()


def stream() -> torch.cuda.Stream:
    """Return the stream of the calling thread."""
    if not hasattr(_threads, "stream"):
        _threads.stream = torch.cuda.Stream()
    return _threads.stream  # type: ignore[no-any-return]


@lru_cache(maxsize=1)
def helpers() -> ThreadPoolExecutor:
    """Return threads that start GPU work."""
    return ThreadPoolExecutor(8, thread_name_prefix="eigen")


def eigh(batch: Tensor) -> tuple[Tensor, Tensor]:
    """Return (eigenvalues (G, S), ascending; eigenvectors (G, S, S), as columns) of symmetric matrices."""
    if batch.is_cuda and SMALL < batch.shape[-1] <= LARGE and len(batch) > 1 and batch.dtype in KINDS:
        solver = batched_solver()
        if solver is not None:
            return solver(batch)
    values, vectors = torch.linalg.eigh(batch)
    return values, vectors


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

    def __call__(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Return eigenvalues and eigenvectors; the matrices are symmetric, so rows and columns may change places."""
        count, size = batch.shape[:2]
        work = batch.clone(memory_format=torch.contiguous_format)
        values = work.new_empty(count, size)
        info = torch.zeros(count, dtype=torch.int32, device=batch.device)
        self.check(self.library.cusolverDnSetStream(self.handle, ctypes.c_void_p(torch.cuda.current_stream(batch.device).cuda_stream)))
        kind, long = KINDS[batch.dtype], ctypes.c_int64
        arguments = (self.handle, self.params, VECTORS, LOWER, long(size), kind, pointer(work), long(size), kind, pointer(values), kind)
        there, here = ctypes.c_size_t(), ctypes.c_size_t()
        self.check(self.library.cusolverDnXsyevBatched_bufferSize(*arguments, ctypes.byref(there), ctypes.byref(here), long(count)))
        device = torch.empty(max(there.value, 1), dtype=torch.uint8, device=batch.device)
        host = (ctypes.c_char * max(here.value, 1))()
        self.check(self.library.cusolverDnXsyevBatched(*arguments, pointer(device), there, host, here, pointer(info), long(count)))
        if bool(info.any()):
            raise RuntimeError(f"{int((info != 0).sum())} of {count} symmetric matrices have no eigenvectors; are all values finite?")
        return values, work.mT


def pointer(tensor: Tensor) -> ctypes.c_void_p:
    """Return the address of a tensor's memory."""
    return ctypes.c_void_p(tensor.data_ptr())


@lru_cache(maxsize=1)
def batched_solver() -> BatchedSolver | None:
    """Return the batched routine of the library torch has loaded, or None."""
    torch.linalg.eigh(torch.eye(2, device="cuda"))  # loads the library
    maps = Path("/proc/self/maps")
    found = sorted(set(re.findall(r"/\S*libcusolver\.so\S*", maps.read_text()))) if maps.exists() else []
    try:
        return BatchedSolver(found[0]) if found else None
    except (AttributeError, OSError, RuntimeError) as error:
        log.debug("no batched eigenvectors: %s", error)
        return None
