"""A Flower Strategy class for every method: `bayflower.strategies.FedMAP` and its siblings."""

from __future__ import annotations

from .. import methods
from .strategy import BayflowerStrategy


def names() -> dict[str, str]:
    """Return the methods by the names of their classes, those of other packages among them."""
    return {methods.class_name(row.title): row.name for row in methods.METHODS.values()}


def strategy_class(method: str) -> type[BayflowerStrategy]:
    """Return the Flower Strategy class of the method called `method`."""
    row = methods.get(method)
    text = f"{row.title} ({row.paper}): {row.summary}."
    fields = {"method": method, "__doc__": text, "__module__": "bayflower.strategies"}
    return type(methods.class_name(row.title), (BayflowerStrategy,), fields)
