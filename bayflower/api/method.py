"""A method with its settings, for `fit` and `compare`."""

from __future__ import annotations

from typing import Any

from .. import methods
from ..errors import ConfigError, hint_for


class Method:
    """A method by its name, with settings of its own: `Method("fedmap", sigma2=50, lr=0.002)`.

    name      a name from `bayflower methods`
    label     what to call it in a comparison, where a method occurs twice; default: the name
    settings  any setting of `bayflower settings NAME`; they win over those given to `fit`
    """

    def __init__(self, name: str, *, label: str = "", **settings: Any) -> None:
        methods.get(name)  # raises with a hint
        self.name, self.label, self.settings = name, label or name, settings
        check_settings(name, settings)

    def __repr__(self) -> str:
        words = [repr(self.name), *(f"{key}={value!r}" for key, value in self.settings.items())]
        words += [f"label={self.label!r}"] if self.label != self.name else []
        return f"Method({', '.join(words)})"


def method_of(given: Any) -> Method:
    """Return a method, which may be given by its name."""
    if isinstance(given, Method):
        return given
    if isinstance(given, str):
        return Method(given)
    raise ConfigError(
        f"method must be a name or bayflower.Method(name, …), got {type(given).__name__}"
    )


def check_settings(method: str, given: dict[str, Any], also: tuple[str, ...] = ()) -> None:
    """Raise with a hint if a name is no setting of a method; `also` has more names to suggest."""
    from ..config import names  # which loads torch

    known = names(method)
    for key in given:
        if key not in known:
            hint = hint_for(key, [*also, *known], method)
            raise ConfigError(f"method {method!r} has no setting {key!r}; {hint}")
