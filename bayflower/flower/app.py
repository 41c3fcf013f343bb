"""Our Flower app: from a run-config to settings, clients and results. `flwr run .` and the engines
ray and deployment use it.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.serverapp import Grid
from threadpoolctl import threadpool_limits

from .. import methods
from ..config import Run, Training, names, parse
from ..data import (
    DataSettings,
    client_scaling,
    describe,
    load_client,
    num_classes,
    raw_client,
    source_of,
    table_of,
)
from ..errors import BayflowerError, ConfigError, in_one_line
from ..files import checkpoint, journal, lease, place
from ..files import status as status_file
from ..files.records import RoundRecord
from ..files.store import DiskStore
from ..files.texts import write_json
from ..networks.model import Model
from ..networks.papers import build
from ..recipes.check import sums_of, told
from ..rounds import prints, solo
from ..rounds.calibrated import save_total
from ..rounds.halves import Halves, make_halves
from ..rounds.refine import refiner_of
from ..rounds.result import clients_of, result
from ..settings import with_pairs
from ..wire.hello import listed
from . import masking, records
from .bundle import APP_KEYS, USUAL
from .client import Site
from .guard import GUARD, raw_parts
from .loop import make_strategy
from .regions.grid import Tree
from .regions.serving import serve_region
from .roster import Membership, Roster
from .strategy import BayflowerStrategy


def methods_of(config: Mapping[str, Any]) -> list[str]:
    """Return the methods that a run-config names, in their order."""
    return [name.strip() for name in str(config.get("method") or methods.DEFAULT).split(",")]


def run_of(config: Mapping[str, Any], method: str) -> Run:
    """Return the settings of `method` in a run-config; settings of other methods of the run are
    ignored.
    """
    known = names(method)
    elsewhere = {key for other in methods.METHODS for key in names(other)}
    given = {
        key.replace("-", "_"): value
        for key, value in config.items()
        if value != "" and key not in APP_KEYS
    }
    texts = shlex.split(str(config.get("set") or ""))
    given = with_pairs(given, texts, "set must be KEY=VALUE KEY=VALUE", "set='sigma2=50'")
    if unknown := sorted(set(given) - elsewhere):
        parse(method, {unknown[0]: given[unknown[0]]})  # raises with a hint
    return parse(method, {key: value for key, value in given.items() if key in known})


def folded(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run-config with the keys that our apps list, and all other settings in `set`. Flower
    rejects keys that an app does not list.
    """
    listed = {*APP_KEYS, *USUAL}
    rest = {key: value for key, value in config.items() if key not in listed}
    found = {key: value for key, value in config.items() if key in listed}
    if rest:
        texts = [shlex.quote(f"{key}={value}") for key, value in sorted(rest.items())]
        found["set"] = " ".join([*([str(config["set"])] if config.get("set") else []), *texts])
    return found


def serve(grid: Grid, config: Mapping[str, Any]) -> None:
    """Run every method of the run-config in turn; results go to `out`/result.json, or
    `out`/METHOD/result.json for several.
    """
    with single_threaded():
        if config.get("spool"):
            serve_region(grid, config)
            return
        in_tree = str(config.get("tree")).lower() == "true"
        serve_all(Tree(grid) if in_tree else grid, config)


def serve_all(grid: Grid, config: Mapping[str, Any]) -> None:
    """Run every method of the run-config; write the outcome to `out`/status.json."""
    names = methods_of(config)
    journal.set_up()
    try:
        out, folders = folders_of(config, names)
    except Exception as error:
        # a finished run keeps its status; whoever started this run has removed an older one
        said = Path(str(config.get("out") or "")) / "status.json"
        if said.is_absolute() and not said.exists():
            report_failure(said, error)
        raise
    status = out / "status.json"
    try:
        roll = None
        for name, folder in folders.items():
            folder.mkdir(parents=True, exist_ok=True)
            with lease.alone_in(folder, lease.SERVING):
                roll = serve_method(grid, config, name, folder, status, roll)
        write_json(status, {"state": "finished", "methods": names})
    except lease.BusyError:
        raise  # the status is that of the run which has the folder
    except Exception as error:
        report_failure(status, error)
        raise


