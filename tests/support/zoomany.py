"""Many kinds of networks: layers of torch one by one, and networks that people bring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from zoo import CLASSES, RANDOM, WORDS, Case, Transformer

from bayflower.data.vision import import_torchvision

PICTURE, SERIES, TEXT = (3, 8, 8), (5, 6), (6,)
NORMS = nn.utils.parametrizations


class Series(nn.Module):
    """A recurrent network on numbers (samples, times, features), and its last output."""

    def __init__(self, kind: Any, first: bool = True, **more: Any) -> None:
        super().__init__()
        self.body = kind(6, 4, batch_first=first, **more)
        wide = self.body.proj_size or 4
        self.out = nn.Linear(wide * (2 if self.body.bidirectional else 1), 5)
        self.first, self.fc = first, nn.Linear(5, CLASSES)

    def forward(self, x):
        y, _ = self.body(x if self.first else x.transpose(0, 1))
        return self.fc(torch.tanh(self.out(y[:, -1] if self.first else y[-1])))


class Stepped(nn.Module):
    """A recurrent network as a loop over its times."""

    def __init__(self, kind: Any, **more: Any) -> None:
        super().__init__()
        self.cell, self.out, self.fc = kind(6, 4, **more), nn.Linear(4, 5), nn.Linear(5, CLASSES)

    def forward(self, x):
        state = None
        for time in x.unbind(1):
            state = self.cell(time, state)
        last = state[0] if isinstance(state, tuple) else state
        return self.fc(torch.tanh(self.out(last)))


class Distances(nn.Module):
    """Radial basis functions."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(7, 12))
        self.out, self.fc = nn.Linear(7, 5), nn.Linear(5, CLASSES)

    def forward(self, x):
        return self.fc(self.out(torch.exp(-0.1 * torch.cdist(x, self.centres))))


class Attends(nn.Module):
    """Multi-head attention by itself, with weights that are asked for."""

    def __init__(self, **more: Any) -> None:
        super().__init__()
        self.body = nn.MultiheadAttention(6, 2, batch_first=True, **more)
        self.out, self.fc = nn.Linear(6, 5), nn.Linear(5, CLASSES)

    def forward(self, x):
        y, weights = self.body(x, x, x)
        return self.fc(torch.tanh(self.out(y.mean(1) + weights.sum((1, 2))[:, None])))


class Own(nn.Module):
    """Attention as people write it today: a function, masked to the past."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.three = nn.Embedding(WORDS, 8), nn.Linear(8, 24)
        self.norm, self.out, self.fc = nn.RMSNorm(8), nn.Linear(8, 6), nn.Linear(6, CLASSES)

    def forward(self, x):
        x = self.words(x.long())
        q, k, v = self.three(self.norm(x)).unflatten(-1, (2, 12)).transpose(1, 2).chunk(3, -1)
        y = nn.functional.scaled_dot_product_attention(
            q, k, v, dropout_p=0.1 if self.training else 0.0, is_causal=True
        )
        return self.fc(torch.relu(self.out((x + y.transpose(1, 2).flatten(-2))[:, -1])))


class Text(nn.Module):
    """Words, two LSTM layers with dropout between them, the last output."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 5, padding_idx=0)
        self.body = nn.LSTM(5, 6, 2, batch_first=True, dropout=0.2)
        self.drop, self.out, self.fc = nn.Dropout(0.2), nn.Linear(6, 5), nn.Linear(5, CLASSES)

    def forward(self, x):
        y, _ = self.body(self.words(x.long()))
        return self.fc(torch.relu(self.out(self.drop(y[:, -1]))))


class Bag(nn.Module):
    """A bag of words."""

    def __init__(self, mode: str, padding: int | None = None) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(WORDS, 6, mode=mode, padding_idx=padding)
        self.out, self.fc = nn.Linear(6, 5), nn.Linear(5, CLASSES)

    def forward(self, x):
        return self.fc(torch.tanh(self.out(self.words(x.long()))))


