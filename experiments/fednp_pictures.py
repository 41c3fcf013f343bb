"""FedNP's Figures 3 and 5: features in the plane, and the classifier's distribution as the latent
predicts it. Needs matplotlib.

    # or any runs made with --out; one folder a method
    bayflower reproduce fednp-figure-3 --data-dir data --keep runs/np
    python experiments/fednp_pictures.py gather runs/np/* --data-dir data --npz runs/np.npz
    python experiments/fednp_pictures.py draw --npz runs/np.npz --folder experiments/pictures

Figure 3: t-SNE of the features of test images, of all clients, by each run's global model; the
silhouette (−1 to 1) of the true classes in the full feature space stands beside it. Figure 5
(FedNP's run): every client's latent, tilted by its data, goes through the NPN, which gives a
Gaussian over the classifier's weights; samples of its rows, one row a class, and the classifier's
own rows, by t-SNE. `gather` needs the run's data and may run elsewhere than `draw`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from drawing import drawing, save

from bayflower.data import load_federation
from bayflower.maths import npn
from bayflower.maths.propagation import tilted
from bayflower.personal.runs import Opened, client_state, open_run
from bayflower.report.special import in_plane
from bayflower.rounds.solo import samples
from bayflower.strategies.fednp import EXTRA, classifier
from bayflower.tree import to, unflatten

# test images, classes, samples of a client's Gaussian, images at a time
POINTS, SHOWN, DRAWS, CHUNK = 1000, 10, 5, 256


def gather(folders: list[Path], data_dir: str, device: str = "cpu") -> dict[str, np.ndarray]:
    """Return features and labels of each run, and of FedNP's the rows of classifiers."""
    found: dict[str, np.ndarray] = {}
    for folder in folders:
        opened = open_run(folder, data_dir)
        opened = opened._replace(server=to(opened.server, device))
        data = load_federation(opened.run.data, opened.run.settings.seed).clients
        owned = [samples(one, torch.device(device), torch.float32) for one in data]
        with torch.no_grad():
            found[f"{opened.run.method}/features"], found[f"{opened.run.method}/labels"] = features(
                opened, owned
            )
            if opened.run.method == "fednp":
                found |= {f"rows/{name}": value for name, value in rows(opened, owned).items()}
        print(f"gathered: {folder}")
    return found


