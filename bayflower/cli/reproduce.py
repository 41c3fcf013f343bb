"""`bayflower reproduce`: the papers' tables next to our own numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import BayflowerError, ConfigError
from .options import AsJson, DataDir, Device, Together


def reproduce(
    tables: Annotated[
        list[str] | None, typer.Argument(metavar="TABLE...", help="e.g. pfedvmp-1; see --list")
    ] = None,
    show_list: Annotated[
        bool,
        typer.Option(
            "--list", help="list the tables with their state and expected time; run nothing"
        ),
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="reproduce every table")] = False,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="a small form that takes minutes on a CPU; it only shows that it works"
        ),
    ] = False,
    seeds: Annotated[
        int, typer.Option(min=0, help="number of seeds; 0 = the table's own number")
    ] = 0,
    rounds: Annotated[
        int, typer.Option(min=0, help="rounds of training; 0 = the table's own number")
    ] = 0,
    engine: Annotated[str, typer.Option(help="fused or loop")] = "fused",
    together: Together = None,
    data_dir: DataDir = "data",
    device: Device = "auto",
    minutes: Annotated[
        float,
        typer.Option(min=0, help="time limit; the same command later continues; 0 = no limit"),
    ] = 0.0,
    part: Annotated[
        str,
        typer.Option(
            help="do only part K of N of the runs, as K/N, to share the work between N processes"
        ),
    ] = "1/1",
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="only runs with this setting, e.g. method=fednp or beta=0.5; repeatable",
        ),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            help="folder in which to keep the --out folder of each run, for `bayflower report`"
        ),
    ] = None,
    tuned: Annotated[
        Path | None, typer.Option(help="file of `bayflower tune` with settings of the methods")
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(
            help="folder that caches finished runs [experiments/results/runs in a checkout, else "
            "runs/reproduce]"
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="folder for TABLE.md and TABLE.json [runs/tables]")
    ] = None,
    no_run: Annotated[
        bool, typer.Option("--no-run", help="run nothing; show the finished runs")
    ] = False,
    write: Annotated[
        Path | None,
        typer.Option(
            help="write this page of findings, and the tables and pictures it links to in "
            "experiments/tables beside it; the text below its marker is kept"
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="compare the pages with what the runs give, byte by byte; exit code 1 if one "
            "differs; needs --all and the page, RESULTS.md unless --write names it",
        ),
    ] = False,
    collect: Annotated[
        bool,
        typer.Option(
            "--collect",
            help="move the finished runs from the folder to the files beside it, one line each",
        ),
    ] = False,
    take: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="bring the runs in this file, one line each, from another machine into the "
            "folder; repeatable",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Reproduce a published table: do the missing runs and print our numbers, the paper's and the
    difference.

    Example: `bayflower reproduce fedmap-1 --quick`
    """
    import logging
    from dataclasses import replace

    from ..files.texts import write_json
    from ..reproduce import Cache, find, load_tables
    from ..reproduce.show import content, look, markdown, state
    from ..reproduce.sweep import Plan, run_missing
    from ..reproduce.verdict import decide, plain, sentences

    logging.getLogger("bayflower").setLevel(logging.ERROR)
    changes = {"rounds": rounds} if rounds else {}
    form, only = "quick" if quick else "full", pairs(where or [])
    plan = Plan(
        form,
        seeds,
        changes,
        read_tuned(tuned),
        data_dir,
        device,
        engine,
        minutes,
        parts(part),
        only,
        str(keep or ""),
        bool(together),
    )
    cache = Cache(results or default_folder(), say)
    chosen = (
        list(load_tables().values())
        if everything or not tables
        else [find(name) for name in tables]
    )
    if take:
        from ..reproduce.collect import take as take_runs

        take_runs(cache, take, say)
    if collect:
        from ..reproduce.collect import collect as collect_runs

        collect_runs(cache, say)
    if show_list:
        records = cache.everything()
        forms = {form: replace(plan, form=form) for form in ("full", "quick")}
        lines = [
            {
                "table": table.id,
                "title": table.title,
                **{form: state(table, one, cache, records) for form, one in forms.items()},
            }
            for table in chosen
        ]
        print(json.dumps(lines)) if as_json else print_list(lines)
        return
    if write or check:
        from ..reproduce.page import differing, write_page

        page = write or Path("RESULTS.md")
        if not check:
            write_page(page, chosen, plan, cache)
            say(f"written: {page}")
        elif stale := differing(page, chosen, plan, cache):
            raise BayflowerError(
                f"{', '.join(map(str, stale))}: not what the runs give; "
                f"`bayflower reproduce --all --write {page}` writes them"
            )
        return
    if not tables and not everything:
        if collect or take:
            return
        raise ConfigError(
            "no table was named; `bayflower reproduce --list` lists them, --all means every table"
        )
    failed = 0 if no_run else run_missing(chosen, plan, cache, say)
    shown = []
    for table in chosen:
        found = look(table, plan, cache)
        decided = decide(table, plan, cache)
        shown.append({**content(table, plan, found), "claims": plain(decided)})
        folder = out or Path("runs/tables")
        write_json(folder / f"{table.id}.json", shown[-1])
        said = "\n".join(sentences(decided))
        text = markdown(table, plan, found) + (f"\n{said}\n" if said else "")
        (folder / f"{table.id}.md").write_text(text)
        if not as_json:
            print_table(table, plan, found)
            if said:
                print(said)
            print(f"written: {folder / table.id}.md and .json")
    if as_json:
        print(json.dumps(shown))
    if failed:
        raise BayflowerError(
            f"{failed} runs failed; the lines above say why; the same command retries them"
        )


