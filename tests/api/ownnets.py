"""Networks as a user has them in a module: text (whole numbers) and torchvision's ResNet-18."""

from __future__ import annotations

import torch
from torch import nn

from bayflower.data.vision import import_torchvision

WORDS = 30


class Lstm(nn.Module):
    """An LSTM over words."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(WORDS, 8), nn.LSTM(8, 12, batch_first=True)
        self.fc = nn.Linear(12, num_classes)

    def forward(self, x):
        return self.fc(self.lstm(self.words(x))[0][:, -1])


class Transformer(nn.Module):
    """A transformer over words, with dropout."""

    def __init__(self, num_classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.places = nn.Parameter(torch.zeros(input_shape[0], 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.fc = nn.Linear(16, num_classes)

    def forward(self, x):
        return self.fc(self.body(self.words(x) + self.places).mean(1))


def resnet18(num_classes: int) -> nn.Module:
    """torchvision's ResNet-18."""
    return import_torchvision().models.resnet18(num_classes=num_classes)
