"""`bayflower bench`: how fast the fused engine is on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .terminal import quiet_logs


def bench(
    suite: Annotated[
        str, typer.Argument(help="methods, scaling, cross-device, cpu, profile or steps")
    ] = "methods",
    workload: Annotated[
        list[str] | None,
        typer.Option(
            help="digits, fmnist-50 or cifar10-100; may be repeated [fmnist-50 on a GPU, else "
            "digits]"
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="see `bayflower methods`; may be repeated [the suite's own]"),
    ] = None,
    clients: Annotated[
        list[int] | None,
        typer.Option(help="scaling, cross-device, steps: how many; may be repeated"),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=0, help="rounds that count, after the warm-up; 0 = the suite's own")
    ] = 0,
    seconds: Annotated[
        float,
        typer.Option(help="a case ends early after this time, with at least one round that counts"),
    ] = 120.0,
    device: Annotated[
        str, typer.Option(help="cpu, cuda or cuda:N; auto = a GPU if there is one")
    ] = "auto",
    data_dir: Annotated[
        str, typer.Option(help="where data sets lie: DATA_DIR/fmnist.npz and so on")
    ] = "data",
    seed: Annotated[
        int, typer.Option(min=0, help="decides partition, initialisation, batches and sampling")
    ] = 0,
    loop: Annotated[
        bool,
        typer.Option("--loop/--no-loop", help="compare with clients one by one; cpu: with Ray"),
    ] = True,
    tf32: Annotated[bool, typer.Option("--tf32", help="methods: measure with TF32 too")] = False,
    file: Annotated[
        Path | None,
        typer.Option(
            "--json", help="what was measured, written after every case [runs/bench-SUITE.json]"
        ),
    ] = None,
) -> None:
    """Measure how fast the fused engine is on this machine; docs/benchmarks.md says what each suite
    does.

    Example: `bayflower bench methods --workload digits --method fedper --method pfedvmp`
    """
    from .. import bench as benchmark

    quiet_logs(False)
    options = benchmark.Options(
        device,
        data_dir,
        seed,
        rounds,
        seconds,
        tuple(method or ()),
        tuple(workload or ()),
        tuple(clients or ()),
        loop,
        tf32,
    )
    file = file or Path("runs") / f"bench-{suite}.json"
    progress = Console(stderr=True)
    content = benchmark.run(
        suite,
        options,
        file,
        lambda line: progress.print(
            line, style="dim", highlight=False, markup=False, soft_wrap=True
        ),
    )
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(benchmark.table(content))
    console.print(f"written: {file}", markup=False)
