"""The command line: `bayflower run`, `compare`, `bench`, `methods`, `settings`, `models`; further commands are in `commands/`."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from . import __version__
from . import methods as table
from .commands import add_commands
from .commands.looking import cite, doctor
from .deploy.cli import app as deploy
from .errors import BayflowerError, ConfigError
from .terminal import bar, check_folder, quiet_logs, show, values

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Bayesian personalised federated learning on Flower.",
    epilog="Example: `bayflower run fedmap --dataset synthetic --rounds 50`",
)
add_commands(app)
app.command()(doctor)
app.command()(cite)
app.add_typer(deploy, name="deploy")
errors = Console(stderr=True)


Dataset = Annotated[
    str | None,
    typer.Option(
        help="digits, synthetic, fmnist, mnist, cifar10, cifar100, emnist, emnist47, officecaltech, heart, femnist, celeba, "
        "several as A+B, or a path to an .npz file"
    ),
]
Clients = Annotated[int | None, typer.Option(help="number of clients that train")]
Rounds = Annotated[int | None, typer.Option(help="rounds of training")]
Seed = Annotated[int | None, typer.Option(help="decides partition, initialisation, batches and sampling")]
Engine = Annotated[str, typer.Option(help="fused (all clients together), loop (one by one), ray (simulation) or deployment (processes)")]
MaxFused = Annotated[int | None, typer.Option(min=0, help="fused: most clients trained together; 0 = as many as fit into memory")]
Port = Annotated[int, typer.Option(help="ray and deployment: port of the SuperLink on loopback; 0 = any free one")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="any other setting; see `bayflower settings METHOD`")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON for programs instead of a table")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="log what happens")]


def main() -> None:
    """Run the command line; an error that a person can act on is one line and exit code 2 (configuration) or 1."""
    try:
        app()
    except BayflowerError as error:
        errors.print(f"bayflower: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


@app.command()
def run(
    method: Annotated[str, typer.Argument(help="see `bayflower methods`", autocompletion=lambda: list(table.METHODS))],
    dataset: Dataset = None,
    engine: Engine = "fused",
    clients: Clients = None,
    rounds: Rounds = None,
    seed: Seed = None,
    max_fused: MaxFused = None,
    sets: Sets = None,
    out: Annotated[Path | None, typer.Option(help="folder for result.json [runs/METHOD-DATASET-SEED]")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on from the last checkpoint in the folder, with the same settings")] = False,
    port: Port = 0,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="write each round's numbers to OUT/tensorboard")] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Train one method and write `result.json`.

    Example: `bayflower run fedmap --dataset synthetic --rounds 50 --set sigma2=100 --out runs/first`
    """
    from . import checkpoint
    from .config import parse
    from .engines import prepare, run_to_result, run_under_flower
    from .tracking import TensorBoard, each_round, together

    quiet_logs(verbose)
    given = values(sets, dataset=dataset, num_clients=clients, rounds=rounds, seed=seed, max_fused=max_fused)
    chosen = parse(method, given)
    folder = out or Path("runs") / f"{method}-{Path(chosen.data.dataset).stem}-{chosen.settings.seed}"
    check_folder(folder)
    start = checkpoint.to_resume(folder, chosen) if resume else None
    if not resume:
        checkpoint.begin_anew(folder)
    tracker = TensorBoard(folder / "tensorboard") if tensorboard else nullcontext()
    prepared = prepare(chosen, engine)
    with tracker as track, bar(chosen.settings.rounds, table.get(method).title, hidden=as_json) as progress:
        if track is not None:
            progress = together(progress, each_round(track))
        if engine in ("fused", "loop"):
            result = run_to_result(prepared, folder, progress, start)
        else:
            (result,) = run_under_flower([prepared], given, folder, port, resume, lambda status: progress(status.get("records", [])))
    if as_json:
        print(json.dumps(result))
        return
    from .tables import result_table

    console = Console()
    console.print(result_table(result))
    for line in [*([result["remark"]] if result["remark"] else []), *result["faults"][-5:]]:
        console.print(f"note: {line}", style="yellow", markup=False)
    console.print(f"written: {folder / 'result.json'}", markup=False)


