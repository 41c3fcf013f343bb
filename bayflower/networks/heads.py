"""The head of a network: the layers of its classifier, and their parameters."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError


def find_head(module: nn.Module, given: str | Sequence[str] | None, model: str) -> tuple[str, ...]:
    """Return the layers of the head in the network's order: what was given, else an attribute
    called head, else the last Linear.
    """
    known = [name for name, _ in module.named_modules() if name]
    if given is not None:
        wanted = [given] if isinstance(given, str) else list(given)
        for name in wanted:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = (
                    f"did you mean {close[0]!r}?"
                    if close
                    else f"it has {', '.join(known) or 'no layers'}"
                )
                raise ConfigError(f"model {model} has no layer {name!r} for its head; {hint}")
        return tuple(sorted(wanted, key=known.index))
    if has_head(module):
        return ("head",)
    linears = [
        name for name, part in module.named_modules() if isinstance(part, nn.Linear) and name
    ]
    return tuple(linears[-1:])


def has_head(module: nn.Module) -> bool:
    """Return whether the network has a layer called head, with parameters. One that another network
    inside it has is called otherwise.
    """
    head = module._modules.get("head")
    return head is not None and any(True for _ in head.parameters())


def called_last(module: nn.Module, x: Tensor) -> str | None:
    """Return the Linear layer whose output is what the network gives for some samples x, tried with
    these as numbers and as words; None if there is none, or if the network cannot take them.
    """
    outputs: dict[str, Tensor] = {}

    def note(path: str, _: nn.Module, args: Any, out: Tensor) -> None:
        outputs[path] = out

    layers = [(path, part) for path, part in module.named_modules() if path]
    handles = [
        part.register_forward_hook(partial(note, path))
        for path, part in layers
        if isinstance(part, nn.Linear)
    ]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for some in (x, x.long()):
                outputs.clear()
                with suppress(Exception):
                    found = module(some.clone())  # it may write into its input
                    return next((path for path, out in outputs.items() if out is found), None)
    finally:
        for handle in handles:
            handle.remove()
    return None


def head_parameters(first: Mapping[str, str], layers: tuple[str, ...]) -> frozenset[str]:
    """Return the names of the parameters in `layers`, which nothing outside may share; `first` has
    the first name of every parameter by each of its names.
    """
    inside: dict[str, str] = {}
    outside: dict[str, str] = {}
    for name, one in first.items():
        part = inside if any(name.startswith(layer + ".") for layer in layers) else outside
        part.setdefault(one, name)
    if tied := sorted(set(inside) & set(outside)):
        shared = tied[0]
        raise ConfigError(
            f"layer {inside[shared].rpartition('.')[0]!r} of the head shares {inside[shared]!r} "
            f"with {outside[shared]!r}; "
            "a head needs weights of its own: name another layer as head, or take a method "
            "without a head, e.g. fedmap"
        )
    return frozenset(inside)


def features_of(
    seen: Sequence[Tensor], logits: Tensor, layer: nn.Module, head: str, model: str
) -> Tensor:
    """Return what the head got in a pass, which must be one row a sample."""
    if not seen:
        raise ConfigError(
            f"model {model} never calls its head {head!r}, so it has no features; name another "
            "layer"
        )
    features = seen[-1].to(logits.dtype)
    several = isinstance(layer, nn.Linear) and features.ndim != 2
    if several or features.shape[:1] != logits.shape[:1]:
        raise ConfigError(
            f"the head {head!r} of model {model} gets {tuple(features.shape)} for "
            f"{logits.shape[0]} samples, several rows a sample; name a layer that gets one row a "
            "sample, or take a method without features, e.g. fedmap"
        )
    return features
