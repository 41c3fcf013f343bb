"""`bayflower run`: train one method."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from .. import methods as table
from .data import announce
from .options import (
    AsJson,
    Clients,
    Dataset,
    Engine,
    MaxFused,
    MLflowTarget,
    ModelName,
    Overwrite,
    Port,
    Preset,
    Rounds,
    Seed,
    Sets,
    SiteColumn,
    Target,
    TensorBoardFiles,
    Test,
    Verbose,
    WandbProject,
    Workers,
)
from .terminal import bar, quiet_logs, values

if TYPE_CHECKING:
    from ..engines import Prepared
    from ..files.trackers import Wanted

OPTIONS = {
    "dataset": "--dataset",
    "target": "--target",
    "sites": "--site",
    "test": "--test",
    "model": "--model",
    "num_clients": "--clients",
    "rounds": "--rounds",
    "seed": "--seed",
    "max_fused": "--max-fused",
    "workers": "--workers",
    "preset": "--preset",
}


def run(
    method: Annotated[
        str,
        typer.Argument(help="see `bayflower methods`", autocompletion=lambda: list(table.METHODS)),
    ],
    dataset: Dataset = None,
    target: Target = None,
    site: SiteColumn = None,
    test: Test = None,
    model: ModelName = None,
    engine: Engine = "fused",
    clients: Clients = None,
    rounds: Rounds = None,
    seed: Seed = None,
    max_fused: MaxFused = None,
    workers: Workers = None,
    sets: Sets = None,
    preset: Preset = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="folder for result.json [runs/METHOD-DATASET-SEED and the settings that are not "
            "defaults]"
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="go on from the last checkpoint in the folder, with the same settings"
        ),
    ] = False,
    overwrite: Overwrite = False,
    port: Port = 0,
    tensorboard: TensorBoardFiles = False,
    mlflow: MLflowTarget = "",
    wandb: WandbProject = "",
    track_group: Annotated[str, typer.Option(hidden=True)] = "",
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Train one method and write `result.json`.

    Example: `bayflower run fedmap --dataset synthetic --rounds 50 --set sigma2=100 --out
    runs/first`
    """
    from ..api.trackers import wanted
    from ..api.training import Job, carried_out
    from ..config import parse
    from ..files import place

    quiet_logs(verbose)
    given = values(
        sets,
        dataset=dataset,
        target=target,
        sites=site,
        test=test,
        model=model,
        num_clients=clients,
        rounds=rounds,
        seed=seed,
        max_fused=max_fused,
        workers=workers,
        preset=preset,
    )
    trackers = wanted(tensorboard, mlflow, wandb, track_group)
    chosen = parse(method, given)
    folder = out or place.usual_folder(chosen, engine)
    result = carried_out(
        Job(
            run=chosen,
            given=given,
            engine=engine,
            folder=folder,
            watch=lambda prepared: watching(prepared, folder, trackers, as_json),
            refuse=lambda: place.check_free(folder, chosen, engine, command(method, given, engine)),
            announce=lambda prepared: announce(prepared, as_json),
            resume=resume,
            overwrite=overwrite,
            port=port,
        )
    )
    if as_json:
        print(json.dumps(result))
        return
    from ..report.learning import ending
    from ..report.text import result_table, uncertainty_table

    console = Console()
    console.print(result_table(result))
    if (more := uncertainty_table(result)) is not None:
        console.print(more)
    notes = [line for line in (result["remark"], ending(result)) if line]
    for line in [*notes, *result["faults"][-5:]]:
        console.print(f"note: {line}", style="yellow", markup=False)
    console.print(f"written: {folder / 'result.json'}", markup=False)


@contextmanager
def watching(
    prepared: Prepared, folder: Path, trackers: Wanted, hidden: bool
) -> Iterator[Callable[[list[Any]], None]]:
    """Give a progress function with a bar and the trackers that are asked for."""
    from ..files.trackers import tracked
    from ..files.tracking import together

    title = table.get(prepared.run.method).title
    with (
        tracked(trackers, prepared.run, prepared.engine, folder) as track,
        bar(prepared.run.settings.rounds, title, hidden) as progress,
    ):
        yield together(progress, track)


def command(method: str, given: dict[str, Any], engine: str) -> list[str]:
    """Return the words of a run's command without its folder, for a line that a person copies."""
    words = ["bayflower", "run", method]
    words += [] if engine == "fused" else ["--engine", engine]
    for name, option in OPTIONS.items():
        words += [option, str(given[name])] if name in given else []
    for name in given:
        words += [] if name in OPTIONS else ["--set", f"{name}={given[name]}"]
    return words