@app.command()
def compare(
    methods: Annotated[
        list[str], typer.Argument(help="two or more methods; see `bayflower methods`", autocompletion=lambda: list(table.METHODS))
    ],
    dataset: Dataset = None,
    engine: Engine = "fused",
    clients: Clients = None,
    rounds: Rounds = None,
    seed: Seed = None,
    max_fused: MaxFused = None,
    sets: Sets = None,
    out: Annotated[Path, typer.Option(help="folder; each method gets one below it")] = Path("runs/compare"),
    port: Port = 0,
    app: Annotated[Path | None, typer.Option(help="ray and deployment: folder of the Flower app [the installed package]")] = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Train several methods on the same data with the same training and show one table.

    Settings that only some of the methods have (e.g. `--set sigma2=100`) go to those that have them.

    Example: `bayflower compare fedmap fedavg local --dataset synthetic --rounds 50`
    """
    import dataclasses

    from .config import groups, parse
    from .engines import prepare, run_to_result, run_under_flower

    quiet_logs(verbose)
    given = values(sets, dataset=dataset, num_clients=clients, rounds=rounds, seed=seed, max_fused=max_fused)
    known = {method: {field.name for kind in groups(method).values() for field in dataclasses.fields(kind)} for method in methods}
    for key in given:
        if not any(key in names for names in known.values()):
            parse(methods[0], {key: given[key]})  # raises with a hint
    runs = {method: parse(method, {key: value for key, value in given.items() if key in known[method]}) for method in methods}
    check_folder(out)
    prepared = {method: prepare(chosen, engine) for method, chosen in runs.items()}
    results: list[dict[str, Any]] = []
    if engine in ("ray", "deployment"):
        with bar(max(ready.run.settings.rounds for ready in prepared.values()), f"Flower ({engine})", hidden=as_json) as progress:
            results = run_under_flower(list(prepared.values()), given, out, port, False, lambda status: progress(status.get("records", [])),
                                       app.resolve() if app else None)  # fmt: skip
        prepared = {}
    for method, ready in prepared.items():
        with bar(ready.run.settings.rounds, table.get(method).title, hidden=as_json) as progress:
            results.append(run_to_result(ready, out / method, progress))
    if as_json:
        print(json.dumps(results))
        return
    from .tables import comparison_table

    console = Console()
    console.print(comparison_table(results))
    for result in results:
        if result["remark"]:
            console.print(f"note: {result['remark']}", style="yellow", markup=False)
    console.print(f"written: {out}/METHOD/result.json", markup=False)


@app.command()
def bench(
    suite: Annotated[str, typer.Argument(help="methods, scaling, cross-device, cpu, profile or steps")] = "methods",
    workload: Annotated[
        list[str] | None, typer.Option(help="digits, fmnist-50 or cifar10-100; may be repeated [fmnist-50 on a GPU, else digits]")
    ] = None,
    method: Annotated[list[str] | None, typer.Option(help="see `bayflower methods`; may be repeated [the suite's own]")] = None,
    clients: Annotated[list[int] | None, typer.Option(help="scaling, cross-device, steps: how many; may be repeated")] = None,
    rounds: Annotated[int, typer.Option(min=0, help="rounds that count, after the warm-up; 0 = the suite's own")] = 0,
    seconds: Annotated[float, typer.Option(help="a case ends early after this time, with at least one round that counts")] = 120.0,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N; auto = a GPU if there is one")] = "auto",
    data_dir: Annotated[str, typer.Option(help="where data sets lie: DATA_DIR/fmnist.npz and so on")] = "data",
    seed: Annotated[int, typer.Option(min=0, help="decides partition, initialisation, batches and sampling")] = 0,
    loop: Annotated[bool, typer.Option("--loop/--no-loop", help="compare with clients one by one; cpu: with Ray")] = True,
    tf32: Annotated[bool, typer.Option("--tf32", help="methods: measure with TF32 too")] = False,
    file: Annotated[Path | None, typer.Option("--json", help="what was measured, written after every case [runs/bench-SUITE.json]")] = None,
) -> None:
    """Measure how fast the fused engine is on this machine; docs/benchmarks.md says what each suite does.

    Example: `bayflower bench methods --workload digits --method fedper --method pfedvmp`
    """
    from . import bench as benchmark

    quiet_logs(False)
    options = benchmark.Options(device, data_dir, seed, rounds, seconds, tuple(method or ()), tuple(workload or ()), tuple(clients or ()),
                                loop, tf32)  # fmt: skip
    file = file or Path("runs") / f"bench-{suite}.json"
    content = benchmark.run(
        suite, options, file, lambda line: errors.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)
    )
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(benchmark.table(content))
    console.print(f"written: {file}", markup=False)


@app.command("methods")
def list_methods(as_json: AsJson = False) -> None:
    """List the methods: name, paper, where the two halves are."""
    rows = [
        {"name": row.name, "title": row.title, "paper": row.paper, "summary": row.summary,
         "server": f"bayflower/strategies/{row.stem}.py", "client": f"bayflower/clients/{row.stem}.py"}
        for row in table.ROWS
    ]  # fmt: skip
    show(rows, ("name", "paper", "summary"), as_json)


@app.command()
def settings(
    method: Annotated[str, typer.Argument(help="see `bayflower methods`", autocompletion=lambda: list(table.METHODS))],
    as_json: AsJson = False,
) -> None:
    """List every setting of a method with its default; set them with `--set KEY=VALUE`."""
    from .config import describe

    rows = [{"group": group, "name": name, "default": default, "meaning": text} for group, name, default, text in describe(method)]
    show(rows, ("group", "name", "default", "meaning"), as_json)


@app.command()
def models(as_json: AsJson = False) -> None:
    """List the networks for `--set model=NAME`."""
    from .models import MODELS

    show([{"name": name, "network": text} for name, text in MODELS.items()], ("name", "network"), as_json)


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)
