"""The settings of data: one frozen dataclass, checked before any data are loaded."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from ..settings import setting
from . import normalise
from .checks import at_least, domains, generated, is_path, member, names_in, numeric
from .images import LAYOUTS
from .known import CROWD, GENERATED, MEASURED, NATURAL
from .known import DATASETS as DATASETS
from .known import KNOWN as KNOWN
from .npz import Options, is_share

PARTITIONS = ("dirichlet", "iid", "pathological", "major-minor", "quantity", "natural")
CLIENTS = 10  # if their number is not set and the data have no sites
READINGS = ("r1", "r2", "r3")
SCENARIOS = ("feature", "quantity", "label")
CALIBRATIONS = ("shrunk", "client", "global", "off")
SETS = ("marginal", "class")
# how a user's own data are read, and which sites take part
READING_SETTINGS = (
    *("target", "sites", "test", "categorical", "drop", "layout", "white", "image_side"),
    *("new_sites", "leave_out", "targets", "scaling", "split", "time", "train_rows", "server_data"),
)
SPLITS = ("random", "time")
REST = "rest"  # of the data set, beside what `keep` keeps
SCALINGS = ("client", "federation", "none")
CALIBRATION_SETTINGS = ("calibration", "calibration_share", "calibration_rows", "coverage", "sets")


@dataclass(frozen=True)
class DataSettings:
    """The data of each client. They depend on these settings and the seed only."""

    dataset: str = setting(
        "digits",
        "digits, synthetic, crowd, mnist, cifar10, … (see `bayflower doctor`), several as A+B, or "
        "the path of your own data: a .csv, .parquet or .npz file, several files (a pattern, or "
        "separated by commas; one a site), or a folder of images",
    )
    target: str = setting(
        "",
        "your own data: column of the labels; '' = the one called target, label, class, outcome, "
        "diagnosis or y; task=survival: TIME,EVENT; task=labels: several, with commas",
    )
    targets: str = setting(
        "classes", "what targets are: classes, numbers, times or labels; `task` decides"
    )
    scaling: str = setting(
        "client", "who standardises a table's inputs; `input_scale` decides, leave it out"
    )
    sites: str = setting(
        "",
        "your own data: column of the sites; '' = the one called site, client, hospital, centre, "
        "center or clinic; off = none; folder of images: a .csv with columns file and site",
    )
    test: str = setting(
        "",
        "your own data: column that marks test samples, or a file or folder of test samples, or "
        "the share of each client's samples; '' = as test_fraction says",
    )
    categorical: str = setting(
        "", "tables: columns whose numbers are categories, separated by commas"
    )
    drop: str = setting("", "tables: columns to leave out, separated by commas")
    layout: str = setting(
        "auto",
        "arrays of images: NHW, NHWC, NCHW or flat (plain values); auto = found by the shape, "
        "refused if it is unclear",
    )
    white: float | None = setting(
        None,
        "arrays of images: value of a white pixel, scaled to 1 (black, 0, to −1); 0 = values as "
        "they are; none = found by the range, refused if it is unclear",
    )
    image_side: int = setting(
        0,
        "folder of images: side in pixels that images are brought to; 0 = their own size if it is "
        "the same and at most 128, else 64",
    )
    data_dir: str = setting(
        "data", "folder of the data sets: <data_dir>/<dataset>.npz, or torchvision's own folders"
    )
    download: bool = setting(False, "download missing data sets with torchvision")
    num_clients: int = setting(
        0, "number of clients that train; 0 = all sites with partition=natural, else 10"
    )
    new_clients: int = setting(
        0, "number of further clients of the same partition that take part in no round"
    )
    new_sites: str = setting(
        "",
        "partition=natural: sites, by name, that take part in no round and are the new clients; "
        "separated by commas",
    )
    leave_out: str = setting(
        "", "partition=natural: sites, by name, that are not used; separated by commas"
    )
    partition: str = setting(
        "auto",
        "how samples are split between clients: dirichlet, iid, pathological, major-minor, "
        "quantity or natural (by site); auto = natural where your own data have sites (.npz files: "
        "where `sites` is set), else dirichlet; dataset=synthetic makes its own clients",
    )
    beta: float = setting(
        0.3,
        "concentration of the Dirichlet distribution (partitions dirichlet and quantity); small = "
        "skewed",
    )
    min_size: int = setting(
        10,
        "fewest samples a client may have, train and test together; 1 unless set where targets are "
        "no classes",
    )
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
        0,
        "partition=major-minor: samples of each client; 0 = as many as the data allow; "
        "dataset=crowd: 0 = 20",
    )
    test_fraction: float | None = setting(
        None,
        "share of each client's samples used for its test; none = 0.2 (synthetic: 0.3); 0 = the "
        "samples that the data set marks as test",
    )
    split: str = setting(
        "random",
        "which of a client's samples are its test part: random, or time (the last ones by `time`)",
    )
    time: str = setting(
        "", "split=time: column or array that orders a client's samples; '' = as they stand"
    )
    train_rows: int = setting(
        0, "a client trains on its first so many training samples, in the order of split; 0 = all"
    )
    validation: float = setting(
        0.0,
        "for tuning: share of each training client's training samples that replaces its test "
        "samples; 0 = use the test samples",
    )
    calibration: str = setting(
        "shrunk",
        "how each client's uncertainty is calibrated on held-out training samples: shrunk (between "
        "its own samples and everyone's, by its size; numbers with split=time: as global), client, "
        "global, or off",
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
    normalise: str = setting(
        "none",
        "images: (x − mean)/std of each channel: none, client (its own training images), published "
        "(constants of the data set), or MEAN,…/STD,… with one number a channel",
    )
    keep: float = setting(
        1.0,
        "share of the whole data set that is used, drawn at random before it is split between "
        "clients; 1 = all of it",
    )
    server_data: str = setting(
        "",
        "samples without labels that the server has (methods that distil there): an .npz file with "
        "the array x, or rest = what `keep` leaves out of the data set; '' = none",
    )
    scenario: str = setting(
        "label", "dataset=synthetic: how clients differ: feature, quantity or label"
    )
    nuisance_variance: float = setting(
        9.0,
        "dataset=synthetic: variance s^2 of the 26 directions without information (erratum E-M6)",
    )

    def __post_init__(self) -> None:
        self._settle()
        if self.domains:
            domains(self.dataset, self.domains, self.partition, self.num_clients)
        elif self.dataset not in DATASETS and not self.is_path:
            close = difflib.get_close_matches(self.dataset, DATASETS, n=1)
            raise ConfigError(
                f"dataset must be one of {', '.join(DATASETS)}, got {self.dataset!r}; "
                f"{f'did you mean {close[0]!r}? ' if close else ''}a path to "
                "an .npz file, a table (.csv, .parquet) or a folder of images works too"
            )
        self._check_reading()
        numeric(
            self.targets, self.dataset, self.is_path or self.dataset in MEASURED, self.partition
        )
        member("partition", self.partition, (*PARTITIONS, "auto"))
        member("major_minor_reading", self.major_minor_reading, READINGS)
        member("scenario", self.scenario, SCENARIOS)
        member("calibration", self.calibration, CALIBRATIONS)
        member("sets", self.sets, SETS)
        normalise.checked(self.normalise, self.dataset)
        at_least("num_clients", self.num_clients, 0, "; 0 means all sites, or 10")
        at_least("new_clients", self.new_clients, 0, "; 0 means that every client trains")
        least = 2 if self.targets == "classes" else 1
        needs = "; a client needs one sample to train and one to test" if least == 2 else ""
        at_least("min_size", self.min_size, least, needs)
        at_least("train_rows", self.train_rows, 0, "; 0 means all training samples")
        member("split", self.split, SPLITS)
        member("scaling", self.scaling, SCALINGS)
        if self.time and self.split != "time":
            raise ConfigError(f"time is for split=time, got split={self.split}")
        at_least("classes_per_client", self.classes_per_client, 1, "")
        at_least(
            "samples_per_class", self.samples_per_class, 0, "; 0 means that everything is split"
        )
        at_least("major_classes", self.major_classes, 1, "")
        at_least(
            "samples_per_client", self.samples_per_client, 0, "; 0 means as many as the data allow"
        )
        at_least("calibration_rows", self.calibration_rows, 1, "; calibration=off holds nothing")
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
        if self.server_data == REST and self.keep == 1:
            raise ConfigError(
                "server_data=rest is what keep leaves out, and keep=1 leaves nothing; set keep, "
                "e.g. keep=0.8"
            )
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
        if self.dataset in GENERATED:
            generated(self.dataset, self.partition, self.keep, self.test_fraction)
        if self.dataset == CROWD and self.samples_per_client == 1:
            raise ConfigError("samples_per_client must be at least 2, one to train and one to test")
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

    def _settle(self) -> None:
        """Set what follows from other settings: partition and num_clients where no file decides,
        new_clients from the names of new sites.
        """
        if self.partition == "auto" and (not self.is_path or self._plain_npz):
            usual = "dirichlet" if self.targets == "classes" else "iid"
            usual = "natural" if self.dataset in NATURAL else usual
            object.__setattr__(self, "partition", usual)
        by_site = self.partition in ("auto", "natural")
        if (self.new_sites or self.leave_out) and self.partition == "dirichlet" and self.is_path:
            object.__setattr__(self, "partition", "natural")
            by_site = True
        if (self.new_sites or self.leave_out) and not by_site:
            raise ConfigError(
                f"new_sites and leave_out need partition=natural, got {self.partition!r}"
            )
        if self.new_sites:
            number = len(names_in(self.new_sites))
            if self.new_clients not in (0, number):
                raise ConfigError(
                    f"new_clients must be {number}, the number of new_sites, got "
                    f"{self.new_clients}; leave it out"
                )
            object.__setattr__(self, "new_clients", number)
        made = self.dataset in ("digits", *GENERATED) or self.domains
        if self.num_clients == 0 and (made or not by_site):
            object.__setattr__(self, "num_clients", CLIENTS)

    def _check_reading(self) -> None:
        member("layout", self.layout, LAYOUTS)
        at_least("image_side", self.image_side, 0, "; 0 means that it is chosen by the images")
        if self.white is not None and not 0 <= self.white < math.inf:
            raise ConfigError(f"white must be at least 0 and finite, got {self.white}")
        if not self.is_path:
            own = ("sites", "test", "categorical", "drop")
            for name in own if self.dataset in MEASURED else ("target", *own):
                if getattr(self, name) and not (name == "test" and is_share(self.test)):
                    raise ConfigError(
                        f"{name} is for your own data, a file or a folder; dataset "
                        f"{self.dataset!r} takes none"
                    )
        if self.test and self.test_fraction is not None:
            raise ConfigError("give test or test_fraction, not both")
        if is_share(self.test) and not 0 < float(self.test) < 1:
            raise ConfigError(
                f"test must be a share in (0, 1), a column or a file, got {self.test}"
            )

    @property
    def is_path(self) -> bool:
        """Return whether the data set is a user's own: a file, several, or a folder."""
        return self.dataset not in DATASETS and is_path(self.dataset)

    @property
    def _plain_npz(self) -> bool:
        """Return whether the data set is one .npz file of which no array is named as sites."""
        return self.dataset.endswith(".npz") and not self.sites and not self.several

    @property
    def several(self) -> bool:
        """Return whether the data set is written as several files."""
        text = self.dataset
        return self.is_path and any(mark in text for mark in "*?[,") and not Path(text).exists()

    def options(self) -> Options:
        """Return how a user's own data are to be read."""
        names = ("target", "test", "categorical", "drop", "layout", "white", "image_side", "time")
        unseen = ",".join(filter(None, [self.new_sites, self.leave_out]))
        return Options(
            site=self.sites,
            unseen=unseen,
            kind=self.targets,
            **{name: getattr(self, name) for name in names},
        )

    @property
    def domains(self) -> tuple[str, ...]:
        """Return the names of the data sets if there are several; () for one."""
        return tuple(self.dataset.split("+")) if "+" in self.dataset and not self.is_path else ()

    @property
    def calibrated(self) -> bool:
        """Return whether training samples are held out; tuning uses its validation part instead."""
        return self.calibration != "off" and not self.validation

    @property
    def calibrated_with(self) -> str:
        """Return `calibration` as it is done. Rows of a block in time share their drift, which is
        another one in the next block: so by time, intervals of numbers are made with everyone's.
        """
        drifts = self.split == "time" and self.targets == "numbers"
        return "global" if drifts and self.calibration == "shrunk" else self.calibration

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
        if self.test:
            return float(self.test) if is_share(self.test) else 0.0
        return default if self.test_fraction is None else self.test_fraction