def features(opened: Opened, owned: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return (features of the global model, labels) of test images of the first classes, evenly of
    all clients.
    """
    server, model = opened.server, opened.halves.model
    x = torch.cat([one.test.x for one in owned])
    y = torch.cat([one.test.y for one in owned])
    chosen = (y < SHOWN).nonzero()[:, 0]
    chosen = chosen[torch.linspace(0, len(chosen) - 1, min(POINTS, len(chosen))).long()]
    out = [
        model.forward_features(server.params, server.buffers, part, train=False)[1].flatten(1)
        for part in x[chosen].split(CHUNK)
    ]
    # half precision is enough for a picture
    return torch.cat(out).half().cpu().numpy(), y[chosen].cpu().numpy()


def rows(opened: Opened, owned: list[Any]) -> dict[str, np.ndarray]:
    """Return rows of classifiers: `drawn` (clients, draws, classes, features) from the NPN's
    Gaussians, `mean`, and the model's `own`.
    """
    half: Any = opened.halves.client
    model, generator = opened.halves.model, torch.Generator().manual_seed(0)
    drawn, mean = [], []
    for client, one in enumerate(owned[: opened.run.data.num_clients]):
        broadcast = opened.halves.server.broadcast(opened.server, client)
        work = half.begin(
            to(unflatten(half.state_type, client_state(opened, client)), one.train.x.device),
            broadcast,
            one.train,
        )
        parts = [
            half.survey(work, type(one.train)(*part))
            for part in zip(*(field.split(CHUNK) for field in one.train), strict=True)
        ]
        f = sum(part.total["f"] for part in parts) / one.train.mask.sum()
        z = tilted(half.site(f), work.memo.cavity, half.slopes)
        layers = {
            name.removeprefix(EXTRA + "npn."): value
            for name, value in work.params.items()
            if name.startswith(EXTRA + "npn.")
        }
        q = npn.forward(layers, npn.Gauss(z.mean, z.variance))
        own = work.params[classifier(work.params, model.head_names)]
        shape = (DRAWS, *own.shape)
        noise = torch.randn(DRAWS, q.mean.numel(), generator=generator).to(q.mean.device)
        drawn.append((q.mean + q.var.sqrt() * noise).reshape(shape)[:, :SHOWN])
        mean.append(q.mean.reshape(own.shape)[:SHOWN])
    return {
        name: value.cpu().numpy()
        for name, value in (
            ("drawn", torch.stack(drawn)),
            ("mean", torch.stack(mean)),
            ("own", own[:SHOWN]),
        )
    }


def draw(found: dict[str, np.ndarray], folder: Path) -> None:
    """Draw both figures, those that have data."""
    with drawing("fednp", **{"font.size": 10, "axes.grid": False}) as pyplot:
        for name, make in (("features", feature_figure), ("classifier", classifier_figure)):
            figure = make(found, pyplot)
            if figure is None:
                print(f"{name}: nothing gathered, not drawn")
                continue
            save(figure, folder / f"fednp_{name}.svg")


def feature_figure(found: dict[str, np.ndarray], pyplot: Any) -> Any:
    """Return Figure 3: a panel a method, digits are classes."""
    from sklearn.metrics import silhouette_score

    methods = sorted({key.split("/")[0] for key in found if key.endswith("/features")})
    if not methods:
        return None
    figure, axes = pyplot.subplots(
        1, len(methods), figsize=(4.2 * len(methods), 4.4), squeeze=False
    )
    for axis, method in zip(axes[0], methods, strict=True):
        points, labels = found[f"{method}/features"].astype(np.float64), found[f"{method}/labels"]
        plane = in_plane(points)
        scatter(axis, plane, labels, pyplot)
        axis.set_title(f"{method}: silhouette {silhouette_score(points, labels):+.3f}")
    figure.suptitle("t-SNE of test images' features, all clients; digits are classes")
    return figure


def classifier_figure(found: dict[str, np.ndarray], pyplot: Any) -> Any:
    """Return Figure 5: the predicted classifier's rows, their means and samples, and the rows of
    the trained one, marked by a ring.
    """
    if "rows/drawn" not in found:
        return None
    drawn, mean, own = (
        found[f"rows/{name}"].astype(np.float64) for name in ("drawn", "mean", "own")
    )
    clients, draws, classes, width = drawn.shape
    apart, wide = (mean - mean.mean(1, keepdims=True)).std(), (drawn - mean[:, None]).std()
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 5.4))
    for axis, rows, title in (
        (axes[0], mean, f"means, one a client: classes are {apart:.3f} apart a weight"),
        (axes[1], drawn, f"{draws} samples a client: standard deviation {wide:.3f} a weight"),
    ):
        rows = rows.reshape(-1, width)
        plane = in_plane(np.concatenate([rows, own]))
        scatter(axis, plane, np.tile(np.arange(classes), len(rows) // classes + 1), pyplot)
        axis.scatter(*plane[-classes:].T, s=160, facecolors="none", edgecolors="black")
        axis.set_title(title)
    figure.suptitle(
        f"t-SNE of the classifier's rows as {clients} clients' latents predict them (ring: the "
        "trained classifier's)"
    )
    return figure


def scatter(axis: Any, plane: np.ndarray, labels: np.ndarray, pyplot: Any) -> None:
    """Write each point as the digit of its class."""
    colours = pyplot.get_cmap("tab10")
    for (x, y), label in zip(plane, labels, strict=True):
        axis.text(
            x, y, str(label), color=colours(int(label) % 10), fontsize=7, ha="center", va="center"
        )
    low, high = plane.min(0), plane.max(0)
    margin = 0.05 * (high - low) + 1e-3  # points that coincide have a picture, too
    axis.set(
        xlim=(low[0] - margin[0], high[0] + margin[0]),
        ylim=(low[1] - margin[1], high[1] + margin[1]),
        xticks=[],
        yticks=[],
    )


def main() -> None:
    """Gather or draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("gather", help="features and classifiers of finished runs")
    first.add_argument("runs", nargs="+", type=Path)
    first.add_argument("--data-dir", default="")
    first.add_argument("--device", default="cpu")
    second = commands.add_parser("draw", help="the pictures")
    second.add_argument("--folder", type=Path, default=Path(__file__).parent / "pictures")
    for command in (first, second):
        command.add_argument("--npz", type=Path, required=True)
    args = parser.parse_args()
    if args.command == "gather":
        args.npz.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(args.npz, **gather(args.runs, args.data_dir, args.device))
        print(f"written: {args.npz}")
    else:
        with np.load(args.npz) as file:
            draw(dict(file), args.folder)


if __name__ == "__main__":
    main()
