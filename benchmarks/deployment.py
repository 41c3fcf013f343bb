"""A deployment over time: seconds of a round next to stock Flower FedAvg on the same nodes, and
memory over thirty rounds.

    python benchmarks/deployment.py rounds     writes benchmarks/results/rounds.json and .md
    python benchmarks/deployment.py soak       writes benchmarks/results/soak.json and .md

Three clients as processes over TLS with authenticated nodes (`bayflower deploy up --local`). Stock
FedAvg trains the same network on as many samples with the same optimiser; it asks twice a round, to
train and to evaluate, where Bayflower asks once. Runs alternate, so that both meet the same noise;
ratios are of medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bayflower.deploy import folders, runs
from bayflower.deploy.local import Local
from bayflower.deploy.server import Server
from bayflower.files import children
from bayflower.files.texts import write_json
from bayflower.flower import control

RESULTS = Path(__file__).parent / "results"
CLIENTS = 3
SETTINGS = {
    "dataset": "digits",
    "num_clients": CLIENTS,
    "partition": "iid",
    "batch_size": 32,
    "local_epochs": 2,
    "device": "cpu",
}

STOCK = {
    "pyproject.toml": """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "stock"
version = "1.0.0"
description = "Stock FedAvg"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "bayflower"

[tool.flwr.app.components]
serverapp = "stock.server_app:app"
clientapp = "stock.client_app:app"

[tool.flwr.app.config]
out = ""
rounds = 3
evaluate = 1.0
""",
    "stock/__init__.py": "",
    "stock/task.py": """
import torch
from sklearn.datasets import load_digits


def net():
    nn = torch.nn
    hidden = (nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
    return nn.Sequential(*hidden, nn.Linear(32, 10))


def load(client, clients):
    x, y = load_digits(return_X_y=True)
    x, y = x[client::clients] / 16, torch.tensor(y[client::clients])
    x = torch.tensor(x, dtype=torch.float32)
    cut = int(0.75 * len(y))
    return x[:cut], y[:cut], x[cut:], y[cut:]
""",
    "stock/client_app.py": """
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from stock.task import load, net

app = ClientApp()


def prepared(message, context):
    torch.set_num_threads(1)
    model = net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    return model, load(context.node_config["partition-id"], context.node_config["num-partitions"])


@app.train()
def train(message, context):
    model, (x, y, _, _) = prepared(message, context)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(2):
        for part in torch.randperm(len(y)).split(32):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x[part]), y[part])
            loss.backward()
            optimizer.step()
    metrics = MetricRecord({"train_loss": float(loss), "num-examples": len(y)})
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}
    return Message(RecordDict(content), reply_to=message)


