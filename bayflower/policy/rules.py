"""The policy of a site: a TOML file of its owner, and the check of a request against it. Nothing
here imports torch: a SuperNode reads it.
"""

from __future__ import annotations

import difflib
import glob
import os
import re
import textwrap
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..errors import ConfigError, PolicyError
from ..settings import meanings, setting

SENDS = {
    "update": "the update of a round",
    "tally": "results of tests on the site's test samples",
    "metrics": "numbers of samples, the training loss, the accuracy",
    "calibration": "counts and sums over the samples held out for calibration",
    "labels": "in the first reply: how many training samples each class has",
    "inputs": "in the first reply: sums over the columns of the training samples",
    "sums": "in the first reply: sums over the targets of the training samples",
}
APP = r"bayflower|sha256:[0-9a-f]{64}"
DATA = "{data}"  # in a pattern: the site's folder of data
PIECES = re.compile(r"[,+]")  # between the parts of a data set's name


@dataclass(frozen=True)
class Policy:
    """What a site allows. A pattern may have * and ?; an empty list allows nothing."""

    apps: tuple[str, ...] = setting(
        ("bayflower",),
        "app bundles that may run: bayflower (that of the installed version), or sha256:… as "
        "`bayflower policy app` prints it",
    )
    methods: tuple[str, ...] = setting(("*",), "methods that may be run, patterns")
    datasets: tuple[str, ...] = setting(
        ("[!/.]*", "{data}/*"),
        "names of data sets and paths of files that may be used, patterns; {data} is the site's "
        "folder of data, [!/.]* any name that is not a path",
    )
    networks: tuple[str, ...] = setting(
        (),
        "networks of your own (package.module:factory) that a run may import here, patterns; the "
        "networks of this package are always allowed",
    )
    send: tuple[str, ...] = setting(tuple(SENDS), "what may leave the site: " + ", ".join(SENDS))
    max_rounds: int = setting(0, "cap on the number of a round; 0 = none")
    max_reply_mb: float = setting(0.0, "cap on a reply, in millions of bytes; 0 = none")
    max_requests_a_day: int = setting(
        0, "cap on the training and test requests answered in 24 hours, counted here; 0 = none"
    )
    max_mb_a_day: float = setting(
        0.0, "cap on what leaves in 24 hours, in millions of bytes, counted here; 0 = none"
    )
    min_change: int = setting(
        5,
        "samples that must have changed between two data sets that were used; fewer are a small "
        "change; 0 = not looked at",
    )
    small_change: str = setting(
        "notice", "what happens on a small change: notice (a line in both logs) or refuse"
    )
    floor: Mapping[str, float] = field(
        default_factory=lambda: {"min_count": 5.0},
        metadata={"meaning": "smallest value of any setting, by its name"},
    )
    ceiling: Mapping[str, float] = field(
        default_factory=dict, metadata={"meaning": "largest value of any setting, by its name"}
    )

    def __post_init__(self) -> None:
        for app in self.apps:
            if not re.fullmatch(APP, app):
                raise ConfigError(
                    f"apps must be bayflower or sha256: and 64 hexadecimal digits, got {app!r}; "
                    "`bayflower policy app APP` prints the digest of an app"
                )
        if unknown := sorted(set(self.send) - set(SENDS)):
            raise ConfigError(f"send must name {', '.join(SENDS)}, got {unknown[0]!r}")
        if self.small_change not in ("notice", "refuse"):
            raise ConfigError(f"small_change must be notice or refuse, got {self.small_change!r}")
        for name in ("max_rounds", "max_reply_mb", "max_requests_a_day", "max_mb_a_day"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.min_change < 0:
            raise ConfigError(f"min_change must be at least 0, got {self.min_change}")
        for name in sorted(set(self.floor) & set(self.ceiling)):
            if self.floor[name] > self.ceiling[name]:
                raise ConfigError(
                    f"the floor of {name} is {self.floor[name]:g}, above its ceiling "
                    f"{self.ceiling[name]:g}; no request could be answered"
                )

    # -- rules, each before anything is trained ---------------------------------------------------
    def check_method(self, method: str) -> None:
        """Raise if a method is not allowed."""
        if not fits(method, self.methods):
            raise refused("methods", f"{method[:80]!r} is not among {shown(self.methods)}")

    def check_settings(self, values: Mapping[str, Any]) -> None:
        """Raise if a setting is below its floor or above its ceiling."""
        for rule, limits in (("floor", self.floor), ("ceiling", self.ceiling)):
            for name, limit in limits.items():
                if name not in values:
                    continue
                value = values[name]
                number = isinstance(value, (int, float)) and not isinstance(value, bool)
                if number and (value >= limit if rule == "floor" else value <= limit):
                    continue  # NaN is neither
                least = "least" if rule == "floor" else "most"
                raise refused(
                    f"{rule}.{name}", f"{name} must be at {least} {limit:g}, got {str(value)[:80]}"
                )

    def check_data(self, folder: str, *paths: str) -> None:
        """Raise if a data set, or a file that stands in another setting, may not be used; `folder`
        is the site's folder of data, "" if it has none.
        """
        named = (one for one in self.datasets if folder or DATA not in one)
        known = [one.replace(DATA, glob.escape(os.path.normpath(folder))) for one in named]
        for part in (one for path in paths for one in PIECES.split(path)):
            where = os.path.normpath(part.strip()) if part.strip() else ""
            outside = ".." in Path(part).parts or not fits(where, known)
            if not where or outside:
                raise refused("datasets", f"{part[:200]!r} is not among {shown(self.datasets)}")

    def check_network(self, model: str) -> None:
        """Raise if a run would import a network that is not allowed."""
        if ":" in model and not fits(model, self.networks):
            raise refused("networks", f"{model[:80]!r} is not among {shown(self.networks)}")

    def check_round(self, round: int) -> None:
        """Raise if a run is too long."""
        if self.max_rounds and round > self.max_rounds:
            raise refused("max_rounds", f"round {round} is beyond {self.max_rounds}")

    def check_sends(self, names: Iterable[str]) -> None:
        """Raise if one of these may not leave the site."""
        if unknown := sorted(set(names) - set(self.send)):
            raise refused("send", f"{unknown[0][:80]!r} may not leave this site")

    def check_bytes(self, number: int) -> None:
        """Raise if a reply is too large."""
        if self.max_reply_mb and number > self.max_reply_mb * 1e6:
            raise refused(
                "max_reply_mb", f"the reply has {number} bytes, more than {self.max_reply_mb:g} MB"
            )


def refused(rule: str, why: str) -> PolicyError:
    """Return the error of a rule."""
    return PolicyError(f"the site's policy forbids it (rule {rule}): {why}")


def fits(text: str, patterns: Iterable[str]) -> bool:
    """Return whether a text fits one of the patterns."""
    return any(fnmatchcase(text, pattern) for pattern in patterns)


def shown(patterns: tuple[str, ...]) -> str:
    """Return the patterns for an error text."""
    return ", ".join(patterns) if patterns else "those allowed (none is)"


def read(path: Path) -> Policy:
    """Return the policy in a file; raise with the reason if it cannot be read. A site without a
    readable policy answers nothing.
    """
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the policy {path} cannot be read ({error}); write one with: bayflower policy new"
        ) from None
    try:
        return parse(given)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def parse(given: Mapping[str, Any]) -> Policy:
    """Return the policy with these values; unknown keys and wrong types are errors."""
    fields = dict(vars(Policy()))
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name not in fields:
            close = difflib.get_close_matches(name, fields, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(fields)}"
            raise ConfigError(f"a policy has no rule {name!r}; {hint}")
        found[name] = converted(name, value, fields[name])
    return Policy(**found)


