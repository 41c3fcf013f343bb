"""`bayflower tune`: equal searches for settings on validation data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError
from .options import AsJson, DataDir, Device, Preset
from .reproduce import pairs, parts, say
from .terminal import values


def tune(
    methods: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="METHOD...", help="see `bayflower methods`; each gets the same number of trials"
        ),
    ] = None,
    table: Annotated[
        str | None,
        typer.Option(
            help="tune every row of a published table instead, for `bayflower reproduce TABLE`"
        ),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="with --table: tune on the columns with this setting, e.g. beta=0.5; repeatable",
        ),
    ] = None,
    part: Annotated[
        str,
        typer.Option(
            help="with --table: tune only part K of N of the rows, as K/N, to share the work "
            "between N processes; then run once without --part to write the file"
        ),
    ] = "1/1",
    trials: Annotated[
        int, typer.Option(min=1, help="trials of each method, including those of earlier calls")
    ] = 20,
    dataset: Annotated[str | None, typer.Option(help="as for `bayflower run`")] = None,
    rounds: Annotated[int | None, typer.Option(help="rounds of training in each run")] = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="runs of each trial, with different seeds; averaged")
    ] = 1,
    metric: Annotated[
        str,
        typer.Option(
            help="what to optimise on the validation data: accuracy, accuracy_mean, "
            "balanced_accuracy_mean or nll; of numbers rmse, mae, nll, crps or deviance; auto = "
            "accuracy, of numbers nll"
        ),
    ] = "auto",
    validation: Annotated[
        float,
        typer.Option(help="share of each training client's training data used for validation"),
    ] = 0.2,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="fix a setting; it is not tuned"),
    ] = None,
    preset: Preset = None,
    data_dir: DataDir = "data",
    device: Device = "auto",
    out: Annotated[
        Path, typer.Option(help="folder for the records of all trials and the chosen values")
    ] = Path("runs/tune"),
    as_json: AsJson = False,
) -> None:
    """Tune a method's settings on validation data of the training clients. The same command
    continues an interrupted search. Needs the extra `tune`.

    Example: `bayflower tune fedmap fedprox --trials 20 --dataset digits --rounds 10`
    """
    import logging

    from ..reproduce import find
    from ..reproduce.tune import Search, rows_of, search, write, write_table

    if bool(methods) == bool(table):
        raise ConfigError(
            "name methods or one --table, not both; for example bayflower tune fedmap, or "
            "bayflower tune --table fedmap-1"
        )
    logging.getLogger("bayflower").setLevel(logging.ERROR)
    given = values(
        sets, dataset=dataset, rounds=rounds, data_dir=data_dir, device=device, preset=preset
    )
    only, (place, count) = pairs(where or []), parts(part)
    found = {}
    if table:
        chosen = find(table)
        rows = rows_of(
            chosen,
            lambda cell: all(
                str(cell.spec and cell.spec.values().get(key)) == value for key, value in only
            ),
        )
        if not rows:
            raise ConfigError(
                f"no column of table {chosen.id} has {' '.join(where or [])}; `bayflower "
                f"reproduce {chosen.id} --no-run` shows the columns"
            )
        for row, (method, stay) in list(rows.items())[place - 1 :: count]:
            wanted = Search({**stay, **given}, trials, metric, validation, seeds)
            found[row] = search(method, wanted, out, say, label=row)
        path = out / f"{chosen.id}.toml"
        if count == 1:
            write_table(
                path,
                chosen,
                wanted,
                found,
                {**dict(only), **({"rounds": rounds} if rounds else {})},
            )
    else:
        path = out / "tuned.toml"
        for method in methods or []:
            found[method] = search(
                method, Search(given, trials, metric, validation, seeds), out, say
            )
            write(path, method, found[method])
    if as_json:
        print(json.dumps(found))
        return
    for name, entry in found.items():
        best = ", ".join(f"{key}={value:g}" for key, value in entry["values"].items())
        print(
            f"{name}: {best} ({entry['metric']} {entry['score']:.4f} on validation data, "
            f"{entry['trials']} trials)"
        )
    if count > 1:
        print(
            "when all parts are done, run the same command without --part to write the file of "
            "chosen values"
        )
    else:
        print(
            f"written: {path}"
            + (
                "; copy it to bayflower/reproduce/papers/tuned to use it in "
                f"`bayflower reproduce {table}`, the full form"
                if table
                else ""
            )
        )
