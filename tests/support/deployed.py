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


def submitted(folder: Path, *words: object) -> subprocess.Popen:
    """Return a `deploy submit` of the run "tree" that is under way."""
    given = ["submit", folder, *words, "--name", "tree", "--wait", 300, "--json"]
    return subprocess.Popen(
        [sys.executable, "-m", "bayflower", "deploy", *map(str, given)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
    )


def collected(
    process: subprocess.Popen, folder: Path, home: Path, settings: dict, seconds: float
) -> dict:
    """Return the result of what `submitted` returned, which ends well with every client in every
    round; its files are in `home`.
    """
    out, err = process.communicate(timeout=seconds)
    assert process.returncode == 0, err
    result = json.loads(out.strip().splitlines()[-1])
    wanted = [settings["num_clients"]] * settings["rounds"]
    assert [one["num_clients"] for one in result["rounds"]] == wanted, result["faults"]
    done = deploy("collect", folder, home, "--name", "tree")
    assert done.returncode == 0, done.stderr
    return result


def ends_with_the_bits_of_the_loop(
    process: subprocess.Popen, folder: Path, home: Path, settings: dict, seconds: float
) -> None:
    """What `submitted` returned ends well, with every client in every round."""
    collected(process, folder, home, settings, seconds)
    same_as(execute(prepare(parse("fedmap", settings), "loop")), home, settings["rounds"])


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
