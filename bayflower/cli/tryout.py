"""`bayflower try`: a Flower app in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..flower.tryout import Tried


def try_app(
    folder: Annotated[
        Path, typer.Argument(metavar="APP", help="folder of a Flower app, with its pyproject.toml")
    ],
    clients: Annotated[int, typer.Option(min=1, help="number of nodes")] = 3,
    engine: Annotated[
        str,
        typer.Option(
            help="loop: clients one after another, with the bits of `flwr run`; fused: clients of "
            "make_client_app as one stack"
        ),
    ] = "loop",
    run_config: Annotated[
        list[str] | None,
        typer.Option(
            "--run-config",
            "-c",
            metavar="'KEY=VALUE …'",
            help="run-config keys of the app, as `flwr run` takes them, or a .toml file",
        ),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="a run-config key of the app"),
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(help="folder for client states [bayflower-runs/state in the home folder]"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="folder for result.json [no file is written]")
    ] = None,
    stacking: Annotated[
        str,
        typer.Option(
            help="fused: auto, measured, yes or no; on a CPU auto decides by a rule, measured by "
            "timing both ways"
        ),
    ] = "auto",
    max_fused: Annotated[
        int, typer.Option(min=0, help="fused: cap on clients trained together; 0 = as many as fit")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print the results as JSON")] = False,
) -> None:
    """Run any Flower app in this process, without SuperLink and Ray.

    Example: `bayflower try examples/fedavg_app --clients 3 --run-config num-server-rounds=1`
    """
    from ..config import Settings
    from ..files import place
    from ..flower.crew import Options
    from ..flower.tryout import overrides
    from ..flower.tryout import try_app as run

    changes: dict[str, Any] = overrides(run_config) if run_config else {}
    for text in sets or []:
        key, mark, value = text.partition("=")
        if not mark or not key:
            raise ConfigError(f"--set needs KEY=VALUE, got {text!r}; for example --set lr=0.01")
        changes[key] = value
    Settings(stacking=stacking, max_fused=max_fused)  # type: ignore[arg-type]  # raises if wrong
    if out is not None and place.held(out) is not None:
        raise ConfigError(f"{out} holds a run; give another folder")
    node = {"state-dir": str(state_dir)} if state_dir else None
    show(
        run(folder, clients, changes, node, engine, Options(stacking, max_fused)),
        folder.resolve().name,
        engine,
        out,
        as_json,
    )


def show(tried: Tried, name: str, engine: str, out: Path | None, as_json: bool) -> None:
    """Print the results of the app's strategies and write them to `out`: result.json for one,
    NUMBER-METHOD/result.json for several.
    """
    from ..files.texts import write_json
    from ..flower.tryout import result_of
    from ..report.text import result_table, uncertainty_table
    from ..rounds.calibrated import save_total

    console, several = Console(), len(tried.strategies) > 1
    found = []
    for number, (strategy, rounds) in enumerate(tried.strategies, 1):
        result = result_of(strategy, rounds, name, engine, tried.remarks)
        if result is None:
            continue
        found.append(result)
        if not as_json:
            console.print(result_table(result))
            if (more := uncertainty_table(result)) is not None:
                console.print(more)
        if out is not None:
            folder = out / f"{number}-{result['method']}" if several else out
            folder.mkdir(parents=True, exist_ok=True)
            if strategy.outcome and strategy.outcome.calibrated:
                save_total(folder, strategy.outcome.calibrated)
            write_json(folder / "result.json", result)
            if not as_json:
                console.print(f"written: {folder / 'result.json'}", markup=False)
    if as_json:
        print(json.dumps(found))
        return
    for line in tried.remarks:
        console.print(f"note: {line}", style="yellow", markup=False)
    if out is not None and not found:
        console.print(
            f"note: {out} was not written: no strategy of Bayflower tested its clients",
            style="yellow",
            markup=False,
        )
