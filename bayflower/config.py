"""A run's settings: parsed once, checked once, frozen. Unknown keys and wrong types are errors,
never ignored.

The names are one flat space (`--set sigma2=15`, `--run-config "sigma2=15"`): run, data, local
training, and the method's own.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from . import methods
from .contract import Phase
from .data import DataSettings
from .errors import ConfigError
from .maths.optim import Optimizer, OptimizerName
from .networks.papers import MODELS
from .settings import meanings, setting

ENGINES: dict[str, str] = {
    "fused": "all clients of a round trained together, on one GPU or CPU",
    "loop": "clients one after another behind an in-process Flower grid; the reference",
    "ray": "Flower's own simulation, as `flwr run .` does it: many cores, several GPUs, a Ray "
    "cluster",
    "deployment": "a SuperLink and one SuperNode process a client, on loopback",
}


@dataclass(frozen=True)
class Training:
    """How a client trains in one round; the same for every method of a comparison unless set
    otherwise.
    """

    optimizer: OptimizerName = setting(
        "adam", "sgd, adam or rmsprop; its state is fresh in every round"
    )
    lr: float = setting(0.001, "learning rate")
    momentum: float = setting(0.0, "sgd and rmsprop")
    weight_decay: float = setting(0.0, "added to the gradient, times the parameter")
    clip_norm: float = setting(0.0, "largest norm of a gradient; 0 = no clipping")
    batch_size: int = setting(64, "samples in one step")
    local_epochs: int = setting(5, "passes over the local data in a round")
    local_steps: int = setting(0, "if positive: that many steps in a round instead of epochs")
    new_client_epochs: int = setting(
        50, "passes over its data for a client that never trained in the rounds"
    )

    def __post_init__(self) -> None:
        self.make_optimizer()
        for name, least in (
            ("batch_size", 1),
            ("local_epochs", 1),
            ("local_steps", 0),
            ("new_client_epochs", 1),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}")

    def make_optimizer(self) -> Optimizer:
        """Return the optimiser of local training."""
        return Optimizer(self.optimizer, self.lr, self.momentum, self.weight_decay, self.clip_norm)

    def phase(
        self, name: str, epochs: int | None = None, trainable: tuple[str, ...] | None = None
    ) -> Phase:
        """Return a stretch of local training: `epochs`, or what a round has."""
        steps = self.local_steps if epochs is None else 0
        return Phase(
            name,
            self.make_optimizer(),
            self.batch_size,
            0 if steps else (epochs or self.local_epochs),
            steps,
            trainable,
        )


@dataclass(frozen=True)
class Settings:
    """The run itself."""

    rounds: int = setting(50, "rounds of training")
    seed: int = setting(0, "decides partition, initialisation, batches and sampling")
    model: str = setting("auto", "see `bayflower models`")
    features: int = setting(512, "width of the cnn's feature layer")
    fraction_train: float = setting(
        1.0, "share of the clients that take part in a round, drawn anew each time"
    )
    min_replies: int = setting(1, "fewest valid replies of a round; fewer stop the run")
    evaluate_every: int = setting(
        5,
        "rounds between two points of the accuracy curve; the last round is always tested; 0 = "
        "only the last",
    )
    checkpoint_every: int = setting(
        10,
        "rounds between two checkpoints, from which --resume goes on; 0 = none (ray, deployment: "
        "every round)",
    )
    device: str = setting("auto", "cpu, cuda or cuda:N; auto = a GPU if there is one")
    dtype: Literal["float32", "float64"] = setting("float32", "of parameters, data and messages")
    tf32: bool = setting(
        False,
        "let a GPU round the inputs of float32 products to 10 bits: faster, and no longer equal "
        "to a CPU's numbers",
    )
    bf16: bool = setting(
        False,
        "training passes with products and activations of bfloat16; parameters, messages and "
        "tests stay in float32",
    )
    max_fused: int = setting(
        0, "fused engine: most clients trained together; 0 = as many as fit into memory"
    )
    stacking: Literal["auto", "measured", "yes", "no"] = setting(
        "auto", "fused engine: train clients as a stack; on a CPU auto goes by a rule"
    )
    cuda_graphs: bool = setting(
        True, "fused engine on a GPU: record a training step once and replay it"
    )
    client_states: Literal["device", "disk"] = setting(
        "device", "fused engine: where states of clients are kept between rounds; disk = in `out`"
    )

    def __post_init__(self) -> None:
        for name, least in (
            ("rounds", 1),
            ("seed", 0),
            ("features", 1),
            ("min_replies", 1),
            ("evaluate_every", 0),
            ("checkpoint_every", 0),
            ("max_fused", 0),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not 0 < self.fraction_train <= 1:
            raise ConfigError(
                f"fraction_train must be in (0, 1], got {self.fraction_train}; 1 means every "
                "client in every round"
            )
        if self.model not in MODELS:
            raise ConfigError(f"model must be one of {', '.join(MODELS)}, got {self.model!r}")
        words = {
            "dtype": ("float32", "float64"),
            "stacking": ("auto", "measured", "yes", "no"),
            "client_states": ("device", "disk"),
        }
        for name, allowed in words.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"{name} must be {', '.join(allowed[:-1])} or {allowed[-1]}, got "
                    f"{getattr(self, name)!r}"
                )
        if self.bf16 and self.dtype != "float32":
            raise ConfigError(
                f"bf16 goes with dtype=float32, got dtype={self.dtype}; leave one of them out"
            )
        if self.device != "auto":
            self.torch_device()

    def torch_device(self) -> torch.device:
        """Return the device clients train on."""
        device = named_device(self.device)
        if device.type == "cuda" and (
            not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()
        ):
            raise ConfigError(
                f"device {self.device!r} is not there ({torch.cuda.device_count()} CUDA devices "
                "found); use device=cpu"
            )
        return device

    def torch_dtype(self) -> torch.dtype:
        """Return the dtype of parameters and data."""
        return torch.float64 if self.dtype == "float64" else torch.float32


def named_device(name: str) -> torch.device:
    """Return the device of that name, whether it is there or not; auto = a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}") from None


