"""The last layer of a network: a Linear layer whose output is the logits, and what it gets."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..tree import Tensors
from .model import Model


def last_layer(model: Model) -> str | None:
    """Return the name of the last Linear layer with one output a logit, None if there is none, or
    if it has no trainable weight of its own (frozen, tied, or the network itself).
    """
    outputs = {model.num_classes, 1} if model.num_classes == 2 else {model.num_classes}
    if not model.task.classes:
        outputs = {model.task.network}
    found = [
        name
        for name, module in model.module_for(False).named_modules()
        if isinstance(module, nn.Linear) and module.out_features in outputs
    ]
    return found[-1] if found and f"{found[-1]}.weight" in model.shapes else None


def forward_last(
    model: Model, params: Tensors, buffers: Tensors, x: Tensor, layer: str | None
) -> tuple[Tensor, Tensor | None]:
    """Return (logits, what the last layer got, (B, D)) in evaluation mode; None instead of the
    latter if the logits are not this layer's output.
    """
    if layer is None:
        return model.forward(params, buffers, x, train=False)[0], None
    seen: list[tuple[Tensor, Tensor]] = []
    whole: list[Tensor] = []  # the network's output, before a task's extra parameters

    def look(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any], out: Tensor) -> None:
        seen.append(((*args, *named.values())[0], out))

    def end(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        whole.append(out)

    module = model.module_for(False)
    handles = [module.get_submodule(layer).register_forward_hook(look, with_kwargs=True)]
    handles.append(module.register_forward_hook(end))
    try:
        logits, _ = model.forward(params, buffers, x, train=False)
    finally:
        for handle in handles:
            handle.remove()
    if len(seen) != 1 or seen[0][1] is not whole[-1] or seen[0][0].ndim != 2:
        return logits, None
    return logits, seen[0][0]
