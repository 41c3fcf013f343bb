"""Checkpoints of a run: the server's state, the records of its rounds, and the clients' states if
they are in this process.

The file is `<out>/checkpoint.safetensors`, written atomically. Its names, "server/…" and
"client/<k>/…", do not depend on the engine.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from ..config import Limits, Run
from ..data import DataSettings
from ..data.settings import CALIBRATION_SETTINGS, READING_SETTINGS
from ..errors import ConfigError
from ..recipes import RECIPE
from ..recipes.aggregation import WAITING
from ..recipes.secrecy import SECRECY
from ..settings import earlier
from ..tree import Tensors, flatten, unflatten
from . import lease
from .atomic import below, load_tensors, save_tensors
from .records import RoundRecord

FORMAT = "bayflower-run-1"
FILE = "checkpoint.safetensors"
FREE = {
    "rounds",
    "evaluate_every",
    "device",
    "max_fused",
    "workers",
    "worker_block",
    "stacking",
    "cuda_graphs",
    "tf32",
    "bf16",
    "checkpoint_every",
    "client_states",
    "fraction_evaluate",
    "min_replies",
    "data_dir",
    "download",
    "replay",
    *(field.name for field in fields(Limits)),
}  # may differ


# settings that runs of an earlier version did not have
BEFORE = {
    **{
        name: DataSettings.__dataclass_fields__[name].default
        for name in (*CALIBRATION_SETTINGS, *READING_SETTINGS)
    },
    "calibration": "off",
    **RECIPE,
    **SECRECY,
    **WAITING,
    "normalise": "none",
    "robust": "off",
    "head": "",
}


class Checkpoint(NamedTuple):
    """A run after `round`."""

    run: str  # identity of the run: client states are kept under it
    round: int
    config: dict[str, Any]
    server: Tensors
    clients: dict[int, Tensors]  # empty if clients keep their own states
    records: list[RoundRecord]
    faults: list[str]
    # the clients so far (`Roster.memory`); {} if the engine's clients never change
    roster: dict[str, Any] = {}
    # fingerprints of the clients' data (`rounds/prints.py`), if the engine has them
    data: dict[str, Any] = {}
    # aggregation=buffered: by round the earlier server states from which clients still train
    sent: dict[int, Tensors] = {}


def make(
    run: Run,
    name: str,
    round: int,
    server: Any,
    clients: dict[int, Any],
    records: list[RoundRecord],
    faults: list[str],
    roster: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    sent: dict[int, Tensors] | None = None,
) -> Checkpoint:
    """Return the checkpoint of a run after `round`."""
    states = {client: flatten(state) for client, state in clients.items()}
    more = (roster or {}, data or {}, sent or {})
    return Checkpoint(name, round, run.flat(), flatten(server), states, records, faults, *more)


def write(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the checkpoint atomically: a reader sees the old one or this one. Raise if this process
    has lost its lease on the folder.
    """
    lease.check(folder)
    tensors = {f"server/{name}": tensor for name, tensor in checkpoint.server.items()}
    for client, state in checkpoint.clients.items():
        tensors.update({f"client/{client}/{name}": tensor for name, tensor in state.items()})
    for round, state in checkpoint.sent.items():
        tensors.update({f"sent/{round}/{name}": tensor for name, tensor in state.items()})
    facts = {
        "run": checkpoint.run,
        "round": checkpoint.round,
        "config": checkpoint.config,
        "clients": sorted(checkpoint.clients),
        "records": checkpoint.records,
        "faults": checkpoint.faults,
        "roster": checkpoint.roster,
        "data": checkpoint.data,
        "sent": sorted(checkpoint.sent),
    }
    save_tensors(
        folder / FILE, tensors, {"format": FORMAT, "facts": json.dumps(facts)}, sealed=True
    )


def read(folder: Path) -> Checkpoint | None:
    """Return the checkpoint in `folder`, or None if there is none."""
    path = folder / FILE
    if not path.exists():
        return None
    tensors, head = load_tensors(path, FORMAT, "checkpoint")
    facts = json.loads(head["facts"])
    clients = {int(client): below(tensors, f"client/{client}") for client in facts["clients"]}
    records = [RoundRecord(record) for record in facts["records"]]
    server, roster = below(tensors, "server"), facts.get("roster", {})
    # runs from before there was calibration held no samples out; those from before there were
    # recipes had none
    config = {**BEFORE, **facts["config"]}
    return Checkpoint(
        facts["run"],
        facts["round"],
        config,
        server,
        clients,
        records,
        facts["faults"],
        roster,
        facts.get("data", {}),
        {int(round): below(tensors, f"sent/{round}") for round in facts.get("sent", [])},
    )


def to_resume(folder: Path, run: Run) -> Checkpoint:
    """Return the checkpoint from which `run` continues; raise if a setting that affects the results
    differs.
    """
    checkpoint = read(folder)
    if checkpoint is None:
        raise ConfigError(
            f"there is nothing to resume: {folder / FILE} does not exist; start without --resume"
        )
    now = run.flat()
    # a setting that the method did not have then has its default, unless it says otherwise
    before = {one.name: one.default for one in fields(run.options)}
    before |= earlier(run.options) | checkpoint.config
    for key in sorted({*now, *before} - FREE, key=lambda name: (name != "method", name)):
        if now.get(key) != before.get(key):
            was = before.get(key)
            raise ConfigError(
                f"{key} is {now.get(key)!r} but the run in {folder} has {was!r}; use the same "
                "settings, or another --out"
            )
    return checkpoint


def server_state(checkpoint: Checkpoint, kind: type) -> Any:
    """Return the server's state as the NamedTuple `kind`."""
    return unflatten(kind, checkpoint.server)
