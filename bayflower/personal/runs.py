"""Personal models from the folder of a run: of a client that took part, or of a new client with its
own data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..config import Run, parse
from ..data import (
    ClientData,
    Scaling,
    Source,
    called,
    client_scaling,
    hold_out,
    load_client,
    load_federation,
    names,
    preparation,
    read_alike,
    read_numbered,
    rng,
    source_of,
    table_of,
)
from ..data.identity import shown, whose
from ..data.moments import apply, read_scaling, ready
from ..errors import ConfigError
from ..files import checkpoint, place
from ..files.store import DiskStore
from ..files.texts import read_json
from ..fused.disk import DiskBank
from ..networks.model import Batch
from ..privacy import budget
from ..rounds import prints, solo, spread
from ..rounds.calibrated import load_spread, load_total, take_home
from ..rounds.halves import Halves, halves_for
from ..tree import Tensors, flatten, take, unflatten
from .made import FORMAT, Kept, batch_of, keep

CHANGED = (
    "the client's data are not those of the run (changed, or rounded differently on this machine), "
    "so tests and calibration may rest on samples that the model was trained on; restore the data "
    "and export again"
)


class Opened(NamedTuple):
    """A run as its checkpoint left it."""

    folder: Path
    run: Run
    halves: Halves
    checkpoint: checkpoint.Checkpoint
    server: Any
    differing: Sequence[int] = ()  # training clients whose data are not those of the run


def open_run(folder: Path | str, data_dir: str = "") -> Opened:
    """Return the run in `folder`, or the only one below it; its data are made again from its
    settings.
    """
    folder = place.the_run(Path(folder))
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
    halves = halves_for(run, federation)
    server = checkpoint.server_state(found, halves.server.state_type)
    seen = ready(federation, halves.client.training.input_scale)
    return Opened(folder, run, halves, found, server, prints.differing(seen, found.data))


def export(
    folder: Path | str,
    client: int | str,
    into: Path | str,
    formats: Sequence[str] = ("safetensors", "pt2"),
    data_dir: str = "",
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write the personal model that a client, by its number or name, had at the end of the run in
    `folder`; return its card. Another client's model is replaced with `overwrite` only.
    """
    opened, into = open_run(folder, data_dir), Path(into)
    number = number_of(opened, client)
    there = read_json(into / "card.json").get("client", number)
    if there != number and not overwrite:
        raise ConfigError(
            f"{into} holds the personal model of client {there}; choose another folder, or "
            "--overwrite"
        )
    return export_one(opened, number, into, formats)


def number_of(opened: Opened, client: int | str) -> int:
    """Return the number of a client that is given by its number or name."""
    text, settings = str(client), opened.run.data
    if text.isdecimal():  # a number that is too large is refused with its data
        return int(text)
    sites = [shown(site) for site in names(settings, opened.run.settings.seed).sites]
    if len(found := whose(text, dict(enumerate(sites)))) == 1:
        return found[0]
    some = ", ".join([*sites[:10], *("…",) * (len(sites) > 10)])
    known = f" and the names {some}" if some else ""
    raise ConfigError(
        f"there is no client {text!r}; clients have the numbers 0 to "
        f"{settings.total_clients - 1}{known}"
    )


def export_one(
    opened: Opened, client: int, into: Path, formats: Sequence[str] = ("safetensors",)
) -> dict[str, Any]:
    """Write the personal model of one client of an opened run; return its card."""
    settings, seed = opened.run.data, opened.run.settings.seed
    data, known = ready_client(opened, load_client(settings, seed, client))
    samples = solo.samples(data, torch.device("cpu"), opened.run.settings.torch_dtype())
    state = None if client >= settings.num_clients else client_state(opened, client)
    found = kept(opened, client, samples, state, known, settings.dataset)
    words = called(names(settings, seed), client)
    changed = client in opened.differing or (opened.differing and client >= settings.num_clients)
    remark = CHANGED if changed else ""
    found = found._replace(remark=remark, **words)
    return keep(into, described(found, source_of(settings)), formats)


