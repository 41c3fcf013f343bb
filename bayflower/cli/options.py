"""Options that several commands share, with their help texts."""

from __future__ import annotations

from typing import Annotated

import typer

Dataset = Annotated[
    str | None,
    typer.Option(
        help="digits, synthetic, fmnist, mnist, cifar10, cifar100, emnist, emnist47, "
        "officecaltech, heart, femnist, celeba, "
        "several as A+B, or your own data: a .csv, .parquet or .npz file, several files "
        "('sites/*.csv'), or a folder of images"
    ),
]


Target = Annotated[str | None, typer.Option(help="your own data: column of the labels")]


SiteColumn = Annotated[
    str | None,
    typer.Option(
        "--site",
        help="your own data: column of the sites, each of which is a client; off = none; folder "
        "of images: a .csv with columns file and site",
    ),
]


Test = Annotated[
    str | None,
    typer.Option(
        help="test samples: a column that marks them, a file of them, or a share of each client's"
    ),
]


ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="the network: a name of `bayflower models`, or package.module:factory for your own; "
        "the current folder is searched too",
    ),
]


Clients = Annotated[int | None, typer.Option(help="number of clients that train")]


Rounds = Annotated[int | None, typer.Option(help="rounds of training")]


Seed = Annotated[
    int | None, typer.Option(help="seed of partition, initialisation, batches and client sampling")
]


Engine = Annotated[
    str,
    typer.Option(
        help="fused (trains all clients together), loop (one by one), ray (Flower's simulation) or "
        "deployment (one process for each client)"
    ),
]


MaxFused = Annotated[
    int | None,
    typer.Option(
        min=0, help="fused: cap on clients trained together; 0 = as many as fit into memory"
    ),
]


Workers = Annotated[
    str | None,
    typer.Option(
        metavar="N|auto",
        help="fused: processes that share the clients, by Ray; auto = one a GPU, else one a core; "
        "a cluster is found by RAY_ADDRESS; 0 = none",
    ),
]


Port = Annotated[
    int,
    typer.Option(
        min=0,
        max=65535,
        help="ray and deployment: port of the SuperLink on loopback; 0 = any free one",
    ),
]


Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="any other setting; see `bayflower settings METHOD`"
    ),
]


Preset = Annotated[
    str | None,
    typer.Option(
        help="start from these settings instead of the defaults; paper = the values of each "
        "method's paper, training included; --set and other options come on top"
    ),
]


AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of a table")]


Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="print the log")]
DataDir = Annotated[str, typer.Option(help="folder of the data sets, e.g. DATA_DIR/cifar10.npz")]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N; auto = a GPU if there is one")]

TensorBoardFiles = Annotated[
    bool, typer.Option("--tensorboard", help="write each round's numbers to OUT/tensorboard")
]
MLflowTarget = Annotated[
    str,
    typer.Option(
        "--mlflow",
        metavar="URI|FOLDER",
        help="track in MLflow: a tracking URI, or a folder for a database of its own",
    ),
]
WandbProject = Annotated[
    str,
    typer.Option(
        "--wandb",
        metavar="PROJECT",
        help="track in Weights & Biases; WANDB_MODE=offline keeps the run on this machine",
    ),
]

Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="replace a run that is in the folder already")
]
Together = Annotated[
    bool | None,  # None: as study.toml says
    typer.Option(
        "--together/--apart",
        help="fused engine: train the seeds of a method side by side in one stack, or one after "
        "another [--apart]",
        show_default=False,
    ),
]
