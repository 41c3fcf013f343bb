"""A small deployment: its settings, its command, and the bits it must reach."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from conftest import assert_same_bits
from flowerapp import personal

from bayflower.config import parse
from bayflower.engines import execute, prepare
from bayflower.files import checkpoint
from bayflower.metrics import summarise

WORK = {
    "dataset": "digits",
    "num_clients": 3,
    "keep": 0.1,
    "min_size": 8,
    "batch_size": 16,
    "local_epochs": 1,
    "rounds": 2,
    "device": "cpu",
    "evaluate_every": 1,
}
SETS = [word for key, value in WORK.items() for word in ("--set", f"{key}={value}")]


def deploy(*words: object, timeout: float = 400) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "bayflower", "deploy", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd="/",
    )


def reference(rounds: int):
    return execute(prepare(parse("fedmap", {**WORK, "rounds": rounds}), "loop"))


def same_as_the_loop(results: Path, rounds: int) -> None:
    """Server state, losses and every client's metrics have the loop engine's bits."""
    same_as(reference(rounds), results, rounds)


def same_as(want, results: Path, rounds: int) -> None:
    known = checkpoint.read(results)
    assert known.round == rounds
    assert_same_bits(checkpoint.server_state(known, type(want.server_state)), want.server_state)
    result = json.loads((results / "result.json").read_text())
    assert [record["train_loss"] for record in result["rounds"]] == [
        record["train_loss"] for record in want.rounds
    ]
    assert personal(result) == summarise(want.views["personal"])["per_client"]