def ready_client(opened: Opened, data: ClientData) -> tuple[ClientData, Scaling | None]:
    """Return a client's data as its network sees them, and how they were prepared."""
    settings, seed = opened.run.data, opened.run.settings.seed
    if table_of(settings, seed, data.x_train) is None:
        return data, client_scaling(settings, seed, data.client)
    text = opened.halves.client.training.input_scale
    held = None if data.x_held is None else apply(text, data.x_held)
    data = data._replace(x_train=apply(text, data.x_train), x_test=apply(text, data.x_test))
    return data._replace(x_held=held), read_scaling(text)


def export_all(
    folder: Path | str,
    into: Path | str,
    formats: Sequence[str] = ("safetensors", "pt2"),
    data_dir: str = "",
    overwrite: bool = False,
) -> Iterator[tuple[dict[str, Any], bool]]:
    """Write the personal models of all clients, training and new, to `into`/client-N; yield each
    card, and whether the model was written now. Finished models are left as they are unless
    `overwrite`.
    """
    opened, into = open_run(folder, data_dir), Path(into)
    clients = range(opened.run.data.total_clients)
    done = {} if overwrite else {n: finished(opened, n, into, formats) for n in clients}
    for client in clients:
        if (card := done.get(client)) is not None:
            yield card, False
        else:
            yield export_one(opened, client, into / f"client-{client}", formats), True


def finished(
    opened: Opened, client: int, into: Path, formats: Sequence[str]
) -> dict[str, Any] | None:
    """Return the card of a client's model that is already there in all formats; None if it has yet
    to be written. A model of another run is an error.
    """
    path = into / f"client-{client}" / "card.json"
    card = read_json(path)
    if not card:
        return None
    end = {
        "method": opened.run.method,
        "client": client,
        "round": opened.checkpoint.round,
        "seed": opened.run.settings.seed,
        "dataset": opened.run.data.dataset,
    }
    there = {**{name: card.get(name) for name in end}, "dataset": card["data"]["dataset"]}
    if there != end:
        name = next(name for name in end if there[name] != end[name])
        raise ConfigError(
            f"{path} is of another run ({name} {there[name]}, not {end[name]}); choose another "
            "folder, or --overwrite"
        )
    complete = card.get("format") == FORMAT and set(formats) <= set(card["files"])
    return card if complete else None


def personalise(
    folder: Path,
    data: Path,
    into: Path,
    formats: Sequence[str] = ("safetensors", "pt2"),
    test_fraction: float = 0.2,
    data_dir: str = "",
) -> dict[str, Any]:
    """Write a personal model for a new client, as the method defines it; return its card.

    Its samples are in `data`: an .npz file, or a table or folder like those of the run. A part of
    the training samples is held out for calibration as in the run.
    """
    if not 0 <= test_fraction < 1:
        raise ConfigError(f"test_fraction must be in [0, 1), got {test_fraction}; 0 means no test")
    opened = open_run(folder, data_dir)
    settings = opened.run.data
    like, client = source_of(settings), settings.total_clients
    classes = opened.halves.model.num_classes
    source = (
        read_numbered(data, classes)
        if like is None
        else read_alike(data, like, settings.test, settings.target)
    )
    if not source.measured and int(source.y.max()) >= classes:
        raise ConfigError(
            f"{data} has label {int(source.y.max())}; the federation's models know {classes} "
            f"classes, 0…{classes - 1}"
        )
    order = rng(opened.run.settings.seed, "personalise", client).permutation(len(source.y))
    cut = int(test_fraction * len(order) + 0.5)
    if source.test is not None and source.test.any() and not source.test.all():
        train, test = order[~source.test[order]], order[source.test[order]]
    else:
        train, test = order[cut:], order[:cut]
    held = train[:0]
    if settings.calibrated:
        train, held = hold_out(train, settings.calibration_share, settings.calibration_rows)
    known = preparation(settings, source, source.samples(train))
    if table_of(settings, opened.run.settings.seed, source.samples(train[:1])) is not None:
        known = read_scaling(opened.halves.client.training.input_scale)
    dtype = opened.run.settings.torch_dtype()

    def batch(rows: Any) -> Batch:
        x = source.samples(rows)
        return batch_of(
            torch.as_tensor(known.apply(x) if known else x).to(dtype),
            solo.targets(source.y[rows], torch.device("cpu"), dtype),
        )

    samples = solo.Samples(batch(train), batch(test), batch(held) if len(held) else None)
    shape = tuple(samples.train.x.shape[1:])
    wanted = tuple(opened.halves.model.recipe["input_shape"])
    if shape != wanted:
        raise ConfigError(
            f"{data} has samples of shape {shape}, but the federation's models need {wanted}"
        )
    found = kept(opened, client, samples, None, known, source.name)
    words = called(names(settings, opened.run.settings.seed), client) | {"site": source.name}
    return keep(into, described(found._replace(**words), like or source), formats)


