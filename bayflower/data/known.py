"""Data sets that are known by name."""

from __future__ import annotations

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
    "radon": (12_573, "", ""),
    "election88": (11_566, "", ""),
    "parkinson": (5_875, "", ""),
    "brca": (1_088, "", ""),
    "wisdm": (5_418, "", ""),
    "femnist": (805_263, "", ""),
    "celeba": (202_599, "", ""),
}
CROWD = "crowd"  # made-up clients, made when they are needed
GENERATED = ("synthetic", CROWD)
DATASETS = ("digits", *GENERATED, *KNOWN)
# those whose targets are no classes, and the task they are for
MEASURED = {"radon": "regression", "parkinson": "regression", "brca": "survival"}
# those whose clients are people or places: partition=auto is natural
NATURAL = ("radon", "election88", "parkinson", "brca", "wisdm")
