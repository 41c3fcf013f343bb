"""Hooks of Flower's Strategy that a subclass of one of our strategies overrides.

An override is called where Flower calls it, and may change what it passes to `super()` and what it
returns: the config, the messages (fewer, or with more records), the replies, the arrays, the
metrics. What cannot be honoured is refused by its name.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Message
from flwr.serverapp.strategy import FedAvg, Strategy

from ..errors import ConfigError

CONFIGURING = ("configure_train", "configure_evaluate")
AGGREGATING = ("aggregate_train", "aggregate_evaluate")
HONOURED = (*CONFIGURING, *AGGREGATING, "start", "summary")
# names of Flower's that subclasses of ours may have: Python's own, and those above
ORDINARY = {name for name in vars(object)} | {"__init_subclass__", "__annotations__"}


WATCHED: weakref.WeakSet[Any] = weakref.WeakSet()  # hooks that `watch` has made


def check(kind: type, base: type) -> None:
    """Raise if a subclass of a strategy of ours overrides what is never called, or is a strategy of
    Flower's at the same time.
    """
    flowers = {
        name
        for one in (Strategy, FedAvg)
        for name, value in vars(one).items()
        if callable(value) and name not in ORDINARY
    }
    for one in kind.__mro__[: kind.__mro__.index(base)]:
        if found := sorted((flowers & set(vars(one))) - set(HONOURED)):
            raise ConfigError(
                f"{kind.__name__} overrides {found[0]}, which Bayflower's strategies never call; "
                f"override one of {', '.join(HONOURED)}"
            )
    for one in kind.__mro__:
        if issubclass(one, Strategy) and one is not Strategy and one.__module__.startswith("flwr."):
            raise ConfigError(
                f"{kind.__name__} is a subclass of Flower's {one.__name__} too, whose aggregation "
                "would be ignored; a method defines its own"
            )


def is_overridden(strategy: Any, name: str, base: type) -> bool:
    """Return whether a hook is not the one of `base`, in the class or on the object."""
    return getattr(getattr(strategy, name), "__func__", None) is not getattr(base, name)


def watch(kind: Any, base: type) -> None:
    """Let a subclass's own hooks tell the strategy what they return, and that `start` runs."""
    makers: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
        **{name: functools.partial(handing_over, name=name) for name in CONFIGURING},
        "aggregate_train": handing_in,
        "start": noted,
    }
    before = kind.__mro__[: kind.__mro__.index(base)]
    for name, make in makers.items():
        hook = next((vars(one)[name] for one in before if name in vars(one)), None)
        if hook is not None and hook not in WATCHED:
            made = make(hook)
            WATCHED.add(made)
            setattr(kind, name, made)


def handing_over(hook: Callable[..., Any], name: str) -> Callable[..., list[Message]]:
    """Return a hook that configures a round, after which the strategy knows the round's messages:
    those that the hook returns.
    """
    signature = inspect.signature(hook)

    @functools.wraps(hook)
    def configure(self: Any, *args: Any, **named: Any) -> list[Message]:
        given = signature.bind(self, *args, **named).args[1:]
        return self._take(name, hook(self, *args, **named), *given)  # type: ignore[no-any-return]

    return configure


def handing_in(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that aggregates a round, whose arrays become the global model."""

    @functools.wraps(hook)
    def aggregate(self: Any, server_round: int, replies: Iterable[Message]) -> Any:
        return self._hand_in(functools.partial(hook, self), server_round, replies)

    return aggregate


def noted(start: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `start` of the user's own that the strategy knows of: its hooks then serve that
    loop, and at its end every client saves its personal model.
    """
    signature = inspect.signature(start)

    @functools.wraps(start)
    def started(self: Any, *args: Any, **named: Any) -> Any:
        if self._own_loop:  # a subclass of a subclass
            return start(self, *args, **named)
        bound = signature.bind(self, *args, **named)
        bound.apply_defaults()
        self._enter(bound.arguments.get("num_rounds"))
        try:
            with self.teller.open():
                result = start(self, *args, **named)
                self._leave()
        finally:
            self._own_loop = False
        return result

    return started
