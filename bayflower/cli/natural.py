"""`bayflower natural`: the benchmark of clients that really differ."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError
from .options import DataDir, Verbose
from .terminal import quiet_logs


def natural(
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="two data sets (heart, radon), two numbers of samples and two seeds: minutes",
        ),
    ] = False,
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            help="heart, radon, election88, parkinson, brca, wisdm, officecaltech or shakespeare; "
            "repeatable [all of them]"
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="a method that takes part besides the rivals, see `bayflower methods`; also one "
            "of your own package; repeatable"
        ),
    ] = None,
    only: Annotated[
        bool, typer.Option("--only", help="run what --method names alone: methods or rivals")
    ] = False,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="number of seeds [10; 3 of officecaltech and shakespeare]"),
    ] = None,
    data_dir: DataDir = "data",
    results: Annotated[
        Path, typer.Option(help="file with a line a finished run; runs that are in it are not done")
    ] = Path("natural.jsonl"),
    page: Annotated[
        Path | None, typer.Option(help="page with plots [RESULTS with the ending .html]")
    ] = None,
    leaderboard: Annotated[
        Path | None, typer.Option(help="leaderboard [RESULTS with the ending .csv]")
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="runs at a time, each in a process of its own")
    ] = 2,
    no_run: Annotated[
        bool, typer.Option("--no-run", help="make page and leaderboard of the runs that are there")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Run the reference benchmark of natural clients: hospitals, counties, people, speakers.

    Rivals have the same splits with the same seeds. A killed benchmark goes on when the same
    command is given again. docs/natural.md has the protocol and the data.

    Example: `bayflower natural --quick --data-dir data`
    """
    from ..files.texts import write_text
    from ..natural import runs
    from ..natural.page import in_words, made
    from ..natural.summary import leaderboard as leaderboard_of
    from ..natural.summary import table_of

    quiet_logs(verbose)

    def say(text: str) -> None:
        print(text, flush=True)

    asked = runs.wanted(dataset or (), method or (), seeds, quick, only)
    for file in (results, page, leaderboard):
        if file is not None and file.is_dir():
            raise ConfigError(f"{file} is a folder; name a file")
    if no_run and not results.exists():
        raise ConfigError(f"there are no runs: no file {results}; leave --no-run out")
    if not no_run:
        runs.mended(results)
        runs.read(results)  # raises before anything starts if it is no file of this benchmark
        plan = runs.planned(asked, Path(data_dir), say)
        runs.carry_out(plan, Path(data_dir), results, jobs, say)
    found = table_of(runs.read(results).values())
    if not found:
        raise ConfigError(f"{results} has no finished run")
    ranks, shown = leaderboard or results.with_suffix(".csv"), page or results.with_suffix(".html")
    told = in_words(found, (shown.name, ranks.name))
    for file, text in (
        (ranks, leaderboard_of(found)),
        (shown, made(found)),
        (shown.with_suffix(".md"), told),
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, text)
        say(f"written: {file}")
