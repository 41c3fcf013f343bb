"""Made-up clients without a limit on their number (dataset=crowd): a client's samples are a
function of (seed, client), made when they are needed, for many clients at once.

    x_i       (32,) inputs: sums of four uniform numbers, of variance 1
    W, V_k    (32, 10) everyone's map from inputs to classes, and the deviation of client k
    y_i       argmax over classes of x_i (2 W + V_k) + noise

So clients share something, and each has something of its own. All random numbers are hashes of
whole numbers (`stacked/chance.py`). Scores are sums of whole numbers below 2^53, which every device
adds up without rounding. So the samples have the same bits on a CPU, on a GPU, alone and in a
stack. All clients have as many samples; which of them are for the test follows from their place
alone, because samples of a client are independent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from ..stacked.chance import GAMMA, further, mixed, shifted
from ..tree import upload
from .batches import rng
from .clients import ClientData, Federation
from .parting import hold_out, parted, validated
from .settings import DataSettings
from .source import Names

INPUTS, CLASSES, SIZE = 32, 10, 20
LANE = 65535  # the largest of the four numbers of 16 bits in a word
SCALE = 37837.0  # standard deviation of their sum
FINER = 6  # bits by which maps are coarser than inputs: sums of products stay below 2^53
NOISE = 3000  # of a score; without noise its standard deviation is about three times as large
BLOCK = 8192  # clients made at once
LISTED = 10_000  # clients that a description lists one by one, at most
SAMPLES, LABELS, OWN, SHARED = 1, 2, 3, 4  # streams


class Parts(NamedTuple):
    """Which of a client's samples are for what, by place."""

    train: np.ndarray
    test: np.ndarray
    held: np.ndarray


class Alike(Mapping[int, int]):
    """The number of training samples of each client, which is the same for all."""

    def __init__(self, clients: range, size: int) -> None:
        self.clients, self.size = clients, size

    def __getitem__(self, client: int) -> int:
        if client not in self.clients:
            raise KeyError(client)
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(self.clients)

    def __len__(self) -> int:
        return len(self.clients)


