"""Workloads of other simulators at their published sizes: the same networks, clients, batches and
numbers of rounds. Only the pictures are made in memory. Each sample's label is drawn for itself, so
that no network learns them all by heart: then some clients' changes are far beyond those of the
others, as they are not with real data at this time, and rounds wait (`fused/ahead.py`).

    name              clients  a round  samples  batch  network
    pfl-cifar10         1,000       50       50     10  two convolutions, dropout, 1.6 M weights
    flute-mnist-lr      1,000       10       60     10  logistic regression
    femnist-cnn         3,400       10      197     20  two convolutions, dropout, 1.2 M weights
    shakespeare-lstm      715       10      100      4  embedding 8, two LSTM layers of 256
    cnn3-10               100       10      369     64  three convolutions (MetaVD), five epochs
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from ..config import parse
from ..data import ClientData, Federation
from ..engines import Prepared
from ..errors import ConfigError
from ..networks.model import Model
from ..networks.papers import cnn3
from ..rounds.halves import make_halves

BANK = 2048  # different pictures; clients have copies of them
LONG = 80  # characters of a sample of text


@dataclass(frozen=True)
class Race:
    """A workload: its data, its network, its training, and who published it with which time."""

    clients: int
    sampled: int  # clients in a round
    rounds: int
    samples: int  # training samples of a client
    shape: tuple[int, ...]
    classes: int
    network: Callable[[], nn.Module]
    settings: Mapping[str, Any]
    rival: str  # who published it, and the time it took there

    def described(self) -> str:
        """Return the sizes, for a table."""
        return (
            f"{self.clients:,} clients, {self.sampled} a round, {self.samples} samples each, "
            f"batch {self.settings['batch_size']}"
        )


def two_convolutions(channels: int, side: int, classes: int) -> nn.Module:
    """Return the network of pfl-research's CIFAR-10 and of FedML's FEMNIST benchmark."""
    flat = 64 * ((side - 4) // 2) ** 2
    return nn.Sequential(
        *(nn.Conv2d(channels, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten()),
        *(nn.Linear(flat, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, classes)),
    )


class Characters(nn.Module):
    """The next character of a text (McMahan et al. 2017)."""

    def __init__(self, known: int = 90, wide: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(known, 8)
        self.lstm = nn.LSTM(8, wide, num_layers=2, batch_first=True)
        self.head = nn.Linear(wide, known)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(x.long()))
        return self.head(hidden[:, -1])  # type: ignore[no-any-return]


def sgd(lr: float, batch: int, epochs: int = 1) -> dict[str, Any]:
    """Return the settings of plain gradient descent."""
    return {"optimizer": "sgd", "lr": lr, "batch_size": batch, "local_epochs": epochs}


RACES: dict[str, Race] = {
    "pfl-cifar10": Race(
        *(1000, 50, 1500, 50, (3, 32, 32), 10, lambda: two_convolutions(3, 32, 10)),
        sgd(0.1, 10),
        "pfl-research: 0.70 s a round on an H200",
    ),
    "flute-mnist-lr": Race(
        *(1000, 10, 100, 60, (784,), 10, lambda: nn.Sequential(nn.Linear(784, 10))),
        sgd(0.03, 10),
        "FLUTE: 95 s on its machine",
    ),
    "femnist-cnn": Race(
        *(3400, 10, 1500, 197, (1, 28, 28), 62, lambda: two_convolutions(1, 28, 62)),
        sgd(0.1, 20),
        "FLUTE: 502 s on its machine",
    ),
    "shakespeare-lstm": Race(
        *(715, 10, 1200, 100, (LONG,), 90, Characters),
        sgd(0.8, 4),
        "FLUTE: 1,310 s on its machine",
    ),
    "cnn3-10": Race(
        *(100, 10, 100, 369, (3, 32, 32), 10, lambda: cnn3((3, 32, 32), 10)),
        sgd(0.01, 64, 5),
        "",
    ),
}


def federation(name: str, data_dir: str, seed: int) -> Federation:
    """Return the clients of a workload."""
    race = RACES[name]
    if name == "shakespeare-lstm":
        owners = speakers(race, Path(data_dir) / "shakespeare.txt", seed)
        note = f"cut from the text into equal clients; {race.described()}"
        return Federation(
            owners, (), race.classes, race.shape, "shakespeare", {"kind": "cut"}, note
        )
    rng = np.random.default_rng(seed)
    bank = rng.standard_normal((BANK, *race.shape), dtype=np.float32)
    owners = tuple(owner(number, race, bank, rng) for number in range(race.clients))
    about = {"kind": "made in memory"}
    return Federation(
        owners, (), race.classes, race.shape, "made in memory", about, race.described()
    )


def owner(number: int, race: Race, bank: np.ndarray, rng: np.random.Generator) -> ClientData:
    """Return a client with pictures of the bank, the last two of which are for its test."""
    x, y = (rng.integers(0, most, race.samples + 2) for most in (len(bank), race.classes))
    return ClientData(number, bank[x[:-2]], y[:-2], bank[x[-2:]], y[-2:])


def speakers(race: Race, file: Path, seed: int) -> tuple[ClientData, ...]:
    """Return clients with equally long pieces of the text; a sample is 80 characters, its class the
    next one.
    """
    if not file.is_file():
        raise ConfigError(f"{file} is not there: the workload needs the plays as one text file")
    text = file.read_text(encoding="utf-8", errors="replace")
    known = {sign: code for code, sign in enumerate(sorted(set(text)))}
    codes = np.array([min(known[sign], race.classes - 1) for sign in text], dtype=np.int64)
    each = len(codes) // race.clients
    wanted = race.samples + 2
    begins = np.linspace(0, each - LONG - 1, wanted).astype(np.int64)
    rng, found = np.random.default_rng(seed), []
    for number in range(race.clients):
        starts = rng.permutation(begins) + number * each
        x = codes[starts[:, None] + np.arange(LONG)].astype(np.float32)
        y = codes[starts + LONG]
        found.append(ClientData(number, x[:-2], y[:-2], x[-2:], y[-2:]))
    return tuple(found)


def prepared(name: str, method: str, values: Mapping[str, Any], engine: str = "fused") -> Prepared:
    """Return a run of a workload, ready; `values` are settings beside the workload's own."""
    race = RACES[name]
    settings = {
        **{key: value for key, value in values.items() if key != "data_dir"},
        **race.settings,
        "num_clients": race.clients,
        "fraction_train": race.sampled / race.clients,
    }
    run = parse(method, settings)
    model = Model(race.network, race.classes, name)
    clients = federation(name, str(values.get("data_dir", "data")), run.settings.seed)
    return Prepared(run, engine, clients, make_halves(run, race.shape, race.classes, model))
