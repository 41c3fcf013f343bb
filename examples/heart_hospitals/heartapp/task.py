"""heartapp: thirteen measurements of a patient, is the heart diseased? Four hospitals, each with
its own way of measuring.
"""

from pathlib import Path

import numpy as np
import torch
from torch import nn

HOSPITALS = ("Cleveland", "Hungary", "Switzerland", "VA Long Beach")
WHERE = (
    "get the four processed.*.data files from "
    "https://archive.ics.uci.edu/dataset/45/heart+disease (CC BY 4.0) and run "
    "python get_data.py FOLDER_OF_THE_FILES DATA_DIR"
)


class Net(nn.Module):
    """A perceptron with one logit: the odds of a disease."""

    def __init__(self):
        super().__init__()
        self.base = nn.Sequential(nn.Linear(13, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.out = nn.Linear(8, 1)

    def forward(self, x):
        return self.out(self.base(x))


def patients(data_dir: str, hospital: int):
    """Return the patients of a hospital: heart.npz in `data_dir`, or made-up ones with a line that
    says so.
    """
    path = Path(data_dir) / "heart.npz"
    if path.exists():
        data = np.load(path)
        mine = data["client"] == hospital
        return data["x"][mine], data["y"][mine]
    print(
        f"heart.npz is not in {Path(data_dir).resolve()}: made-up patients are used, the numbers "
        f"mean nothing; {WHERE}"
    )
    draw = np.random.default_rng(hospital)
    x = draw.normal(size=(120, 13)) + 0.5 * hospital
    y = (x[:, 0] + x[:, 3] - hospital > 0).astype(np.int64)
    x[draw.random(x.shape) < 0.1] = np.nan
    return x, y


def load_data(data_dir: str, hospital: int):
    """Return (train, test); missing values are the training median, columns have training mean 0
    and variance 1.
    """
    x, y = patients(data_dir, hospital)
    rows = np.random.default_rng(0).permutation(len(y))
    cut = len(rows) // 5
    train, test = x[rows[cut:]], x[rows[:cut]]
    known = ~np.isnan(train).all(0)
    median = np.where(known, np.nanmedian(np.where(known, train, 0), 0), 0)
    train, test = (np.where(np.isnan(part) | ~known, median, part) for part in (train, test))
    mean, std = train.mean(0), train.std(0) + (train.std(0) == 0)
    train, test = (torch.tensor((part - mean) / std, dtype=torch.float32) for part in (train, test))
    return (train, torch.tensor(y[rows[cut:]])), (test, torch.tensor(y[rows[:cut]]))
