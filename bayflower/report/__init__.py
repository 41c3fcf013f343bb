"""A report of some runs: one HTML page that needs nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

import numpy as np

from ..config import parse
from ..data import load_federation
from ..errors import BayflowerError, ConfigError
from . import figures, page, panels, special, uncertainty
from .collect import Found, Group, group, read, same_data

FEATURES = ("auto", "all", "none")


def write_report(
    folders: Sequence[Path],
    file: Path,
    features: str = "auto",
    data_dir: str = "",
    say: Callable[[str], None] = lambda text: None,
) -> int:
    """Write the report of the runs in `folders` to `file`; return how many runs it shows."""
    if file.is_dir() or not file.parent.exists():
        raise ConfigError(
            f"{file} cannot be written: "
            f"{'it is a folder' if file.is_dir() else f'{file.parent} does not exist'}; name a file"
        )
    if features not in FEATURES:
        raise ConfigError(f"features must be one of {', '.join(FEATURES)}, got {features!r}")
    runs = read(folders)
    groups = group(runs)
    text = made(groups, features, data_dir, say)
    part = file.with_name(file.name + ".part")
    part.write_text(text)
    os.replace(part, file)
    return sum(len(one.runs) for one in groups)


def made(groups: Sequence[Group], features: str, data_dir: str, say: Callable[[str], None]) -> str:
    """Return the page; runs on different data get sections of their own."""
    sets: list[list[Group]] = []
    for one in groups:
        home = next((some for some in sets if same_data(some[0], one)), None)
        if home is None:
            sets.append([one])
        else:
            home.append(one)
    names = sorted({str(one.first["dataset"]) for one in groups})
    sections: list[tuple[str, str]] = [("Runs", page.origins(groups))]
    for number, some in enumerate(sets, 1):
        head = f"{some[0].first['dataset']}: " if len(sets) > 1 else ""
        if len({str(part[0].first["dataset"]) for part in sets}) < len(sets):
            head = f"{number}. {head}"
        say(f"figures of {some[0].first['dataset']}")
        for before in range(0, len(some), figures.SHOWN):
            part = some[before : before + figures.SHOWN]
            more = f" ({before // figures.SHOWN + 1})" if len(some) > figures.SHOWN else ""
            sections += sections_of(part, head, more, features, data_dir, say)
    return page.page(f"Bayflower: {', '.join(names)}", sections)


def sections_of(
    some: Sequence[Group],
    head: str,
    more: str,
    features: str,
    data_dir: str,
    say: Callable[[str], None],
) -> list[tuple[str, str]]:
    """Return the sections of groups that share their data."""
    states, notes = special.from_states(some, features, say, data_dir)
    shown = [*special.over_rounds(some), *states]
    text = "".join(f"<p class=soft>{escape(note)}</p>" for note in notes)
    return [
        (f"{head}Personal models{more}", page.summary(some)),
        (f"{head}Global models{more}", page.summary(some, "global")),
        (f"{head}New clients{more}", page.summary(some, "new_clients")),
        (f"{head}Over rounds{more}", page.figures(figures.curves(some))),
        (f"{head}Clients{more}", page.figures([*figures.clients(some), *figures.fairness(some)])),
        (f"{head}Uncertainty{more}", uncertainty.section(some)),
        (f"{head}Calibration{more}", page.figures(panels.reliability(some))),
        (f"{head}What the methods show{more}", page.figures(shown) + text),
        (f"{head}Bytes and seconds{more}", page.figures(panels.costs(some))),
        (
            f"{head}The partition{more}",
            page.figures(
                [panels.partition(some[0].runs[0], class_counts(some[0].runs[0], data_dir))]
            ),
        ),
    ]


def class_counts(run: Found, data_dir: str = "") -> list[list[int]] | None:
    """Return the training samples of each client by class, made again from the run's settings; None
    where the data are not at hand.
    """
    config = {key: value for key, value in run.result["config"].items() if key != "method"}
    config.setdefault("calibration", "off")  # runs from before held no samples out
    try:
        settings = parse(
            run.result["method"],
            {**config, "device": "cpu", **({"data_dir": data_dir} if data_dir else {})},
        )
        federation = load_federation(settings.data, settings.settings.seed)
    except (BayflowerError, OSError, KeyError):
        return None
    if [len(data.y_train) for data in federation.clients] != list(
        run.result["partition"].get("train_sizes", [])
    )[: len(federation.clients)]:
        return None  # other data under the same name
    return [
        np.bincount(data.y_train, minlength=federation.num_classes).tolist()
        for data in federation.clients
    ]
