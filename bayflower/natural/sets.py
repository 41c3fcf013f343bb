"""The natural data sets: what is read, which network, how many samples, and which decision.

A decision is one of three, each with costs in the same unit:

    alarm    act if P(event) ≥ 1/(1 + r): a missed event costs r, a false alarm 1
    above    the same for the event that a number lies above a level
    ask      answer with the likeliest class if P ≥ 1 − 1/r: a wrong answer costs r, asking 1
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..data.settings import DataSettings
from ..data.sources import load_source
from ..errors import ConfigError

ALL = 0  # as a number of samples: all there are
HORIZON = 1825  # days: the decision on a patient is about an event within five years
EDGES = "365,730,1095,1460,1825,2555,3650,7300"  # ends of the intervals of time, in days
LINEAR = {"model": "linear", "lr": 0.02, "local_epochs": 5, "rounds": 12}


class Rows(NamedTuple):
    """A data set in memory."""

    x: np.ndarray
    y: np.ndarray
    owner: np.ndarray
    classes: int  # 1 of numbers and times
    time: np.ndarray | None = None  # orders an owner's samples


@dataclass(frozen=True)
class Spec:
    """A data set of the benchmark."""

    name: str
    clients: str  # what a client is
    kind: str  # classes, numbers or times
    sizes: tuple[int, ...]  # training samples a client, at most; ALL = all
    later: tuple[int, ...] = ()  # the same with tests later in time
    settings: Mapping[str, Any] = field(default_factory=lambda: LINEAR)
    decision: str = "alarm"
    ratios: tuple[int, ...] = (1, 4, 10)
    level: float | None = None  # of the decision `above`; None = upper quartile of training targets
    seeds: int = 10
    least: int = 40  # samples of an owner that takes part
    most_clients: int = 1000
    most_rows: int = 400  # training samples of a client, where all are asked for
    most_tested: int = 60  # test samples of a client
    prepare: Callable[[Rows], Rows] | None = None

    @property
    def linear(self) -> bool:
        """Return whether the network is one linear layer."""
        return bool(self.settings["model"] == "linear")


# -- what is done to the inputs --------------------------------------------------------------------
def with_flags(rows: Rows) -> Rows:
    """Return columns with gaps twice: as they are, and as 1 where the value is missing."""
    gaps = np.isnan(rows.x)
    some = gaps.any(0)
    return rows._replace(x=np.concatenate([rows.x, gaps[:, some].astype(rows.x.dtype)], 1))


def votes(rows: Rows) -> Rows:
    """Return the inputs without the region, and with one for black women."""
    x = rows.x
    both = x[:, 0] * x[:, 1]
    return rows._replace(x=np.concatenate([x[:, [0, 1, 2, 3, 5]], both[:, None]], 1))


def by_time(rows: Rows) -> Rows:
    """Return the rows in the order of their third column, the time of a recording."""
    return rows._replace(time=rows.x[:, 2].astype(float))


def halved(rows: Rows) -> Rows:
    """Return images of half the side, from −1 to 1, as (N, 3, H, W)."""
    x = rows.x.astype(np.float32)
    small = (x[:, ::2, ::2] + x[:, 1::2, ::2] + x[:, ::2, 1::2] + x[:, 1::2, 1::2]) / 4
    scaled = (small / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
    return rows._replace(x=np.ascontiguousarray(scaled.transpose(0, 3, 1, 2)))


SETS = {
    one.name: one
    for one in (
        Spec("heart", "hospitals", "classes", (2, 10, 50, ALL), prepare=with_flags),
        Spec(
            "radon",
            "counties",
            "numbers",
            (2, 5, 10, 20, ALL),
            decision="above",
            level=float(np.log(4.0)),  # 4 pCi/L, where a home should be repaired in the US
        ),
        Spec("election88", "states", "classes", (2, 10, 40, ALL), prepare=votes),
        Spec(
            "parkinson",
            "patients",
            "numbers",
            (2, 10, 20, ALL),
            later=(20, ALL),
            decision="above",
            prepare=by_time,
        ),
        Spec(
            "brca",
            "regions",
            "times",
            (10, 40, ALL),
            settings={**LINEAR, "lr": 0.01, "edges": EDGES, "horizon": float(HORIZON)},
        ),
        Spec(
            "wisdm",
            "people",
            "classes",
            (5, 20, ALL),
            decision="ask",
            ratios=(2, 4, 10),
            prepare=with_flags,
        ),
        Spec(
            "officecaltech",
            "collections of pictures",
            "classes",
            (20, ALL),
            settings={"model": "lenet5", "lr": 0.002, "local_epochs": 3, "rounds": 8},
            decision="ask",
            ratios=(2, 4, 10),
            seeds=3,
            most_rows=150,
            prepare=halved,
        ),
        Spec(
            "shakespeare",
            "speakers",
            "classes",
            (),
            later=(20, 100, ALL),
            settings={"model": "mlp", "lr": 0.005, "local_epochs": 3, "rounds": 10},
            decision="ask",
            ratios=(2, 4, 10),
            seeds=3,
            least=400,
            most_clients=30,
        ),
    )
}
QUICK = ("heart", "radon")
KINDS = {"classes": "classes", "numbers": "numbers", "times": "times"}
TASKS = {"classes": "classification", "numbers": "regression", "times": "survival"}


def named(name: str) -> Spec:
    """Return the data set called `name`."""
    if name not in SETS:
        raise ConfigError(f"dataset must be one of {', '.join(SETS)}, got {name!r}")
    return SETS[name]


def load(name: str, folder: Path) -> Rows:
    """Return a data set from the files in a folder."""
    spec = named(name)
    if name == "shakespeare":
        return speeches(folder / "shakespeare.txt")
    found = load_source(DataSettings(dataset=name, data_dir=str(folder), targets=KINDS[spec.kind]))
    if found.client is None:
        raise ConfigError(
            f"the file of {name} in {folder} names no clients; it needs an array `client`"
        )
    rows = Rows(np.asarray(found.x), found.y, found.client, found.num_classes)
    return spec.prepare(rows) if spec.prepare else rows


# -- speeches --------------------------------------------------------------------------------------
LETTERS = "abcdefghijklmnopqrstuvwxyz ',.;!?-"  # the classes; every other character is a space
CONTEXT = 3  # characters that are seen
SHOWN = 600  # samples of a speaker, spread evenly over what is said
SPEAKER = re.compile(r"^([A-Z][A-Za-z ]*):$")


def speeches(path: Path) -> Rows:
    """Return the next letter of what a speaker says from the CONTEXT letters before it."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"dataset 'shakespeare' was not found: no readable file {path} ({error}); set "
            "--data-dir to the folder that holds it"
        ) from None
    said: dict[str, list[str]] = {}
    who = ""
    for line in lines:
        if match := SPEAKER.match(line):
            who = match[1]
        elif who and line.strip():
            said.setdefault(who, []).append(line.strip().lower())
    code = {letter: place for place, letter in enumerate(LETTERS)}
    inputs, targets, owner, time = [], [], [], []
    for number, name in enumerate(sorted(said)):
        text = " ".join(said[name])
        letters = np.array([code.get(letter, code[" "]) for letter in text])
        if len(letters) <= CONTEXT:
            continue
        places = np.unique(np.linspace(CONTEXT, len(letters) - 1, SHOWN).astype(int))
        inputs.append(np.stack([letters[places - back] for back in range(CONTEXT, 0, -1)], 1))
        targets.append(letters[places])
        owner.append(np.full(len(places), number))
        time.append(places.astype(float))
    if not inputs:
        raise ConfigError(f"{path} has no speeches; a speaker is a line NAME: of its own")
    seen = np.eye(len(LETTERS), dtype=np.float32)[np.concatenate(inputs)]
    return Rows(
        seen.reshape(len(seen), -1),
        np.concatenate(targets).astype(np.int64),
        np.concatenate(owner),
        len(LETTERS),
        np.concatenate(time),
    )
