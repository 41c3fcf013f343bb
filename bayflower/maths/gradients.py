"""The gradients of `torch.func`, without the import of torch's compiler.

In newer torch the first gradient of a process asks `torch._dynamo` to switch compiled autograd
off. That imports the compiler and sympy, 830 modules and two seconds, although nothing here is
compiled. While the compiler is not loaded, compiled autograd cannot be on, so there is nothing to
switch off: a stand-in says so, and gives everything else from the compiler itself.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
from torch.func import grad, grad_and_value, jacrev, vjp

__all__ = ["grad", "grad_and_value", "jacrev", "vjp"]
COMPILER = "torch._dynamo"


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
