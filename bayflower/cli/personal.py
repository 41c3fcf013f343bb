"""`bayflower export` and `bayflower personalise`: personal models from the folder of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import ConfigError

Folder = Annotated[
    Path, typer.Argument(metavar="DIR", help="the --out folder of a run, with its checkpoint")
]
Into = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="folder to write; or a file ending in .safetensors, .pt2 or .onnx for one format",
    ),
]
Onnx = Annotated[bool, typer.Option("--onnx", help="also write model.onnx (needs extra `onnx`)")]
DataDir = Annotated[
    str, typer.Option(help="folder of the data sets, if it has changed since the run")
]
AsJson = Annotated[bool, typer.Option("--json", help="print the card as JSON")]


def export(
    folder: Folder,
    into: Into,
    client: Annotated[
        int,
        typer.Option(min=0, help="number of the client; new clients follow the training clients"),
    ],
    onnx: Onnx = False,
    data_dir: DataDir = "",
    as_json: AsJson = False,
) -> None:
    """Write one client's own model: weights, card, and a program that needs nothing of ours.

    Example: `bayflower export runs/first models/client-3 --client 3 --onnx`
    """
    from ..personal import export as write

    target, formats = wanted(into, onnx)
    show(write(folder, client, target, formats, data_dir), into, target, as_json)


def personalise(
    folder: Folder,
    into: Into,
    data: Annotated[
        Path, typer.Option(help="an .npz file with the new client's x and y, as in docs/data.md")
    ],
    test_fraction: Annotated[
        float, typer.Option(help="share of the samples used for the test")
    ] = 0.2,
    onnx: Onnx = False,
    data_dir: DataDir = "",
    as_json: AsJson = False,
) -> None:
    """Make a personal model for a new client that took part in no round, from a run's result and
    the client's data.

    Example: `bayflower personalise runs/first models/ours --data ours.npz`
    """
    from ..personal import personalise as write

    target, formats = wanted(into, onnx)
    show(write(folder, data, target, formats, test_fraction, data_dir), into, target, as_json)


def wanted(into: Path, onnx: bool) -> tuple[Path, tuple[str, ...]]:
    """Return the folder to write and the formats: of a file name with a suffix, the folder of the
    same stem and that format.
    """
    kind = into.suffix.removeprefix(".")
    if kind in ("safetensors", "pt2", "onnx"):
        return into.with_suffix(""), ("safetensors", kind)
    if into.exists() and not into.is_dir():
        raise ConfigError(
            f"{into} is a file; give a folder, or a file ending in .safetensors, .pt2 or .onnx"
        )
    return into, ("safetensors", "pt2", *(["onnx"] if onnx else []))


def show(card: dict[str, Any], into: Path, target: Path, as_json: bool) -> None:
    """Put a single format where it was asked for, and print what was written."""
    kind = into.suffix.removeprefix(".")
    if kind in ("safetensors", "pt2", "onnx"):
        if card["files"][kind] != f"model.{kind}":
            raise ConfigError(f"{into} was {card['files'][kind]}")
        into.write_bytes((target / f"model.{kind}").read_bytes())
    if as_json:
        print(json.dumps(card))
        return
    print(f"client {card['client']}, {card['title']}: {card['model']}")
    if card["metrics"]:
        numbers, ece = card["metrics"], card["calibration"]["ece"]
        print(
            f"on {numbers['num_examples']} test samples: accuracy {numbers['accuracy']:.1%}, NLL "
            f"{numbers['nll']:.3f}, ECE {ece:.1%}"
        )
    if card["posterior"]:
        print(f"uncertainty: {card['posterior']['origin']}")
    for kind, said in card["files"].items():
        print(f"{kind}: {target / said if said == f'model.{kind}' else said}")
    print(f"card: {target / 'card.json'}")
