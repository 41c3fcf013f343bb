"""Long chains of small kernels as one recording: a pure function of tensors, replayed for arguments
of the same shapes.

Starting a kernel from Python takes longer than a small kernel runs. The first call with a shape is
a plain one, the second is recorded, and later ones copy their arguments to where the recording
reads them. Results are the recording's own tensors: the next call in the same stream overwrites
them, unless they are copied (`kept`). On a GPU only; elsewhere, and where a function cannot be
recorded, it is called.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .replay import recording

log = logging.getLogger("bayflower")
MOST = 16  # recordings that are kept

Key = tuple[Any, ...]
_seen: set[Key] = set()
_refused: set[Key] = set()  # what cannot be recorded, or had to make room
_kept: dict[Key, tuple[Any, tuple[Tensor, ...], Any]] = {}  # graph, arguments, results


def recorded(fn: Callable[..., Any], tensors: tuple[Tensor, ...], *facts: Any) -> Any:
    """Return fn(*tensors, *facts), values only; `facts` are hashable."""
    first = tensors[0]
    if not first.is_cuda or torch.cuda.is_current_stream_capturing():
        return fn(*tensors, *facts)
    stream = torch.cuda.current_stream(first.device)
    shapes = tuple((one.shape, one.dtype) for one in tensors)
    key = (fn, first.device, stream.cuda_stream, shapes, facts)
    if key in _refused or key not in _seen:
        _seen.add(key)
        return fn(*tensors, *facts)
    if key not in _kept and not record(key, fn, tensors, facts):
        return fn(*tensors, *facts)
    graph, own, results = _kept[key] = _kept.pop(key)  # the one used last is last
    torch._foreach_copy_(own, tensors)
    graph.replay()
    return results


def kept(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return results that the next call will not overwrite; a GPU copies all at once."""
    if not results[0].is_cuda:
        return results
    found = tuple(torch.empty_like(one) for one in results)
    torch._foreach_copy_(found, results)
    return found


def record(
    key: Key, fn: Callable[..., Any], tensors: tuple[Tensor, ...], facts: tuple[Any, ...]
) -> bool:
    """Record a function, which does no work yet; return whether that could be done."""
    while len(_kept) >= MOST:
        oldest = next(iter(_kept))
        torch.cuda.synchronize()
        del _kept[oldest]
        _refused.add(oldest)
    own = tuple(one.clone(memory_format=torch.contiguous_format) for one in tensors)
    graph = torch.cuda.CUDAGraph()
    try:
        with recording(graph):
            results = fn(*own, *facts)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        log.debug("%s is not recorded: %s", fn.__name__, str(error).splitlines()[0])
        _refused.add(key)
        return False
    _kept[key] = graph, own, results
    return True
