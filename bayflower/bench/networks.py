"""Networks that people bring, at the sizes they have: pictures, text, series and tables. Data are
made in memory; ten clients have 32 samples each, batches of 16.

MetaVD's layer is named where the network has no linear layer with one row a sample but its head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..config import parse
from ..data import ClientData, Federation
from ..data.vision import import_torchvision
from ..engines import Prepared
from ..networks import papers
from ..networks.model import Model
from ..rounds.halves import make_halves
from .races import RACES

CLASSES, WORDS = 10, 1000
MANY, SAMPLES = 10, 32  # clients, and the training samples of each
DROPPING = ("metavd", "vd", "ensemblevd")  # methods with a `dropout_layer`
SETTINGS: dict[str, Any] = {
    "optimizer": "sgd",
    "lr": 0.01,
    "batch_size": 16,
    "local_epochs": 1,
}
PICTURE, TEXT, SERIES, TABLE = (3, 32, 32), (64,), (9, 128), (32,)


@dataclass(frozen=True)
class Brought:
    """A network, and what its samples look like: `words` are whole numbers below it, 0 stands for
    real numbers. `layer` is MetaVD's, if it is not the one that MetaVD finds.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    words: int = 0
    layer: str = ""
    head: str | None = None
    classes: int = CLASSES


class Recurrent(nn.Module):
    """Words, two recurrent layers in both directions, the mean over time."""

    def __init__(self, kind: Callable[..., nn.Module], wide: int = 128) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 64, padding_idx=0)
        self.body = kind(64, wide, 2, batch_first=True, bidirectional=True, dropout=0.2)
        self.out, self.fc = nn.Linear(2 * wide, 64), nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.body(self.words(x.long()))
        return self.fc(torch.relu(self.out(hidden.mean(1))))  # type: ignore[no-any-return]


class TextTransformer(nn.Module):
    """Words and their places, four layers of attention, the mean over time."""

    def __init__(self, wide: int = 128) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, wide), nn.Embedding(TEXT[0], wide)
        layer = nn.TransformerEncoderLayer(wide, 4, 4 * wide, 0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.out, self.fc = nn.Linear(wide, 64), nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[-1], device=x.device)
        hidden = self.body(self.words(x.long()) + self.places(at))
        return self.fc(torch.relu(self.out(hidden.mean(1))))  # type: ignore[no-any-return]


