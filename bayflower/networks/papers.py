"""The networks of the papers, each with a feature extractor `base` and a classifier `head`."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..tasks import Task
from .model import Model
from .own import build_own, is_own, num_outputs, taken_apart


def linear(shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return one linear layer."""
    return BaseHead(nn.Flatten(), nn.Linear(math.prod(shape), num_classes))


def mlp(
    shape: tuple[int, ...], num_classes: int, norm: bool = False, single: bool = True
) -> nn.Module:
    """Return FedMAP's perceptron, inputs→32→16→1 (one logit a class if there are more than two),
    optionally with BatchNorm; without `single` two outputs are two.
    """
    outputs = 1 if num_classes == 2 and single else num_classes
    layers: list[nn.Module] = [nn.Flatten()]
    width = math.prod(shape)
    for hidden in (32, 16) if outputs == 1 else (64, 32):
        layers += [nn.Linear(width, hidden), *([nn.BatchNorm1d(hidden)] if norm else []), nn.ReLU()]
        width = hidden
    return BaseHead(nn.Sequential(*layers), nn.Linear(width, outputs))


def cnn(shape: tuple[int, ...], num_classes: int, features: int = 512) -> nn.Module:
    """Return pFedVMP's CNN (its Table 4): two 5×5 convolutions, a feature layer of `features`, a
    linear head.
    """
    channels, height, width = shape
    flat = 64 * (((height - 4) // 2 - 4) // 2) * (((width - 4) // 2 - 4) // 2)
    base = nn.Sequential(
        *(nn.Conv2d(channels, 32, 5), nn.LeakyReLU(0.1), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5), nn.LeakyReLU(0.1), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(flat, features), nn.LeakyReLU(0.1)),
    )
    return BaseHead(base, nn.Linear(features, num_classes))


def cnn3(shape: tuple[int, ...], num_classes: int, maps: int = 64) -> nn.Module:
    """Return MetaVD's CNN: three padded 3×3 convolutions of `maps` maps, each pooled, hidden layers
    of 256 and 128, a linear head.
    """
    layers: list[nn.Module] = []
    for channels in (shape[0], maps, maps):
        layers += [nn.Conv2d(channels, maps, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers.append(nn.Flatten())
    for before, after in ((maps * (shape[1] // 8) * (shape[2] // 8), 256), (256, 128)):
        layers += [nn.Linear(before, after), nn.LeakyReLU(0.1)]
    return BaseHead(nn.Sequential(*layers), nn.Linear(128, num_classes))


def lenet(
    shape: tuple[int, ...],
    num_classes: int,
    maps: tuple[int, int] = (6, 16),
    widths: tuple[int, int] = (120, 84),
) -> nn.Module:
    """Return LeNet-5 with ReLU and max-pooling: two 5×5 convolutions (the first padded by 2), two
    hidden layers, a linear head.
    """
    channels, height, width = shape
    flat = maps[1] * ((height // 2 - 4) // 2) * ((width // 2 - 4) // 2)
    base = nn.Sequential(
        *(nn.Conv2d(channels, maps[0], 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(maps[0], maps[1], 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(
            nn.Flatten(),
            nn.Linear(flat, widths[0]),
            nn.ReLU(),
            nn.Linear(widths[0], widths[1]),
            nn.ReLU(),
        ),
    )
    return BaseHead(base, nn.Linear(widths[1], num_classes))


def resnet(shape: tuple[int, ...], num_classes: int, depth: int = 20) -> nn.Module:
    """Return the CIFAR ResNet of He et al. 2016 with `depth` = 6n + 2 layers: 16, 32, 64 maps, n
    blocks each, shortcuts without weights.
    """
    blocks: list[nn.Module] = [
        nn.Conv2d(shape[0], 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
    ]
    for before, after in ((16, 16), (16, 32), (32, 64)):
        blocks += [Block(before if i == 0 else after, after) for i in range((depth - 2) // 6)]
    model = BaseHead(
        nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten()), nn.Linear(64, num_classes)
    )
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(module.weight)
    return model


def resnet18(shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return ResNet-18 for small images (FedNP): a 3×3 stem without pooling, 64 to 512 maps, two
    blocks each, projected shortcuts.
    """
    blocks: list[nn.Module] = [
        nn.Conv2d(shape[0], 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
    ]
    for before, after in ((64, 64), (64, 128), (128, 256), (256, 512)):
        blocks += [Block(before, after, projected=True), Block(after, after)]
    model = BaseHead(
        nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten()), nn.Linear(512, num_classes)
    )
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


class Block(nn.Module):
    """Two 3×3 convolutions and a shortcut; where the maps double, it drops every other pixel and
    adds maps of zeros, or is projected.
    """

    def __init__(self, before: int, after: int, projected: bool = False) -> None:
        super().__init__()
        self.more, self.stride = after - before, 1 if after == before else 2
        self.conv1, self.norm1 = (
            nn.Conv2d(before, after, 3, self.stride, padding=1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.conv2, self.norm2 = (
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.shortcut: nn.Sequential | None = None
        if projected and self.more:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, self.stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        if self.shortcut is not None:
            x = self.shortcut(x)
        elif self.more:
            x = nn.functional.pad(
                x[..., :: self.stride, :: self.stride],
                (0, 0, 0, 0, self.more // 2, self.more - self.more // 2),
            )
        return torch.relu(y + x)


class BaseHead(nn.Module):
    """A feature extractor `base` and a classifier `head`."""

    def __init__(self, base: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base(x))


# -- the papers' networks, by name ---------------------------------------------------------------
MODELS: dict[str, str] = {
    "auto": "cnn for images of at least 16×16, else mlp",
    "mlp": "perceptron with two hidden layers (FedMAP: 32 and 16 for two classes; 64 and 32 "
    "otherwise)",
    "linear": "one linear layer",
    "mlp-bn": "the same with BatchNorm after each hidden layer",
    "cnn": "two 5×5 convolutions and a 512-feature layer (pFedVMP, Table 4); images of at least "
    "16×16",
    "cnn3": "three 3×3 convolutions of 64 maps, 256 and 128 hidden units (MetaVD); images of at "
    "least 16×16",
    "cnn3-256": "the same with 256 maps, as the authors' code has it for MetaVD and not for what "
    "it is compared with",
    "lenet5": "LeNet-5: convolutions of 6 and 16 maps, 120 and 84 hidden units (FedBPS: MNIST); "
    "images of at least 16×16",
    "lenet-wide": "the same with 64 and 64 maps, 384 and 192 hidden units (FedBPS: CIFAR-10); "
    "images of at least 16×16",
    "resnet18": "ResNet-18 with a 3×3 stem and BatchNorm (FedNP), 11 million weights; images of "
    "at least 16×16",
    **{
        f"resnet{depth}": f"CIFAR ResNet of {depth} layers with BatchNorm (FedBPS); images of at "
        "least 16×16"
        for depth in (20, 32, 44, 56)
    },
}


NETWORKS: dict[str, Callable[[tuple[int, ...], int], nn.Module]] = {
    "mlp": mlp,
    "linear": linear,
    "mlp-bn": partial(mlp, norm=True),
    "cnn": cnn,
    "cnn3": cnn3,
    "cnn3-256": partial(cnn3, maps=256),
    "lenet5": lenet,
    "lenet-wide": partial(lenet, maps=(64, 64), widths=(384, 192)),
    "resnet18": resnet18,
    **{f"resnet{depth}": partial(resnet, depth=depth) for depth in (20, 32, 44, 56)},
}


def without_shift(made: Callable[[], nn.Module]) -> nn.Module:
    """Return the network without the bias of its head."""
    module = made()
    module.get_submodule("head").register_parameter("bias", None)
    return module


def build(
    name: str,
    input_shape: tuple[int, ...],
    num_classes: int,
    features: int = 512,
    head: str = "",
    task: Task | None = None,
) -> Model:
    """Return the model called `name` for inputs of `input_shape`; `features` is the width of the
    cnn's feature layer, `head` names the classifier of a network of one's own. Without a `task` it
    is classification.
    """
    recipe = {
        "name": name,
        "input_shape": list(input_shape),
        "num_classes": num_classes,
        "features": features,
    }
    if is_own(name):
        own = build_own(name, input_shape, num_classes, head, task)
        own.recipe = recipe
        return own
    check_name(name)
    image = len(input_shape) == 3 and min(input_shape[1:]) >= 16
    if name == "auto":
        name = "cnn" if image else "mlp"
    if not name.startswith(("mlp", "linear")) and not image:
        raise ConfigError(
            f"model {name} needs images of at least 16×16, got inputs of shape "
            f"{tuple(input_shape)}; use model=mlp"
        )
    network = partial(cnn, features=features) if name == "cnn" else NETWORKS[name]
    outputs = num_outputs(num_classes, task)
    if task is not None and not task.classes and name.startswith("mlp"):
        network = partial(mlp, norm=name == "mlp-bn", single=False)
    made = partial(network, input_shape, outputs)
    if task is not None and task.shifts:
        made = partial(without_shift, made)
    model = Model(made, num_classes, name, task=task)
    model.recipe = {**recipe, "name": name}
    return model


def check_name(name: str) -> None:
    """Raise unless a network is one of ours, or named as one's own is."""
    if is_own(name):
        taken_apart(name)
    elif name not in MODELS:
        close = difflib.get_close_matches(name, MODELS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(
            f"model must be one of {', '.join(MODELS)}, or package.module:factory for a network "
            f"of your own, got {name!r}{hint}"
        )
