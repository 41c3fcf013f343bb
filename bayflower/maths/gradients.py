"""The gradients of `torch.func`, or of plain autograd where `torch.func` cannot be used.

`torch.func` takes no networks with an `autograd.Function` of the older form, with
`torch.utils.checkpoint`, or with packed sequences. `plainly` gives the gradients of autograd to
everything inside: the same numbers, but not in stacks.

The compiler is not imported. In newer torch the first gradient of a process asks `torch._dynamo`
to switch compiled autograd off. That imports the compiler and sympy, 830 modules and two seconds,
although nothing here is compiled. While the compiler is not loaded, compiled autograd cannot be on,
so there is nothing to switch off: a stand-in says so, and gives everything else from the compiler
itself.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, func
from torch.func import jacrev, vjp

from ..tree import map_tree

__all__ = ["are_plain", "grad", "grad_and_value", "jacrev", "plainly", "vjp"]
COMPILER = "torch._dynamo"
_plain: ContextVar[bool] = ContextVar("plain", default=False)


@contextmanager
def plainly(yes: bool) -> Iterator[None]:
    """Take gradients inside by plain autograd, if `yes`."""
    token = _plain.set(yes)
    try:
        yield
    finally:
        _plain.reset(token)


def are_plain() -> bool:
    """Return whether gradients are taken by plain autograd here."""
    return _plain.get()


def grad_and_value(fn: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
    """Return a function of (the gradients of fn in its first argument, what fn gives)."""
    mapped = func.grad_and_value(fn, has_aux=has_aux)

    def run(first: Any, *rest: Any) -> Any:
        return by_autograd(fn, has_aux, first, rest) if _plain.get() else mapped(first, *rest)

    return run


def grad(fn: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
    """Return a function of the gradients of fn in its first argument; with `has_aux`, of (these,
    the second value of fn).
    """
    mapped = func.grad(fn, has_aux=has_aux)

    def run(first: Any, *rest: Any) -> Any:
        if not _plain.get():
            return mapped(first, *rest)
        slopes, given = by_autograd(fn, has_aux, first, rest)
        return (slopes, given[1]) if has_aux else slopes

    return run


def by_autograd(fn: Callable[..., Any], has_aux: bool, first: Any, rest: Any) -> tuple[Any, Any]:
    """Return (the gradients, what fn gives) as `torch.func` does; a gradient may be differentiated
    again by one around it.
    """
    again: list[bool] = []

    def leaf(value: Tensor) -> Tensor:
        again.append(value.requires_grad)
        return value.view_as(value) if value.requires_grad else value.detach().requires_grad_()

    with torch.enable_grad():
        moving = map_tree(leaf, first)
        given = fn(moving, *rest)
        value = given[0] if has_aux else given
        leaves: list[Tensor] = []
        map_tree(leaves.append, moving)
        found = iter(
            torch.autograd.grad(
                value, leaves, create_graph=any(again), allow_unused=True, materialize_grads=True
            )
        )
    slopes = map_tree(lambda _: next(found), moving)
    return slopes, given if any(again) else map_tree(Tensor.detach, given)


class Absent(ModuleType):
    """A module of the compiler that is loaded when one of its names is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by Python's own tools, which must not load anything
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


def stand_in() -> None:
    """Put the stand-in in the compiler's place; `import torch._dynamo` replaces it by the
    compiler.
    """
    if COMPILER in sys.modules or "_dynamo" in vars(torch):
        return
    absent, autograd = Absent(COMPILER), Absent(f"{COMPILER}.compiled_autograd")
    vars(autograd)["_disable"] = nullcontext
    vars(absent)["compiled_autograd"] = autograd
    vars(torch)["_dynamo"] = absent


stand_in()
