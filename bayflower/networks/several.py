"""Networks with several inputs, or with more than logits as output, as networks of one tensor.

A sample with several parts (tokens and their mask, an image and a table) is one row of numbers in
all engines. The network gets its parts back, by position or by keyword. Of what it returns, the
logits are taken: `.logits`, the entry "logits", or the first of a tuple.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ConfigError

EXACT = 2**24  # whole numbers below this are exact in float32
Parts = Mapping[str, Tensor] | Sequence[Tensor]


class Layout(NamedTuple):
    """The parts of a sample: keywords of `forward`, or () for positions; shapes and dtypes."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    @classmethod
    def of(cls, parts: Parts) -> Layout:
        """Return the layout of samples with these parts."""
        named = isinstance(parts, Mapping)
        tensors = list(parts.values()) if isinstance(parts, Mapping) else list(parts)
        return cls(
            tuple(parts) if named else (),  # type: ignore[arg-type]
            tuple(tuple(tensor.shape[1:]) for tensor in tensors),
            tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors),
        )

    @classmethod
    def read(cls, text: str) -> Layout:
        """Return the layout that `text` wrote."""
        names, shapes, dtypes = json.loads(text)
        return cls(tuple(names), tuple(tuple(shape) for shape in shapes), tuple(dtypes))

    @property
    def text(self) -> str:
        """Return the layout as a text."""
        return json.dumps(self)

    @property
    def floats(self) -> bool:
        """Return whether a part has floats."""
        return any(name.startswith(("float", "bfloat")) for name in self.dtypes)

    def pack(self, parts: Parts, what: str = "a batch") -> Tensor:
        """Return samples as rows (B, numbers); raise unless they have this layout."""
        if isinstance(parts, Mapping):
            if set(parts) != set(self.names):
                raise ConfigError(
                    f"{what} has the inputs {', '.join(parts)}, expected "
                    f"{', '.join(self.names) or f'{len(self.shapes)} without names'}"
                )
            parts = [parts[name] for name in self.names]
        shapes = tuple(tuple(part.shape[1:]) for part in parts)
        if shapes != self.shapes:
            raise ConfigError(
                f"{what} has inputs of shapes {shapes}, expected {self.shapes}; give all samples "
                "the same shapes, e.g. padding='max_length'"
            )
        dtype = torch.get_default_dtype() if self.floats else torch.int64
        whole = [part.long().abs() for part in parts if not part.is_floating_point()]
        if self.floats and any(part.numel() and int(part.max()) >= EXACT for part in whole):
            raise ConfigError(
                f"{what} has whole numbers of {EXACT} or more beside floats; use smaller ones"
            )
        return torch.cat([part.reshape(len(part), -1).to(dtype) for part in parts], 1)

    def unpack(self, rows: Tensor) -> list[Tensor]:
        """Return the parts of rows, in their shapes and dtypes; floats have the rows' dtype."""
        found, start = [], 0
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            size = math.prod(shape)
            # len(rows) would fix the number of samples in an exported program
            part = rows[:, start : start + size].reshape(rows.shape[0], *shape)
            start += size
            if dtype == "bool":
                part = part != 0
            elif not dtype.startswith(("float", "bfloat")):
                part = part.to(torch.int64)
            found.append(part)
        return found


def one_tensor(module: nn.Module, layout: Layout | None = None) -> nn.Module:
    """Return the module, which from now on takes packed samples where there is a layout, and
    returns its logits.
    """
    handles = [module.register_forward_hook(logits_of)]
    if layout is not None:
        unpack = partial(unpacked, layout)
        handles.append(module.register_forward_pre_hook(unpack, with_kwargs=True))
    module.__dict__["_one_tensor"] = handles
    return module


def as_written(module: nn.Module) -> nn.Module:
    """Return the module as its author wrote it, with its own inputs and outputs."""
    for handle in module.__dict__.pop("_one_tensor", ()):
        handle.remove()
    return module


def unpacked(
    layout: Layout, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with packed samples."""
    parts = layout.unpack(args[0])
    if layout.names:
        return (), dict(zip(layout.names, parts, strict=True))
    return tuple(parts), {}


def logits_of(module: nn.Module, args: tuple[Any, ...], found: Any) -> Any:
    """Return the logits in what a network returned; None if they are all of it."""
    if isinstance(found, Tensor):
        return None
    logits = getattr(found, "logits", None)
    if logits is None and isinstance(found, Mapping):
        logits = found.get("logits")
    if logits is None and isinstance(found, (tuple, list)) and len(found):
        logits = found[0]
    return logits if isinstance(logits, Tensor) else None
