"""`result.json`: the file other tools rely on."""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Collection, Mapping, Sequence
from importlib import metadata
from typing import Any

import numpy
import torch

from ..config import Run
from ..data import Federation, Identity, identities
from ..data.crowd import LISTED, Crowd
from ..files.records import Outcome
from ..files.texts import finite
from ..tasks.saved import to_json
from ..wire.hello import Summary
from .calibrated import block as block_of
from .halves import Halves
from .refine import missing
from .spread import block as spread_block


def result(
    run: Run, engine: str, federation: Federation | Summary, halves: Halves, outcome: Outcome
) -> dict[str, Any]:
    """Return the content of result.json."""
    views = halves.client.views()
    tested = len(next(iter(outcome.views.values()), ()))
    sampled = 0 < tested < len(federation.clients)
    trained = (
        f"{f'{tested} sampled ones of ' if sampled else ''}"
        f"the {len(federation.clients)} training clients, each on its own test data, after "
        f"round {outcome.rounds[-1]['round'] if outcome.rounds else run.settings.rounds}"
    )
    unseen = (
        f"{len(federation.new_clients)} clients that never trained, each adapted on its own "
        "training data as the method defines"
    )

    task = halves.client.model.task

    def block(tallies: Mapping[int, Any], model: str, clients: str) -> dict[str, Any]:
        return {"model": model, "clients": clients, **task.summarise(tallies)}

    final = {
        view: block(tallies, views[view], trained)
        for view, tallies in outcome.views.items()
        if view in views
    }
    final.setdefault("global", None)  # type: ignore[arg-type]
    # then the personal model is the one after local training; a reader finds it under both names
    if "before" in final:
        final["after"] = final["personal"]
    new = outcome.new_clients.get("personal")
    final["new_clients"] = block(new, views["personal"], unseen) if new else None  # type: ignore[assignment]
    if new and "personal" in final and "accuracy" in final["personal"]:
        final["new_clients"]["gap"] = (
            final["new_clients"]["accuracy"] - final["personal"]["accuracy"]
        )
    settings = run.settings
    known = clients_of(
        federation, settings.seed, {c for one in outcome.views.values() for c in one}
    )
    device = settings.torch_device()
    about = block_of if task.classes else spread_block
    uncertainty = outcome.calibrated and about(
        outcome.calibrated, run.data.calibrated_with, run.data.coverage
    )
    name_rows(known, *final.values(), *(uncertainty or {}).values())
    remarks = [
        halves.client.remark(),
        missing(run),
        untested(federation),
        diverged(outcome.rounds),
        *outcome.remarks,
    ]
    content = {
        "method": run.method,
        "dataset": federation.dataset,
        "note": federation.note,
        "partition": federation.partition,
        "engine": engine,
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"cpu ({platform.machine()})",
        "seed": settings.seed,
        "num_clients": len(federation.clients),
        "num_new_clients": len(federation.new_clients),
        "clients": [one._asdict() for one in known],
        "classes": list(federation.names.classes) or None,
        "columns": list(federation.names.columns) or None,
        "task": to_json(task),
        "model": {"name": halves.model.name, "parameters": halves.model.num_parameters},
        "versions": versions(),
        "config": run.flat(),
        "rounds": [dict(record) for record in outcome.rounds],
        "final": final,
        "uncertainty": uncertainty,
        "privacy": outcome.privacy and dict(outcome.privacy),
        "faults": list(outcome.faults),
        "usage": outcome.usage and dict(outcome.usage),
        "remark": "; ".join(filter(None, remarks)) or None,
    }
    return dict(finite(content))


def untested(federation: Federation | Summary) -> str | None:
    """Return a line on clients that have no test samples."""
    sizes = federation.partition.get("test_sizes", [])
    if not (none := sizes.count(0)):
        return None
    return (
        f"{none} of {len(sizes)} clients have too few samples for a test: they train and get a "
        "model, and no metric counts them"
    )


def diverged(rounds: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a warning if a number of some round is not finite."""
    for record in rounds:
        for name, value in record.items():
            if isinstance(value, float) and not math.isfinite(value):
                return (
                    f"training diverged: {name} is not finite from round {record['round']} on; "
                    "lower lr or set clip_norm"
                )
    return None


def clients_of(
    federation: Federation | Summary, seed: int, tested: Collection[int] | None = None
) -> list[Identity]:
    """Return who the clients of a run are; of very many only those `tested`, if they are given."""
    numbers: list[Sequence[int]] = [
        some.clients
        if isinstance(some, Crowd)
        else [one if isinstance(one, int) else one.client for one in some]
        for some in (federation.clients, federation.new_clients)
    ]
    if tested is not None and len(numbers[0]) > LISTED:
        numbers[0] = sorted(tested)
    return identities(federation.partition, seed, federation.names.sites, *numbers)


def name_rows(known: Sequence[Identity], *blocks: Any) -> None:
    """Write the clients' names into the rows `per_client` of some blocks."""
    names = {one.client: one.name for one in known}
    for block in blocks:
        for row in block.get("per_client", []) if isinstance(block, dict) else []:
            if row["client"] in names:
                row["name"] = names[row["client"]]


def versions() -> dict[str, str]:
    """Return the versions that decide the numbers."""
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
    }
    for package in ("bayflower", "flwr"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = (
                "not installed as a package"
                if package in sys.modules or package == "bayflower"
                else "not installed"
            )
    return found