def converted(name: str, value: Any, like: Any) -> Any:
    """Return a value from TOML in the type of a rule's default."""
    if isinstance(like, tuple):
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise ConfigError(f'{name} must be a list of texts, for instance ["*"], got {value!r}')
        return tuple(value)
    if isinstance(like, Mapping):
        if not isinstance(value, Mapping) or not all(map(is_number, value.values())):
            raise ConfigError(f"{name} must be a table of numbers by setting, got {value!r}")
        return {key.replace("-", "_"): float(number) for key, number in value.items()}
    if isinstance(like, str):
        return str(value)
    if not is_number(value) or (isinstance(like, int) and not isinstance(value, int)):
        kind = "a whole number" if isinstance(like, int) else "a number"
        raise ConfigError(f"{name} must be {kind}, got {value!r}")
    return type(like)(value)


def is_number(value: Any) -> bool:
    """Return whether a value from TOML is a number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value


def written(policy: Policy | None = None) -> str:
    """Return a policy as a TOML file with the meaning of every rule; by default the usual one."""
    policy, meaning = policy or Policy(), meanings(Policy)
    lines = [
        "# What the owner of this site allows. The client checks every request against it,",
        "# whatever the server sends. Check a change with: bayflower policy check FILE",
    ]
    for rule, value in vars(policy).items():
        lines += ["", *(f"# {line}" for line in textwrap.wrap(meaning[rule], 96))]
        if isinstance(value, Mapping):
            lines.append(f"[{rule}]")
            lines += [f"{name} = {number:g}" for name, number in value.items()]
        elif isinstance(value, tuple):
            lines.append(f"{rule} = [{', '.join(quoted(one) for one in value)}]")
        else:
            lines.append(f"{rule} = {quoted(value) if isinstance(value, str) else value}")
    return "\n".join(lines) + "\n"


def quoted(text: str) -> str:
    """Return a text as TOML."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
