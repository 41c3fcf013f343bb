"""`bayflower cite`: the BibTeX of what a run used."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import __version__, methods
from ..errors import ConfigError
from .citations import METHODS, Entry, arxiv, paper
from .options import AsJson
from .sources import DATA


def cite(
    what: Annotated[
        list[str], typer.Argument(metavar="METHOD|DIR", help="methods, or folders of runs")
    ],
    as_json: AsJson = False,
) -> None:
    """Print the BibTeX of what a run used: method, data set, Flower, Bayflower.

    Example: `bayflower cite fedmap >> references.bib`
    """
    found = entries(what)
    print(
        json.dumps([{"kind": kind, "key": key, **fields} for kind, key, fields in found])
        if as_json
        else bibtex(found)
    )


RAW = "bibtex"  # the only field of an entry that a method's row has as a text
SAME_DATA = {"cifar100": "cifar10", "emnist47": "emnist", "synthetic": "", "crowd": ""}
FLOWER = paper(
    "misc",
    "beutel2020flower",
    "Beutel, Daniel J. and others",
    "Flower: A Friendly Federated Learning Research Framework",
    2020,
    **arxiv("2007.14390"),
)
OURS: Entry = (
    "software",
    "bayflower",
    {
        "title": "{Bayflower: Bayesian Personalised Federated Learning on Flower}",
        "version": __version__,
    },
)


def entries(words: Sequence[str]) -> list[Entry]:
    """Return what to cite for methods, or for the runs in folders with a result.json."""
    found: dict[str, Entry] = {}
    for word in words:
        method, dataset = used(word)
        row = methods.get(method)
        for entry in (
            entry_of(row),
            *(DATA.get(SAME_DATA.get(name, name)) for name in dataset.split("+")),
        ):
            if entry is not None:
                found[entry[1]] = entry
        if row.stem == "metavd":  # an add-on: what it rides on is used too
            found[METHODS["reptile"][1]] = METHODS["reptile"]
    return [*found.values(), FLOWER, OURS]


def entry_of(row: methods.Method) -> Entry | None:
    """Return the entry of a method's paper: the one above, the row's own, or, of a method of
    another package, one made of its line in the table.
    """
    if row.stem in METHODS:
        return METHODS[row.stem]
    if head := re.match(r"\s*@(\w+)\{([^\s,]+),", row.bibtex):
        return head[1], head[2], {RAW: row.bibtex.strip()}
    if row.outside is None:
        return None
    title = f"{row.title}: {row.summary}" if row.summary else row.title
    return "misc", row.name, {"title": f"{{{title}}}", "note": row.paper}


def used(word: str) -> tuple[str, str]:
    """Return (method, data set) of a run's folder, or (method, "")."""
    path = Path(word)
    if word in methods.METHODS or not path.exists():
        return methods.get(word).name, ""
    path = path / "result.json" if path.is_dir() else path
    try:
        content: Any = json.loads(path.read_text())
        return str(content["method"]), str(content["dataset"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is not the result of a run ({type(error).__name__}); give a method, or the "
            "--out of a run"
        ) from None


def bibtex(found: Sequence[Entry]) -> str:
    """Return the entries as BibTeX."""
    return "\n\n".join(
        fields[RAW]
        if RAW in fields
        else "\n".join(
            [
                f"@{kind}{{{key},",
                *(f"  {name} = {{{value}}}," for name, value in fields.items()),
                "}",
            ]
        )
        for kind, key, fields in found
    )
