"""What a person can set about data: one frozen dataclass, checked when it is made, before anything
is loaded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import ConfigError
from ..settings import setting

# name -> (samples of the original data set, torchvision's class or "" where only an .npz is known,
# what must be said about it)
KNOWN: dict[str, tuple[int, str, str]] = {
    "mnist": (70_000, "MNIST", ""),
    "fmnist": (70_000, "FashionMNIST", ""),
    "cifar10": (60_000, "CIFAR10", ""),
    "cifar100": (60_000, "CIFAR100", ""),
    "emnist": (131_600, "EMNIST", ""),
    "emnist47": (
        18_800,
        "",
        "EMNIST-47 subset: 47 classes drawn from the test split of EMNIST ByMerge, not the "
        "official Balanced split",
    ),
    "officecaltech": (2_533, "", "Office-Caltech-10 at 64x64: a stand-in for Office-31"),
    "heart": (920, "", ""),
    "femnist": (805_263, "", ""),
    "celeba": (202_599, "", ""),
}
DATASETS = ("digits", "synthetic", *KNOWN)
PARTITIONS = ("dirichlet", "iid", "pathological", "major-minor", "quantity", "natural")
READINGS = ("r1", "r2", "r3")
SCENARIOS = ("feature", "quantity", "label")


@dataclass(frozen=True)
class DataSettings:
    """Which data each client has. Equal settings and seed give equal clients, whatever else
    changes.
    """

    dataset: str = setting(
        "digits",
        "a name in DATASETS, several as A+B, or an .npz file with x, y and optionally test, "
        "client, num_classes",
    )
    data_dir: str = setting(
        "data", "where data sets lie: <data_dir>/<dataset>.npz, or torchvision's own folders"
    )
    download: bool = setting(False, "let torchvision fetch what is not there")
    num_clients: int = setting(10, "clients that train")
    new_clients: int = setting(
        0, "clients that never train; they are drawn from the same partition"
    )
    partition: str = setting(
        "dirichlet", "a name in PARTITIONS; `synthetic` brings its own clients"
    )
    beta: float = setting(
        0.3,
        "concentration of the Dirichlet distribution (partitions dirichlet and quantity); small = "
        "skewed",
    )
    min_size: int = setting(10, "fewest samples of a client, train and test together")
    classes_per_client: int = setting(2, "pathological: classes a client has")
    samples_per_class: int = setting(
        0, "pathological: samples a client has of each of its classes; 0 = split everything"
    )
    major_classes: int = setting(2, "major-minor: frequent classes of a client")
    minor_share: float = setting(0.2, "major-minor: the share s of erratum E-B7")
    major_minor_reading: str = setting(
        "r1",
        "major-minor: r1 s is iid over all classes; r2 s is the share of the majors; r3 of the "
        "minors",
    )
    samples_per_client: int = setting(
        0, "major-minor: samples of every client; 0 = as many as the data allow"
    )
    test_fraction: float | None = setting(
        None,
        "of each client's samples; None = 0.2, synthetic 0.3; 0 = those the data set marks as test",
    )
    validation: float = setting(
        0.0,
        "share of each training client's training part that takes the place of its test part; 0 = "
        "none (for tuning)",
    )
    keep: float = setting(1.0, "share of the pooled data set that is used, drawn uniformly")
    scenario: str = setting("label", "synthetic: a name in SCENARIOS")
    nuisance_variance: float = setting(
        9.0, "synthetic: variance s^2 of the 26 directions without information (erratum E-M6)"
    )

    def __post_init__(self) -> None:
        if self.domains:
            self._check_domains()
        elif self.dataset not in DATASETS and not self.dataset.endswith(".npz"):
            raise ConfigError(
                f"dataset must be one of {', '.join(DATASETS)}, got {self.dataset!r}; a path to "
                "an .npz file with arrays x and y works too"
            )
        _member("partition", self.partition, PARTITIONS)
        _member("major_minor_reading", self.major_minor_reading, READINGS)
        _member("scenario", self.scenario, SCENARIOS)
        _at_least("num_clients", self.num_clients, 1, "")
        _at_least("new_clients", self.new_clients, 0, "; 0 means that every client trains")
        _at_least(
            "min_size", self.min_size, 2, "; a client needs one sample to train and one to test"
        )
        _at_least("classes_per_client", self.classes_per_client, 1, "")
        _at_least(
            "samples_per_class", self.samples_per_class, 0, "; 0 means that everything is split"
        )
        _at_least("major_classes", self.major_classes, 1, "")
        _at_least(
            "samples_per_client", self.samples_per_client, 0, "; 0 means as many as the data allow"
        )
        if not 1e-3 <= self.beta <= 1e6:
            raise ConfigError(
                f"beta must be in [0.001, 1000000], got {self.beta}; small is skewed, large is even"
            )
        if not 0 <= self.minor_share <= 1:
            raise ConfigError(f"minor_share must be in [0, 1], got {self.minor_share}")
        if not 0 < self.keep <= 1:
            raise ConfigError(f"keep must be in (0, 1], got {self.keep}; 1 keeps every sample")
        if self.test_fraction is not None and not 0 <= self.test_fraction < 1:
            raise ConfigError(
                f"test_fraction must be in [0, 1), got {self.test_fraction}; 0 takes the samples "
                "marked as test"
            )
        if not 0 <= self.validation < 1:
            raise ConfigError(
                f"validation must be in [0, 1), got {self.validation}; 0 tests on the test part"
            )
        if not (self.nuisance_variance >= 0 and math.isfinite(self.nuisance_variance)):
            raise ConfigError(
                f"nuisance_variance must be at least 0 and finite, got {self.nuisance_variance}"
            )
        if self.dataset == "synthetic":
            self._check_synthetic()
        if self.dataset == "digits" and self.partition == "natural":
            raise ConfigError(
                "partition must not be 'natural' for dataset 'digits', which has no natural "
                "clients; try 'dirichlet'"
            )
        if self.dataset == "digits" and self.test_fraction == 0:
            raise ConfigError(
                "test_fraction must be in (0, 1) for dataset 'digits', got 0; it marks no samples "
                "as test"
            )

    @property
    def domains(self) -> tuple[str, ...]:
        """Return the data sets of a federation of several; () of one."""
        return (
            tuple(self.dataset.split("+"))
            if "+" in self.dataset and not self.dataset.endswith(".npz")
            else ()
        )

    def _check_domains(self) -> None:
        names = self.domains
        if unknown := [name for name in names if name not in KNOWN]:
            raise ConfigError(
                f"dataset must be names joined by +, each one of {', '.join(KNOWN)}, got "
                f"{unknown[0]!r} in {self.dataset!r}"
            )
        if len(set(names)) < len(names):
            raise ConfigError(f"dataset must name each data set once, got {self.dataset!r}")
        if self.partition not in ("dirichlet", "natural", "iid"):
            raise ConfigError(
                "partition must be dirichlet, natural or iid for several data sets, got "
                f"{self.partition!r}"
            )
        if self.num_clients < len(names):
            raise ConfigError(
                f"num_clients must be at least {len(names)}, one for each data set, got "
                f"{self.num_clients}"
            )

    def _check_synthetic(self) -> None:
        if self.partition not in ("dirichlet", "natural"):  # the default, and what it is
            raise ConfigError(
                f"partition must be left out for dataset 'synthetic', got {self.partition!r}; set "
                "scenario instead"
            )
        if self.keep != 1:
            raise ConfigError(
                f"keep must be 1 for dataset 'synthetic', got {self.keep}; its sizes are set by "
                "scenario"
            )
        if self.test_fraction == 0:
            raise ConfigError(
                "test_fraction must be in (0, 1) for dataset 'synthetic', got 0; it marks no "
                "samples as test"
            )

    @property
    def total_clients(self) -> int:
        """Return the number of clients that are made: those that train and the new ones."""
        return self.num_clients + self.new_clients

    @property
    def fraction(self) -> float:
        """Return the share of a client's samples that are its test part; 0 means those marked as
        test.
        """
        default = 0.3 if self.dataset == "synthetic" else 0.2
        return default if self.test_fraction is None else self.test_fraction


def _member(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def _at_least(name: str, value: int, least: int, remedy: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}{remedy}")
    if value < least:
        raise ConfigError(f"{name} must be at least {least}, got {value}{remedy}")
