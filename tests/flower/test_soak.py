"""Many rounds with flat memory. Slow: `pytest -m soak` runs it."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.soak
ROUNDS, WARM = 500, 100
SOAK = """
import gc, json, sys
import torch
from bayflower.config import parse
from bayflower.engines import prepare
from bayflower.flower.loop import run_loop

torch.set_num_threads(1)
method, rounds = sys.argv[1], int(sys.argv[2])
run = parse(method, {"dataset": "digits", "num_clients": 3, "keep": 0.05, "min_size": 4,
                     "batch_size": 16, "local_steps": 2, "rounds": rounds, "evaluate_every": 10,
                     "device": "cpu"})
used = []

def resident():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) * 1024

def progress(records):
    if len(records) % 25 == 0:
        gc.collect()
    used.append(resident())

prepared = prepare(run, "loop")
outcome = run_loop(run, prepared.federation, prepared.halves, progress)
found = {"used": used[:rounds], "faults": list(outcome.faults), "rounds": len(outcome.rounds)}
print(json.dumps(found))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("method", ["fedmap", "fednp"])
def test_five_hundred_rounds_in_flat_memory(method):
    """The resident memory of server and clients in one process after each round; its slope from
    round 100 on is under 8 kB a round.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SOAK, method, str(ROUNDS)],
        check=True,
        capture_output=True,
        text=True,
        timeout=3000,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["rounds"] == ROUNDS
    assert found["faults"] == []
    used = np.array(found["used"][WARM:], dtype=float)
    slope = float(np.polyfit(np.arange(len(used)), used, 1)[0])
    print(
        f"{method}: {slope / 1e3:.2f} kB a round, {used[0] / 1e6:.1f} MB after round {WARM}, "
        f"{used[-1] / 1e6:.1f} MB after round {ROUNDS}"
    )
    assert slope < 8_000, f"{slope / 1e3:.1f} kB a round"
