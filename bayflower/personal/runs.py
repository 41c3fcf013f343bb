"""Personal models from the folder of a run: of a client that took part, or of a new client with its
own data.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..config import Run, parse
from ..data import Scaling, client_scaling, load_client, load_federation, read_npz, rng, scaling
from ..errors import ConfigError
from ..files import checkpoint
from ..files.store import DiskStore
from ..fused.bank import DiskBank
from ..networks.model import Batch
from ..rounds import solo
from ..rounds.halves import Halves, make_halves
from ..tree import Tensors, flatten, take, unflatten
from .made import Kept, batch_of, keep


class Opened(NamedTuple):
    """A run as its checkpoint left it."""

    folder: Path
    run: Run
    halves: Halves
    checkpoint: checkpoint.Checkpoint
    server: Any


def open_run(folder: Path, data_dir: str = "") -> Opened:
    """Return the run in `folder`; its data are made again from its settings."""
    found = checkpoint.read(folder)
    if found is None:
        raise ConfigError(
            f"{folder} has no {checkpoint.FILE}; give the --out of a run with checkpoint_every "
            "above 0"
        )
    changes = {"device": "cpu", **({"data_dir": data_dir} if data_dir else {})}
    config = {key: value for key, value in found.config.items() if key != "method"}
    run = parse(found.config["method"], {**config, **changes})
    federation = load_federation(run.data, run.settings.seed)
    halves = make_halves(run, federation.input_shape, federation.num_classes)
    return Opened(
        folder, run, halves, found, checkpoint.server_state(found, halves.server.state_type)
    )


def export(
    folder: Path,
    client: int,
    into: Path,
    formats: Sequence[str] = ("safetensors", "pt2"),
    data_dir: str = "",
) -> dict[str, Any]:
    """Write the personal model that `client` had at the end of the run in `folder`; return its
    card.
    """
    opened = open_run(folder, data_dir)
    settings, seed = opened.run.data, opened.run.settings.seed
    data = load_client(settings, seed, client)
    samples = solo.samples(data, torch.device("cpu"), opened.run.settings.torch_dtype())
    new = client >= settings.num_clients
    state = None if new else client_state(opened, client)
    return keep(
        into,
        kept(
            opened, client, samples, state, client_scaling(settings, seed, client), settings.dataset
        ),
        formats,
    )


def personalise(
    folder: Path,
    data: Path,
    into: Path,
    formats: Sequence[str] = ("safetensors", "pt2"),
    test_fraction: float = 0.2,
    data_dir: str = "",
) -> dict[str, Any]:
    """Write a personal model for a new client whose samples are in the .npz file `data`, as the
    method defines it; return its card.
    """
    if not 0 <= test_fraction < 1:
        raise ConfigError(f"test_fraction must be in [0, 1), got {test_fraction}; 0 means no test")
    opened = open_run(folder, data_dir)
    source, client = read_npz(data), opened.run.data.total_clients
    classes = opened.halves.model.num_classes
    if int(source.y.max()) >= classes:
        raise ConfigError(
            f"{data} has label {int(source.y.max())}; the federation's models know {classes} "
            f"classes, 0…{classes - 1}"
        )
    order = rng(opened.run.settings.seed, "personalise", client).permutation(len(source.y))
    cut = int(test_fraction * len(order) + 0.5)
    if source.test is not None and source.test.any() and not source.test.all():
        parts = order[~source.test[order]], order[source.test[order]]
    else:
        parts = order[cut:], order[:cut]
    table = source.x.ndim == 2
    known = scaling(source.samples(parts[0])) if table else None
    dtype = opened.run.settings.torch_dtype()

    def batch(rows: Any) -> Batch:
        x = source.samples(rows)
        return batch_of(
            torch.as_tensor(known.apply(x) if known else x).to(dtype),
            torch.as_tensor(source.y[rows]),
        )

    samples = solo.Samples(batch(parts[0]), batch(parts[1]))
    shape = tuple(samples.train.x.shape[1:])
    wanted = tuple(opened.halves.model.recipe["input_shape"])
    if shape != wanted:
        raise ConfigError(
            f"{data} has samples of shape {shape}, but the federation's models need {wanted}"
        )
    return keep(into, kept(opened, client, samples, None, known, source.name), formats)


def kept(
    opened: Opened,
    client: int,
    samples: solo.Samples,
    state: Tensors | None,
    known: Scaling | None,
    dataset: str,
) -> Kept:
    """Return the client at the end, adapted as the method does it for a trained client, or for one
    that never trained (no state).
    """
    server, half, _, initial = opened.halves
    settings, round = opened.run.settings, opened.checkpoint.round
    broadcast = half.unpack(
        server.broadcast_type, dict(server.pack(server.broadcast(opened.server, client)))
    )
    before = half.init(*initial) if state is None else unflatten(half.state_type, state)
    keys: dict[str, Any] = {"seed": settings.seed, "client": client, "round": round}
    with solo.one_thread():
        adapted = solo.adapt(
            half, before, broadcast, samples.train, "new" if state is None else "finetune", **keys
        )
    return Kept(
        opened.run.method,
        half,
        adapted,
        broadcast,
        samples,
        **keys,
        new=state is None,
        scaling=known,
        dataset=dataset,
    )


def client_state(opened: Opened, client: int) -> Tensors:
    """Return a client's saved state: from the checkpoint, the fused engine's files, or the client's
    own files under `state`.
    """
    found, half = opened.checkpoint, opened.halves.client
    if client in found.clients:
        return found.clients[client]
    if (opened.folder / "states").is_dir():
        bank = DiskBank(
            opened.folder / "states", half.init(*opened.halves.initial), torch.device("cpu"), 10**8
        )
        return flatten(take(bank.take([client]), 0))
    saved = [
        one
        for one in DiskStore(opened.folder / "state").load(found.run, client)
        if one.round <= found.round
    ]
    if not saved:
        where = opened.folder / "state" / found.run / f"client-{client}"
        raise ConfigError(
            f"the state of client {client} is not in {where}; a client on another machine saves "
            "its personal model there"
        )
    return saved[0].state
