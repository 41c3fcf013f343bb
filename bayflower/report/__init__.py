"""A report of some runs: one HTML page that needs nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

import numpy as np

from ..config import parse
from ..data import load_federation
from ..errors import BayflowerError, ConfigError
from ..files.texts import write_text, writing
from . import (
    board,
    figures,
    measured,
    numbers,
    outcomes,
    page,
    panels,
    special,
    twoclass,
    uncertainty,
)
from .collect import DATA, Found, Group, brief, group, read, same_data, title, unequal
from .glossary import glossary
from .verdict import Verdict, verdict

FEATURES = ("auto", "all", "none")


def write_report(
    folders: Sequence[Path],
    file: Path,
    features: str = "auto",
    data_dir: str = "",
    say: Callable[[str], None] = lambda text: None,
) -> int:
    """Write the report of the runs in `folders` to `file`; return how many runs it shows."""
    where = file.parent
    if file.is_dir() or not os.access(where, os.W_OK):
        why = f"{where} {'is not writable' if where.exists() else 'does not exist'}"
        raise ConfigError(
            f"{file} cannot be written: {'it is a folder' if file.is_dir() else why}; name a file"
        )
    if features not in FEATURES:
        raise ConfigError(f"features must be one of {', '.join(FEATURES)}, got {features!r}")
    runs = read(folders)
    groups = group(runs)
    text = made(groups, features, data_dir, say)
    with writing(file):
        write_text(file, text)
    return sum(len(one.runs) for one in groups)


def made(groups: Sequence[Group], features: str, data_dir: str, say: Callable[[str], None]) -> str:
    """Return the page; runs on different data get parts of their own."""
    sets: list[list[Group]] = []
    for one in groups:
        home = next((some for some in sets if same_data(some[0], one)), None)
        if home is None:
            sets.append([one])
        else:
            home.append(one)
    sets = [retitled(some) for some in sets]
    names = sorted({str(one.first["dataset"]) for one in groups})
    parts, shown = [], []
    for some in sets:
        short = labelled(some, sets)
        say(f"figures of {short}")
        sections = sections_of(some, features, data_dir, say)
        parts.append(page.Part(*described(some, short), sections))
        shown += [(short, one) for one in some]
    calibrated = any(
        run.result.get("uncertainty") and "accuracy" in run.result["final"]["personal"]
        for one in groups
        for run in one.runs
    )
    two = any(twoclass.of_group(one) for one in groups)
    metrics = {key for one in groups for key in one.first["final"]["personal"]}
    end = [
        ("Glossary", glossary(calibrated, two, metrics)),
        ("Runs and versions", numbers.origins(shown)),
    ]
    about = ", ".join(names) if len(names) < 5 else f"{len(names)} data sets"
    return page.page(f"Bayflower: {about}", parts, end)


def retitled(some: Sequence[Group]) -> list[Group]:
    """Return groups that share their data with titles that tell apart no more than these."""
    found = []
    for one in some:
        others = [other for other in some if other is not one and other.method == one.method]
        words = title(one.first, [other.first for other in others])
        found.append(replace(one, title=words))
    return found


def labelled(some: Sequence[Group], sets: Sequence[Sequence[Group]]) -> str:
    """Return the name of a data set with all that tells it from others of the same name."""
    name, config = str(some[0].first["dataset"]), some[0].first["config"]
    alike = [part[0].first["config"] for part in sets if str(part[0].first["dataset"]) == name]
    differ = [key for key in DATA if any(one.get(key) != config.get(key) for one in alike)]
    said = ", ".join(f"{key}={brief(config.get(key))}" for key in differ)
    return f"{name} ({said})" if said else name


def described(some: Sequence[Group], short: str) -> tuple[str, str, str]:
    """Return the heading of groups that share their data, its short form, and a line of facts."""
    one = some[0].first
    sites = all(who.lasting for who in some[0].runs[0].clients.values())
    number, new = one.get("num_clients", 0), one.get("num_new_clients", 0)
    word = ("site" if sites else "client") + ("" if number == 1 else "s")
    facts = [
        f"{number} {word}{f' and {new} new' if new else ''}",
        str(one["partition"].get("kind")),
    ]
    train = sum(one["partition"].get("train_sizes") or [])
    facts += [f"{train:,} training samples"] if train else []
    facts += [f"{one['final']['personal']['num_examples']:,} test samples"]
    seeds, rounds = max(len(group.runs) for group in some), len(one["rounds"])
    facts += [f"{rounds} round{'s' * (rounds != 1)}", f"{seeds} seed{'s' * (seeds != 1)}"]
    what = "methods" if len({group.method for group in some}) == len(some) else "variants"
    heading = f"{short}: {len(some)} {what} compared" if len(some) > 1 else short
    who = "site" if sites else "client"
    text = f"Each {who} is tested on its own test data, after the last round."
    return heading, short, f"{', '.join(facts)}. {text}"


def sections_of(
    some: Sequence[Group], features: str, data_dir: str, say: Callable[[str], None]
) -> list[tuple[str, str]]:
    """Return the sections of groups that share their data: verdict, plots, tables. A picture shows
    at most SHOWN groups, so more groups make more pictures in the same sections.
    """
    found = verdict(some)
    if measured.is_measured(some) or outcomes.is_about(some):
        return sections_of_numbers(some, found)
    states, notes = special.from_states(some, features, say, data_dir)
    text = "".join(f"<p class=soft>{escape(note)}</p>" for note in notes)

    def each(*draw: Callable[[Sequence[Group]], list[figures.Figure]]) -> list[figures.Figure]:
        parts = [some[i : i + figures.SHOWN] for i in range(0, len(some), figures.SHOWN)]
        return [one for part in parts for make in draw for one in make(part)]

    leading = next(iter(found.means), some[0].title)
    first = some[0].runs[0]
    people = each(lambda part: figures.gains(part, found), figures.clients, figures.fairness)
    return [
        ("Verdict", board.section(some, found)),
        ("Sites", page.figures(people)),
        ("Two classes", twoclass.section(some, leading)),
        ("Trust", uncertainty.section(some, each(panels.reliability))),
        ("Cost", page.figures(each(panels.costs))),
        ("Over rounds", page.figures(each(figures.curves))),
        ("What the methods show", page.figures([*each(special.over_rounds), *states]) + text),
        ("Data", page.figures([panels.partition(first, class_counts(first, data_dir))])),
        ("Tables", numbers.tables(some) + uncertainty.tables(some)),
        ("Settings", numbers.settings(some, unequal(some))),
    ]


def sections_of_numbers(some: Sequence[Group], found: Verdict) -> list[tuple[str, str]]:
    """Return the sections of groups whose targets are no classes."""
    parts = [some[i : i + figures.SHOWN] for i in range(0, len(some), figures.SHOWN)]

    def each(*draw: Callable[[Sequence[Group]], list[figures.Figure]]) -> list[figures.Figure]:
        return [one for part in parts for make in draw for one in make(part)]

    people = each(
        lambda part: measured.gains(part, found), lambda part: measured.sites(part, found.metric)
    )
    if outcomes.is_about(some):
        trust = outcomes.section(some, each(*outcomes.pictures(some)))
        rounds = each(lambda part: measured.curves(part, outcomes.over_rounds(some)))
        tables = outcomes.tables(some)
    else:
        trust = measured.section(some, each(measured.pits))
        rounds, tables = each(measured.curves), measured.tables(some)
    return [
        ("Verdict", board.section(some, found)),
        ("Sites", page.figures(people)),
        ("Trust", trust),
        ("Cost", page.figures(each(panels.costs))),
        ("Over rounds", page.figures(rounds)),
        ("What the methods show", page.figures(each(special.over_rounds))),
        ("Data", page.figures([panels.partition(some[0].runs[0], None)])),
        ("Tables", tables),
        ("Settings", numbers.settings(some, unequal(some))),
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
    sizes = list(run.result["partition"].get("train_sizes", []))[: len(federation.clients)]
    if len(sizes) < len(federation.clients):
        return None  # other data under the same name, or too many clients to list
    if [len(data.y_train) for data in federation.clients] != sizes:
        return None  # other data under the same name
    return [
        np.bincount(data.y_train, minlength=federation.num_classes).tolist()
        for data in federation.clients
    ]