@dataclass(frozen=True)
class Limits:
    """Bounds for peers; `SECURITY.md` says what each protects. The fused engine, which has no
    peers, does not look at them.
    """

    max_faults: int = setting(
        5, "replies in a row that cannot be used after which a client is excluded from the run"
    )
    leave_after: int = setting(
        3, "rounds in a row without a reply after which a client counts as gone; it may come back"
    )
    rejoin_seconds: float = setting(
        90.0,
        "how long a client whose node is lost is waited for before the round goes on without it",
    )
    ask_again_seconds: float = setting(
        120.0,
        "silence after which a node that is online is asked again, then after twice that time; 0 "
        "= never",
    )
    max_message_mb: int = setting(
        2048, "largest content of a reply, in millions of bytes; a larger one is not unpacked"
    )
    max_examples: int = setting(100_000_000, "most training samples that a client may claim")
    max_share: float = setting(
        1.0,
        "largest share of a round's samples (pFedVMP: also of a class's precision) one client may "
        "have; 1 = no limit",
    )
    max_change: float = setting(
        1e4,
        "largest norm of a client's change of the model, as a multiple of 1 + the model's own norm",
    )
    max_precision: float = setting(
        1e6, "largest precision that a client may claim for one number (FedLA, FedNP)"
    )
    max_value: float = setting(1e12, "largest size of any other number in an update")

    def __post_init__(self) -> None:
        for name in ("max_faults", "leave_after", "max_message_mb", "max_examples"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name, none in (("rejoin_seconds", "not to wait"), ("ask_again_seconds", "never")):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{name} must be finite and not negative, got {getattr(self, name)}; 0 means "
                    f"{none}"
                )
        if not 0 < self.max_share <= 1:
            raise ConfigError(
                f"max_share must be in (0, 1], got {self.max_share}; 1 means no limit"
            )
        for name in ("max_change", "max_precision", "max_value"):
            if not 0 < getattr(self, name) <= 1e30:
                raise ConfigError(f"{name} must be in (0, 1e30], got {getattr(self, name)}")


@dataclass(frozen=True)
class Run:
    """Everything that decides a run's numbers."""

    method: str
    settings: Settings
    data: DataSettings
    training: Training
    options: Any  # the method's own Config
    limits: Limits = dataclasses.field(default_factory=Limits)

    def flat(self) -> dict[str, Any]:
        """Return every setting by its name."""
        flat: dict[str, Any] = {"method": self.method}
        for group in (self.settings, self.data, self.training, self.options, self.limits):
            flat.update(
                {field.name: getattr(group, field.name) for field in dataclasses.fields(group)}
            )
        return flat

    def instructions(self) -> str:
        """Return what a client needs to know of training and method, as JSON: it travels with every
        message.
        """
        return make_instructions(self.training, self.options)


def make_instructions(training: Training, options: Any) -> str:
    """Return what a client needs to know, as JSON."""
    return json.dumps(
        {"training": dataclasses.asdict(training), "options": dataclasses.asdict(options)},
        sort_keys=True,
    )


STRATEGY_GROUPS = ("training", "options", "limits")  # what a Flower Strategy takes


def groups(method: str) -> dict[str, type]:
    """Return the settings classes of a run of `method`, by the name of their field in `Run`."""
    return {
        "settings": Settings,
        "data": DataSettings,
        "training": Training,
        "options": methods.get(method).config,
        "limits": Limits,
    }


def parse(
    method: str,
    values: Mapping[str, Any] | None = None,
    among: tuple[str, ...] = (),
) -> Run:
    """Return the run described by `values` (texts are converted), with defaults for the rest; with
    `among` only the settings of these groups may be given.
    """
    row, kinds = methods.get(method), groups(method)
    known = {
        field.name: group
        for group, kind in kinds.items()
        if not among or group in among
        for field in dataclasses.fields(kind)
    }
    chosen: dict[str, dict[str, Any]] = {group: {} for group in kinds}
    for key, value in {**row.defaults, **(values or {})}.items():
        name = key.replace("-", "_")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = (
                f"did you mean {close[0]!r}?"
                if close
                else f"`bayflower settings {method}` lists them"
            )
            raise ConfigError(f"setting {key!r} is not known to method {method!r}; {hint}")
        group = known[name]
        chosen[group][name] = convert(name, value, typing.get_type_hints(kinds[group])[name])
    return Run(method, **{group: kind(**chosen[group]) for group, kind in kinds.items()})


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
    """Return the settings class `kind` with `values`, which came as JSON."""
    hints = typing.get_type_hints(kind)
    if unknown := sorted(set(values) - set(hints)):
        raise ConfigError(
            f"{kind.__qualname__} has no setting {unknown[0]!r}; both sides need the same version "
            "of Bayflower"
        )
    return kind(**{name: convert(name, value, hints[name]) for name, value in values.items()})


def describe(method: str) -> list[tuple[str, str, Any, str]]:
    """Return (group, name, default, meaning) of every setting of `method`; the meaning is what its
    class says of it.
    """
    row = methods.get(method)
    return [
        (
            group,
            field.name,
            row.defaults.get(field.name, field.default),
            meanings(kind).get(field.name, ""),
        )
        for group, kind in groups(method).items()
        for field in dataclasses.fields(kind)
    ]