class Table(nn.Module):
    """An FT-transformer: one token a column, a token that reads them all, dropout everywhere."""

    def __init__(self, columns: int = 12, wide: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(columns, wide) * 0.3)
        self.bias = nn.Parameter(torch.randn(columns, wide) * 0.3)
        self.reads = nn.Parameter(torch.randn(1, 1, wide) * 0.3)
        layer = nn.TransformerEncoderLayer(
            wide, 2, 12, 0.1, nn.functional.gelu, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.out, self.fc = nn.LayerNorm(wide), nn.Linear(wide, 5), nn.Linear(5, CLASSES)

    def forward(self, x):
        tokens = x[..., None] * self.weight + self.bias
        tokens = torch.cat([self.reads.expand(len(x), -1, -1), tokens], 1)
        return self.fc(torch.relu(self.out(self.norm(self.body(tokens)[:, 0]))))


class Viewed(nn.Module):
    """Two convolutions with pooling and a `view`, as in torch's first tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
        self.pool = nn.MaxPool2d(2, 2)
        self.out, self.fc = nn.Linear(24, 5), nn.Linear(5, CLASSES)

    def forward(self, x):
        x = self.pool(torch.relu(self.conv1(x)))
        x = self.pool(torch.relu(self.conv2(x)))
        return self.fc(torch.relu(self.out(x.view(-1, 24))))


def pictures(*layers: Callable[[], nn.Module], channels: int = 6) -> Callable[[], nn.Module]:
    """Return a network of a convolution, `layers`, pooling and two linear layers."""
    return lambda: nn.Sequential(
        nn.Conv2d(3, 6, 3),
        *(layer() for layer in layers),
        nn.Tanh(),
        nn.AdaptiveAvgPool2d((2, 3)),
        nn.Flatten(),
        nn.Linear(channels * 6, 5),
        nn.Linear(5, CLASSES),
    )


def seen(name: str, **more: Any) -> Callable[[], nn.Module]:
    """Return a network of torchvision."""
    return lambda: getattr(import_torchvision().models, name)(
        weights=None, num_classes=CLASSES, **more
    )


def narrow_convnext() -> nn.Module:
    """ConvNeXt-Tiny's blocks and stochastic depth, with a sixth of its channels."""
    kind = import_torchvision().models.convnext
    wide = (16, 32, 64, 128)
    blocks = [
        kind.CNBlockConfig(size, after, number)
        for size, after, number in zip(wide, (*wide[1:], None), (3, 3, 9, 3), strict=True)
    ]
    return kind.ConvNeXt(blocks, stochastic_depth_prob=0.2, num_classes=CLASSES)


def narrow_vit() -> nn.Module:
    return import_torchvision().models.VisionTransformer(
        16, 8, 2, 2, 16, 24, dropout=0.1, attention_dropout=0.1, num_classes=CLASSES
    )


def narrow_swin() -> nn.Module:
    return import_torchvision().models.SwinTransformer(
        [2, 2],
        8,
        [2, 2],
        [2, 4],
        [2, 2],
        dropout=0.1,
        attention_dropout=0.1,
        stochastic_depth_prob=0.2,
        num_classes=CLASSES,
    )


LAYERS: dict[str, Case] = {
    "lstm": Case(lambda: Series(nn.LSTM, num_layers=2, bidirectional=True, dropout=0.2), SERIES),
    "lstm-time-first": Case(lambda: Series(nn.LSTM, False, proj_size=3, bias=False), SERIES),
    "gru": Case(lambda: Series(nn.GRU, False, num_layers=2, dropout=0.3), SERIES),
    "gru-two-ways": Case(lambda: Series(nn.GRU, bidirectional=True, bias=False), SERIES),
    "rnn": Case(lambda: Series(nn.RNN, num_layers=2, nonlinearity="relu"), SERIES),
    "lstm-cell": Case(lambda: Stepped(nn.LSTMCell), SERIES),
    "gru-cell": Case(lambda: Stepped(nn.GRUCell), SERIES),
    "rnn-cell": Case(lambda: Stepped(nn.RNNCell, bias=False, nonlinearity="relu"), SERIES),
    "distances": Case(Distances, (12,)),
    "attention": Case(Attends, SERIES),
    "attention-of-functions": Case(Own, TEXT, WORDS),
    "transformer": Case(lambda: Transformer(0.0), TEXT, WORDS),
    "transformer-time-first": Case(
        lambda: Transformer(0.1, False, norm_first=True, activation="gelu"), TEXT, WORDS
    ),
    "bag-mean": Case(lambda: Bag("mean", 0), TEXT, WORDS),
    "bag-max": Case(lambda: Bag("max"), TEXT, WORDS),
    "norms": Case(
        lambda: nn.Sequential(
            nn.LayerNorm(SERIES), nn.Flatten(), nn.Linear(30, 8), nn.RMSNorm(8), nn.Linear(8, 4)
        ),
        SERIES,
    ),
    "group-norm": Case(pictures(lambda: nn.GroupNorm(2, 6)), PICTURE),
    "instance-norm": Case(
        pictures(lambda: nn.InstanceNorm2d(6, affine=True, track_running_stats=True)), PICTURE
    ),
    "viewed": Case(Viewed, PICTURE),
    "depthwise": Case(
        pictures(
            lambda: nn.Conv2d(6, 6, 3, padding="same", dilation=2, groups=6),
            lambda: nn.Conv2d(6, 6, 3, padding=1, padding_mode="reflect"),
        ),
        PICTURE,
    ),
    "transposed": Case(
        pictures(lambda: nn.ConvTranspose2d(6, 4, 3, stride=2, output_padding=1), channels=4),
        PICTURE,
    ),
    "conv1d": Case(
        lambda: nn.Sequential(
            nn.Conv1d(5, 6, 3, padding=1),
            nn.PReLU(6),
            nn.AdaptiveMaxPool1d(2),
            nn.Flatten(),
            nn.Linear(12, 5),
            nn.Linear(5, CLASSES),
        ),
        SERIES,
    ),
    "conv3d": Case(
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, 3)),
            nn.Conv3d(1, 4, (2, 3, 3)),
            nn.Dropout3d(0.2),
            nn.AdaptiveAvgPool3d((1, 2, 2)),
            nn.Flatten(),
            nn.Linear(16, 5),
            nn.Linear(5, CLASSES),
        ),
        PICTURE,
    ),
    "weight-norm": Case(
        lambda: nn.Sequential(
            NORMS.weight_norm(nn.Conv2d(3, 4, 3), dim=None),
            nn.Flatten(),
            NORMS.weight_norm(nn.Linear(144, 5)),
            nn.Linear(5, 5),
            nn.Linear(5, CLASSES),
        ),
        PICTURE,
    ),
    "spectral-norm": Case(
        lambda: nn.Sequential(
            nn.Flatten(),
            NORMS.spectral_norm(nn.Linear(192, 5)),
            nn.Linear(5, 5),
            nn.Linear(5, CLASSES),
        ),
        PICTURE,
    ),
}
BROUGHT: dict[str, Case] = {
    "resnet18": Case(seen("resnet18"), (3, 40, 40), layer="fc"),
    "mobilenet": Case(seen("mobilenet_v3_small"), (3, 40, 40)),
    "shufflenet": Case(seen("shufflenet_v2_x0_5"), (3, 64, 64), layer="fc"),
    "squeezenet": Case(seen("squeezenet1_1"), (3, 24, 24), head="classifier"),
    "convnext": Case(narrow_convnext, (3, 32, 32), layer="classifier.2"),
    "vit": Case(narrow_vit, (3, 16, 16), layer="heads.head"),
    "swin": Case(narrow_swin, (3, 16, 16), layer="head"),
    "text-lstm": Case(Text, TEXT, WORDS),
    "text-transformer": RANDOM["transformer"],
    "ft-transformer": Case(Table, (12,)),
}
