"""The table of methods: name → server half, client half, paper. A new method of this package is two
files, one row here, and one test. A method of another package calls `register`.

Halves are imported on demand, so that looking at the table costs nothing.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from . import plugins
from .baselines import DRIFT, MORE
from .errors import ConfigError
from .plugins import Given, Outside, Table
from .plugins import Method as Method  # a row

# why statistics cannot be added behind masks, or bounded
CLASSES = "it sums counts and matrices of classes, of which a client has some and not others"
STEPS = "it sends steps by client, which a sum would not keep apart"
SQUARES = "it ranks by squares of a client's numbers, which noise would hide"
ROWS = (
    Method(
        "fedmap",
        "fedmap",
        "FedMAP",
        "Zhang et al. 2024, arXiv 2405.19000v1",
        "personal MAP models under a shared Gaussian prior, evidence-weighted",
        unless={
            "weights=sum": "its weights differ by more powers of two than a secure sum can hold",
            "prior=learned": "its sums have no bounds that could be agreed beforehand",
            "prior=full": "its sums have no bounds that could be agreed beforehand",
        },
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
        private_unless={"ranking=balanced": SQUARES},
    ),
    Method(
        "metavd",
        "metavd",
        "MetaVD",
        "Jeon et al. 2023, NeurIPS",
        "client-wise dropout posteriors from a hypernetwork, on FedAvg, Reptile, MAML or PerFedAvg",
        additive=STEPS,
    ),
    Method(
        "vd",
        "metavd",
        "VD",
        "the same, ablation",
        "one dropout posterior for all clients, averaged",
        {"posterior": "global"},
        private="its weights depend on what a client sends",
        unless={"posterior=hyper": STEPS, "posterior=own": STEPS},
    ),
    Method(
        "ensemblevd",
        "metavd",
        "EnsembleVD",
        "the same, ablation",
        "one dropout posterior a client, without a hypernetwork",
        {"posterior": "own"},
        additive=STEPS,
    ),
    Method(
        "fednp",
        "fednp",
        "FedNP",
        "Federated Neural Propagation 2023, AAAI",
        "a Gaussian over a latent by expectation propagation regularises the classifier",
        private=DRIFT,
    ),
    Method(
        "fedavg",
        "fedavg",
        "FedAvg",
        "McMahan et al. 2017, AISTATS",
        "one global model, averaged by sample count",
        in_loss_alone=True,
    ),
    Method(
        "fedavg-ft",
        "fedavg",
        "FedAvg-FT",
        "McMahan et al. 2017, AISTATS",
        "FedAvg, fine-tuned on the client's data before each test",
        {"finetune_epochs": 5},
        in_loss_alone=True,
    ),
    Method(
        "fedprox",
        "fedprox",
        "FedProx",
        "Li et al. 2020, MLSys",
        "FedAvg with a proximal term in the local loss",
        in_loss_alone=True,
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
        "moon",
        "moon",
        "MOON",
        "Li et al. 2021, CVPR",
        "FedAvg with a contrastive term on features",
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
        private="its sums are products of two numbers of a client",
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
        in_loss_alone=True,
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
        in_loss_alone=True,
    ),
    Method(
        "moon-ft",
        "moon",
        "MOON-FT",
        "Li et al. 2021, CVPR",
        "MOON, fine-tuned on the client’s data before each test",
        {"finetune_epochs": 5},
    ),
    Method(
        "fedpa-ft",
        "fedpa",
        "FedPA-FT",
        "Al-Shedivat et al. 2021, ICLR",
        "FedPA, fine-tuned on the client’s data before each test",
        {"finetune_epochs": 5},
    ),
    Method(
        "ditto",
        "ditto",
        "Ditto",
        "Li et al. 2021, ICML",
        "FedAvg, and a personal model tied to the global one",
    ),
    Method(
        "fedproto",
        "fedproto",
        "FedProto",
        "Tan et al. 2022, AAAI",
        "own networks that share nothing but class prototypes",
        private=CLASSES,
    ),
    Method(
        "fedrod",
        "fedrod",
        "FedROD",
        "Chen and Chao 2022, ICLR",
        "a class-balanced shared network, a personal head on top",
    ),
    Method(
        "pfedbayes",
        "pfedbayes",
        "PFedBayes",
        "Zhang et al. 2022, ICML",
        "own Gaussians over weights, an averaged one as prior",
    ),
    Method(
        "pvi",
        "pvi",
        "PVI",
        "Ashman et al. 2022, arXiv 2202.12275",
        "a Gaussian posterior over all weights, one factor a client",
        {"lr": 0.02},
        private=DRIFT,
    ),
    *MORE,
    Method(
        "local",
        "local",
        "Local",
        "(baseline)",
        "individual training, nothing shared",
        additive="it shares nothing",
    ),
)
DEFAULT = ROWS[0].name  # the method of an app whose run-config names none
METHODS = Table(ROWS)


def get(name: str) -> Method:
    """Return the row called `name`."""
    if name not in METHODS:
        if problems := METHODS.problems(name):
            raise ConfigError(f"method {name!r} is not known; {'; '.join(problems)}")
        close = difflib.get_close_matches(name.lower(), METHODS, n=1, cutoff=0.6)
        hint = f"did you mean {close[0]!r}? Known: " if close else "known: "
        raise ConfigError(f"method {name!r} is not known; {hint}{', '.join(METHODS)}")
    return METHODS[name]


def register(
    name: str,
    server: Given,
    client: Given,
    settings: Given | None = None,
    *,
    title: str = "",
    paper: str = "",
    summary: str = "",
    bibtex: str = "",
    defaults: Mapping[str, Any] | None = None,
    ranges: Mapping[str, Any] | None = None,
    additive: bool = False,
) -> Method:
    """Add a method to the table and return its row.

    `server` and `client` are classes of halves, `settings` is the data class of the method's
    settings (default: `Config` beside the server half). Each may be a text "package.module:Class",
    which is imported when it is needed. `title` is the name of its Flower strategy class; `paper`,
    `summary` and `bibtex` are what lists and `bayflower cite` show. `defaults` are settings in
    which this row differs from `settings`; `ranges` is what `bayflower tune` searches. `additive`
    says that `statistic` needs nothing but the broadcast, with the same names for every client:
    then the method can have secure sums.
    """
    module = str(sys._getframe(1).f_globals.get("__name__", ""))
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
        raise ConfigError(
            f"a method's name consists of small letters, digits and hyphens, got {name!r}"
        )
    title = title or "".join(part.capitalize() for part in name.split("-"))
    if not (title.replace("-", "").isidentifier() and title[0].isupper()):
        raise ConfigError(
            f"the title of method {name!r} must be the name of a class, e.g. FedMine, got {title!r}"
        )
    for row in METHODS.rows.values():
        home = row.outside.module if row.outside else "bayflower"
        if row.name == name and home != module:
            raise ConfigError(
                f"method {name!r} of module {module} has the name of a method of {home}; choose "
                "another name"
            )
        if row.name != name and class_name(row.title) == class_name(title):
            raise ConfigError(
                f"method {name!r} has the title of method {row.name!r}; choose another title"
            )
    if bibtex and not re.match(r"\s*@\w+\{[^\s,]+,", bibtex):
        raise ConfigError(f"bibtex of method {name!r} must begin with @kind{{key, as in @misc{{a,")
    own = Method(
        name,
        plugins.text_of(client),
        title,
        paper or "(no paper)",
        summary,
        dict(defaults or {}),
        bibtex,
        dict(ranges or {}),
        Outside(module, server, client, settings),
        additive="" if additive else plugins.UNDECLARED,
    )
    # classes are looked at now, texts when they are needed
    checks: tuple[tuple[Any, Any], ...] = (
        (server, lambda: own.server),
        (client, lambda: own.client),
        (settings, lambda: own.config),
    )
    for given, look in checks:
        if isinstance(given, str):
            continue
        if given is not None or not isinstance(server, str):
            look()
    METHODS.rows[name] = own
    return own


def class_name(title: str) -> str:
    """Return the name of the Flower strategy class of a method's title."""
    return title.replace("-", "")


def handed_on(names: Iterable[str] = ()) -> dict[str, str]:
    """Return the environment in which other processes find all methods that were registered here;
    raise if one of `names` cannot be found there.
    """
    for name in names:
        row = METHODS.get(name)
        if row is not None and row.outside is not None and row.outside.module == "__main__":
            raise ConfigError(
                f"method {name!r} is registered in a script or notebook, which other processes "
                f"cannot import; move it to a module, e.g. {name.replace('-', '_')}.py, and import "
                "that, or use the engine fused or loop"
            )
    outside = [row.outside for row in METHODS.rows.values() if row.outside is not None]
    return plugins.handed_on(tuple(dict.fromkeys(one.module for one in outside)))
