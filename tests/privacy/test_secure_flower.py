"""secure=sum under Flower's simulation and as real processes: the bits of a plain loop run."""

from __future__ import annotations

import json

import pytest
from conftest import assert_same_bits
from flowerapp import WORK, bayflower, clean

from bayflower.config import parse
from bayflower.engines import execute, prepare
from bayflower.files import checkpoint

pytestmark = pytest.mark.flower


@pytest.mark.parametrize("engine", ["ray", "deployment"])
def test_secure_sums_give_the_bits_of_a_plain_loop(tmp_path, engine):
    few = {"num_clients": 3, "new_clients": 0, "rounds": 2, "calibration": "off"}
    more = {**few, "secure": "sum", "secure_limbs": 3}
    done = bayflower(["run", "fedmap"], tmp_path / "out", engine, **more)
    assert done.returncode == 0, done.stderr
    want = execute(prepare(parse("fedmap", {**WORK, **few}), "loop"))
    known = checkpoint.read(tmp_path / "out")
    assert known is not None
    assert_same_bits(checkpoint.server_state(known, type(want.server_state)), want.server_state)
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["faults"] == []
    assert result["config"]["secure"] == "sum"
    for ours, theirs in zip(result["rounds"], want.rounds, strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-12)
    secrets = list((tmp_path / "out").glob("state/**/secure.json"))
    assert len(secrets) == 6  # an identity and the notes of the run, for each client
    assert all(path.stat().st_mode & 0o077 == 0 for path in secrets)
    assert clean(tmp_path / "out")
