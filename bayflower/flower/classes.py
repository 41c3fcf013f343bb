"""A Flower Strategy class for every method: `bayflower.strategies.FedMAP` and its siblings."""

from __future__ import annotations

from .. import methods
from .strategy import BayflowerStrategy

NAMES = {row.title.replace("-", ""): row.name for row in methods.ROWS}  # class → method


def strategy_class(method: str) -> type[BayflowerStrategy]:
    """Return the Flower Strategy class of the method called `method`."""
    row = methods.get(method)
    text = f"{row.title} ({row.paper}): {row.summary}."
    fields = {"method": method, "__doc__": text, "__module__": "bayflower.strategies"}
    return type(row.title.replace("-", ""), (BayflowerStrategy,), fields)
