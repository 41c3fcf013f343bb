"""Client halves, one a method, and Flower ClientApps made of them: `from bayflower.clients import
make_client_app`.

The names below are imported on demand, so that importing a client half never imports flwr.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Job", "Plug", "make_client_app"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"bayflower.clients has no {name!r}; it has {', '.join(__all__)}")
    from ..flower import plug

    return getattr(plug, name)
