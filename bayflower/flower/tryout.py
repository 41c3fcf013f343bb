"""Any Flower app in one process, without Flower's programs: for first trials, for debugging with
breakpoints, and with the fused engine for speed.
"""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from flwr.common.config import parse_config_args

from ..config import Run, Settings
from ..data import DataSettings
from ..errors import BayflowerError, ConfigError, in_one_line
from ..rounds.halves import make_halves
from ..rounds.result import result
from . import plug
from .crew import Options
from .fusing import FusedGrid
from .loop import InProcessGrid, contexts
from .strategy import BayflowerStrategy
from .watching import watched

ENGINES = ("loop", "fused")


class Tried(NamedTuple):
    """What an app did: the strategies of ours that it started, with their numbers of rounds, and
    notes on how its clients ran.
    """

    strategies: list[tuple[BayflowerStrategy, int]]
    remarks: list[str]


def try_app(
    folder: Path,
    clients: int,
    changes: Mapping[str, Any] | None = None,
    node: Mapping[str, Any] | None = None,
    engine: str = "loop",
    options: Options | None = None,
) -> Tried:
    """Run the app in `folder` with `clients` nodes in this process. `changes` override its
    run-config, `node` each node's configuration. With the engine fused, clients that
    `make_client_app` trains are trained as one stack.
    """
    if engine not in ENGINES:
        raise ConfigError(
            f"engine must be loop or fused, got {engine!r}; `flwr run` starts Flower's own programs"
        )
    components, config = read(folder)
    for key, value in (changes or {}).items():
        if key not in config:
            raise ConfigError(
                f"the app in {folder} has no run-config key {key!r}; it has "
                f"{', '.join(config) or 'none'}"
            )
        config[key] = like(key, config[key], value)
    found: list[tuple[BayflowerStrategy, int]] = []
    plug.KEPT = max(plug.KEPT, clients)  # all clients are here
    with importable(folder), watched(lambda strategy, rounds: found.append((strategy, rounds))):
        server, client = (load(components[name]) for name in ("serverapp", "clientapp"))
        nodes = contexts(range(clients))
        for context in nodes:
            context.run_config = dict(config)
            context.node_config.update(node or {})
        (mine,) = contexts([0])
        mine.run_config, mine.node_config = dict(config), {}
        if engine == "loop":
            server(InProcessGrid(client, nodes), mine)
            return Tried(found, [])
        grid = FusedGrid(client, nodes, options)
        try:
            server(grid, mine)
        finally:
            grid.close()
        return Tried(found, grid.crew.remarks)


def overrides(texts: list[str]) -> dict[str, Any]:
    """Return the keys and values of `--run-config`, read as `flwr run` reads them."""
    try:
        return dict(parse_config_args(texts))
    except Exception as error:
        reason = in_one_line(error)
        raise ConfigError(
            f"--run-config cannot be read ({reason}); write it as 'key=1 other=\"text\"'"
        ) from None


def result_of(
    strategy: BayflowerStrategy, rounds: int, name: str, engine: str, remarks: list[str]
) -> dict[str, Any] | None:
    """Return the content of result.json for a strategy that has ended; None if it tested no client.
    `name` is what the result calls the data.
    """
    outcome, common = strategy.outcome, strategy.roster.common
    sites = [one.site for one in plug.SITES.values()]
    site = next((one for one in sites if common and one.model.anatomy == common.anatomy), None)
    if outcome is None or "personal" not in outcome.views or site is None:
        return None
    settings = Settings(
        rounds=rounds,
        seed=strategy.seed,
        fraction_train=strategy.fraction_train,
        min_replies=strategy.min_replies,
        evaluate_every=strategy.evaluate_every,
        device=str(site.data.train.x.device),
    )
    data = strategy.calibrator.settings if strategy.calibrator else DataSettings()
    groups = (strategy.training, strategy.options, strategy.limits, strategy.privacy)
    run = Run(strategy.row.name, settings, data, *groups, strategy.aggregation)
    shape = tuple(site.data.train.x.shape[1:])
    halves = make_halves(run, shape, site.model.num_classes, site.model)
    outcome = outcome._replace(remarks=(*outcome.remarks, *remarks))
    return result(run, engine, strategy.roster.summary(name), halves, outcome)


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
