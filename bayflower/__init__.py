"""Bayflower: Bayesian personalised federated learning on Flower."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import BayflowerError, ConfigError

if TYPE_CHECKING:  # what the names below are
    from .api.compare import Comparison as Comparison
    from .api.compare import compare as compare
    from .api.fit import fit as fit
    from .api.method import Method as Method
    from .api.result import Result as Result
    from .methods import register as register
    from .personal import load_personal as load_personal

__version__ = "0.1.0"
# public names and the modules that have them, which are loaded when a name is asked for
NAMES = {
    "Comparison": "api.compare",
    "Method": "api.method",
    "Result": "api.result",
    "compare": "api.compare",
    "fit": "api.fit",
    "load_personal": "personal",
    "register": "methods",
}
__all__ = [
    "BayflowerError",
    "ConfigError",
    "__version__",
    *NAMES,
]


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"bayflower has no {name!r}; it has {', '.join(sorted(__all__))}")
    return getattr(import_module(f".{NAMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *NAMES})
