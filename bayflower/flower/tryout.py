"""Any Flower app in one process, without Flower's programs: for first trials and debugging with
breakpoints.
"""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import BayflowerError, ConfigError
from .loop import InProcessGrid, contexts


def try_app(
    folder: Path,
    clients: int,
    changes: Mapping[str, Any] | None = None,
    node: Mapping[str, Any] | None = None,
) -> None:
    """Run the app in `folder` with `clients` nodes in this process. `changes` override its
    run-config, `node` each node's configuration.
    """
    components, config = read(folder)
    for key, value in (changes or {}).items():
        if key not in config:
            raise ConfigError(
                f"the app in {folder} has no run-config key {key!r}; it has "
                f"{', '.join(config) or 'none'}"
            )
        config[key] = like(key, config[key], value)
    with importable(folder):
        server, client = (load(components[name]) for name in ("serverapp", "clientapp"))
        nodes = contexts(range(clients))
        for context in nodes:
            context.run_config = dict(config)
            context.node_config.update(node or {})
        (mine,) = contexts([0])
        mine.run_config, mine.node_config = dict(config), {}
        server(InProcessGrid(client, nodes), mine)


def read(folder: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the components and the run-config in an app's pyproject.toml, nested tables joined by
    dots.
    """
    path = folder / "pyproject.toml"
    try:
        app = tomllib.loads(path.read_text())["tool"]["flwr"]["app"]
        components = {name: str(app["components"][name]) for name in ("serverapp", "clientapp")}
    except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"{path} does not describe a Flower app ({type(error).__name__}: {error}); it needs "
            "[tool.flwr.app.components]"
        ) from None
    return components, flat(app.get("config", {}))


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one, keys joined by dots, as Flower does it."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= (
            flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return found


def like(key: str, old: Any, value: Any) -> Any:
    """Return `value` converted to the type of `old`."""
    if isinstance(old, bool):
        return str(value).lower() in ("true", "1", "yes")
    try:
        return type(old)(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{key} must be of type {type(old).__name__}, got {value!r}") from None


def load(name: str) -> Any:
    """Return the object called "module:attribute"."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise BayflowerError(f"{name} cannot be loaded: {error}") from error


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Import modules from `folder` first; unload the modules imported from it afterwards."""
    root, before = str(folder.resolve()), set(sys.modules)
    sys.path.insert(0, root)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(root)
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(root):
                del sys.modules[name]
