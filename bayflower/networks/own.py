"""A network of one's own, by name: `package.module:factory`, or `package.module:factory(width=64)`.

The name is all that travels to other processes, which import it; nothing is pickled. Arguments in a
name are numbers, true, false and none only: a name in a file of settings can build a network, and
nothing else. A factory that has a parameter called `input_shape` or `num_classes` is given the
data's; `num_outputs`, and of tasks without classes also `num_classes`, is the number of outputs
that the task needs.

A network that cannot be imported (defined in a notebook or a function, or a module that exists
already) is known to this process only, while `given` lasts.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..tasks import Task
from ..tree import digest
from .check import check_layers
from .model import Model
from .parts import plain_attributes, uncompiled
from .several import one_tensor

Factory = Callable[..., nn.Module]
FACTS = (
    "input_shape",
    "num_classes",
    "num_outputs",
)  # parameters that a factory is given if it has them
FORM = "write package.module:factory, for instance nets:Net or nets:Net(width=64)"
_given: dict[str, Factory] = {}  # networks of this process by name


class Named(NamedTuple):
    """A network with the name that stands for it in the settings of a run."""

    name: str
    factory: Factory
    only_here: str  # why other processes cannot import it; "" if they can


def copied(module: nn.Module) -> nn.Module:
    """Return a copy of a module; what its last pass has left in it need not be its own tensors."""
    left = [value for _, _, value in plain_attributes(module)]
    computed = [one for one in left if isinstance(one, Tensor) and not one.is_leaf]
    return deepcopy(module, {id(one): one.detach().clone() for one in computed})


def is_own(name: str) -> bool:
    """Return whether a network's name is that of a factory."""
    return ":" in name


def named(given: Any) -> Named:
    """Return a class, a factory or a module with its name; raise if it is none of these."""
    if isinstance(given, nn.Module):
        given = uncompiled(given)
        check_layers(given, type(given).__name__)
        weights = {key: value.detach().cpu() for key, value in given.state_dict().items()}
        name = f"{type(given).__module__}:{type(given).__qualname__}@{digest(weights)[:12]}"
        kept = copied(given)
        return Named(name, lambda: deepcopy(kept), "it is a module that exists already")
    if not callable(given):
        raise ConfigError(
            f"model must be a torch.nn.Module, its class, a function that returns one, or a name, "
            f"got {type(given).__name__}"
        )
    func, words = given, ""  # type: Any, Any
    if isinstance(given, partial) and not given.args:
        func, words = given.func, written(given.keywords)
    where, what = getattr(func, "__module__", ""), getattr(func, "__qualname__", "")
    known = "@given" if words is None else words
    name = f"{where or '__main__'}:{what or type(func).__name__}{known}"
    return Named(name, given, why_only_here(func, where, what, words is None))


def why_only_here(func: Any, where: str, what: str, unwritable: bool) -> str:
    """Return why other processes cannot import a factory; "" if they can."""
    if unwritable or isinstance(func, partial):
        return "its arguments are not all named numbers"
    if where == "__main__":
        return "it is defined in the program itself or in a notebook"
    if not what or "<" in what:
        return "it is defined inside a function"
    try:
        return "" if attribute(where, what) is func else "its module has another of this name"
    except ConfigError:
        return "its module cannot be imported"


def written(values: Mapping[str, Any]) -> Any:
    """Return arguments as a name has them, "" for none; None if they cannot be written."""
    if not all(plain(value) for value in values.values()):
        return None
    return f"({', '.join(f'{key}={value!r}' for key, value in values.items())})" if values else ""


def plain(value: Any) -> bool:
    """Return whether a value may stand in a name: a number, true, false, none, or a tuple."""
    if isinstance(value, tuple):
        return all(plain(one) for one in value)
    return value is None or type(value) in (bool, int, float)


@contextmanager
def given(known: Named | None) -> Iterator[None]:
    """Let this process find a network that cannot be imported, while the block lasts."""
    before = dict(_given)
    if known is not None and known.only_here:
        _given[known.name] = known.factory
    try:
        yield
    finally:
        _given.clear()
        _given.update(before)


# -- from the name to the network ----------------------------------------------------------------
def taken_apart(name: str) -> tuple[str, str, dict[str, Any]]:
    """Return (module, factory, arguments) of a name; raise if it is not well formed."""
    where, _, rest = name.partition(":")
    what, mark, inside = rest.partition("(")
    arguments: dict[str, Any] = {}
    what = what.partition("@")[0]
    if mark:
        try:
            call = ast.parse(f"f({inside}", mode="eval").body
            assert isinstance(call, ast.Call)
            assert not call.args
            arguments = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
            assert all(one.arg for one in call.keywords)
            assert all(map(plain, arguments.values()))
        except (SyntaxError, ValueError, AssertionError):
            raise ConfigError(
                f"the arguments of model {name!r} must be named numbers, True, False or None; "
                "for anything else write a factory without arguments"
            ) from None
    # Python's names of what has none: <locals>, <lambda>, <genexpr>
    words = [*where.split("."), *re.sub("<[a-z]+>", "x", what).split(".")]
    if not all(word.isidentifier() for word in words):
        raise ConfigError(f"model {name!r} is not the name of a factory; {FORM}")
    return where, what, arguments


