"""Short runs of every method, whose personal models tests save and read."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from conftest import NEEDED, SMALL

from bayflower.config import parse
from bayflower.data import load_client
from bayflower.engines import prepare, run_to_result
from bayflower.personal.made import Kept
from bayflower.personal.runs import client_state, kept, open_run
from bayflower.rounds import solo
from bayflower.rounds.calibrated import One, tests_of
from bayflower.rounds.deciding import Choice, thresholds
from bayflower.rounds.uncertain import Uncertain, judge_alone, pieces

TRAINED, NEW = 1, 5  # of five clients that train and two that do not


def trained(folder: Path, method: str, engine: str = "fused", **changes) -> Path:
    """Return the folder of a short run."""
    values = {
        **SMALL,
        **NEEDED.get(method, {}),
        "keep": 0.25,
        "calibration": "shrunk",
        "evaluate_every": 0,
        "device": "cpu",
        "stacking": "no",
        "checkpoint_every": 1,
        **changes,
    }
    run_to_result(prepare(parse(method, values), engine), folder)
    return folder


def end_of(folder: Path, client: int) -> Kept:
    """Return a client at the end of a run, with its uncertainty."""
    opened = open_run(folder)
    found = load_client(opened.run.data, opened.run.settings.seed, client)
    data = solo.samples(found, torch.device("cpu"), torch.float32)
    new = client >= opened.run.data.num_clients
    return kept(opened, client, data, None if new else client_state(opened, client), None, "")


def expected(folder: Path, client: int) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Return (test inputs, probabilities by the method's own `predict`, that client's row of
    result.json).
    """
    end, new = end_of(folder, client), client >= open_run(folder).run.data.num_clients
    with torch.no_grad():
        probs = end.half.predict("personal", end.state, end.broadcast, end.data.test.x, {})
    final = json.loads((folder / "result.json").read_text())["final"]
    block = final["new_clients" if new else "personal"]["per_client"]
    return end.data.test.x, probs, next(row for row in block if row["client"] == client)


def using(
    end: Kept, posterior: str, scale: float = 0.7, lowest: int = 900, plain: bool = False
) -> Kept:
    """Return a client that uses one of its posteriors at a scale, tested again by `judge`: what the
    gate would have decided on other data.
    """
    taken = end.taken
    wide = {"dtype": torch.float64}
    scales = {
        name: torch.tensor(scale if name == posterior else 0.0, **wide) for name in taken.kinds
    }
    choice = Choice(
        scales,
        scales,
        torch.tensor(0.8, **wide),
        torch.tensor(0.4, **wide),
        torch.tensor(0.5, **wide),
        torch.tensor([lowest]),
        torch.tensor(int(plain)),
        taken.choice.alarms,
    )
    uncertain = Uncertain(end.half, False)
    uncertain.kinds = taken.kinds
    with torch.no_grad():
        measured = [
            uncertain.measures(taken.fitted, choice, part) for part in pieces(end.data.held)
        ]
    choice = choice._replace(alarms=thresholds(torch.cat(measured)))
    chosen = taken.one.chosen._replace(
        posterior=posterior, scale=scale, temperature=0.8, share=0.5, plain=plain, rest=0.4
    )
    tests = tests_of(end.data.test, end.half.model, seed=end.seed, client=end.client)
    judged = judge_alone(uncertain, taken.fitted, choice, tests)
    one = One(taken.one.rows, chosen, judged, choice)
    return end._replace(taken=taken._replace(choice=choice, one=one))
