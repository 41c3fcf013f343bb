"""Recordings that always follow each other, started as one.

A device pauses for some microseconds between two CUDA graphs that are started one by one, and the
host needs more than ten to start each. NVIDIA's runtime library can make one graph of many; torch
has no call for that, so it is called here directly, from the copy that torch has loaded. Where it
is not there, graphs are started one by one.
"""

from __future__ import annotations

import ctypes
import logging
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger("bayflower")
MOST = 1024  # graphs that are made one; more would take seconds


class Joined:
    """CUDA graphs one after the other, as one graph."""

    def __init__(self, runtime: Any, graphs: Sequence[Any]) -> None:
        self.runtime, self.graphs = runtime, tuple(graphs)  # kept: their memory is in use
        whole, self.ready = ctypes.c_void_p(), ctypes.c_void_p()
        self.check(runtime.cudaGraphCreate(ctypes.byref(whole), 0))
        try:
            last = None
            for graph in graphs:
                before = (ctypes.c_void_p * 1)(last) if last else None
                node, part = ctypes.c_void_p(), ctypes.c_void_p(graph.raw_cuda_graph())
                many = ctypes.c_size_t(1 if last else 0)
                add = runtime.cudaGraphAddChildGraphNode
                self.check(add(ctypes.byref(node), whole, before, many, part))
                last = node.value
            flags = ctypes.c_ulonglong(0)
            self.check(runtime.cudaGraphInstantiate(ctypes.byref(self.ready), whole, flags))
        finally:
            runtime.cudaGraphDestroy(whole)

    @staticmethod
    def check(status: int) -> None:
        """Raise if a call failed."""
        if status != 0:
            raise RuntimeError(f"CUDA's runtime answered with status {status}")

    def replay(self) -> None:
        """Start all of them in the current stream."""
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self.check(self.runtime.cudaGraphLaunch(self.ready, stream))

    def __del__(self) -> None:
        with suppress(Exception):  # the process may be about to end
            if self.ready:
                self.runtime.cudaGraphExecDestroy(self.ready)


def joined(graphs: Sequence[Any]) -> Joined | None:
    """Return graphs as one; None where that is not possible."""
    if not 1 < len(graphs) <= MOST or not can_be_joined():
        return None
    try:
        return Joined(runtime(), graphs)
    except (AttributeError, RuntimeError) as error:
        log.debug("recordings are not joined: %s", error)
        return None


def new_graph() -> Any:
    """Return a CUDA graph that can be joined with others, if that is possible here."""
    return torch.cuda.CUDAGraph(keep_graph=True) if can_be_joined() else torch.cuda.CUDAGraph()


@lru_cache(maxsize=1)
def can_be_joined() -> bool:
    """Return whether torch keeps what it has recorded (since 2.8), and the library is there."""
    return hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph") and runtime() is not None


@lru_cache(maxsize=1)
def runtime() -> Any:
    """Return the runtime library that torch has loaded, or None."""
    maps = Path("/proc/self/maps")
    text = maps.read_text() if maps.exists() else ""
    found = sorted(set(re.findall(r"/\S*libcudart\.so\S*", text)))
    if not found:
        return None
    try:
        library: Any = ctypes.CDLL(found[0])
        _ = library.cudaGraphAddChildGraphNode, library.cudaGraphInstantiate
    except (AttributeError, OSError) as error:
        log.debug("recordings are not joined: %s", error)
        return None
    return library
