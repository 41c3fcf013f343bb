"""`bayflower bench`: how fast the fused engine is on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .terminal import quiet_logs


def bench(
    suite: Annotated[
        str,
        typer.Argument(
            help="methods, scaling, cross-device, cpu, races, networks, profile or steps"
        ),
    ] = "methods",
    workload: Annotated[
        list[str] | None,
        typer.Option(
            help="digits, fmnist-50, cifar10-100, pfl-cifar10, flute-mnist-lr, femnist-cnn, "
            "shakespeare-lstm, cnn3-10, or a network of the suite networks (docs/benchmarks.md); "
            "repeatable [fmnist-50 on a GPU, else digits]"
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="see `bayflower methods`; repeatable [those of the suite]"),
    ] = None,
    clients: Annotated[
        list[int] | None,
        typer.Option(
            help="suites scaling, cross-device, networks, steps: number of clients; repeatable"
        ),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=0, help="measured rounds after the warm-up; 0 = as the suite says")
    ] = 0,
    seconds: Annotated[
        float,
        typer.Option(help="time limit of a case in seconds; at least one round is measured"),
    ] = 120.0,
    device: Annotated[
        str, typer.Option(help="cpu, cuda or cuda:N; auto = a GPU if there is one")
    ] = "auto",
    data_dir: Annotated[
        str, typer.Option(help="folder of the data sets, e.g. DATA_DIR/fmnist.npz")
    ] = "data",
    seed: Annotated[
        int, typer.Option(min=0, help="seed of partition, initialisation, batches and sampling")
    ] = 0,
    loop: Annotated[
        bool,
        typer.Option(
            "--loop/--no-loop", help="compare with training one by one; suite cpu: with Ray"
        ),
    ] = True,
    tf32: Annotated[
        bool,
        typer.Option(
            "--tf32",
            help="also measure with TF32; suite races: with TF32 and bfloat16; suite networks: "
            "with TF32 instead",
        ),
    ] = False,
    file: Annotated[
        Path | None,
        typer.Option(
            "--json", help="file for the results, updated after every case [runs/bench-SUITE.json]"
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
