"""Results of every method on the loop engine equal those of another checkout to the bit.

Name the other checkout: BAYFLOWER_REFERENCE=/path/to/checkout pytest -m slow tests/engines/...
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bayflower import methods

ROOT = Path(__file__).parents[2]
SCRIPT = """
import hashlib, json, sys
from bayflower.config import parse
from bayflower.engines import execute, prepare
from bayflower.errors import BayflowerError
from bayflower.rounds.result import result
from bayflower.tree import flatten

settings = {"dataset": "digits", "num_clients": 4, "rounds": 2, "keep": 0.2, "local_epochs": 1,
            "evaluate_every": 1, "min_size": 2, "beta": 1.0, "new_clients": 1,
            "new_client_epochs": 1}
try:  # without robust clients are added up as they came, as in a checkout that does not know it
    run = parse(sys.argv[1], {**settings, "robust": "off"})
except BayflowerError:
    run = parse(sys.argv[1], settings)
prepared = prepare(run, "loop")
outcome = execute(prepared)
found = result(prepared.run, "loop", prepared.federation, prepared.halves, outcome)
parts = {name: tensor.numpy().tobytes().hex() for name, tensor in
         flatten(outcome.server_state).items()}
kept = {"state": parts, "final": found["final"], "uncertainty": found["uncertainty"],
        # a message names the settings, so its bytes grow with them
        "rounds": [{k: v for k, v in one.items() if k not in ("seconds", "bytes_down", "bytes_up")}
                   for one in found["rounds"]]}
text = json.dumps(kept, sort_keys=True)
print(hashlib.sha256(text.encode()).hexdigest(), len(text))
"""


def digest(method: str, checkout: str | Path) -> str:
    env = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, method],
        cwd=checkout,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    if checkout != ROOT and "is not known" in done.stderr:
        pytest.skip("the other checkout has no such method")
    assert done.returncode == 0, json.dumps(done.stderr[-800:])
    return done.stdout.split("\n")[-2]


@pytest.mark.slow
@pytest.mark.skipif("BAYFLOWER_REFERENCE" not in os.environ, reason="no other checkout is named")
@pytest.mark.parametrize("method", [row.name for row in methods.ROWS])
def test_the_results_of_another_checkout_are_the_same(method: str) -> None:
    assert digest(method, ROOT) == digest(method, os.environ["BAYFLOWER_REFERENCE"])
