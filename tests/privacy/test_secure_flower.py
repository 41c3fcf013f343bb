"""secure=sum under Flower's simulation and as real processes: the bits of a plain loop run."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import assert_same_bits
from flowerapp import WORK, bayflower, clean

from bayflower.config import parse
from bayflower.engines import execute, prepare
from bayflower.files import checkpoint
from bayflower.privacy.accounting import epsilon

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


def test_classes_that_a_client_does_not_have_are_hidden_under_ray(tmp_path):
    """pFedVMP's secure sums of all classes: the bits of a secure loop."""
    few = {"num_clients": 3, "new_clients": 0, "rounds": 2, "calibration": "off", "secure": "sum"}
    done = bayflower(["run", "pfedvmp"], tmp_path / "out", "ray", **few)
    assert done.returncode == 0, done.stderr
    want = execute(prepare(parse("pfedvmp", {**WORK, **few}), "loop"))
    known = checkpoint.read(tmp_path / "out")
    assert_same_bits(checkpoint.server_state(known, type(want.server_state)), want.server_state)
    assert json.loads((tmp_path / "out" / "result.json").read_text())["faults"] == []


def test_a_private_run_under_ray_is_that_of_the_loop_but_for_its_noise(tmp_path):
    """Noise is drawn anew in every run, so bits differ. After one round nothing else does: the
    difference of two models is Gaussian with variance 2 (zC/m)² in every coordinate.
    """
    pytest.importorskip("dp_accounting")
    noise, clients = 0.05, 3
    few = {"num_clients": clients, "new_clients": 0, "rounds": 1, "calibration": "off"}
    few |= {"dp": "client", "dp_noise": noise, "dp_epsilon": 1000.0}
    done = bayflower(["run", "fedavg"], tmp_path / "out", "ray", **few)
    assert done.returncode == 0, done.stderr
    want = execute(prepare(parse("fedavg", {**WORK, **few}), "loop"))
    known = checkpoint.read(tmp_path / "out")
    ours = checkpoint.server_state(known, type(want.server_state)).params
    theirs = want.server_state.params
    apart = torch.cat([(ours[name] - theirs[name]).double().reshape(-1) for name in theirs])
    apart /= 2**0.5 * noise / clients
    assert float(apart.mean().abs()) < 5 / len(apart) ** 0.5
    assert float(apart.std()) == pytest.approx(1, abs=5 / (2 * len(apart)) ** 0.5)
    spent = json.loads((tmp_path / "out" / "result.json").read_text())["privacy"]
    assert spent["epsilon"] == pytest.approx(epsilon(noise, 1, 1e-5))


@pytest.mark.parametrize("engine", ["ray", "deployment"])
def test_private_runs_stop_and_are_refused_under_flower(tmp_path, engine):
    """Noise of the clients in secure sums; the budget is enough for two of four rounds."""
    pytest.importorskip("dp_accounting")
    few = {"num_clients": 3, "new_clients": 0, "rounds": 4, "calibration": "off"}
    noise = {"dp": "client", "dp_noise": 4.0, "dp_epsilon": epsilon(4.0, 2, 1e-5) * 1.01}
    more = {**few, **noise, "secure": "sum"}
    done = bayflower(["run", "fedavg"], tmp_path / "out", engine, **more)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert len(result["rounds"]) == 2
    assert result["faults"] == []
    spent = result["privacy"]
    assert spent["epsilon"] == pytest.approx(epsilon(4.0, 2, 1e-5))
    assert spent["per_client"] == dict.fromkeys("012", spent["epsilon"])
    cards = [json.loads(one.read_text()) for one in (tmp_path / "out").glob("state/**/card.json")]
    assert [one["privacy"]["epsilon"] for one in cards] == [spent["epsilon"]] * 3
    again = bayflower(["run", "fedavg"], tmp_path / "out", engine, "--resume", **more)
    assert again.returncode != 0
    assert "privacy budget of this run is spent" in again.stderr + again.stdout
    assert clean(tmp_path / "out")
