"""Bayflower: Bayesian personalised federated learning on Flower."""

from .errors import BayflowerError, ConfigError

__version__ = "0.1.0"
__all__ = ["BayflowerError", "ConfigError", "__version__"]
