"""What a pass of a network leaves behind in its layers, as plain tensors: states that the next call
reads are refused; what each call writes before it is read, such as weights of attention for a
picture or weights under a norm of the older form, is put back after a pass (`parts.tidied`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .mixing import remembers
from .model import Model
from .parts import ABSENT, plain_attributes, tidied

NEAR = 1e-5  # differences that are rounding


def memory(module: nn.Module, model: Model) -> dict[str, tuple[int, int]]:
    """Return the tensors that layers keep outside parameters and state, with what tells whether
    they changed.
    """
    found = {}
    for path, part, value in plain_attributes(module):
        each = {path: value}
        if isinstance(part, nn.RNNBase) and path.endswith("_flat_weights"):  # its parameters
            continue
        if isinstance(value, (list, tuple)):
            each = {f"{path}[{place}]": one for place, one in enumerate(value)}
        elif isinstance(value, dict):
            each = {f"{path}[{key!r}]": one for key, one in value.items()}
        for what, one in each.items():
            if isinstance(one, Tensor):
                found[what] = (id(one), one._version)
    for constants in model.constants_in_use():
        found |= {name: (id(value), value._version) for name, value in constants.items()}
    return found


class Left:
    """Looks before and after a pass of a module."""

    def __init__(self, model: Model, module: nn.Module) -> None:
        self.model, self.module = model, module
        self.before = memory(module, model)
        # the tensors, too: an id is given to another one when the first is gone
        self.plain = {path: dict(vars(part)) for path, part in module.named_modules()}

    def check(self, logits: Any, again: Callable[[], Any]) -> dict[str, Any]:
        """Return the attributes that the pass that gave `logits` has left and the next one does not
        read, with what was there before, which is there again; raise ConfigError for what it reads.
        `again` does the pass once more.
        """
        now = memory(self.module, self.model)
        kept = [path for path, what in now.items() if what != self.before.get(path)]
        # a cache that is filled at the first call
        kept = [path for path in kept if not path.endswith("]") or path in self.before]
        for path in kept:
            if path.endswith("]") or now[path][0] == self.before.get(path, (0, 0))[0]:
                raise remembers(self.model, path)
        for path in kept:
            spoil(self.owner(path), path.rpartition(".")[2])
        if kept and not is_same(logits, again):
            raise remembers(self.model, kept[0])
        found = {}
        for path in kept:
            layer, _, name = path.rpartition(".")
            value = self.plain[layer].get(name, ABSENT)
            found[path] = value.detach() if isinstance(value, Tensor) else value
        with tidied(self.module, found):
            return found

    def owner(self, path: str) -> dict[str, Any]:
        """Return the plain attributes of the layer that an attribute belongs to."""
        return vars(self.module.get_submodule(path.rpartition(".")[0]))


def spoil(attributes: dict[str, Any], name: str) -> None:
    """Replace a tensor by one with which nobody could go on."""
    value = attributes[name]
    if value.is_floating_point() or value.is_complex():
        attributes[name] = torch.full_like(value, torch.nan)
    elif value.dtype == torch.bool:
        attributes[name] = ~value
    else:
        attributes[name] = torch.full_like(value, torch.iinfo(value.dtype).max)


def is_same(logits: Any, again: Callable[[], Any]) -> bool:
    """Return whether a pass gives the same logits again."""
    try:
        found = again()
    except Exception:  # of a number that it could not go on with
        return False
    if not isinstance(logits, Tensor) or not isinstance(found, Tensor):
        return False
    whole = found.shape == logits.shape and bool((found.isfinite() == logits.isfinite()).all())
    return whole and torch.allclose(found, logits, rtol=NEAR, atol=NEAR, equal_nan=True)
