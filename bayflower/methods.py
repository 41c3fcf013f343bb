"""The table of methods: name → server half, client half, paper. A new method is two files, one row
here, and one test.

Halves are imported on demand, so that looking at the table costs nothing.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import ConfigError

PAPER = "paper"  # the preset with the values of a method's paper

if TYPE_CHECKING:
    from .contract import ClientHalf, ServerHalf


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
    defaults: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> type:
        """Return the class of the method's settings."""
        return import_module(f"bayflower.strategies.{self.stem}").Config

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
        return import_module(f"bayflower.strategies.{self.stem}").Server

    @property
    def client(self) -> type[ClientHalf]:
        """Return the client half."""
        return import_module(f"bayflower.clients.{self.stem}").Client


ROWS = (
    Method(
        "fedmap",
        "fedmap",
        "FedMAP",
        "Zhang et al. 2024, arXiv 2405.19000v1",
        "personal MAP models under a shared Gaussian prior, evidence-weighted",
    ),
    Method(
        "pfedvmp",
        "pfedvmp",
        "PFedVMP",
        "Personalized Federated Learning via Variational Message Passing",
        "shared base, private head, Gaussian messages about each class's features",
    ),
    Method(
        "pfedvmp-avg",
        "pfedvmp",
        "PFedVMP-avg",
        "the same, ablation",
        "pFedVMP whose class centroids are plain means over clients",
        {"centroid": "mean"},
    ),
    Method(
        "fedbps",
        "fedbps",
        "FedBPS",
        "Luo and Kuruoglu 2024, arXiv 2402.16091",
        "the most uncertain weights are personal, the others averaged; uncertainty by Laplace "
        "approximations",
    ),
    Method(
        "metavd",
        "metavd",
        "MetaVD",
        "Jeon et al. 2023, NeurIPS",
        "client-wise dropout posteriors from a hypernetwork, on FedAvg, Reptile, MAML or PerFedAvg",
    ),
    Method(
        "vd",
        "metavd",
        "VD",
        "the same, ablation",
        "one dropout posterior for all clients, averaged",
        {"posterior": "global"},
    ),
    Method(
        "ensemblevd",
        "metavd",
        "EnsembleVD",
        "the same, ablation",
        "one dropout posterior a client, without a hypernetwork",
        {"posterior": "own"},
    ),
    Method(
        "fednp",
        "fednp",
        "FedNP",
        "Federated Neural Propagation 2023, AAAI",
        "a Gaussian over a latent by expectation propagation regularises the classifier",
    ),
    Method(
        "fedavg",
        "fedavg",
        "FedAvg",
        "McMahan et al. 2017, AISTATS",
        "one global model, averaged by sample count",
    ),
    Method(
        "fedavg-ft",
        "fedavg",
        "FedAvg-FT",
        "McMahan et al. 2017, AISTATS",
        "FedAvg, fine-tuned on the client's data before each test",
        {"finetune_epochs": 5},
    ),
    Method(
        "fedprox",
        "fedprox",
        "FedProx",
        "Li et al. 2020, MLSys",
        "FedAvg with a proximal term in the local loss",
    ),
    Method(
        "reptile",
        "reptile",
        "Reptile",
        "Nichol et al. 2018, arXiv 1803.02999",
        "FedAvg with a server rate, and some steps of adaptation before each test",
    ),
    Method(
        "maml",
        "maml",
        "MAML",
        "Finn et al. 2017, ICML",
        "an initialisation from which a few steps adapt; second-order meta-gradients",
    ),
    Method(
        "perfedavg",
        "perfedavg",
        "PerFedAvg",
        "Fallah et al. 2020, NeurIPS",
        "MAML without second derivatives (HF-MAML)",
    ),
    Method(
        "snip",
        "snip",
        "SNIP",
        "Lee et al. 2019, ICLR",
        "one layer pruned once by connection sensitivity, on any of MetaVD's bases",
    ),
    Method(
        "scaffold",
        "scaffold",
        "SCAFFOLD",
        "Karimireddy et al. 2020, ICML",
        "FedAvg whose steps are corrected by control variates",
    ),
    Method(
        "moon", "moon", "MOON", "Li et al. 2021, CVPR", "FedAvg with a contrastive term on features"
    ),
    Method(
        "feddyn",
        "feddyn",
        "FedDyn",
        "Acar et al. 2021, ICLR",
        "dynamic regularisation: local optima become those of the whole",
    ),
    Method(
        "feddc",
        "feddc",
        "FedDC",
        "Gao et al. 2022, CVPR",
        "each client learns its drift and takes it off before averaging",
    ),
    Method(
        "fedpa",
        "fedpa",
        "FedPA",
        "Al-Shedivat et al. 2021, ICLR",
        "posterior samples of each client give its step",
    ),
    Method(
        "fedla",
        "fedla",
        "FedLA",
        "Liu et al. 2021, arXiv 2102.01936",
        "online Laplace approximations, multiplied on the server",
    ),
    Method(
        "fedbn",
        "fedbn",
        "FedBN",
        "Li et al. 2021, ICLR",
        "FedAvg with private normalisation layers",
    ),
    Method(
        "fedper",
        "fedper",
        "FedPer",
        "Arivazhagan et al. 2019, arXiv 1912.00818",
        "shared base, private head, trained jointly",
    ),
    Method(
        "fedrep",
        "fedrep",
        "FedRep",
        "Collins et al. 2021, ICML",
        "shared base, private head, trained in turn",
    ),
    Method(
        "lgfedavg",
        "lgfedavg",
        "LG-FedAvg",
        "Liang et al. 2020, arXiv 2001.01523",
        "private feature extractor, shared head",
    ),
    Method("local", "local", "Local", "(baseline)", "individual training, nothing shared"),
)
DEFAULT = ROWS[0].name  # the method of an app whose run-config names none
METHODS: dict[str, Method] = {row.name: row for row in ROWS}


def get(name: str) -> Method:
    """Return the row called `name`."""
    if name not in METHODS:
        close = difflib.get_close_matches(name.lower(), METHODS, n=1, cutoff=0.6)
        hint = f"did you mean {close[0]!r}? Known: " if close else "known: "
        raise ConfigError(f"method {name!r} is not known; {hint}{', '.join(METHODS)}")
    return METHODS[name]
