"""What methods show of themselves: numbers over rounds, pictures of the last state, features."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from .. import methods
from ..contract import ServerHalf
from ..data import load_federation
from ..errors import BayflowerError, in_one_line
from ..personal.made import numbers
from ..personal.runs import Opened, client_state, kept, open_run
from ..rounds.solo import one_thread, samples
from ..shown import Heading, Picture
from .collect import Found, Group
from .figures import Figure, lines_over_rounds
from .svg import Chart, around, legend

log = logging.getLogger("bayflower")
POINTS = 300  # samples in a picture of features
# methods that shape the features, which are therefore shown


def over_rounds(groups: Sequence[Group]) -> list[Figure]:
    """Return what the methods themselves report of their rounds, in the order of the table of
    methods.
    """
    wanted: dict[tuple[str, Heading], None] = {}
    for row in methods.METHODS.values():
        if any(group.method == row.name for group in groups):
            wanted |= dict.fromkeys(row.server.headings.items())
    found = []
    for key, heading in wanted:
        if key.endswith("/"):
            found += [layers(group, key, heading) for group in groups if below(group, key)]
            continue
        lines = [(group.title, curve(group, key, heading)) for group in groups]
        lines = [(title, points) for title, points in lines if points]
        if lines:
            found.append(drawn(heading.title, lines, heading))
    return found


def layers(group: Group, key: str, heading: Heading) -> Figure:
    """Return one line for each number below `key` of one method."""
    lines = [(name.removeprefix(key), curve(group, name, heading)) for name in below(group, key)]
    return drawn(f"{heading.title}: {group.title}", lines, heading)


def below(group: Group, key: str) -> list[str]:
    """Return the names of a method's numbers that begin with `key`."""
    return [name for name in group.first["rounds"][-1] if name.startswith(key)]


def curve(group: Group, key: str, heading: Heading) -> list[tuple[float, float, float, float]]:
    """Return a number over rounds, as a percentage where the heading says so."""
    factor = 100.0 if heading.percent else 1.0

    def read(record: dict[str, Any]) -> float | None:
        value = record.get(key)
        return None if value is None else factor * float(value)

    return group.curve(read)


def drawn(title: str, lines: list[Any], heading: Heading) -> Figure:
    """Return lines over rounds."""
    limits = ((0.0, 100.0),) if heading.percent else ()
    chart = lines_over_rounds(title, lines, heading.axis, *limits)
    return Figure(title, chart.svg(), heading.words, legend([name for name, _ in lines]))


def from_states(
    groups: Sequence[Group], features: str, say: Callable[[str], None], data_dir: str = ""
) -> tuple[list[Figure], list[str]]:
    """Return what only the states at the end of a run show, and why some could not be shown. One
    run a group is looked at.
    """
    found: list[Figure] = []
    notes: list[str] = []
    for group in groups:
        run = group.runs[0]
        row = methods.METHODS.get(group.method)
        if row is None:
            notes.append(f"{group.title}: the method is not installed here")
            continue
        pictured = row.server.pictures is not ServerHalf.pictures
        show = features == "all" or (features == "auto" and row.client.shapes_features)
        if not pictured and not show:
            continue
        try:
            opened = open_run(run.folder, data_dir)
            pictures = opened.halves.server.pictures(opened.server)
            found += [pictured_as(picture, group) for picture in pictures]
            if show:
                say(f"features of {group.title}")
                found += embedded(group, run, opened)
        except (BayflowerError, OSError) as error:
            notes.append(f"{group.title}: features and states are not shown ({in_one_line(error)})")
    return found, notes


def pictured_as(picture: Picture, group: Group) -> Figure:
    """Return a picture of a method's last state as a figure."""
    marks = picture.marks
    ends = [end for mark in marks for end in (mark.low, mark.high)]
    chart = Chart(
        f"{picture.title}, {group.title}",
        (-0.5, len(marks) - 0.5),
        picture.y_range or around(ends),
        x_title=picture.x_title,
        y_title=picture.y_title,
        width=1120.0,
    )
    boxes = any(mark.quartiles for mark in marks)
    chart.axes(x_names=[mark.name for mark in marks]) if boxes else chart.axes()
    for place, mark in enumerate(marks):
        chart.rule(place, mark.low, place, mark.high)
        text = f"{mark.name}: {mark.middle:.3f}, from {mark.low:.3f} to {mark.high:.3f}"
        if mark.quartiles:
            first, third = mark.quartiles
            text = (
                f"{picture.x_title} {mark.name}: lowest {mark.low:.3f}, quartiles {first:.3f}, "
                f"{mark.middle:.3f}, {third:.3f}, highest {mark.high:.3f}"
            )
            chart.bar(place - 0.3, place + 0.3, first, third, 0, text, kind="box")
        chart.point(place, mark.middle, 0, text)
    return Figure(f"{picture.title}: {group.title}", chart.svg(), picture.words, wide=True)


def embedded(group: Group, run: Found, opened: Opened) -> list[Figure]:
    """Return features of test samples in the plane: of the network as it began, and of the personal
    models.
    """
    half, model = opened.halves.client, opened.halves.model
    federation = load_federation(opened.run.data, opened.run.settings.seed)
    each = max(1, POINTS // max(len(federation.clients), 1))
    before, after, labels = [], [], []
    with torch.no_grad(), one_thread():
        params, buffers = opened.halves.initial
        for data in federation.clients:
            own = samples(data, torch.device("cpu"), opened.run.settings.torch_dtype())
            x, y = own.test.x[:each], own.test.y[:each]
            if not len(y):
                continue
            with torch.enable_grad():
                found = kept(
                    opened,
                    data.client,
                    own,
                    client_state(opened, data.client),
                    None,
                    federation.dataset,
                )
            mine, rest = numbers(half, found.state, found.broadcast, x)
            before.append(model.forward_features(params, buffers, x, train=False)[1].flatten(1))
            after.append(model.forward_features(mine, rest, x, train=False)[1].flatten(1))
            labels += y.tolist()
    if len(labels) < 5:
        return []
    pictures = []
    for words, parts in (("as the network began", before), ("of the personal models", after)):
        name = f"features {words}, {group.title}"
        plane = in_plane(torch.cat(parts).double().numpy())
        chart = Chart(
            name,
            around(plane[:, 0].tolist()),
            around(plane[:, 1].tolist()),
            width=420.0,
            height=400.0,
            left=20.0,
            bottom=20.0,
        )
        for (x, y), k in zip(plane.tolist(), labels, strict=True):
            chart.text(x, y, str(k), series=k)
        text = f"t-SNE of {len(labels)} test samples of all clients; digits are classes. "
        text += "Distances between groups mean little, their tightness more."
        pictures.append(Figure(f"Features {words}: {group.title}", chart.svg(), text))
    return pictures


def in_plane(features: np.ndarray) -> np.ndarray:
    """Return the features in two dimensions, by t-SNE from their two main directions; the same
    numbers every time.
    """
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(features) - 1) / 3)
    start = PCA(2, random_state=0).fit_transform(features)
    start = start / (np.std(start[:, 0]) or 1.0) * 1e-4
    return np.asarray(
        TSNE(2, perplexity=perplexity, init=start, random_state=0, max_iter=500).fit_transform(
            features
        )
    )