@app.evaluate()
def evaluate(message, context):
    model, (_, _, x, y) = prepared(message, context)
    with torch.no_grad():
        right = float((model(x).argmax(1) == y).float().mean())
    metrics = MetricRecord({"accuracy": right, "num-examples": len(y)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
""",
    "stock/server_app.py": """
import json
import time
from pathlib import Path

from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from stock.task import net

app = ServerApp()


@app.main()
def main(grid, context):
    config = context.run_config
    moments = []
    strategy = FedAvg(fraction_evaluate=float(config["evaluate"]), min_available_nodes=3)
    strategy.start(grid, ArrayRecord(net().state_dict()), num_rounds=config["rounds"],
                   evaluate_fn=lambda round, arrays: moments.append(time.time()))
    taken = [later - earlier for earlier, later in zip(moments, moments[1:])]
    Path(config["out"]).write_text(json.dumps(taken))
""",
}


def stock(server: Server, folder: Path, rounds: int, evaluate: bool) -> list[float]:
    """Return the seconds of each round of Flower's own FedAvg."""
    app = folder / "app"
    for name, text in STOCK.items():
        (app / name).parent.mkdir(parents=True, exist_ok=True)
        (app / name).write_text(text.lstrip())
    out = folder / "rounds.json"
    out.unlink(missing_ok=True)
    run = control.submit(
        server.flwr, app, {"rounds": rounds, "out": str(out), "evaluate": 1.0 if evaluate else 0.0}
    )
    while not control.run_status(server.flwr, run).startswith("finished"):
        time.sleep(10)
    return list(json.loads(out.read_text()))


def ours(server: Server, method: str, rounds: int, evaluate_every: int) -> list[float]:
    """Return the seconds of each round of a method of ours."""
    settings = {**SETTINGS, "rounds": rounds, "evaluate_every": evaluate_every}
    result = runs.submit(server, method, settings, name=f"{method}-{time.time():.0f}")
    return [record["seconds"] for record in result["rounds"]]


def measure_rounds(local: Local, folder: Path, rounds: int, repeats: int) -> dict[str, Any]:
    """Return the medians of all runs and their ratios."""
    server = local.server()
    ways = {
        "stock FedAvg, train and evaluate": lambda: stock(server, folder, rounds, True),
        "Bayflower FedAvg, trained and tested": lambda: ours(server, "fedavg", rounds, 1),
        "Bayflower FedMAP, trained and tested": lambda: ours(server, "fedmap", rounds, 1),
        "stock FedAvg, train only": lambda: stock(server, folder, rounds, False),
        "Bayflower FedAvg, trained only": lambda: ours(server, "fedavg", rounds, 0),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, run in ways.items():
            seconds[way] += run()[1:]  # in the first round nodes fetch the app
            print(way, [round(value, 1) for value in seconds[way]], flush=True)
    medians = {way: statistics.median(values) for way, values in seconds.items()}
    both, alone = medians["stock FedAvg, train and evaluate"], medians["stock FedAvg, train only"]
    ratios = {
        way: value / (alone if way.endswith("only") else both) for way, value in medians.items()
    }
    return {"rounds": seconds, "median_seconds": medians, "ratio": ratios}


def rss(mark: str) -> dict[str, float]:
    """Return the resident megabytes of each long-lived program of a deployment."""
    found: dict[str, float] = {}
    for pid in children.marked(mark):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except OSError:
            continue
        kind = next(
            (
                kind
                for kind in (
                    "deploy.superlink",
                    "flower-supernode",
                    "deploy.gate",
                    "flwr-serverapp",
                )
                if any(kind in w for w in words)
            ),
            "",
        )
        if kind:
            found[kind] = max(found.get(kind, 0.0), pages * 4096 / 2**20)
    return found


def measure_soak(local: Local, rounds: int) -> dict[str, Any]:
    """Return the memory of every program while a run of so many rounds goes on."""
    server = local.server()
    samples: list[dict[str, Any]] = []

    def show(status: dict[str, Any]) -> None:
        done = status.get("completed", 0)
        if done and (not samples or samples[-1]["round"] != done):
            samples.append({"round": done, **rss(local.facts["mark"])})
            print(samples[-1], flush=True)

    result = runs.submit(
        server,
        "fedmap",
        {**SETTINGS, "rounds": rounds, "evaluate_every": 1},
        name="soak",
        show=show,
        watch=local.watch,
    )
    seconds = [record["seconds"] for record in result["rounds"]]
    kinds = sorted({kind for sample in samples for kind in sample} - {"round"})
    third = max(1, len(samples) // 3)
    memory = {}
    for kind in kinds:
        values = [sample[kind] for sample in samples if kind in sample]
        memory[kind] = {
            "middle_third": statistics.mean(values[third : 2 * third] or values),
            "last_third": statistics.mean(values[-third:]),
        }
    return {
        "rounds": rounds,
        "faults": result["faults"],
        "seconds": seconds,
        "samples": samples,
        "memory": memory,
    }


def main() -> None:
    """Run one of the two and write its files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["rounds", "soak"])
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bayflower-deployment-") as name:
        local = Local(folders.init(Path(name) / "fed", clients=CLIENTS))
        try:
            local.up(print)
            if given.what == "rounds":
                content = measure_rounds(local, Path(name), given.rounds or 5, given.repeats)
            else:
                content = measure_soak(local, given.rounds or 30)
        finally:
            local.down()
    write_json(RESULTS / f"{given.what}.json", content)
    (RESULTS / f"{given.what}.md").write_text(
        rounds_page(content) if given.what == "rounds" else soak_page(content)
    )


def rounds_page(content: dict[str, Any]) -> str:
    """Return the page about rounds."""
    lines = [
        "# A round next to stock Flower FedAvg",
        "",
        f"`python benchmarks/deployment.py rounds`. {about()}",
        "",
        "| run | time of a round, stock FedAvg = 1 |",
        "|---|---|",
    ]
    return (
        "\n".join(
            [*lines, *(f"| {way} | {ratio:.2f} |" for way, ratio in content["ratio"].items())]
        )
        + "\n"
    )


def soak_page(content: dict[str, Any]) -> str:
    """Return the page about memory."""
    lines = [
        f"# {content['rounds']} rounds in deployment",
        "",
        f"`python benchmarks/deployment.py soak`. {about()}",
        "",
        f"Faults: {len(content['faults'])}. Resident memory of the programs that live as long as "
        "the run (the largest of a kind):",
        "",
        "| program | middle third of the run, MiB | last third, MiB | growth |",
        "|---|---|---|---|",
    ]
    for kind, value in content["memory"].items():
        growth = value["last_third"] / value["middle_third"] - 1
        lines.append(
            f"| {kind} | {value['middle_third']:.1f} | {value['last_third']:.1f} | {growth:+.1%} |"
        )
    return "\n".join(lines) + "\n"


def about() -> str:
    """Return what was measured, in a sentence or two."""
    return " ".join(__doc__.split("\n\n")[2].split())


if __name__ == "__main__":
    main()
