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
        return sorted(classes.NAMES)
    if name not in classes.NAMES:
        known = ", ".join(sorted(classes.NAMES))
        raise AttributeError(f"bayflower.strategies has no {name!r}; it has {known}")
    made = classes.strategy_class(classes.NAMES[name])
    globals()[name] = made
    return made
