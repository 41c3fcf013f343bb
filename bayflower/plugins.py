"""Rows of the table of methods, and methods of other packages: where they are announced, how their
modules are imported, and what other processes need to find them too.

A package announces a method by an entry point of the group `bayflower.methods`, whose value names
the module that calls `bayflower.register`. Without a package, BAYFLOWER_METHODS names such modules.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import lru_cache
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import ConfigError, in_one_line

if TYPE_CHECKING:
    from .contract import ClientHalf, ServerHalf

PAPER = "paper"  # the preset with the values of a method's paper
GROUP = "bayflower.methods"
VARIABLE = "BAYFLOWER_METHODS"
UNDECLARED = "register(…, additive=True) must say that its statistics can be added behind masks"


class Announced(NamedTuple):
    """One announcement of a module that registers methods."""

    name: str  # the method; "" if the variable names the module, which may register any
    module: str
    origin: str  # who announces it
    remedy: str


def announced() -> tuple[Announced, ...]:
    """Return all announcements; a module that is named twice is announced by the variable first."""
    return read(os.environ.get(VARIABLE, ""), tuple(sys.path))


@lru_cache(maxsize=8)
def read(variable: str, path: tuple[str, ...]) -> tuple[Announced, ...]:
    """Return the announcements of the variable's value and of the packages on `path`."""
    found = [
        Announced("", module.strip(), VARIABLE, f"correct or unset {VARIABLE}")
        for module in variable.split(",")
        if module.strip()
    ]
    for point in sorted(metadata.entry_points(group=GROUP), key=lambda one: one.name):
        name = point.dist.name if point.dist else point.module
        origin = f"package {name} {point.dist.version}" if point.dist else f"package {name}"
        remedy = f"repair it, or remove it with: pip uninstall {name}"
        found.append(Announced(point.name, point.module, origin, remedy))
    return tuple(found)


def fault_of(one: Announced) -> str | None:
    """Import an announced module; return why that fails in a few words, or None."""
    if not one.name and os.getcwd() not in sys.path:  # a module of the user's folder
        sys.path.append(os.getcwd())
    try:
        import_module(one.module)
    except (Exception, SystemExit) as error:  # a broken package must not break other methods
        text = in_one_line(error)
        if isinstance(error, ConfigError):
            return text
        kind = type(error).__name__
        return f"module {one.module} cannot be imported ({kind}: {text})"
    return None


def handed_on(modules: Collection[str]) -> dict[str, str]:
    """Return the environment in which another process finds methods of these modules."""
    found = [one.module for one in announced() if not one.name]
    found += [module for module in modules if module not in (*found, "__main__")]
    if not found:
        return {}
    path = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    path += [folder for folder in map(folder_of, found) if folder and folder not in path]
    return {VARIABLE: ",".join(found), "PYTHONPATH": os.pathsep.join(dict.fromkeys(path))}


def folder_of(module: str) -> str:
    """Return the folder from which a module is imported; "" for an installed one."""
    file = vars(sys.modules[module]).get("__file__") if module in sys.modules else None
    if file is None:
        return ""
    up = len(module.split(".")) - (Path(file).name != "__init__.py")
    folder = str(Path(file).resolve().parents[up])
    paths = sysconfig.get_paths()
    return "" if folder in (paths["purelib"], paths["platlib"]) else folder


# -- classes of a method -------------------------------------------------------------------------
Given = type | str  # a class, or "package.module:Class"


def text_of(given: Given) -> str:
    """Return a class as "package.module:Class"."""
    return given if isinstance(given, str) else f"{given.__module__}:{given.__qualname__}"


def class_at(given: Given, needs: str) -> Any:
    """Return a class, imported if it is named; raise in words that begin with what needs it."""
    if not isinstance(given, str):
        return given
    module, _, name = given.partition(":")
    try:
        found = vars(import_module(module))[name]
    except (Exception, SystemExit) as error:
        why = f"{type(error).__name__}: {in_one_line(error)}"
        raise ConfigError(
            f'{needs} {given!r} cannot be imported ({why}); write "package.module:Class"'
        ) from None
    return found


def half_at(given: Given, base: type, needs: str, declared: tuple[str, ...]) -> Any:
    """Return a class of half `base`; raise unless it has every hook that has no default."""
    kind = class_at(given, needs)
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise ConfigError(
            f"{needs} must be a class that extends bayflower.contract.{base.__name__}, got {kind!r}"
        )
    there = {name for one in kind.__mro__ for name in vars(one)}
    lacks = sorted(vars(kind)["__abstractmethods__"])
    lacks += [name for name in declared if name not in there]
    if lacks:
        raise ConfigError(
            f"{needs} {text_of(kind)} lacks {', '.join(lacks)}; docs/contract.md says what each is"
        )
    return kind


def check_settings(kind: Any, needs: str) -> None:
    """Raise unless `kind` is a frozen data class whose fields all have defaults."""
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise ConfigError(
            f"{needs} must be a data class with @dataclass(frozen=True), got {kind!r}"
        )
    try:
        kind()
    except TypeError:
        names = ", ".join(field.name for field in fields(kind))
        raise ConfigError(
            f"{needs} {text_of(kind)} needs a default for each of: {names}; write "
            'name: float = setting(1.0, "meaning")'
        ) from None


