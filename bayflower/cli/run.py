"""`bayflower run` and `bayflower compare`: train one method, or several on the same data."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

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
    Port,
    Preset,
    Rounds,
    Seed,
    Sets,
    SiteColumn,
    Target,
    Test,
    Verbose,
)
from .terminal import bar, bars, check_folder, quiet_logs, values


def run(
    method: Annotated[
        str,
        typer.Argument(help="see `bayflower methods`", autocompletion=lambda: list(table.METHODS)),
    ],
    dataset: Dataset = None,
    target: Target = None,
    site: SiteColumn = None,
    test: Test = None,
    engine: Engine = "fused",
    clients: Clients = None,
    rounds: Rounds = None,
    seed: Seed = None,
    max_fused: MaxFused = None,
    sets: Sets = None,
    preset: Preset = None,
    out: Annotated[
        Path | None, typer.Option(help="folder for result.json [runs/METHOD-DATASET-SEED]")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="go on from the last checkpoint in the folder, with the same settings"
        ),
    ] = False,
    port: Port = 0,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="write each round's numbers to OUT/tensorboard")
    ] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Train one method and write `result.json`.

    Example: `bayflower run fedmap --dataset synthetic --rounds 50 --set sigma2=100 --out
    runs/first`
    """
    from ..config import parse
    from ..data import name_of
    from ..engines import prepare, run_to_result, run_under_flower
    from ..files import checkpoint
    from ..files.tracking import TensorBoard, each_round, together

    quiet_logs(verbose)
    given = values(
        sets,
        dataset=dataset,
        target=target,
        sites=site,
        test=test,
        num_clients=clients,
        rounds=rounds,
        seed=seed,
        max_fused=max_fused,
        preset=preset,
    )
    chosen = parse(method, given)
    folder = out or Path("runs") / f"{method}-{name_of(chosen.data.dataset)}-{chosen.settings.seed}"
    check_folder(folder)
    start = checkpoint.to_resume(folder, chosen) if resume else None
    if not resume:
        checkpoint.begin_anew(folder)
    tracker = TensorBoard(folder / "tensorboard") if tensorboard else nullcontext()
    prepared = prepare(chosen, engine)
    announce(prepared, as_json)
    with (
        tracker as track,
        bar(chosen.settings.rounds, table.get(method).title, hidden=as_json) as progress,
    ):
        if track is not None:
            progress = together(progress, each_round(track))
        if engine in ("fused", "loop"):
            result = run_to_result(prepared, folder, progress, start)
        else:
            (result,) = run_under_flower(
                [prepared],
                given,
                folder,
                port,
                resume,
                lambda status: progress(status.get("records", [])),
            )
    if as_json:
        print(json.dumps(result))
        return
    from ..report.text import result_table, uncertainty_table

    console = Console()
    console.print(result_table(result))
    if (more := uncertainty_table(result)) is not None:
        console.print(more)
    for line in [*([result["remark"]] if result["remark"] else []), *result["faults"][-5:]]:
        console.print(f"note: {line}", style="yellow", markup=False)
    console.print(f"written: {folder / 'result.json'}", markup=False)


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
    engine: Engine = "fused",
    clients: Clients = None,
    rounds: Rounds = None,
    seed: Seed = None,
    max_fused: MaxFused = None,
    sets: Sets = None,
    preset: Preset = None,
    out: Annotated[Path, typer.Option(help="folder; each method gets one below it")] = Path(
        "runs/compare"
    ),
    port: Port = 0,
    app: Annotated[
        Path | None,
        typer.Option(help="ray and deployment: folder of the Flower app [the installed package]"),
    ] = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Train several methods on the same data with the same training and show one table.

    Settings that only some of the methods have (e.g. `--set sigma2=100`) go to those that have
    them.

    Example: `bayflower compare fedmap fedavg local --dataset synthetic --rounds 50`
    """
    from ..config import names, parse
    from ..engines import prepare, run_to_result, run_under_flower

    quiet_logs(verbose)
    given = values(
        sets,
        dataset=dataset,
        target=target,
        sites=site,
        test=test,
        num_clients=clients,
        rounds=rounds,
        seed=seed,
        max_fused=max_fused,
        preset=preset,
    )
    known = {method: names(method) for method in methods}
    for key in given:
        if not any(key in keys for keys in known.values()):
            parse(methods[0], {key: given[key]})  # raises with a hint
    runs = {
        method: parse(method, {key: value for key, value in given.items() if key in known[method]})
        for method in methods
    }
    check_folder(out)
    prepared = {method: prepare(chosen, engine) for method, chosen in runs.items()}
    announce(prepared[methods[0]], as_json)
    results: list[dict[str, Any]] = []
    if engine in ("ray", "deployment"):
        titles = {method: table.get(method).title for method in prepared}
        lengths = {titles[name]: ready.run.settings.rounds for name, ready in prepared.items()}
        with bars(lengths, hidden=as_json) as progress_of:

            def show(status: dict[str, Any]) -> None:
                if status.get("method") in titles:
                    progress_of(titles[status["method"]], status.get("records", []))

            results = run_under_flower(
                list(prepared.values()),
                given,
                out,
                port,
                False,
                show,
                app.resolve() if app else None,
            )
        prepared = {}
    for method, ready in prepared.items():
        with bar(ready.run.settings.rounds, table.get(method).title, hidden=as_json) as progress:
            results.append(run_to_result(ready, out / method, progress))
    if as_json:
        print(json.dumps(results))
        return
    from ..report.text import comparison_table, uncertainty_comparison

    console = Console()
    console.print(comparison_table(results))
    if (more := uncertainty_comparison(results)) is not None:
        console.print(more)
    for result in results:
        if result["remark"]:
            console.print(f"note: {result['remark']}", style="yellow", markup=False)
    console.print(f"written: {out}/METHOD/result.json", markup=False)
