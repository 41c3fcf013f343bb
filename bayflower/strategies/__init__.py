"""Server halves, one a method, and Flower strategies made of them: `from bayflower.strategies
import FedMAP`.

The classes are made on demand, so that importing a server half never imports flwr.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    # a submodule that is not loaded yet, or nothing
    if name != "__all__" and not name[:1].isupper():
        raise AttributeError(f"bayflower.strategies has no {name!r}")
    from ..flower import classes

    if name == "__all__":
        return sorted(classes.names())
    known = classes.names()
    if name not in known:
        listed = ", ".join(sorted(known))
        raise AttributeError(f"bayflower.strategies has no {name!r}; it has {listed}")
    made = classes.strategy_class(known[name])
    globals()[name] = made
    return made
