"""Short runs of every method, whose personal models tests save and read."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from conftest import NEEDED, SMALL

from bayflower.config import parse
from bayflower.data import load_client
from bayflower.engines import prepare, run_to_result
from bayflower.personal.runs import client_state, kept, open_run
from bayflower.rounds import solo

TRAINED, NEW = 1, 5  # of five clients that train and two that do not


def trained(folder: Path, method: str, engine: str = "fused", **changes) -> Path:
    """Return the folder of a short run."""
    values = {
        **SMALL,
        **NEEDED.get(method, {}),
        "device": "cpu",
        "stacking": "no",
        "checkpoint_every": 1,
        **changes,
    }
    run_to_result(prepare(parse(method, values), engine), folder)
    return folder


def expected(folder: Path, client: int) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Return (test inputs, probabilities by the method's own `predict`, that client's row of
    result.json).
    """
    opened = open_run(folder)
    data = solo.samples(
        load_client(opened.run.data, opened.run.settings.seed, client),
        torch.device("cpu"),
        torch.float32,
    )
    new = client >= opened.run.data.num_clients
    end = kept(opened, client, data, None if new else client_state(opened, client), None, "")
    with torch.no_grad():
        probs = end.half.predict("personal", end.state, end.broadcast, data.test.x, {})
    final = json.loads((folder / "result.json").read_text())["final"]
    block = final["new_clients" if new else "personal"]["per_client"]
    return data.test.x, probs, next(row for row in block if row["client"] == client)