# -- rows -----------------------------------------------------------------------------------------
class Outside(NamedTuple):
    """Where a method of another package comes from: the module that registers it, and its classes,
    each as it was given.
    """

    module: str
    server: Given
    client: Given
    settings: Given | None  # None: the class `Config` beside the server half


@dataclass(frozen=True)
class Method:
    """One row. `stem` is the file name of both halves; `defaults` are settings in which the row
    differs from its stem's.
    """

    name: str
    stem: str
    title: str
    paper: str
    summary: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    bibtex: str = ""  # what `bayflower cite` prints, where `cli/cite.py` has no entry
    ranges: Mapping[str, Any] = field(default_factory=dict)  # for `bayflower tune`, as ranges.toml
    outside: Outside | None = None
    # why the statistics of clients cannot be added behind masks; "" = they can: `statistic` needs
    # nothing but the broadcast, and its names are the same for every client
    additive: str = ""
    unless: Mapping[str, str] = field(default_factory=dict)  # "setting=value": why it then cannot
    # why one client's part in the sums cannot be bounded, though they add; "" = it can: `statistic`
    # is affine in the real numbers of an update, or the server half has portions
    private: str = ""
    private_unless: Mapping[str, str] = field(default_factory=dict)  # "setting=value": why not then
    # whether clients use their samples in `loss` alone, and train in one phase: then single samples
    # can be hidden
    in_loss_alone: bool = False

    @property
    def files(self) -> tuple[str, str]:
        """Return where the halves are: files of this package, or classes of another one."""
        if self.outside is not None:
            return text_of(self.outside.server), text_of(self.outside.client)
        return f"bayflower/strategies/{self.stem}.py", f"bayflower/clients/{self.stem}.py"

    @property
    def config(self) -> type:
        """Return the class of the method's settings."""
        if self.outside is None:
            return import_module(f"bayflower.strategies.{self.stem}").Config
        given = self.outside.settings or f"{self.server.__module__}:Config"
        found = class_at(given, f"the settings of method {self.name!r}:")
        check_settings(found, f"the settings of method {self.name!r}:")
        return found

    @property
    def presets(self) -> dict[str, dict[str, Any]]:
        """Return settings by the name of a preset. Every method has `paper`; it is empty where
        the method's defaults are the paper's values or the paper states none.
        """
        return {PAPER: {}, **vars(self.config).get("presets", {})}

    def start(self, preset: str | None = None) -> dict[str, Any]:
        """Return the values of a preset and those in which the row differs from its stem; all
        other settings start at their defaults.
        """
        if preset and preset not in self.presets:
            raise ConfigError(
                f"preset {preset!r} is not known for {self.name}; known: {', '.join(self.presets)}"
            )
        return {**(self.presets[preset] if preset else {}), **self.defaults}

    @property
    def server(self) -> type[ServerHalf]:
        """Return the server half."""
        if self.outside is None:
            return import_module(f"bayflower.strategies.{self.stem}").Server
        from .contract import ServerHalf

        needs = f"the server half of method {self.name!r}:"
        return half_at(self.outside.server, ServerHalf, needs, ("state_type", "broadcast_type"))

    @property
    def client(self) -> type[ClientHalf]:
        """Return the client half."""
        if self.outside is None:
            return import_module(f"bayflower.clients.{self.stem}").Client
        from .contract import ClientHalf

        needs = f"the client half of method {self.name!r}:"
        return half_at(self.outside.client, ClientHalf, needs, ("state_type", "update_type"))


class Table(MutableMapping[str, Method]):
    """Methods by name: those above at once, those of other packages when they are asked for."""

    def __init__(self, rows: Iterable[Method]) -> None:
        self.rows = {row.name: row for row in rows}
        self.faults: dict[Announced, str] = {}  # why an announced method cannot be used
        self.seen: set[Announced] = set()

    def look(self, name: str = "") -> None:
        """Import the modules that announce `name`; without it, all that are announced."""
        known = announced()
        wanted = [one for one in known if one not in self.seen and one.name in (name, "")]
        for one in wanted if name else [one for one in known if one not in self.seen]:
            self.seen.add(one)
            taken = self.rows.get(one.name)
            if taken is not None and taken.outside is None:
                self.faults[one] = "a built-in method has this name; it must be renamed"
            elif why := fault_of(one):
                self.faults[one] = why
            elif one.name and one.name not in self.rows:
                self.faults[one] = (
                    f"module {one.module} calls no bayflower.register({one.name!r}, …)"
                )

    def __getitem__(self, name: str) -> Method:
        if name not in self.rows:
            self.look(name)
        if name not in self.rows:
            self.look()
        return self.rows[name]

    def __setitem__(self, name: str, row: Method) -> None:
        self.rows[name] = row

    def __delitem__(self, name: str) -> None:
        del self.rows[name]

    def __iter__(self) -> Iterator[str]:
        self.look()
        return iter(list(self.rows))

    def __len__(self) -> int:
        self.look()
        return len(self.rows)

    def problems(self, name: str = "") -> list[str]:
        """Return a line for each announced method that cannot be used, or for `name` alone."""
        self.look()
        return [
            f"{f'method {one.name!r} of ' if one.name else ''}{one.origin} cannot be used: {why}; "
            f"{one.remedy}"
            for one, why in self.faults.items()
            if not name or one.name in (name, "")
        ]
