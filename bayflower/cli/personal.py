"""`bayflower export` and `bayflower personalise`: personal models from the folder of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import ConfigError
from .terminal import show as table

Folder = Annotated[
    Path, typer.Argument(metavar="DIR", help="the --out folder of a run, with its checkpoint")
]
Into = Annotated[
    Path | None,
    typer.Argument(
        metavar="FILE",
        help="folder to write; or a file ending in .safetensors, .pt2 or .onnx for one format",
    ),
]
Out = Annotated[Path | None, typer.Option("--out", help="the same as FILE")]
Onnx = Annotated[bool, typer.Option("--onnx", help="also write model.onnx (needs extra `onnx`)")]
DataDir = Annotated[
    str, typer.Option(help="folder of the data sets, if it has changed since the run")
]
AsJson = Annotated[bool, typer.Option("--json", help="print the card as JSON")]


def export(
    folder: Folder,
    into: Into = None,
    client: Annotated[
        str | None,
        typer.Option(
            help="number of the client, or its name; new clients follow the training clients"
        ),
    ] = None,
    every: Annotated[
        bool,
        typer.Option("--all", help="every client's model, in FILE/client-N; finished ones stay"),
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="replace another client's model; with --all: write finished models again",
        ),
    ] = False,
    onnx: Onnx = False,
    data_dir: DataDir = "",
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Write one client's own model: weights, card, and a program that needs nothing of ours. Or
    every client's, with --all.

    Example: `bayflower export runs/first models/client-3 --client 3 --onnx`
    """
    if every == (client is not None):
        raise ConfigError("export takes one client (--client 3) or every client (--all)")
    into = one_of(into, out)
    target, formats = wanted(into, onnx)
    if client is None:
        if target != into:
            raise ConfigError(f"--all writes a folder of models, got {into}; leave out the suffix")
        export_everyone(folder, into, formats, data_dir, overwrite, as_json)
        return
    from ..personal import export as write

    show(write(folder, client, target, formats, data_dir, overwrite), into, target, as_json)


def one_of(into: Path | None, out: Path | None) -> Path:
    """Return where to write, given as FILE or as --out."""
    if (into is None) == (out is None):
        raise ConfigError("name what to write once: as FILE after DIR, or by --out FILE")
    return into or out or Path()


def export_everyone(
    folder: Path,
    into: Path,
    formats: tuple[str, ...],
    data_dir: str,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write every client's model, with a line each and a table at the end."""
    from ..personal import export_all

    rows = []
    for card, now in export_all(folder, into, formats, data_dir, overwrite):
        rows.append(row(card, now))
        if not as_json:
            said = "written" if now else "was there"
            print(f"{who(card)} {said}: {into / str(rows[-1]['model'])}", flush=True)
            if remark := card["data"].get("remark"):
                print(f"warning: {who(card)}: {remark}")
    columns: tuple[str, ...] = (
        "client",
        "new",
        "tested",
        "accuracy",
        "nll_point",
        "nll",
        "coverage",
        "uses",
    )
    for key in ("rmse", "c_index", "macro_auroc"):
        if any(key in one for one in rows):
            covered = ("coverage",) if key == "rmse" else ()
            columns = ("client", "new", "tested", key, "nll_point", "nll", *covered, "uses")
    if any(one["site"] for one in rows):
        columns = ("client", "site", *columns[1:])
    if not as_json:
        rows = [{name: shown(name, one[name]) for name in columns} for one in rows]
    table(rows, columns, as_json)


def row(card: dict[str, Any], now: bool) -> dict[str, Any]:
    """Return one client's numbers of the table after `export --all`."""
    tests = (card["uncertainty"]["tests"] or {}).get("test", {})
    calibrated, numbers = tests.get("calibrated", {}), card["metrics"] or {}
    point = tests.get("point", {}).get("nll", numbers.get("nll"))
    name = card["task"]["name"] if "task" in card else "classification"
    key = {"survival": "c_index", "labels": "macro_auroc"}.get(name, "rmse")
    measured = name not in ("classification", "ordinal")
    covered = calibrated.get("coverage_90" if measured else "coverage")
    return {
        **({key: numbers.get(key)} if measured else {}),
        "client": card["client"],
        "site": card.get("site"),
        "model": f"client-{card['client']}",
        "new": card["never_trained"],
        "written": now,
        "tested": card["data"]["num_test"],
        "accuracy": numbers.get("accuracy"),
        "nll_point": point,
        "nll": numbers.get("nll"),
        "coverage": covered,
        "uses": card["uncertainty"]["used"],
    }


def who(card: dict[str, Any]) -> str:
    """Return the number and, where it is known, the name of a card's client."""
    site = card.get("site")
    return f"client {card['client']}{f' ({site})' if site else ''}"


def shown(name: str, value: Any) -> str:
    """Return a number of the table as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3f}" if name.startswith(("nll", "rmse", "c_index")) else f"{value:.1%}"
    return "–" if value is None else str(value)


def personalise(
    folder: Folder,
    data: Annotated[
        Path,
        typer.Option(
            help="the new client's samples: a table or folder as the run's, or an .npz file with x "
            "and y, as in docs/data.md"
        ),
    ],
    into: Into = None,
    test_fraction: Annotated[
        float, typer.Option(help="share of the samples used for the test")
    ] = 0.2,
    onnx: Onnx = False,
    data_dir: DataDir = "",
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Make a personal model for a new client that took part in no round, from a run's result and
    the client's data.

    Example: `bayflower personalise runs/first models/ours --data ours.npz`
    """
    from ..personal import personalise as write

    into = one_of(into, out)
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
    print(f"{who(card)}, {card['title']}: {card['model']}")
    if "task" in card:
        show_numbers(card)
    elif card["metrics"]:
        numbers, ece = card["metrics"], card["calibration"]["ece"]
        tests = (card["uncertainty"]["tests"] or {}).get("test", {})
        before = f" (point {tests['point']['nll']:.3f})" if tests else ""
        print(
            f"on {numbers['num_examples']} test samples: accuracy {numbers['accuracy']:.1%}, NLL "
            f"{numbers['nll']:.3f}{before}, ECE {ece:.1%}"
        )
    print(f"uncertainty: {card['uncertainty']['why']}")
    if card["uncertainty"]["sets"]:
        print(f"sets: {card['uncertainty']['sets']['promise']}")
    if "intervals" in card["uncertainty"]:
        print(f"intervals: {card['uncertainty']['intervals']['promise']}")
    if remark := card["data"].get("remark"):
        print(f"warning: {remark}")
    for kind, said in card["files"].items():
        print(f"{kind}: {target / said if said == f'model.{kind}' else said}")
    print(f"card: {target / 'card.json'}")


def show_numbers(card: dict[str, Any]) -> None:
    """Print how a model of numbers, counts or ordered classes did, and its units."""
    known = card["metrics"]
    print(f"task: {card['task']['name']}, {card['task']['likelihood']}; {card['units']}")
    if not known:
        print("it was not tested: the client has too few samples")
        return
    names = ("rmse", "mae", "nll", "crps", "deviance", "accuracy", "c_index", "macro_auroc")
    said = [f"{name.upper()} {known[name]:.4g}" for name in names if known.get(name) is not None]
    if "coverage_90" in known:
        said.append(f"{known['coverage_90']:.1%} in 90 % intervals")
    print(f"on {known['num_examples']} test samples: {', '.join(said)}")
