"""A run's settings: parsed once, checked once, frozen. Unknown keys and wrong types are errors.

All settings share one flat name space (`--set sigma2=15`, `--run-config "sigma2=15"`): those of the
run, the data, local training, the limits and the method. `preset=paper` stands for several: the
values of the method's paper, which its Config holds.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch

from . import methods
from .data import DataSettings, resolve
from .errors import ConfigError, check_least, field_types, hint_for
from .networks.papers import check_name
from .recipes import RECIPE
from .recipes import Training as Training  # part of a run's settings
from .recipes.aggregation import Aggregation
from .recipes.check import reading_for
from .recipes.limits import Limits as Limits  # part of a run's settings
from .recipes.secrecy import Privacy
from .settings import meanings, setting

ENGINES: dict[str, str] = {
    "fused": "all clients of a round trained together, on one GPU or CPU, or shared by workers",
    "loop": "clients one after another behind an in-process Flower grid; the reference",
    "ray": "Flower's own simulation, as `flwr run .` does it: many cores, several GPUs, a Ray "
    "cluster",
    "deployment": "a SuperLink and one SuperNode process a client, on loopback",
}


@dataclass(frozen=True)
class Settings:
    """The run itself."""

    rounds: int = setting(50, "rounds of training")
    seed: int = setting(0, "seed of partition, initialisation, batches and client sampling")
    model: str = setting(
        "auto",
        "the network; `bayflower models` lists them; package.module:factory for your own",
    )
    head: str = setting(
        "",
        "a network of your own: the layers of its classifier, separated by commas; '' = the "
        "attribute called head, else the Linear that gives the logits",
    )
    features: int = setting(512, "model=cnn: width of the feature layer")
    fraction_train: float = setting(
        1.0, "share of the clients that train in a round, sampled anew in every round"
    )
    fraction_evaluate: float = setting(
        1.0,
        "share of the clients, new ones among them, that are tested after the last round, sampled",
    )
    min_replies: int = setting(1, "the run stops if a round has fewer valid replies than this")
    evaluate_every: int = setting(
        5,
        "rounds between two tests for the accuracy curve; the last round is always tested; 0 = "
        "only the last",
    )
    checkpoint_every: int = setting(
        10,
        "rounds between two checkpoints for --resume; 0 = none; engines ray and deployment write "
        "one in every round",
    )
    device: str = setting("auto", "cpu, cuda or cuda:N; auto = a GPU if there is one")
    dtype: Literal["float32", "float64"] = setting(
        "float32", "floating-point type of parameters, data and messages"
    )
    tf32: bool = setting(
        False,
        "GPU: round the inputs of float32 products to 10 bits; faster, but results differ from a "
        "CPU's",
    )
    bf16: bool = setting(
        False,
        "train with products and activations in bfloat16; parameters, messages and tests stay in "
        "float32",
    )
    max_fused: int = setting(
        0, "fused engine: cap on clients trained together; 0 = as many as fit into memory"
    )
    stacking: Literal["auto", "measured", "yes", "no"] = setting(
        "auto",
        "fused engine: train clients as one stack; on a CPU auto decides by a rule, measured by "
        "timing both ways",
    )
    cuda_graphs: bool = setting(
        True, "fused engine on a GPU: record a training step as a CUDA graph and replay it"
    )
    workers: str = setting(
        "0",
        "fused engine: processes that share the clients, by Ray: a number, or auto = one a GPU, "
        "else one a core; 0 = none",
    )
    worker_block: int = setting(
        0, "workers: clients that are trained and moved together; 0 = a sixteenth of all clients"
    )
    client_states: Literal["auto", "device", "disk"] = setting(
        "auto",
        "fused engine: where client states are kept between rounds; disk = in `out`; auto = disk "
        "if they would take a quarter of the free memory",
    )

    def __post_init__(self) -> None:
        check_least(
            self,
            rounds=1,
            seed=0,
            features=1,
            min_replies=1,
            evaluate_every=0,
            checkpoint_every=0,
            max_fused=0,
            worker_block=0,
        )
        if self.workers != "auto" and not self.workers.isdecimal():
            raise ConfigError(
                f"workers must be a number or auto, got {self.workers!r}; 0 means no workers"
            )
        if not 0 < self.fraction_train <= 1:
            raise ConfigError(
                f"fraction_train must be in (0, 1], got {self.fraction_train}; 1 means every "
                "client in every round"
            )
        if not 0 < self.fraction_evaluate <= 1:
            raise ConfigError(
                f"fraction_evaluate must be in (0, 1], got {self.fraction_evaluate}; 1 means to "
                "test every client after the last round"
            )
        check_name(self.model)
        words = {
            "dtype": ("float32", "float64"),
            "stacking": ("auto", "measured", "yes", "no"),
            "client_states": ("auto", "device", "disk"),
        }
        for name, allowed in words.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"{name} must be {', '.join(allowed[:-1])} or {allowed[-1]}, got "
                    f"{getattr(self, name)!r}"
                )
        if self.bf16 and self.dtype != "float32":
            raise ConfigError(
                f"bf16 needs dtype=float32, got dtype={self.dtype}; remove one of the two settings"
            )
        if self.device != "auto":
            self.torch_device()

    @property
    def on_workers(self) -> bool:
        """Return whether workers share the clients."""
        return self.workers == "auto" or int(self.workers) > 0

    def refuse_workers(self, what: str, instead: str) -> None:
        """Raise if workers are asked of something that runs in one process."""
        if self.on_workers:
            raise ConfigError(
                f"{what} trains all clients of a run in one process, got workers={self.workers}; "
                f"leave workers out, and use {instead}"
            )

    def torch_device(self) -> torch.device:
        """Return the device clients train on."""
        device = named_device(self.device)
        if device.type == "cuda" and (
            not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()
        ):
            raise ConfigError(
                f"device {self.device!r} was not found ({torch.cuda.device_count()} CUDA devices "
                "found); use device=cpu"
            )
        return device

    def torch_dtype(self) -> torch.dtype:
        """Return the dtype of parameters and data."""
        return torch.float64 if self.dtype == "float64" else torch.float32


def named_device(name: str) -> torch.device:
    """Return the device called `name`, even if this machine has none; auto = a GPU if present."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}") from None


