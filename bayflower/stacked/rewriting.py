"""Functions of torch replaced while a network runs: random ones take the numbers of a step
(`randomly.py`); in stacks, and where second derivatives are needed, some are in plain operations
(`plainly.py`).

A `TorchFunctionMode` sees every function that the network calls, in layers or directly, so that
`nn.Dropout`, its subclasses and `functional.dropout` are treated alike. What it costs, about a
microsecond a call, is saved where the first pass has shown that there is nothing to replace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from . import attention, chance, filled, plainly, randomly, recurrent
from .recomputed import called_directly

Functions = dict[Any, Callable[..., Any]]
RANDOM: Functions = {
    **randomly.FUNCTIONS,
    **recurrent.functions(only_random=True),
    functional.scaled_dot_product_attention: attention.random_scaled_dot_product,
    functional.multi_head_attention_forward: attention.random_multi_head,
}
Use = Literal["once", "twice", "mapped"]
# by (training, use)
TABLES: dict[tuple[bool, Use], Functions] = {
    (True, "once"): RANDOM,
    (False, "once"): recurrent.functions(only_random=True),
    (True, "twice"): {**RANDOM, **plainly.TWICE},
    (False, "twice"): plainly.TWICE,
    (True, "mapped"): {**RANDOM, **plainly.FUNCTIONS},
    (False, "mapped"): plainly.FUNCTIONS,
}
_use: ContextVar[Use] = ContextVar("use", default="once")


class Seen:
    """What passes of a network have shown: whether functions were replaced, by (training, use),
    and whether random numbers were drawn. Missing or None: there was no such pass yet.
    """

    def __init__(self) -> None:
        self.replaced: dict[tuple[bool, Use], bool] = {}
        self.draws: bool | None = None
        self.plain = False  # whether only plain autograd can differentiate it
        self.fills = False  # whether it fills tensors of its own with numbers of a stack
        self.writes = False  # whether it writes into what layers keep for their slopes

    def again(self, error: Exception) -> bool:
        """Return whether a stack that failed may be tried again: its tensors will have a place for
        every client, or it will get copies of what layers keep.
        """
        before = self.fills, self.writes
        self.fills |= filled.REFUSED in str(error)
        self.writes |= filled.CHANGED in str(error)
        return (self.fills, self.writes) != before


class Replacing(TorchFunctionMode):
    """Calls a function of the table in place of torch's, unless it says `NotImplemented`."""

    def __init__(self, table: Functions) -> None:
        super().__init__()
        self.table, self.replaced = table, False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        ours = self.table.get(func)
        if ours is not None:
            found = ours(*args, **(kwargs or {}))
            if found is not NotImplemented:
                self.replaced = True
                return found
        return func(*args, **(kwargs or {}))


@contextmanager
def used(how: Use) -> Iterator[None]:
    """Give the passes inside functions that can be differentiated "twice", or "mapped" over samples
    or clients as well; others keep torch's own kernels, and their bits.
    """
    token = _use.set(how)
    try:
        yield
    finally:
        _use.reset(token)


@contextmanager
def formulas() -> Iterator[None]:
    """Keep transformers from torch's shorter way without gradients: on a GPU it takes an
    approximation of GELU, so that a network would be tested with other numbers than it was trained.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def passing(seen: Seen, train: bool, stacked: bool, x: Tensor | None = None) -> Iterator[None]:
    """Run one pass of a network on samples x inside, alone or in a stack."""
    kind: tuple[bool, Use] = (train, "mapped" if stacked else _use.get())
    table = TABLES.get(kind)
    with ExitStack() as inside:
        mode = None
        inside.enter_context(called_directly())
        if not train:
            inside.enter_context(formulas())
        if train:
            inside.enter_context(chance.one_pass())
        if stacked and seen.writes:
            inside.enter_context(filled.written())
        if stacked and seen.fills and x is not None:
            inside.enter_context(filled.made_of(x))
            inside.enter_context(Replacing({**TABLES[kind], **filled.FUNCTIONS}))
        elif table is not None and seen.replaced.get(kind) is not False:
            mode = inside.enter_context(Replacing(table))
        yield
        if mode is not None:
            seen.replaced[kind] = mode.replaced
        if train:
            seen.draws = bool(seen.draws) or chance.calls() > 0
