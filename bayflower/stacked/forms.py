"""Other forms of layers: a layer gets another `forward` and stays what it was, as a network may ask
for a layer's type, its hooks or its place.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn


def give(layer: nn.Module, form: Callable[..., Any]) -> None:
    """Give a layer another `forward`, unless somebody else has done so."""
    if "forward" not in vars(layer):
        layer.forward = MethodType(form, layer)  # type: ignore[method-assign]


def has(layer: nn.Module, form: Callable[..., Any]) -> bool:
    """Return whether a layer has got this form, and nobody watches what goes in and out."""
    return getattr(vars(layer).get("forward"), "__func__", None) is form and not watched(layer)


def is_plain(layer: nn.Module) -> bool:
    """Return whether a layer has its type's `forward`, and nobody watches what goes in and out."""
    return "forward" not in vars(layer) and not watched(layer)


def watched(layer: nn.Module) -> bool:
    """Return whether a layer has hooks."""
    before, after = layer._forward_pre_hooks, layer._forward_hooks
    return bool(before or after or layer._backward_pre_hooks or layer._backward_hooks)