@dataclass(frozen=True)
class Run:
    """Everything that determines a run's results."""

    method: str
    settings: Settings
    data: DataSettings
    training: Training
    options: Any  # the method's own Config
    limits: Limits = dataclasses.field(default_factory=Limits)
    privacy: Privacy = dataclasses.field(default_factory=Privacy)
    aggregation: Aggregation = dataclasses.field(default_factory=Aggregation)

    def flat(self) -> dict[str, Any]:
        """Return every setting by its name."""
        flat: dict[str, Any] = {"method": self.method}
        shared = (self.settings, self.data, self.training, self.options)
        for group in (*shared, self.limits, self.privacy, self.aggregation):
            flat.update(
                {field.name: getattr(group, field.name) for field in dataclasses.fields(group)}
            )
        return flat

    def instructions(self) -> str:
        """Return the settings a client needs, as JSON: part of every message to it."""
        return self._instructions

    @cached_property
    def _instructions(self) -> str:
        return make_instructions(self.training, self.options)


def make_instructions(training: Training, options: Any) -> str:
    """Return the settings of local training and of the method, as JSON; a recipe's settings only
    where they are not the defaults.
    """
    told = {
        name: value
        for name, value in dataclasses.asdict(training).items()
        if name not in RECIPE or value != RECIPE[name]
    }
    return json.dumps({"training": told, "options": dataclasses.asdict(options)}, sort_keys=True)


PRESET = "preset"  # the key that names a preset
# keys of a run-config and of files beside settings
TAKEN = (
    *(PRESET, "method", "out", "resume", "min_nodes", "wait", "timeout", "tree", "spool", "set"),
)
STRATEGY_GROUPS = (
    "training",
    "options",
    "limits",
    "privacy",
    "aggregation",
)  # groups that a Flower Strategy accepts


def groups(method: str) -> dict[str, type]:
    """Return the settings classes of a run of `method`, by the name of their field in `Run`."""
    row = methods.get(method)
    shared = {"settings": Settings, "data": DataSettings, "training": Training}
    kinds = {**shared, "options": row.config, "limits": Limits, "privacy": Privacy}
    kinds["aggregation"] = Aggregation
    if row.outside is not None:  # a test looks at those of this package
        others = [kind for group, kind in kinds.items() if group != "options"]
        taken = {*TAKEN, *(field.name for kind in others for field in dataclasses.fields(kind))}
        for field in dataclasses.fields(row.config):
            if field.name in taken:
                raise ConfigError(
                    f"method {method!r} has a setting {field.name!r}, which every run has with "
                    "another meaning; rename it"
                )
    return kinds


