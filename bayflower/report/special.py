"""What single methods show: personal layers (FedBPS), dropout (MetaVD), the latent belief (FedNP),
weights (FedMAP), features.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ..data import load_federation
from ..errors import BayflowerError
from ..personal.made import numbers
from ..personal.runs import Opened, client_state, kept, open_run
from ..rounds.solo import one_thread, samples
from .collect import Found, Group
from .figures import Figure, lines_over_rounds, quantiles
from .svg import Chart, around, legend

log = logging.getLogger("bayflower")
POINTS = 300  # samples in a picture of features
# methods that shape the features, which are therefore shown
SHAPED = ("pfedvmp", "pfedvmp-avg", "fednp")
REPORTED = {  # what a method tells of each round: heading, axis, words
    "effective_clients": (
        "Clients that made the prior",
        "effective clients",
        "(Σω)²/Σω²: 1 means that one client made the prior alone.",
    ),
    "latent_precision": (
        "Belief about the latent",
        "mean precision of z",
        "How sure the federation has become of z, over rounds.",
    ),
    "dropout_rate": (
        "Dropout over rounds",
        "mean dropout rate",
        "Mean over clients and weights of the layer.",
    ),
    "sparsity": (
        "Dropped weights",
        "share of the layer",
        "Weights that no longer travel, because their dropout rate is too high.",
    ),
    "known_classes": (
        "Classes with a centroid",
        "classes",
        "Classes about which at least one client has sent a message.",
    ),
    "disagreement": (
        "Disagreement of the clients",
        "between / within",
        "Median variance of a weight between clients over that within.",
    ),
}


def over_rounds(groups: Sequence[Group]) -> list[Figure]:
    """Return what the methods themselves report of their rounds."""
    found = []
    for key, (heading, y_title, words) in REPORTED.items():
        lines = [
            (group.title, group.curve(lambda record, key=key: record.get(key))) for group in groups
        ]  # type: ignore[misc]
        lines = [(title, points) for title, points in lines if points]
        if lines:
            found.append(
                Figure(
                    heading,
                    lines_over_rounds(heading, lines, y_title).svg(),
                    words,
                    legend([title for title, _ in lines]),
                )
            )
    for group in groups:
        layers = [key for key in group.first["rounds"][-1] if key.startswith("personal_share/")]
        lines = [
            (key.partition("/")[2], group.curve(lambda record, key=key: scaled(record.get(key))))
            for key in layers
        ]  # type: ignore[misc]
        if lines:
            chart = lines_over_rounds(
                f"personal share of layers, {group.title}",
                lines,
                "personal entries, % of a layer",
                (0.0, 100.0),
            )
            words = "Share of each layer's weights that every client keeps for itself."
            found.append(
                Figure(
                    f"What is personal: {group.title}",
                    chart.svg(),
                    words,
                    legend(layers_named(layers)),
                )
            )
    return found


def layers_named(keys: Sequence[str]) -> list[str]:
    """Return the layers' names."""
    return [key.partition("/")[2] for key in keys]


def scaled(value: float | None) -> float | None:
    """Return a share in per cent."""
    return None if value is None else 100 * value


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
        wanted = [
            fn
            for name, fn in (("metavd", dropout_rates), ("fednp", latent))
            if group.method == name
        ]
        show = features == "all" or (features == "auto" and group.method in SHAPED)
        if not wanted and not show:
            continue
        try:
            opened = open_run(run.folder, data_dir)
            for fn in wanted:
                found += fn(group, opened)
            if show:
                say(f"features of {group.title}")
                found += embedded(group, run, opened)
        except (BayflowerError, OSError) as error:
            notes.append(
                f"{group.title}: features and states are not shown ({' '.join(str(error).split())})"
            )
    return found, notes


def dropout_rates(group: Group, opened: Opened) -> list[Figure]:
    """Return the dropout rates of each client's layer, a box a client."""
    from ..maths.dropout import rate

    server: Any = opened.halves.server
    seen = sorted(int(client) for client in opened.server.belief.seen)
    if not seen:
        return []
    chart = Chart(
        f"dropout rates, {group.title}",
        (-0.5, len(seen) - 0.5),
        (0.0, 1.0),
        x_title="client",
        y_title="dropout rate",
        width=1120.0,
    )
    chart.axes(x_names=[str(client) for client in seen])
    for place, client in enumerate(seen):
        values = sorted(rate(server.log_alpha(opened.server, client)).double().reshape(-1).tolist())
        low, first, middle, third, high = quantiles(values)
        text = (
            f"client {client}: lowest {low:.3f}, quartiles {first:.3f}, {middle:.3f}, "
            f"{third:.3f}, highest {high:.3f}"
        )
        chart.rule(place, low, place, high)
        chart.bar(place - 0.3, place + 0.3, first, third, 0, text, kind="box")
        chart.point(place, middle, 0, text)
    words = (
        "α/(1+α) of the weights of the layer, as the hypernetwork makes them for each client. "
        "Box: the middle half, mark: the median."
    )
    return [Figure(f"Dropout rates of each client: {group.title}", chart.svg(), words, wide=True)]


def latent(group: Group, opened: Opened) -> list[Figure]:
    """Return the belief about z at the end: mean and two standard deviations of each coordinate."""
    total = opened.server.total
    precision = total.precision.double().reshape(-1)
    mean, spread = total.shift.double().reshape(-1) / precision, 2 / precision.sqrt()
    points = [(i, float(m), float(s)) for i, (m, s) in enumerate(zip(mean, spread, strict=True))][
        :200
    ]
    chart = Chart(
        f"belief about z, {group.title}",
        (-0.5, len(points) - 0.5),
        around([v for _, m, s in points for v in (m - s, m + s)]),
        x_title="coordinate of z",
        y_title="mean ± 2 sd",
        width=1120.0,
    )
    chart.axes()
    for i, m, s in points:
        chart.rule(i, m - s, i, m + s)
        chart.point(i, m, 0, f"z[{i}]: {m:.3f} ± {s:.3f}")
    return [
        Figure(
            f"The latent belief at the end: {group.title}",
            chart.svg(),
            "The product of all clients' factors and the prior.",
            wide=True,
        )
    ]


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
