"""Measurement of the peak memory of a computation, on a GPU and on a CPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# On a CPU the process grows by up to this multiple of the tensors' bytes, because of the kernels'
# scratch memory and fragmentation.
SCRATCH = 2.0


class Live(TorchDispatchMode):
    """Counts the bytes of the tensors made inside: `now` those that are alive, `most` their peak. A
    CPU has no counter of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count what it made; a view shares memory that is counted already."""
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, Tensor):
                self._count(one.untyped_storage())
        return made

    def _count(self, store: torch.UntypedStorage) -> None:
        key, size = store._cdata, store.nbytes()
        if key not in self.known:
            self.known.add(key)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(store, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def peak(work: Callable[[], Any], device: torch.device) -> float:
    """Return the peak memory of `work` in bytes, beyond what was in use before it."""
    if device.type != "cuda":
        with Live() as live:
            work()
        return SCRATCH * live.most
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return float(torch.cuda.max_memory_allocated(device) - before)
