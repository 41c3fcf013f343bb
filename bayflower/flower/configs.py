"""Settings of local training in Flower's configs: `train_config`, `evaluate_config` and the app's
run config. What they name is honoured, or the difference is logged once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from typing import Any

from ..config import convert
from ..errors import field_types
from ..recipes import Training

ALIASES = {"learning_rate": "lr"}
# settings that a config may change from round to round
HONOURED = (
    *("lr", "local_epochs", "local_steps", "batch_size"),
    *("momentum", "weight_decay", "clip_norm"),
)
TRAINING = tuple(field.name for field in fields(Training))
# keys of an app's run config that apps of Flower use for local training
RUN_CONFIG = ("local_epochs", "batch_size", "lr")

Warn = Callable[[str, str], None]  # (key, text): logs the text once for each key


def named(config: Mapping[str, Any], among: Collection[str] = TRAINING) -> dict[str, Any]:
    """Return the settings of local training in a config, by their own names; a key may have dashes
    for underscores. "" stands for the default.
    """
    found = {}
    for key, value in config.items():
        name = key.replace("-", "_")
        name = ALIASES.get(name, name)
        if name in among and value != "":
            found[name] = value
    return found


def converted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values in the types of the settings; raise for a value that cannot be one."""
    hints = field_types(Training)
    return {name: convert(name, value, hints[name]) for name, value in values.items()}


def trained_with(
    training: Training, config: Mapping[str, Any], given: Collection[str], warn: Warn
) -> Training:
    """Return the settings of a round whose `train_config` is `config`. `given` names those that the
    strategy was made with.
    """
    said = named(config)
    for name in sorted(set(said) - set(HONOURED)):
        if said[name] != (ours := field_of(training, name)):
            warn(
                f"train_config {name}",
                f"train_config has {name}={said[name]}, but the strategy trains with {ours}; "
                f"{name} cannot change during a run: give it to the strategy",
            )
    changes = converted({name: said[name] for name in HONOURED if name in said})
    for name, value in changes.items():
        if name in given and value != (ours := field_of(training, name)):
            warn(
                f"train_config {name}",
                f"train_config has {name}={value}, but the strategy was made with {ours}; {value} "
                "is used",
            )
    if not changes:
        return training
    found = replace(training, **changes)
    if "local_epochs" in changes and found.local_steps:
        warn(
            "train_config local_epochs",
            f"train_config has local_epochs={found.local_epochs}, but the strategy trains "
            f"local_steps={found.local_steps} a round, which count instead of epochs",
        )
    return found


def tested_with(training: Training, config: Mapping[str, Any], warn: Warn) -> None:
    """Warn of settings of local training in `evaluate_config` that differ from those in use."""
    for name, value in named(config).items():
        if value != (ours := field_of(training, name)):
            warn(
                f"evaluate_config {name}",
                f"evaluate_config has {name}={value}, which is only sent to the clients; local "
                f"training before a test takes {ours}, as in a round",
            )


def differing(training: Training, config: Mapping[str, Any]) -> dict[str, str]:
    """Return a line for each setting of local training in an app's run config that differs from
    what the strategy asks for, by name.
    """
    found = {}
    for name, value in named(config, RUN_CONFIG).items():
        if str(value) != str(ours := field_of(training, name)) and value != ours:
            found[name] = (
                f"the app's run config has {name}={value}, but the strategy trains with {ours}; "
                "make the strategy with run_config=context.run_config, or change one of them"
            )
    return found


def field_of(training: Training, name: str) -> Any:
    """Return the value of a setting."""
    return getattr(training, name)
