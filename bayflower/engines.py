"""One call for every engine: load the data, make the halves, run, write the results."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from . import methods
from .config import ENGINES, Run
from .data import ClientData, Federation, absolute, load_federation
from .data.moments import ready
from .errors import BayflowerError, ConfigError, in_one_line
from .files import lease, place
from .files.checkpoint import Checkpoint
from .files.records import Outcome, Progress
from .files.texts import write_json
from .networks.check import check_fit, check_single
from .networks.own import is_own
from .rounds.calibrated import save_total
from .rounds.halves import Halves, halves_for
from .rounds.rehearsal import rehearsed
from .rounds.result import result
from .rounds.solo import moved, samples

TRIED = 16  # samples of the first client on which a network of one's own is tried


class Prepared(NamedTuple):
    """Everything that was checked before the first round."""

    run: Run
    engine: str
    federation: Federation
    halves: Halves


def prepare(run: Run, engine: str = "fused") -> Prepared:
    """Return the run with its data and halves; raise if any of them is invalid."""
    if engine not in ENGINES:
        raise ConfigError(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}")
    if why := run.aggregation.refuses_engine(engine):
        raise ConfigError(why)
    if engine != "fused" and run.settings.on_workers:
        raise ConfigError(f"workers need engine fused, got {engine}; leave workers out")
    federation = load_federation(run.data, run.settings.seed)
    halves = halves_for(run, federation)
    federation = ready(federation, halves.client.training.input_scale)
    if is_own(run.settings.model):
        dtype = run.settings.torch_dtype()
        tried = moved(for_trial(federation), torch.device("cpu"), dtype)
        check_fit(halves.model, tried)
        if run.data.calibrated:
            check_single(halves.model, tried)
        train = samples(first_of(federation.clients[0]), torch.device("cpu"), dtype).train
        half = halves.client  # made again: it may refuse what was found
        half = type(half)(half.config, half.training, halves.model)
        rehearsed(methods.get(run.method).title, half, halves.server, halves.initial, train)
    return Prepared(run, engine, federation, halves)


def for_trial(federation: Federation) -> np.ndarray:
    """Return samples to try a network with; of whole numbers, first those with the smallest and
    the largest, which an embedding has to know.
    """
    x = federation.clients[0].x_train[:TRIED]
    if x.dtype.kind == "f":
        return x
    parts = [
        part
        for client in (*federation.clients, *federation.new_clients)
        for part in (client.x_train, client.x_test, client.x_held)
        if part is not None and part.size
    ]
    low, high = min(parts, key=np.min), max(parts, key=np.max)
    ends = np.argwhere(low == low.min())[0, 0], np.argwhere(high == high.max())[0, 0]
    return np.concatenate([low[ends[0]][None], high[ends[1]][None], x])


def first_of(data: ClientData) -> ClientData:
    """Return a client's first samples alone, with which a step is tried."""
    few = (array[:TRIED] for array in (data.x_train, data.y_train, data.x_test, data.y_test))
    return ClientData(data.client, *few)


def run_under_flower(
    prepared: list[Prepared],
    given: Mapping[str, Any],
    out: Path,
    port: int,
    resume: bool,
    show: Callable[[dict[str, Any]], None],
    app: Path | None = None,
    folders: Sequence[Path] | None = None,
) -> list[dict[str, Any]]:
    """Return the results of some methods run one after another by Flower's own programs, in one
    app. `folders` are theirs, those that `files.place` gives; one method alone has `out`.
    """
    from .flower.processes import run_app

    first = prepared[0]
    methods.handed_on(one.run.method for one in prepared)  # raises if one cannot be found there
    config = {
        **given,
        "method": ",".join(one.run.method for one in prepared),
        "resume": resume,
        "wait": 120,
    }
    config |= absolute(first.run.data)  # the apps run in other folders
    if first.run.aggregation.replay:
        config["replay"] = str(Path(first.run.aggregation.replay).expanduser().resolve())
    run_app(first.engine, config, first.run.data.total_clients, out, port, show, app)
    found = [out] if len(prepared) == 1 or folders is None else folders
    return [json.loads((folder / "result.json").read_text()) for folder in found]


def train(
    prepared: Prepared,
    given: Mapping[str, Any],
    out: Path,
    progress: Progress,
    resume: Checkpoint | None = None,
    port: int = 0,
) -> dict[str, Any]:
    """Return the result of a run in `out`, on whichever engine; `given` are the settings that were
    given, which Flower's programs read.
    """
    if prepared.engine in ("fused", "loop"):
        return run_to_result(prepared, out, progress, resume)
    (found,) = run_under_flower(
        [prepared],
        given,
        out,
        port,
        resume is not None,
        lambda status: progress(status.get("records", [])),
    )
    return found


def execute(
    prepared: Prepared,
    progress: Progress | None = None,
    out: Path | None = None,
    resume: Checkpoint | None = None,
    seat: Any = None,
) -> Outcome:
    """Return the outcome of a prepared run; checkpoints go to `out`. A `seat` (`fused/beside.py`)
    lets runs of the fused engine train side by side.
    """
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    if prepared.engine not in ("fused", "loop"):
        raise ConfigError(
            f"engine {prepared.engine} runs in separate processes; use run_under_flower"
        )
    run, engine, federation, halves = prepared
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = run.settings.tf32
    if engine == "fused":
        try:
            if run.settings.on_workers:
                from .fused.workers.run import run_workers

                return run_workers(run, federation, halves, progress, out, resume)
            from .fused.run import run_fused

            return run_fused(run, federation, halves, progress, out, resume, seat)
        except torch.linalg.LinAlgError as error:
            raise BayflowerError(
                f"training diverged: a matrix has no decomposition "
                f"({in_one_line(error, 120)}); lower lr or set clip_norm"
            ) from error
    from .flower.loop import run_loop  # needs flwr, which the fused engine does not

    return run_loop(run, federation, halves, progress, out, resume)


def run_to_result(
    prepared: Prepared,
    out: Path | None = None,
    progress: Progress | None = None,
    resume: Checkpoint | None = None,
    overwrite: bool = False,
    seat: Any = None,
) -> dict[str, Any]:
    """Return result.json's content, written to `out`/result.json if given. A folder that holds a
    run is refused unless the run is resumed or to be replaced.
    """
    if out is not None and overwrite:
        place.clear(out)
    elif out is not None and resume is None and place.held(out) is not None:
        raise ConfigError(
            f"{out} holds a run; give another folder, the checkpoint to resume from, or "
            "overwrite=True"
        )
    outcome = execute(prepared, progress, out, resume, seat)
    content = result(prepared.run, prepared.engine, prepared.federation, prepared.halves, outcome)
    if out is not None:
        if outcome.calibrated:
            save_total(out, outcome.calibrated)
        lease.check(out)
        write_json(out / "result.json", content)
    return content