class BagOfWords(nn.Module):
    """The mean of a text's words, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(WORDS, 64, mode="mean")
        self.out, self.fc = nn.Linear(64, 64), nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.out(self.words(x.long()))))  # type: ignore[no-any-return]


class TableTransformer(nn.Module):
    """One token a column and one that reads them all (as the FT-Transformer)."""

    def __init__(self, columns: int = TABLE[0], wide: int = 64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(columns, wide) * 0.3)
        self.bias = nn.Parameter(torch.randn(columns, wide) * 0.3)
        self.reads = nn.Parameter(torch.randn(1, 1, wide) * 0.3)
        layer = nn.TransformerEncoderLayer(
            wide, 4, 2 * wide, 0.1, nn.functional.gelu, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.norm, self.out, self.fc = nn.LayerNorm(wide), nn.Linear(wide, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x[..., None] * self.weight + self.bias
        tokens = torch.cat([self.reads.expand(len(x), -1, -1), tokens], 1)
        read = self.norm(self.body(tokens)[:, 0])
        return self.fc(torch.relu(self.out(read)))  # type: ignore[no-any-return]


class TableMasks(nn.Module):
    """Steps that each look at some of the columns, which a mask chooses (as TabNet), behind
    BatchNorm.
    """

    def __init__(self, columns: int = TABLE[0], wide: int = 32, steps: int = 3) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(columns)
        self.first = nn.Linear(columns, wide)
        self.masks = nn.ModuleList(nn.Linear(wide, columns) for _ in range(steps))
        self.norms = nn.ModuleList(nn.BatchNorm1d(columns) for _ in range(steps))
        self.steps = nn.ModuleList(nn.Linear(columns, 2 * wide) for _ in range(steps))
        self.out, self.fc = nn.Linear(wide, 32), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        going, left = self.first(x), torch.ones_like(x)
        found = torch.zeros_like(going)
        for mask, norm, step in zip(self.masks, self.norms, self.steps, strict=True):
            chosen = torch.softmax(left * norm(mask(going)), -1)
            left = left * (1.3 - chosen)
            going = nn.functional.glu(step(chosen * x), -1)
            found = found + torch.relu(going)
        return self.fc(torch.relu(self.out(found)))  # type: ignore[no-any-return]


class Mixer(nn.Module):
    """Layers that mix patches, then channels (MLP-Mixer)."""

    def __init__(self, wide: int = 96, patches: int = 64, deep: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, wide, 4, stride=4)
        self.norms = nn.ModuleList(nn.LayerNorm(wide) for _ in range(2 * deep))
        self.across = nn.ModuleList(self.two(patches, 2 * patches) for _ in range(deep))
        self.within = nn.ModuleList(self.two(wide, 4 * wide) for _ in range(deep))
        self.out, self.fc = nn.Linear(wide, 64), nn.Linear(64, CLASSES)

    @staticmethod
    def two(width: int, hidden: int) -> nn.Module:
        """Return two linear layers with dropout between them."""
        return nn.Sequential(
            nn.Linear(width, hidden), nn.GELU(), nn.Dropout(0.1), nn.Linear(hidden, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        for at, (across, within) in enumerate(zip(self.across, self.within, strict=True)):
            x = x + across(self.norms[2 * at](x).transpose(1, 2)).transpose(1, 2)
            x = x + within(self.norms[2 * at + 1](x))
        return self.fc(torch.relu(self.out(x.mean(1))))  # type: ignore[no-any-return]


def in_series() -> nn.Module:
    """Return dilated convolutions with normed weights, over the time of nine sensors."""
    norm, layers, before = nn.utils.parametrizations.weight_norm, list[nn.Module](), SERIES[0]
    for dilation in (1, 2, 4, 8):
        layer = nn.Conv1d(before, 64, 3, padding=dilation, dilation=dilation)
        layers += [norm(layer), nn.ReLU(), nn.Dropout1d(0.1)]
        before = 64
    ends = (nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(256, 64), nn.ReLU())
    return nn.Sequential(*layers, *ends, nn.Linear(64, CLASSES))


def of_volumes() -> nn.Module:
    """Return three convolutions over volumes."""
    layers, before = list[nn.Module](), 1
    for channels in (16, 32, 64):
        layers += [nn.Conv3d(before, channels, 3, padding=1), nn.GroupNorm(4, channels), nn.ReLU()]
        layers.append(nn.MaxPool3d(2))
        before = channels
    ends = (nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Dropout(0.3))
    return nn.Sequential(*layers, *ends, nn.Linear(64, CLASSES))


def of_tables() -> nn.Module:
    """Return a perceptron with BatchNorm and dropout."""
    layers, before = list[nn.Module](), TABLE[0]
    for width in (256, 128):
        layers += [nn.Linear(before, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2)]
        before = width
    return nn.Sequential(*layers, nn.Linear(before, CLASSES))


def seen(name: str, **more: Any) -> nn.Module:
    """Return a network of torchvision, without trained weights."""
    made = getattr(import_torchvision().models, name)
    return made(weights=None, num_classes=CLASSES, **more)  # type: ignore[no-any-return]


def small_vit() -> nn.Module:
    """Return a vision transformer with 192 channels and patches of 4×4."""
    kind = import_torchvision().models.VisionTransformer
    sizes = {"num_layers": 6, "num_heads": 3, "hidden_dim": 192, "mlp_dim": 768}
    rest = {"dropout": 0.1, "attention_dropout": 0.1, "num_classes": CLASSES}
    return kind(32, 4, **sizes, **rest)  # type: ignore[no-any-return]


def of_race(name: str, **more: Any) -> Brought:
    """Return the network of a race."""
    race = RACES[name]
    letters = race.classes if name == "shakespeare-lstm" else 0
    return Brought(race.network, race.shape, letters, classes=race.classes, **more)


NETWORKS: dict[str, Brought] = {
    "logistic": of_race("flute-mnist-lr", layer="0"),
    "table-mlp": Brought(of_tables, TABLE),
    "table-masks": Brought(TableMasks, TABLE, layer="out"),
    "table-transformer": Brought(TableTransformer, TABLE),
    "lenet-wide": Brought(partial(papers.NETWORKS["lenet-wide"], PICTURE, CLASSES), PICTURE),
    "cnn": Brought(partial(papers.cnn, (1, 28, 28), CLASSES), (1, 28, 28)),
    "cnn3": Brought(partial(papers.cnn3, PICTURE, CLASSES), PICTURE),
    "pfl-cnn": of_race("pfl-cifar10"),
    "femnist-cnn": of_race("femnist-cnn"),
    "resnet20": Brought(
        partial(papers.NETWORKS["resnet20"], PICTURE, CLASSES), PICTURE, layer="head"
    ),
    "resnet18": Brought(partial(seen, "resnet18"), PICTURE, layer="fc"),
    "mobilenet-v3": Brought(partial(seen, "mobilenet_v3_small"), PICTURE),
    "shufflenet-v2": Brought(partial(seen, "shufflenet_v2_x0_5"), PICTURE, layer="fc"),
    "squeezenet": Brought(partial(seen, "squeezenet1_1"), PICTURE, head="classifier"),
    "efficientnet-b0": Brought(partial(seen, "efficientnet_b0"), PICTURE, layer="classifier.1"),
    "regnet": Brought(partial(seen, "regnet_y_400mf"), PICTURE, layer="fc"),
    "convnext-tiny": Brought(partial(seen, "convnext_tiny"), PICTURE, layer="classifier.2"),
    "swin-tiny": Brought(partial(seen, "swin_t"), PICTURE, layer="head"),
    "vit": Brought(small_vit, PICTURE, layer="heads.head"),
    "mixer": Brought(Mixer, PICTURE),
    "volumes": Brought(of_volumes, (1, 16, 16, 16)),
    "series": Brought(in_series, SERIES),
    "text-bag": Brought(BagOfWords, TEXT, WORDS),
    "text-lstm": Brought(partial(Recurrent, nn.LSTM), TEXT, WORDS),
    "text-gru": Brought(partial(Recurrent, nn.GRU), TEXT, WORDS),
    "text-transformer": Brought(TextTransformer, TEXT, WORDS),
    "letters-lstm": of_race("shakespeare-lstm"),
}


def federation(brought: Brought, sizes: Sequence[int], seed: int, test: int = 4) -> Federation:
    """Return clients with so many training samples, made in memory."""
    draw = np.random.default_rng(seed)

    def part(size: int) -> tuple[np.ndarray, np.ndarray]:
        shape = (size, *brought.shape)
        x = draw.integers(0, brought.words, shape) if brought.words else draw.normal(size=shape)
        return x.astype(np.float32), draw.integers(0, brought.classes, size)

    owners = tuple(ClientData(at, *part(size), *part(test)) for at, size in enumerate(sizes))
    about = {"kind": "made in memory"}
    return Federation(owners, (), brought.classes, brought.shape, "made in memory", about, "")


def prepared(
    name: str,
    method: str,
    values: Mapping[str, Any],
    engine: str = "fused",
    sizes: Sequence[int] = (),
) -> Prepared:
    """Return a run on a network, ready; `values` are settings beside the suite's own. Clients have
    so many training samples each; without `sizes` all have as many.
    """
    brought = NETWORKS[name]
    sizes = sizes or (SAMPLES,) * int(values.get("num_clients", MANY))
    layer = {"dropout_layer": brought.layer} if brought.layer and method in DROPPING else {}
    mine = {key: value for key, value in values.items() if key != "data_dir"}
    run = parse(method, {**SETTINGS, **layer, **mine, "num_clients": len(sizes)})
    model = Model(brought.make, brought.classes, name, brought.head)
    clients = federation(brought, sizes, run.settings.seed)
    return Prepared(run, engine, clients, make_halves(run, brought.shape, brought.classes, model))
