"""Flower strategies, one a method: `from bayflower.strategies import FedMAP`.

The classes are made on demand, so that importing a server half never imports flwr.
"""

from __future__ import annotations

from typing import Any

from ..methods import ROWS

_CLASSES = {row.title.replace("-", ""): row.name for row in ROWS}
__all__ = sorted(_CLASSES)


def __getattr__(name: str) -> Any:
    if name not in _CLASSES:
        raise AttributeError(f"bayflower.strategies has no {name!r}; it has {', '.join(__all__)}")
    made = strategy_class(_CLASSES[name])
    globals()[name] = made
    return made


def strategy_class(method: str) -> type:
    """Return the Flower Strategy class of the method called `method`."""
    from .. import methods
    from .base import BayflowerStrategy

    row = methods.get(method)
    text = f"{row.title} ({row.paper}): {row.summary}."
    return type(row.title.replace("-", ""), (BayflowerStrategy,), {"method": method, "__doc__": text, "__module__": __name__})
