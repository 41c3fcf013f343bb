"""The settings of data: one frozen dataclass, checked before any data are loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import ConfigError
from ..settings import setting

# name -> (samples of the original data set, torchvision's class or "" if only an .npz file works,
# a note to show beside the name)
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
CALIBRATIONS = ("shrunk", "client", "global", "off")
SETS = ("marginal", "class")
CALIBRATION_SETTINGS = ("calibration", "calibration_share", "calibration_rows", "coverage", "sets")


@dataclass(frozen=True)
class DataSettings:
    """The data of each client. They depend on these settings and the seed only."""

    dataset: str = setting(
        "digits",
        "digits, synthetic, mnist, cifar10, … (see `bayflower doctor`), several as A+B, or the "
        "path of an .npz file with x, y and optionally test, client, num_classes",
    )
    data_dir: str = setting(
        "data", "folder of the data sets: <data_dir>/<dataset>.npz, or torchvision's own folders"
    )
    download: bool = setting(False, "download missing data sets with torchvision")
    num_clients: int = setting(10, "number of clients that train")
    new_clients: int = setting(
        0, "number of further clients of the same partition that take part in no round"
    )
    partition: str = setting(
        "dirichlet",
        "how samples are split between clients: dirichlet, iid, pathological, major-minor, "
        "quantity or natural; dataset=synthetic makes its own clients",
    )
    beta: float = setting(
        0.3,
        "concentration of the Dirichlet distribution (partitions dirichlet and quantity); small = "
        "skewed",
    )
    min_size: int = setting(10, "fewest samples a client may have, train and test together")
    classes_per_client: int = setting(2, "partition=pathological: classes of each client")
    samples_per_class: int = setting(
        0, "partition=pathological: samples of each class a client has; 0 = split all samples"
    )
    major_classes: int = setting(2, "partition=major-minor: frequent classes of each client")
    minor_share: float = setting(
        0.2, "partition=major-minor: the share s; major_minor_reading says of what (erratum E-B7)"
    )
    major_minor_reading: str = setting(
        "r1",
        "partition=major-minor: r1 = s is drawn iid from all classes; r2 = s is the share of the "
        "major classes; r3 = of the minor ones",
    )
    samples_per_client: int = setting(
        0, "partition=major-minor: samples of each client; 0 = as many as the data allow"
    )
    test_fraction: float | None = setting(
        None,
        "share of each client's samples used for its test; none = 0.2 (synthetic: 0.3); 0 = the "
        "samples that the data set marks as test",
    )
    validation: float = setting(
        0.0,
        "for tuning: share of each training client's training samples that replaces its test "
        "samples; 0 = use the test samples",
    )
    calibration: str = setting(
        "shrunk",
        "how each client's uncertainty is calibrated on held-out training samples: shrunk (between "
        "its own samples and everyone's, by its size), client, global, or off",
    )
    calibration_share: float = setting(
        0.2, "share of each client's training samples held out for calibration"
    )
    calibration_rows: int = setting(
        500, "cap on the training samples of a client held out for calibration"
    )
    coverage: float = setting(
        0.9, "share of samples whose true class the prediction sets promise to contain"
    )
    sets: str = setting(
        "marginal",
        "what the promise of prediction sets is about: marginal (all samples together) or class "
        "(the samples of each class)",
    )
    keep: float = setting(
        1.0,
        "share of the whole data set that is used, drawn at random before it is split between "
        "clients; 1 = all of it",
    )
    scenario: str = setting(
        "label", "dataset=synthetic: how clients differ: feature, quantity or label"
    )
    nuisance_variance: float = setting(
        9.0,
        "dataset=synthetic: variance s^2 of the 26 directions without information (erratum E-M6)",
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
        _member("calibration", self.calibration, CALIBRATIONS)
        _member("sets", self.sets, SETS)
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
        _at_least("calibration_rows", self.calibration_rows, 1, "; calibration=off holds nothing")
        for name in ("calibration_share", "coverage"):
            if not 0 < getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} must be in (0, 1), got {getattr(self, name)}; calibration=off holds "
                    "no samples out"
                )
        if not 1e-3 <= self.beta <= 1e6:
            raise ConfigError(
                f"beta must be in [0.001, 1000000], got {self.beta}; small means skewed clients, "
                "large means similar ones"
            )
        if not 0 <= self.minor_share <= 1:
            raise ConfigError(f"minor_share must be in [0, 1], got {self.minor_share}")
        if not 0 < self.keep <= 1:
            raise ConfigError(f"keep must be in (0, 1], got {self.keep}; 1 keeps every sample")
        if self.test_fraction is not None and not 0 <= self.test_fraction < 1:
            raise ConfigError(
                f"test_fraction must be in [0, 1), got {self.test_fraction}; 0 means the samples "
                "that the data set marks as test"
            )
        if not 0 <= self.validation < 1:
            raise ConfigError(
                f"validation must be in [0, 1), got {self.validation}; 0 means to test on the "
                "clients' test samples"
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
                "test_fraction must be in (0, 1) for dataset 'digits', got 0; this data set marks "
                "no samples as test"
            )

    @property
    def domains(self) -> tuple[str, ...]:
        """Return the names of the data sets if there are several; () for one."""
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
                f"{self.num_clients}; raise num_clients or name fewer data sets"
            )

    def _check_synthetic(self) -> None:
        if self.partition not in ("dirichlet", "natural"):  # the default, and what it is
            raise ConfigError(
                f"partition must not be set for dataset 'synthetic', got {self.partition!r}; set "
                "scenario instead"
            )
        if self.keep != 1:
            raise ConfigError(
                f"keep must be 1 for dataset 'synthetic', got {self.keep}; its sizes are set by "
                "scenario"
            )
        if self.test_fraction == 0:
            raise ConfigError(
                "test_fraction must be in (0, 1) for dataset 'synthetic', got 0; this data set "
                "marks no samples as test"
            )

    @property
    def calibrated(self) -> bool:
        """Return whether training samples are held out; tuning uses its validation part instead."""
        return self.calibration != "off" and not self.validation

    @property
    def total_clients(self) -> int:
        """Return the number of all clients: training and new."""
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
