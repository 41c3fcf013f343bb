"""Bayflower: Bayesian personalised federated learning on Flower."""

from typing import Any

from .errors import BayflowerError, ConfigError

__version__ = "0.1.0"
__all__ = ["BayflowerError", "ConfigError", "__version__", "load_personal"]


def __getattr__(name: str) -> Any:
    if name != "load_personal":
        raise AttributeError(f"bayflower has no {name!r}; it has {', '.join(__all__)}")
    from .personal import load_personal

    return load_personal