def say(line: str) -> None:
    """Print a line of progress where results are not."""
    typer.echo(line, err=True)


def pairs(texts: list[str]) -> tuple[tuple[str, str], ...]:
    """Return KEY=VALUE as pairs."""
    for text in texts:
        if "=" not in text:
            raise ConfigError(f"--where must be KEY=VALUE, got {text!r}; e.g. --where method=fednp")
    return tuple((text.partition("=")[0], text.partition("=")[2]) for text in texts)


def default_folder() -> Path:
    """Return the default folder of finished runs."""
    return (
        Path("experiments/results/runs")
        if Path("experiments/results").is_dir()
        else Path("runs/reproduce")
    )


def parts(text: str) -> tuple[int, int]:
    """Return (K, N) of "K/N"."""
    first, mark, last = text.partition("/")
    if not (mark and first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last)):
        raise ConfigError(
            f"--part needs K/N with K from 1 to N, got {text!r}; for example --part 1/4"
        )
    return int(first), int(last)


def read_tuned(path: Path | None) -> dict[str, dict[str, Any]]:
    """Return the tuned settings of each method."""
    if path is None:
        return {}
    from ..reproduce.tune import read

    return {method: entry["values"] for method, entry in read(path).items()}


def print_list(lines: list[dict[str, Any]]) -> None:
    """Print the list of tables: for both forms the cells that have a number, and the time that the
    others should take.
    """
    from rich.table import Table

    grid = Table(box=None, pad_edge=False, header_style="bold")
    for name in (
        "table",
        "what",
        "full",
        "quick",
        "not yet",
        "time left, full",
        "quick",
        "no data",
    ):
        grid.add_column(
            name,
            justify="left" if name in ("table", "what", "no data") else "right",
            no_wrap=name == "table",
        )
    for one in lines:
        full, quick = one["full"], one["quick"]
        grid.add_row(
            one["table"],
            one["title"].partition(": ")[2],
            f"{full['done']}/{full['cells']}",
            f"{quick['done']}/{quick['cells']}",
            str(full["not_yet"]),
            duration(full["seconds_left"]),
            duration(quick["seconds_left"]),
            ", ".join(full["missing_data"]),
        )
    wide().print(grid)
    print(
        "full, quick: cells with a number / all cells; not yet: cells of methods that Bayflower "
        "lacks; times are estimated from similar runs"
    )


def duration(seconds: float | None) -> str:
    """Return a time for a person."""
    if seconds is None:
        return "unknown"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def print_table(table: Any, plan: Any, found: list[Any]) -> None:
    """Print a table: under each column ours, the paper's and the difference."""
    from ..report.text import bare_table
    from ..reproduce.show import facts, gap, ours, unit

    grid = bare_table(table.title, "")
    grid.add_column("")
    for column in table.columns:
        grid.add_column(f"{column.name}\nours, {unit(table, column.metric)}", justify="right")
        grid.add_column("paper", justify="right", style="italic")
        grid.add_column("diff.", justify="right")
    width = len(table.columns)
    for place, row in enumerate(table.rows):
        cells: list[str] = []
        for one in found[place * width : (place + 1) * width]:
            cells += [ours(one), one.cell.published or "–", gap(one)]
        grid.add_row(row.name, *cells)
    console = wide()
    console.print(grid)
    for line in facts(table, plan, found):
        console.print(line, markup=False, highlight=False)


def wide() -> Any:
    """Return a console that does not fold tables where there is no terminal."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=400, markup=False, highlight=False)
