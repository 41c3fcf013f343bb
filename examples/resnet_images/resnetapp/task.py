"""resnetapp: a ResNet of one's own, and pictures dealt out with skewed labels."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.conv1, self.norm1 = (
            nn.Conv2d(before, after, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.conv2, self.norm2 = (
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.short = (
            nn.Conv2d(before, after, 1, stride, bias=False)
            if (before, stride) != (after, 1)
            else nn.Identity()
        )

    def forward(self, x):
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.short(x))


class ResNet(nn.Module):
    """Three stages of one block each; the classifier is `fc`."""

    def __init__(self, classes: int = 10, width: int = 16):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.stages = nn.Sequential(
            Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2)
        )
        self.fc = nn.Linear(4 * width, classes)

    def forward(self, x):
        return self.fc(self.stages(self.stem(x)).mean((2, 3)))


def pictures(data_dir: str):
    """Return all pictures (N, 1, H, W) and labels: Fashion-MNIST from torchvision's files in
    `data_dir`, or scikit-learn's digits.
    """
    if data_dir:
        from bayflower.data.vision import import_torchvision

        try:
            data = import_torchvision().datasets.FashionMNIST(data_dir, download=False)
        except RuntimeError as error:
            raise SystemExit(
                f"no Fashion-MNIST in {data_dir} ({error}); get it with torchvision's "
                "FashionMNIST(..., download=True)"
            ) from None
        return data.data[:, None].float() / 255, data.targets
    from sklearn.datasets import load_digits

    digits = load_digits()
    return torch.tensor(digits.images / 16, dtype=torch.float32)[:, None], torch.tensor(
        digits.target
    )


def load_data(partition_id: int, num_partitions: int, data_dir: str):
    """Return (train, test) of one client: classes are dealt out by a Dirichlet distribution, the
    same on every node.
    """
    x, y = pictures(data_dir)
    draw = np.random.default_rng(0)
    mine = []
    for label in range(10):
        rows = draw.permutation(np.flatnonzero(y.numpy() == label))
        shares = draw.dirichlet(np.full(num_partitions, 0.5))
        mine.append(np.split(rows, (np.cumsum(shares)[:-1] * len(rows)).astype(int))[partition_id])
    rows = np.random.default_rng(partition_id).permutation(np.concatenate(mine))
    cut = max(1, len(rows) // 5)
    return (x[rows[cut:]], y[rows[cut:]]), (x[rows[:cut]], y[rows[:cut]])