def described(found: Kept, source: Source | None) -> Kept:
    """Return a client with how its data were read."""
    if source is None:
        return found
    return found._replace(
        pixels=source.pixels, columns=source.names.columns, reading=source.reading()
    )


def kept(
    opened: Opened,
    client: int,
    samples: solo.Samples,
    state: Tensors | None,
    known: Scaling | None,
    dataset: str,
) -> Kept:
    """Return the client at the end, adapted as the method does it for a trained client, or for one
    that never trained (no state), with its uncertainty if calibration is on.
    """
    server, half, _, initial = opened.halves
    settings, round = opened.run.settings, opened.checkpoint.round
    broadcast = half.unpack(
        server.broadcast_type, dict(server.pack(server.broadcast(opened.server, client)))
    )
    before = half.init(*initial) if state is None else unflatten(half.state_type, state)
    keys: dict[str, Any] = {"seed": settings.seed, "client": client, "round": round}
    taken: Any = None
    with solo.one_thread():
        adapted = solo.adapt(
            half, before, broadcast, samples.train, "new" if state is None else "finetune", **keys
        )
        if not half.model.task.classes:
            data = opened.run.data
            how = data.calibrated_with if data.calibrated else "off"
            total = load_spread(opened.folder)
            end = (half, adapted, broadcast, samples, total, how, data.coverage)
            taken = spread.take_home(*end)
        elif opened.run.data.calibrated:
            known_sums = load_total(opened.folder)
            parts = (half, adapted, broadcast, samples, known_sums, opened.run.data)
            taken = take_home(*parts, seed=settings.seed, client=client)
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
        taken=taken,
        baseline=baseline_of(opened.folder),
        privacy=budget.for_card(read_json(opened.folder / "result.json").get("privacy"), client),
    )


def baseline_of(folder: Path) -> Tensor | None:
    """Return everyone's baseline of Cox's model from a run's result; None if it has none."""
    final = (read_json(folder / "result.json") or {}).get("final") or {}
    known = (final.get("personal") or {}).get("baseline")
    return torch.tensor(known["cumulative_hazard"], dtype=torch.float64) if known else None


def client_state(opened: Opened, client: int) -> Tensors:
    """Return a client's saved state: from the checkpoint, the fused engine's files, or the client's
    own files under `state`.
    """
    found, half = opened.checkpoint, opened.halves.client
    if client in found.clients:
        return found.clients[client]
    if (opened.folder / "states").is_dir():
        known = (half.init(*opened.halves.initial), torch.device("cpu"), found.round)
        bank = DiskBank(opened.folder / "states", *known)
        try:
            return flatten(take(bank.take([client]), 0))
        finally:
            bank.shut()
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
