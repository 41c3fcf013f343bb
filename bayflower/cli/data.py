"""`bayflower data`: how a data set is read, what follows from it, and what looks wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..errors import ConfigError
from .options import AsJson, Sets, SiteColumn, Target, Test
from .terminal import show, values

if TYPE_CHECKING:
    from ..engines import Prepared


def data(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...",
            help="a .csv, .parquet or .npz file, several (one a site), a folder of images, or a "
            "data set by name",
        ),
    ],
    target: Target = None,
    site: SiteColumn = None,
    test: Test = None,
    sets: Sets = None,
    save: Annotated[
        Path | None, typer.Option(help="also write the data, as they were read, to an .npz file")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show how data are read: columns, classes, sites, the network that follows, and what looks
    wrong. Nothing is trained.

    Example: `bayflower data patients.csv --target outcome --site hospital`
    """
    from .. import data as rooms
    from ..config import parse
    from ..data import look
    from ..data.known import GENERATED
    from ..files.texts import writing
    from ..rounds.halves import make_halves

    given = values(sets, dataset=",".join(files), target=target, sites=site, test=test)
    run = parse("local", given)
    if run.data.dataset in GENERATED:
        raise ConfigError(
            f"{run.data.dataset} data are generated; give a file, a folder or another data set"
        )
    source = rooms.load_source(run.data)
    shape = look.shape_of(source)
    halves = make_halves(run, shape, source.num_classes)
    columns, sites, odd = look.columns(source), look.sites(source), look.wrong(source, run.data)
    said: dict[str, Any] = {
        "read": look.in_words(source),
        "lines": list(source.lines),
        "columns": columns,
        "sites": sites,
        "classes": list(source.class_names()),
        "input_shape": list(shape),
        "network": {"name": halves.model.name, "parameters": halves.model.num_parameters},
        "settings": {
            name: getattr(run.data, name)
            for name in ("partition", "num_clients", "new_clients", "min_size", "fraction")
        },
        "wrong": odd,
    }
    if save is not None:
        with writing(save):
            rooms.save(source, save)
        said["saved"] = str(save)
    if as_json:
        print(json.dumps(said))
        return
    say(said["read"])
    for line in source.lines:
        say(f"  {line}")
    if columns:
        show(columns, ("column", "read as", "inputs", "missing", "values"), False)
    show(sites, tuple(sites[0]) if len(sites[0]) <= 12 else ("site", "rows"), False)
    say(f"network: {network(halves.model)}")
    part = "those marked" if not run.data.fraction else f"{run.data.fraction:.0%} of each client's"
    say(
        f"settings: partition={run.data.partition}, num_clients={run.data.num_clients}, "
        f"new_clients={run.data.new_clients}; test samples: {part}"
    )
    for line in odd:
        say(f"looks wrong: {line}", "yellow")
    if save is not None:
        say(f"written: {save}")


def network(model: Any) -> str:
    """Return a network in words."""
    inputs = "×".join(map(str, model.recipe["input_shape"]))
    what = f"{model.num_classes} classes" if model.task.whole else model.task.name
    return f"{model.name}, inputs {inputs}, {what}, {model.num_parameters:,} weights"


def announce(prepared: Prepared, as_json: bool) -> None:
    """Print one line on how the data were read and which network they train."""
    from ..data import load_source
    from ..data.known import GENERATED
    from ..data.look import in_words

    if as_json:
        return
    settings = prepared.run.data
    name = settings.dataset
    said = name if name in GENERATED else in_words(load_source(settings))
    say(f"{said}. Network: {network(prepared.halves.model)}")


def say(text: str, style: str | None = None) -> None:
    """Print one line as it is."""
    Console().print(text, style=style, markup=False, highlight=False, soft_wrap=True)