def report_failure(status: Path, error: Exception) -> None:
    """Write why the run failed to `status`, and print where."""
    write_json(
        status,
        {
            "state": "failed",
            "reason": in_one_line(error) or type(error).__name__,
            "kind": type(error).__name__,
        },
    )
    traceback.print_exc()


def folders_of(config: Mapping[str, Any], names: list[str]) -> tuple[Path, dict[str, Path]]:
    """Return `out` and the folders of the methods that are to run: `out` itself for one method,
    OUT/METHOD/seed-S for several, less those that have finished. A run that is there is never
    overwritten: without `out` a new folder is taken, else it is an error.
    """
    out = Path(str(config.get("out") or Path.home() / "bayflower-runs" / "-".join(names)))
    if not out.is_absolute():
        raise ConfigError(
            f"out must be an absolute path, got {str(out)!r}; the ServerApp runs in another folder"
        )
    engine, resume = engine_here(), str(config.get("resume")).lower() == "true"
    if len(names) > 1:
        found = {name: place.place(out, name, run_of(config, name), engine) for name in names}
        there = {name: place.held(folder) for name, folder in found.items()}
        return out, {
            name: folder
            for name, folder in found.items()
            if not ((known := there[name]) and known.finished)
        }
    if not resume and place.held(out) is not None:
        if config.get("out"):
            raise ConfigError(
                f"{out} holds a run; set resume=true (and more rounds) to go on from it, or "
                "another out for a new run"
            )
        out = place.next_free(out)
    return out, {names[0]: out}


def engine_here() -> str:
    """Return the engine that started this app."""
    return os.environ.get("BAYFLOWER_ENGINE", "flower")


@contextmanager
def single_threaded() -> Iterator[None]:
    """Compute with one thread, torch and numpy alike.

    Flower's simulation starts Ray's processes while the ServerApp runs. OpenBLAS stops its threads
    whenever the process forks, and a matrix product that waits for them then hangs.
    """
    torch.set_num_threads(1)
    # for a second OpenBLAS (scipy's) that is loaded later
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with threadpool_limits(1, user_api="blas"):
        yield


def serve_method(
    grid: Grid, config: Mapping[str, Any], method: str, folder: Path, status: Path, roll: Any
) -> Any:
    """Run one method on the grid's nodes and write its result; return the clients, so that the next
    method need not query them.

    The server has no data: clients report the shape of an input and the number of classes, and the
    settings name the network.
    """
    run = run_of(config, method)
    wait = float(config.get("wait") or 300)
    notes = journal.Journal("", [])
    if roll is None:
        roster = Roster(run.limits, notes, run.training)
        roster.gather(grid, int(config.get("min_nodes") or run.data.total_clients), wait)
        roll = roster.membership()
    known = [member.facts.target_sums for member in roll.members.values() if not member.new]
    sums = known if run.training.standardises else None
    halves = make_halves(run, roll.common.input_shape, roll.common.num_classes, sums=sums)
    same_network(halves, run, roll)
    facts = [member.facts for member in roll.members.values() if not member.new]
    scale = told(run.training, sums_of(facts)).input_scale
    refiner = refiner_of(run, halves, tuple(roll.common.input_shape), scale)
    start = None
    if str(config.get("resume")).lower() == "true" and checkpoint.read(folder) is not None:
        start = checkpoint.to_resume(folder, run)
        prints.check_states(start, halves, here=False)

    def save(strategy: BayflowerStrategy, round: int, forced: bool) -> None:
        s = strategy
        checkpoint.write(
            folder,
            checkpoint.make(
                run, s.run, round, s.state, {}, s.records, s.faults, s.memory(), sent=s.kept()
            ),
        )

    def progress(rounds: list[RoundRecord]) -> None:
        roster = strategy.roster
        status_file.write(
            status,
            status_file.running(
                method=method,
                run=strategy.run,
                rounds=run.settings.rounds,
                records=rounds,
                present=roster.present(),
                left=sorted(roster.left),
                excluded=sorted(roster.excluded),
                faults=strategy.faults,
                names=names_of(roster, run),
            ),
        )

    more: dict[str, Any] = {"after_round": save, "resume": start, "folder": folder}
    more["refiner"] = refiner
    strategy = make_strategy(run, progress, **more, roll=roll)
    strategy.faults.extend(notes.faults)
    params, buffers = halves.initial
    strategy.start(
        grid,
        records.to_arrays({**params, **buffers}),
        num_rounds=run.settings.rounds,
        timeout=float(config.get("timeout") or 3600),
    )
    assert strategy.outcome is not None
    if strategy.outcome.calibrated:
        save_total(folder, strategy.outcome.calibrated)
    lease.check(folder)
    write_json(
        folder / "result.json",
        result(
            run, engine_here(), strategy.roster.summary(run.data.dataset), halves, strategy.outcome
        ),
    )
    return strategy.roll


