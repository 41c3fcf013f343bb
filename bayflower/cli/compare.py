"""`bayflower compare` and `bayflower study`: several methods on the same data, with one seed or
several.
"""

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
    Together,
    Verbose,
    WandbProject,
)
from .terminal import bars, quiet_logs, values

if TYPE_CHECKING:
    from ..files.trackers import Wanted
    from ..study.plan import Planned, Study

Jobs = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="runs at a time, each in a process of its own; 0 = one a core for several seeds on a "
        "CPU, else one",
    ),
]


def compare(
    methods: Annotated[
        list[str],
        typer.Argument(
            help="two or more methods; see `bayflower methods`",
            autocompletion=lambda: list(table.METHODS),
        ),
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
    seeds: Annotated[
        str, typer.Option(help="number of seeds, from --seed on, or the seeds as 0,3,7")
    ] = "1",
    max_fused: MaxFused = None,
    sets: Sets = None,
    preset: Preset = None,
    out: Annotated[Path, typer.Option(help="folder; runs go to OUT/METHOD/seed-SEED")] = Path(
        "runs/compare"
    ),
    jobs: Jobs = None,
    together: Together = None,
    overwrite: Overwrite = False,
    port: Port = 0,
    app: Annotated[
        Path | None,
        typer.Option(help="ray and deployment: folder of the Flower app [the installed package]"),
    ] = None,
    tensorboard: TensorBoardFiles = False,
    mlflow: MLflowTarget = "",
    wandb: WandbProject = "",
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Train several methods on the same data with the same training and show one table.

    Settings that only some of the methods have (e.g. `--set sigma2=100`) go to those that have
    them. Runs that are in the folder already are not done again; a run that was killed goes on.

    Example: `bayflower compare fedmap fedavg local --dataset synthetic --rounds 50 --seeds 5`
    """
    from ..api.trackers import wanted
    from ..study.plan import Study, of_methods, seeds_of

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
        max_fused=max_fused,
        preset=preset,
    )
    first = int(given.pop("seed", 0)) if seed is None else seed
    entries, numbers = of_methods(methods, given), seeds_of(seeds, first)
    study = Study(entries, numbers, out, engine, jobs or 0, bool(together))
    trackers = wanted(tensorboard, mlflow, wandb, out.name)
    done = carried_out(study, overwrite, port, app, as_json, trackers)
    if as_json:
        print(json.dumps([result for _, result in done]))
        return
    show(done, study)


def study(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a study.toml; see docs/studies.md")],
    out: Annotated[
        Path | None, typer.Option(help="folder; runs go to OUT/NAME/seed-SEED [as the file says]")
    ] = None,
    jobs: Jobs = None,
    together: Together = None,
    overwrite: Overwrite = False,
    port: Port = 0,
    tensorboard: TensorBoardFiles = False,
    mlflow: MLflowTarget = "",
    wandb: WandbProject = "",
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Do the runs of a study that are missing, and show what they say.

    Example: `bayflower study study.toml`
    """
    from dataclasses import replace

    from ..api.trackers import wanted
    from ..study.plan import read

    quiet_logs(verbose)
    found = read(file)
    found = replace(found, out=out or found.out, jobs=found.jobs if jobs is None else jobs)
    if together is not None:
        found = replace(found, together=together)
    trackers = wanted(tensorboard, mlflow, wandb, found.out.name)
    done = carried_out(found, overwrite, port, None, as_json, trackers)
    if as_json:
        print(json.dumps([result for _, result in done]))
        return
    show(done, found)


def carried_out(
    study: Study,
    overwrite: bool,
    port: int,
    app: Path | None,
    hidden: bool,
    trackers: Wanted | None = None,
) -> list[tuple[Planned, dict[str, Any]]]:
    """Do the missing runs with bars or lines of progress; return all runs with their results."""
    from ..study.runs import carry_out

    return carry_out(
        study,
        say=(lambda text: None) if hidden else (lambda text: print(text, flush=True)),
        watch=lambda rounds: watching(rounds, study, trackers, hidden),
        overwrite=overwrite,
        port=port,
        app=app.resolve() if app else None,
        announce=lambda prepared: announce(prepared, hidden),
        words=trackers.words() if trackers else (),
    )


@contextmanager
def watching(
    rounds: dict[str, int], study: Study, trackers: Wanted | None, hidden: bool
) -> Iterator[Callable[[str, list[Any]], None]]:
    """Give a progress function of (title, records) with bars, and each run's trackers."""
    from ..api.trackers import of_study

    with bars(rounds, hidden) as progress, of_study(study, trackers, rounds) as track:

        def see(name: str, records: list[Any]) -> None:
            progress(name, records)
            track(name, records)

        yield see


def show(done: list[tuple[Planned, dict[str, Any]]], study: Study) -> None:
    """Print the tables of a study, what they say, and where the runs are."""
    from ..report.collect import Found, group
    from ..report.learning import EARLY, LATE, ending
    from ..report.text import comparison_table, uncertainty_comparison
    from ..report.verdict import verdicts
    from .results import show_groups

    console = Console()
    results = [result for _, result in done]
    groups = group([Found(one.folder, result) for one, result in done])
    if len(study.seeds) == 1:
        console.print(comparison_table(results))
        if (more := uncertainty_comparison(results)) is not None:
            console.print(more)
        for said in verdicts(groups) if len(groups) > 1 else []:
            for line in said.words:
                console.print(f"* {line}", markup=False, highlight=False)
    else:
        show_groups(groups)
    for remark in dict.fromkeys(result["remark"] for result in results if result["remark"]):
        console.print(f"note: {remark}", style="yellow", markup=False)
    ends = [(one["method"], end.short) for one in results if (end := ending(one))]
    for short in (EARLY, LATE):
        if names := dict.fromkeys(name for name, said in ends if said == short):
            console.print(f"note: {', '.join(names)}: {short}", style="yellow", markup=False)
    console.print(f"written: {study.out}/METHOD/seed-SEED/result.json", markup=False)
