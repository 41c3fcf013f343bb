"""What of a module trains and what belongs to its state."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..tree import Tensors

ABSENT = object()  # instead of an attribute that is not there
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
    integers); complex numbers have as many digits.
    """
    if value.is_complex():
        return value.to(dtype.to_complex())
    return value.to(dtype) if value.is_floating_point() else value


def converted(module: nn.Module, like: Tensor) -> nn.Module:
    """Return the module on the device and in the dtype of `like`; complex numbers stay complex, and
    whole numbers whole.
    """
    return module._apply(lambda value: cast(value, like.dtype).to(like.device))


def first_names(module: nn.Module) -> dict[str, str]:
    """Return the first name of every parameter by each of its names."""
    first = {id(value): name for name, value in module.named_parameters()}
    everything = module.named_parameters(remove_duplicate=False)
    return {name: first[id(value)] for name, value in everything}


def further_places(module: nn.Module) -> dict[str, str]:
    """Return the places of parameters and buffers that several layers share, each with the first of
    their names. A layer that is found under several names has one place.
    """
    first: dict[int, str] = {}
    found = {}
    for prefix, part in module.named_modules():
        for name, value in {**part._parameters, **part._buffers}.items():
            if value is None:
                continue
            place = f"{prefix}.{name}" if prefix else name
            if first.setdefault(id(value), place) != place:
                found[place] = first[id(value)]
    return found


def called(
    module: nn.Module, tensors: Tensors, x: Tensor, further: Mapping[str, str] | None = None
) -> Any:
    """Return what the module gives for x with these tensors by their first names; the module is
    left as it was. torch's own rule for shared ones takes a layer under two names for two, and
    leaves the tensors in it.
    """
    further = further_places(module) if further is None else further
    shared = {place: tensors[name] for place, name in further.items() if name in tensors}
    return functional_call(module, {**tensors, **shared}, (x,), tie_weights=False)


def plain_attributes(module: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """Yield what layers keep beside parameters, state, hooks and layers: path, layer and value."""
    usual = vars(nn.Module())
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            if name not in usual:
                yield f"{prefix}.{name}" if prefix else name, part, value


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the network inside torch.compile: clients are trained in stacks here."""
    inside = getattr(module, "_orig_mod", None)
    return inside if isinstance(inside, nn.Module) else module


@contextmanager
def tidied(module: nn.Module, left: Mapping[str, Any]) -> Iterator[None]:
    """Put attributes back that a pass writes and no other reads, by their paths: the tensors of one
    client stay nowhere, and those of a stack could not be copied.
    """
    try:
        yield
    finally:
        for path, value in left.items():
            layer, _, name = path.rpartition(".")
            kept = vars(module.get_submodule(layer))
            if value is ABSENT:
                kept.pop(name, None)
            else:
                kept[name] = value


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