def names(method: str) -> set[str]:
    """Return the keys that `parse` takes for a method: its settings, and `preset`."""
    return {PRESET} | {
        field.name for kind in groups(method).values() for field in dataclasses.fields(kind)
    }


def parse(
    method: str,
    values: Mapping[str, Any] | None = None,
    among: tuple[str, ...] = (),
) -> Run:
    """Return the run described by `values`, with those of its `preset`, if it names one, and
    defaults for the rest. Texts are converted. With `among`, only settings of these groups are
    allowed.
    """
    kinds, given = groups(method), dict(values or {})
    known = {
        field.name: group
        for group, kind in kinds.items()
        if not among or group in among
        for field in dataclasses.fields(kind)
    }
    start = methods.get(method).start(given.pop(PRESET, None))
    usual = {name: value for name, value in start.items() if name in known}
    chosen: dict[str, dict[str, Any]] = {group: {} for group in kinds}
    for key, value in {**usual, **given}.items():
        name = key.replace("-", "_")
        if name not in known:
            hint = hint_for(name, known, method)
            raise ConfigError(f"method {method!r} has no setting {key!r}; {hint}")
        group = known[name]
        chosen[group][name] = convert(name, value, field_types(kinds[group])[name])
    made = {group: kind(**chosen[group]) for group, kind in kinds.items() if group != "data"}
    # a strategy reads no data: its clients have theirs
    known_data = DataSettings() if among and "data" not in among else None
    made["data"] = known_data or reading_for(made["training"], chosen["data"])
    run = Run(method, **{**made, "data": resolve(made["data"])})
    if run.training.task != "classification" and methods.get(method).client.needs_classes:
        raise ConfigError(f"{method} needs classes, got task={run.training.task}")
    if run.data.calibrated and not among and not methods.get(method).client.one_network:
        raise ConfigError(
            f"the personal model of {method} is more than the network, so it cannot be "
            "calibrated; use calibration=off"
        )
    if why := methods.get(method).client.refuses(run.options, run.training):
        raise ConfigError(f"{method} {why}")
    if why := run.privacy.refuses(methods.get(method), run.options, run.limits, run.training):
        raise ConfigError(why)
    if why := run.aggregation.refuses(methods.get(method), run.privacy, run.limits):
        raise ConfigError(why)
    if run.training.sample_noise or run.training.sample_clip:
        raise ConfigError(
            "sample_noise and sample_clip follow from dp=sample; set dp_noise, dp_clip"
        )
    if among:  # a strategy learns its rounds when it is started
        return run
    return dataclasses.replace(run, training=run.training.lasting(run.settings.rounds))


def convert(name: str, value: Any, hint: Any) -> Any:
    """Return `value` as the type `hint` asks for; texts are read as numbers, true/false or none."""
    if isinstance(hint, types.UnionType):
        if value is None or (isinstance(value, str) and value.lower() == "none"):
            return None
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    kind: type = str if typing.get_origin(hint) is Literal else hint
    try:
        if kind is bool:
            if isinstance(value, str) and value.lower() in ("true", "false", "1", "0", "yes", "no"):
                return value.lower() in ("true", "1", "yes")
            if isinstance(value, bool):
                return value
            raise ValueError
        if isinstance(value, bool) or (
            kind is int and isinstance(value, float) and not value.is_integer()
        ):
            raise ValueError
        return kind(value)
    except (TypeError, ValueError):
        article = {"int": "a whole number", "float": "a number", "bool": "true or false"}.get(
            kind.__name__, "a text"
        )
        raise ConfigError(f"{name} must be {article}, got {value!r}") from None


def convert_fields(kind: type, values: Mapping[str, Any]) -> Any:
    """Return the settings class `kind` with `values`, which come from JSON."""
    hints = field_types(kind)
    if unknown := sorted(set(values) - set(hints)):
        raise ConfigError(
            f"setting {unknown[0]!r} in the server's message is unknown; install the same version "
            "of Bayflower on server and clients"
        )
    return kind(**{name: convert(name, value, hints[name]) for name, value in values.items()})


def describe(method: str, preset: str | None = None) -> list[tuple[str, str, Any, str]]:
    """Return (group, name, default, meaning) of every setting of `method`; with a preset its
    values in place of the defaults.
    """
    usual = methods.get(method).start(preset)
    return [
        (
            group,
            field.name,
            usual.get(field.name, field.default),
            meanings(kind).get(field.name, ""),
        )
        for group, kind in groups(method).items()
        for field in dataclasses.fields(kind)
    ]