class Crowd(Sequence[ClientData]):
    """Clients whose samples are made when they are asked for."""

    def __init__(self, seed: int, clients: range, size: int, parts: Parts) -> None:
        self.clients, self.size, self.parts = clients, size, parts
        self.seed, self.key = seed, int(rng(seed, "crowd").integers(2**62))

    def __len__(self) -> int:
        return len(self.clients)

    @overload
    def __getitem__(self, place: int) -> ClientData: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[ClientData]: ...

    def __getitem__(self, place: int | slice) -> Any:
        if isinstance(place, slice):
            return Crowd(self.seed, self.clients[place], self.size, self.parts)
        client = self.clients[place]
        x, y = (part[0].numpy() for part in self.samples([client], torch.device("cpu")))
        pieces = [(x[rows], y[rows]) for rows in self.parts]
        held = pieces[2] if len(self.parts.held) else (None, None)
        return ClientData(client, *pieces[0], *pieces[1], *held)

    def sizes(self) -> Alike:
        """Return the number of training samples of each client."""
        return Alike(self.clients, len(self.parts.train))

    def samples(self, clients: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the inputs (C, size, 32), float32, and labels (C, size) of some clients."""
        numbers = upload(np.asarray(clients, np.int64), device)
        found = [made(self.key, some, self.size) for some in numbers.split(BLOCK)]
        return torch.cat([x for x, _ in found]), torch.cat([y for _, y in found])


def made(key: int, clients: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the samples of some clients (whole numbers on their device)."""
    root = torch.tensor(key, device=clients.device)
    own = further(root, clients)
    x = sums(own, SAMPLES, (size, INPUTS))
    shared = sums(root[None], SHARED, (INPUTS, CLASSES)) >> FINER
    maps = 2 * shared + (sums(own, OWN, (INPUTS, CLASSES)) >> FINER)
    scores = torch.bmm(x.double(), maps.double()).long()
    scores = scores + NOISE * sums(own, LABELS, (size, CLASSES))
    # a class's number makes equal scores unequal: which of equal ones argmax gives is not defined
    y = (scores * CLASSES + torch.arange(CLASSES, device=x.device)).argmax(-1)
    return (x.double() / SCALE).float(), y


def sums(keys: Tensor, stream: int, shape: tuple[int, int]) -> Tensor:
    """Return whole numbers (C, *shape): sums of four uniform numbers of 16 bits, of mean 0."""
    count = shape[0] * shape[1]
    place = torch.arange(1, count + 1, device=keys.device) * GAMMA
    words = mixed(further(keys, torch.tensor(stream, device=keys.device))[:, None] + place)
    lanes = [shifted(words, 16 * lane) & LANE if lane else words & LANE for lane in range(4)]
    return (lanes[0] + lanes[1] + lanes[2] + lanes[3] - 2 * LANE).reshape(-1, *shape)


def parts_of(settings: DataSettings, training: bool) -> Parts:
    """Return which samples of a client are for what; `training`: of a client that trains."""
    size = settings.samples_per_client or SIZE
    order = np.arange(size)
    train, test = parted(size, settings.fraction, None, order)
    if settings.validation and training:
        train, test = validated(train, settings.validation, 0, by_time=True)
    train, held = train[: settings.train_rows or None], train[:0]
    if settings.calibrated:
        train, held = hold_out(train, settings.calibration_share, settings.calibration_rows)
    return Parts(train, test, held)


def crowd(settings: DataSettings, seed: int, training: bool = True) -> Crowd:
    """Return the clients that train, or the new ones."""
    trained, total = settings.num_clients, settings.total_clients
    numbers = range(trained) if training else range(trained, total)
    size = settings.samples_per_client or SIZE
    return Crowd(seed, numbers, size, parts_of(settings, training))


def one(settings: DataSettings, seed: int, client: int) -> ClientData:
    """Return the data of one client."""
    training = client < settings.num_clients
    clients = crowd(settings, seed, training)
    return clients[clients.clients.index(client)]


def described(settings: DataSettings, seed: int) -> dict[str, Any]:
    """Return how the clients are made, in JSON types."""
    return {
        "seed": seed,
        "num_clients": settings.num_clients,
        "new_clients": settings.new_clients,
        "test_fraction": settings.fraction,
        "kind": settings.dataset,
        "samples_per_client": settings.samples_per_client or SIZE,
    }


def federation(settings: DataSettings, seed: int) -> Federation:
    """Return all clients, none of them made yet."""
    train = crowd(settings, seed)
    new = crowd(settings, seed, training=False)[: 0 if settings.validation else None]
    assert isinstance(new, Crowd)
    sizes: dict[str, list[int]] = {}
    if len(train) + len(new) <= LISTED:
        for place, name in enumerate(("train_sizes", "test_sizes", "calibration_sizes")):
            sizes[name] = [len(some.parts[place]) for some in (train, new) for _ in some.clients]
        if not settings.calibrated:
            del sizes["calibration_sizes"]
    return Federation(
        clients=train,
        new_clients=new,
        num_classes=CLASSES,
        input_shape=(INPUTS,),
        dataset=settings.dataset,
        partition={**described(settings, seed), **sizes},
        note="",
        names=Names(classes=tuple(map(str, range(CLASSES)))),
    )


def train_sizes(federation: Federation) -> Mapping[int, int]:
    """Return the number of training samples of each client that trains."""
    if isinstance(federation.clients, Crowd):
        return federation.clients.sizes()
    return {data.client: len(data.y_train) for data in federation.clients}


def numbers_of(clients: Sequence[ClientData]) -> Sequence[int]:
    """Return the numbers of some clients."""
    return clients.clients if isinstance(clients, Crowd) else [data.client for data in clients]
