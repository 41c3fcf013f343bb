"""Errors a person can act on. Apart from everything heavy, so that the command line answers at
once.
"""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin, get_type_hints


class BayflowerError(Exception):
    """An error whose text is one line that names the cause and the remedy."""


class ConfigError(BayflowerError):
    """A setting that cannot be used, found before anything starts."""


def check_choices(config: Any) -> None:
    """Raise if a Literal field of `config` has a value that is not allowed."""
    for name, kind in get_type_hints(type(config)).items():
        if get_origin(kind) is Literal and getattr(config, name) not in get_args(kind):
            raise ConfigError(
                f"{name} must be one of {', '.join(get_args(kind))}, got {getattr(config, name)!r}"
            )


class WireError(BayflowerError):
    """A message that cannot be used; the text says what is wrong with it."""