def names_of(roster: Roster, run: Run) -> dict[int, str]:
    """Return the clients' names by number."""
    known = clients_of(roster.summary(run.data.dataset), run.settings.seed)
    return {one.client: one.name for one in known}


def same_network(halves: Halves, run: Run, roll: Membership) -> None:
    """Raise if the clients' network differs from the one in the settings."""
    if halves.model.anatomy != roll.common.anatomy:
        shape, classes = tuple(roll.common.input_shape), roll.common.num_classes
        raise BayflowerError(
            f"the network of clients {listed(sorted(roll.members))} differs from "
            f"model={run.settings.model} for inputs of shape {shape} and {classes} classes; "
            "install the same version of Bayflower everywhere, or start a strategy with your own "
            "initial_arrays"
        )


def site_of(context: Context) -> Site:
    """Return the client at this node. Its partition id selects its data; the node's `data-dir` and
    `state-dir`, if set, say where data and states are.
    """
    config = context.run_config
    journal.set_up()
    run = first_run(tuple(sorted(config.items())))
    client = int(context.node_config["partition-id"])
    if (guard := GUARD.get()) is not None:  # before data are read
        runs = (run_of(config, name) for name in methods_of(config))
        guard.check_runs(runs, str(context.node_config.get("data-dir") or ""))
    root = context.node_config.get("state-dir") or (
        Path(str(config["out"])) / "state" if config.get("out") else None
    )
    if root is None:
        root = Path.home() / "bayflower-runs" / "state"
    device = run.settings.torch_device()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = run.settings.tf32
    network = (run.settings.model, run.settings.features, run.settings.head)
    source = run.data
    if context.node_config.get("data-dir"):
        source = dataclasses.replace(source, data_dir=str(context.node_config["data-dir"]))
    if guard is not None:
        guard.use(lambda: raw_parts(raw_client(source, run.settings.seed, client)))
    data, model = client_data(
        source, run.settings.seed, client, str(device), run.settings.dtype, network, run.training
    )
    model.bf16 = run.settings.bf16
    origin = describe(source, run.settings.seed)
    prepare = partial(client_scaling, source, run.settings.seed, client)
    return Site(
        client,
        client >= run.data.num_clients,
        model,
        data,
        DiskStore(Path(str(root))),
        origin,
        prepare,
        partial(source_of, source),
        table_of(source, run.settings.seed, data.train.x.cpu().numpy()),
        *masking.told(context.node_config),
    )


@lru_cache(maxsize=64)
def first_run(config: tuple[tuple[str, Any], ...]) -> Run:
    """Return the settings of the first method in a run-config, cached in the process."""
    values = dict(config)
    return run_of(values, methods_of(values)[0])


@lru_cache(maxsize=64)
def client_data(
    settings: DataSettings,
    seed: int,
    client: int,
    device: str,
    dtype: str,
    network: tuple[str, int, str],
    training: Training,
) -> tuple[solo.Samples, Model]:
    """Return a client's samples on its device and the network for them; cached, because a process
    may serve many messages.
    """
    data = load_client(settings, seed, client)
    classes = num_classes(settings, seed)
    samples = solo.samples(
        data, torch.device(device), torch.float64 if dtype == "float64" else torch.float32
    )
    name, features, head = network
    task = training.make_task(classes)
    return samples, build(name, tuple(data.x_train.shape[1:]), classes, features, head, task)