def attribute(where: str, what: str) -> Any:
    """Return what a module has under a dotted name; the current folder is searched last."""
    if (here := os.getcwd()) not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        found: Any = importlib.import_module(where)
        for part in what.split("."):
            found = getattr(found, part)
    except Exception as error:
        reason = " ".join(f"{error}".split())[:200] or type(error).__name__
        raise ConfigError(
            f"model {where}:{what} cannot be imported ({reason}); {FORM}, and start where the "
            "package is, or install it"
        ) from error
    return found


def factory_of(name: str) -> Factory:
    """Return the factory that a name stands for."""
    if name in _given:
        return _given[name]
    where, what, arguments = taken_apart(name)
    if "@" in name or "<" in what:
        raise ConfigError(
            f"model {name!r} was given in Python and is not here; give it again with "
            "bayflower.fit, or write a factory that can be imported"
        )
    found = attribute(where, what)
    if not callable(found) or isinstance(found, nn.Module):
        raise ConfigError(
            f"model {name!r} must be a class or a function that returns a torch.nn.Module, got "
            f"{type(found).__name__}"
        )
    return partial(found, **arguments) if arguments else found


def home(name: str) -> str | None:
    """Return the folders that other processes must search for a network's module and for what it
    imports, separated as in PYTHONPATH; None if the module is installed.
    """
    if not is_own(name) or name in _given:
        return None
    where, what, _ = taken_apart(name)
    attribute(where, what)
    top = sys.modules.get(where.partition(".")[0])
    file = getattr(top, "__file__", None) or next(iter(getattr(top, "__path__", [])), None)
    if file is None:
        return None
    path = Path(file).resolve()
    folder = path.parent.parent if path.name == "__init__.py" or path.is_dir() else path.parent
    folder = path.parent if path.is_dir() else folder
    fixed = {Path(one).resolve() for one in sysconfig.get_paths().values()}
    if folder in fixed:
        return None
    more = [Path(one or ".").resolve() for one in sys.path if Path(one or ".").is_dir()]
    others = [one for one in more if one not in fixed and "site-packages" not in one.parts]
    return os.pathsep.join(dict.fromkeys(map(str, (folder, *others))))


def made(factory: Factory, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return a new module of a factory, which is given the data's facts that it has parameters
    for; `num_classes` is the number of outputs where there are no classes.
    """
    if isinstance(factory, nn.Module) or not callable(factory):
        raise ConfigError(
            f"model must be a class or a function that returns a torch.nn.Module, got "
            f"{type(factory).__name__}"
        )
    facts = {"input_shape": tuple(input_shape), **dict.fromkeys(FACTS[1:], num_classes)}
    try:
        known = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        known = {}  # type: ignore[assignment]
    fixed = factory.keywords if isinstance(factory, partial) else {}
    told = {key: facts[key] for key in FACTS if key in known and key not in fixed}
    open_ones = [
        key
        for key, one in known.items()
        if one.default is one.empty
        and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        and key not in told
    ]
    if open_ones:
        raise ConfigError(
            f"model {shown(factory)} needs {', '.join(open_ones)}; give them defaults, or pass "
            f"functools.partial({shown(factory)}, {open_ones[0]}=…). Only input_shape, "
            "num_classes and num_outputs are filled in"
        )
    try:
        module = factory(**told)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        call = f"{shown(factory)}({', '.join(f'{key}={value}' for key, value in told.items())})"
        raise ConfigError(
            f"model {call} cannot be made ({reason}); mend this call first"
        ) from error
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"model {shown(factory)} must return a torch.nn.Module, got {type(module).__name__}"
        )
    return module


def shown(factory: Any) -> str:
    """Return what to call a factory."""
    while isinstance(factory, partial):
        factory = factory.func
    return str(getattr(factory, "__name__", type(factory).__name__))


def build_own(
    name: str, input_shape: tuple[int, ...], num_classes: int, head: str, task: Task | None = None
) -> Model:
    """Return the model of a network of one's own; `head` names its classifier, layers separated by
    commas.
    """
    factory = factory_of(name)
    layers = [part.strip() for part in head.split(",") if part.strip()]

    def built() -> nn.Module:
        module = uncompiled(made(factory, tuple(input_shape), num_outputs(num_classes, task)))
        check_layers(module, name)
        return one_tensor(module)

    model = Model(built, num_classes, name, layers or None, task)
    model.look_for_head(torch.zeros(2, *input_shape))
    return model


def num_outputs(num_classes: int, task: Task | None) -> int:
    """Return how many outputs a network needs: one a class, or what the task says."""
    return num_classes if task is None or task.classes else task.network
