"""More rows of the table of methods (`methods.py`): baselines of the published tables, and what
users of a Bayesian library look for.
"""

from __future__ import annotations

from .plugins import Method

# why statistics cannot be added behind masks, or bounded
DRIFT = "clipping and noise would part its total from the factors that clients keep"
CODES = "its gradients are codes of whole numbers, times a norm"
PRODUCTS = "its sums are products of two numbers of a client"

MORE = (
    Method(
        "fedep",
        "fedep",
        "FedEP",
        "Guo et al. 2023, ICLR",
        "PVI's factors by moment matching",
        private=DRIFT,
    ),
    Method(
        "fedep-ft",
        "fedep",
        "FedEP-FT",
        "Guo et al. 2023, ICLR",
        "FedEP, fine-tuned on the client’s data before each test",
        {"finetune_epochs": 5},
        private=DRIFT,
    ),
    Method(
        "fedsep",
        "fedep",
        "FedSEP",
        "Guo et al. 2023, ICLR",
        "FedEP whose clients share one factor and keep nothing",
        {"ep_sites": "shared"},
        private="its clients need the number of all samples, which a noisy sum does not have",
    ),
    Method(
        "fedpac",
        "fedpac",
        "FedPAC",
        "Xu et al. 2023, ICLR",
        "a base with class prototypes, and for each client a mixture of all heads",
        additive="its server mixes the heads of single clients",
    ),
    Method(
        "pfedbred",
        "pfedbred",
        "PFedBreD",
        "Shi et al. 2023, NeurIPS",
        "personal models around a prior that each client moves itself",
    ),
    Method(
        "pfedme",
        "pfedbred",
        "PFedMe",
        "Shi et al. 2023, NeurIPS; of Dinh et al. (NeurIPS 2020)",
        "personal models tied to the client's copy of the global one",
        {"bred_prior": "none"},
    ),
    Method(
        "fedbe",
        "fedbe",
        "FedBE",
        "Chen and Chao 2021, ICLR",
        "FedAvg, and an ensemble of models around the average, distilled where the server has data",
        private="its sums have squares of a client's numbers",
    ),
    Method(
        "fedpop",
        "fedpop",
        "FedPop",
        "Kotelevskii et al. 2022, NeurIPS",
        "mixed effects: common layers, and heads sampled under a population that is learned",
    ),
    Method(
        "gpfl",
        "gpfl",
        "GPFL",
        "Zhang et al. 2023, ICCV",
        "shared class embeddings steer global and personal features; own heads",
    ),
    Method(
        "fedcp",
        "fedcp",
        "FedCP",
        "Zhang et al. 2023, KDD",
        "a policy splits each feature between the global and the own head",
    ),
    Method(
        "pfedgp",
        "pfedgp",
        "PFedGP",
        "Achituve et al. 2021, NeurIPS",
        "shared features, and Gaussian processes on the client's own data as its classifier",
    ),
    Method(
        "fedala",
        "fedala",
        "FedALA",
        "Zhang et al. 2023, AAAI",
        "each client learns, weight by weight, how much of the global model it starts from",
    ),
    Method(
        "fedivon",
        "fedivon",
        "FedIvon",
        "Pal et al. 2024, arXiv 2411.18385",
        "a Gaussian over all weights by variational online Newton, averaged by precision",
        {"optimizer": "sgd", "lr": 0.01},
        private=PRODUCTS,
    ),
    Method(
        "qlsd",
        "qlsd",
        "QLSD",
        "Vono et al. 2022, AISTATS",
        "samples of the posterior by Langevin steps with quantised gradients",
        private=CODES,
    ),
    Method(
        "qlsd-ft",
        "qlsd",
        "QLSD-FT",
        "Vono et al. 2022, AISTATS",
        "QLSD, its mean fine-tuned on the client’s data before each test",
        {"finetune_epochs": 5},
        private=CODES,
    ),
)
