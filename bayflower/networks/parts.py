"""What of a module trains and what belongs to its state."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from ..tree import Tensors

NORMS = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm)


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are not frozen, tied ones once, in the module's order."""
    return {name: value for name, value in module.named_parameters() if value.requires_grad}


def persistent(module: nn.Module) -> Tensors:
    """Return the buffers that belong to the module's state, in its order."""
    left = {
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules(remove_duplicate=False)
        for name in part._non_persistent_buffers_set
    }
    return {name: value for name, value in module.named_buffers() if name not in left}


def cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `value` in `dtype` if it is a floating-point tensor, else as it is (counters stay
    integers).
    """
    return value.to(dtype) if value.is_floating_point() else value


def unflattened(module: nn.Module) -> nn.Module:
    """Return the module, whose recurrent layers no longer lay out their weights for cuDNN in every
    pass: weights that are passed in, or wrapped by `torch.func`, have no storage to lay out. Sparse
    slopes become dense ones, which can be stacked.
    """
    for part in module.modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
            part.sparse = False
        if isinstance(part, nn.RNNBase):
            part.flatten_parameters = nothing  # type: ignore[method-assign]
            # cuDNN lays such weights out in every pass, and says so
            warnings.filterwarnings("ignore", "RNN module weights are not part of single contig")
    return module


def nothing() -> None:
    """Do nothing."""


def looks_up(module: nn.Module) -> bool:
    """Return whether the network looks up rows of a table by its inputs (words)."""
    return any(isinstance(part, (nn.Embedding, nn.EmbeddingBag)) for part in module.modules())


def norm_names(network: nn.Module) -> frozenset[str]:
    """Return the names of parameters and buffers that belong to normalisation layers."""
    names = set()
    for prefix, module in network.named_modules():
        if isinstance(module, NORMS):
            for name, _ in [
                *module.named_parameters(recurse=False),
                *module.named_buffers(recurse=False),
            ]:
                names.add(f"{prefix}.{name}" if prefix else name)
    return frozenset(names & {*trainable(network), *persistent(network)})
