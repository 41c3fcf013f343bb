"""Options that several commands share, with their help texts."""

from __future__ import annotations

from typing import Annotated

import typer

Dataset = Annotated[
    str | None,
    typer.Option(
        help="digits, synthetic, fmnist, mnist, cifar10, cifar100, emnist, emnist47, "
        "officecaltech, heart, femnist, celeba, "
        "several as A+B, or a path to an .npz file"
    ),
]


Clients = Annotated[int | None, typer.Option(help="number of clients that train")]


Rounds = Annotated[int | None, typer.Option(help="rounds of training")]


Seed = Annotated[
    int | None, typer.Option(help="decides partition, initialisation, batches and sampling")
]


Engine = Annotated[
    str,
    typer.Option(
        help="fused (all clients together), loop (one by one), ray (simulation) or deployment "
        "(processes)"
    ),
]


MaxFused = Annotated[
    int | None,
    typer.Option(
        min=0, help="fused: most clients trained together; 0 = as many as fit into memory"
    ),
]


Port = Annotated[
    int,
    typer.Option(help="ray and deployment: port of the SuperLink on loopback; 0 = any free one"),
]


Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="any other setting; see `bayflower settings METHOD`"
    ),
]


AsJson = Annotated[bool, typer.Option("--json", help="print JSON for programs instead of a table")]


Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="log what happens")]
DataDir = Annotated[str, typer.Option(help="where data sets lie: DATA_DIR/cifar10.npz and so on")]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N; auto = a GPU if there is one")]
