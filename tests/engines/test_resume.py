"""A killed run goes on to the same bits; nothing is lost or thrown away by accident."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import SMALL, assert_same_bits, small, small_prepared
from prefork import bayflower

from bayflower.engines import execute
from bayflower.errors import BayflowerError, ConfigError
from bayflower.files import checkpoint
from bayflower.rounds import prints

STAYS = {"seconds"}


def words(out, engine: str, rounds: int, *more: str) -> list[str]:
    settings = {
        **SMALL,
        "checkpoint_every": 1,
        "device": "cpu",
        "local_epochs": 2,
        "evaluate_every": 5,
    }
    settings.pop("rounds"), settings.pop("dataset"), settings.pop("num_clients")
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    head = [
        "run",
        "fedmap",
        "--engine",
        engine,
        "--rounds",
        str(rounds),
        "--clients",
        "5",
        "--out",
        str(out),
    ]
    return [sys.executable, "-m", "bayflower", *head, *sets, *more]


def timeless(result: dict) -> dict:
    result = {
        **result,
        "rounds": [
            {k: v for k, v in record.items() if k not in STAYS} for record in result["rounds"]
        ],
    }
    return {key: value for key, value in result.items() if key not in ("config", "usage")}


@pytest.mark.slow  # tests/cli/test_study.py kills a run, too
@pytest.mark.parametrize("engine", ["loop", "fused"])
def test_kill_after_round_3_and_resume_gives_the_same_bits(tmp_path, engine):
    """SIGKILL to the real process once round 3 is on disk; then --resume; against a run left in
    peace.
    """
    long = words(tmp_path / "killed", engine, 900)
    victim = subprocess.Popen(long, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        known = checkpoint.read(tmp_path / "killed") if (tmp_path / "killed").exists() else None
        if known is not None and known.round >= 3:
            break
        time.sleep(0.005)
    victim.send_signal(signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL
    stopped = checkpoint.read(tmp_path / "killed")
    assert 3 <= stopped.round < 900
    assert not (tmp_path / "killed" / "result.json").exists()

    end = stopped.round + 2
    refused = bayflower(*words(tmp_path / "killed", engine, end)[3:])
    assert refused.returncode == 2
    assert f"stopped after round {stopped.round} of 900; add --resume" in refused.stderr

    assert bayflower(*words(tmp_path / "killed", engine, end, "--resume")[3:]).returncode == 0
    assert bayflower(*words(tmp_path / "peace", engine, end)[3:]).returncode == 0
    peace, killed = (checkpoint.read(tmp_path / name) for name in ("peace", "killed"))
    assert_same_bits(killed.server, peace.server)
    assert_same_bits(killed.clients, peace.clients)
    results = [
        timeless(json.loads((tmp_path / name / "result.json").read_text()))
        for name in ("peace", "killed")
    ]
    assert results[0] == results[1]


def test_a_run_may_go_on_with_another_engine(tmp_path):
    execute(
        small_prepared("fedmap", "fused", rounds=2, dtype="float64", optimizer="sgd"), out=tmp_path
    )
    rest = small_prepared("fedmap", "loop", rounds=3, dtype="float64", optimizer="sgd")
    outcome = execute(rest, out=tmp_path, resume=checkpoint.to_resume(tmp_path, rest.run))
    assert [record["round"] for record in outcome.rounds] == [1, 2, 3]


def test_other_settings_are_refused(tmp_path):
    execute(small_prepared("fedmap", "fused", rounds=1), out=tmp_path)
    with pytest.raises(ConfigError, match=r"sigma2 is 3.0 but the run in .* has 100.0"):
        checkpoint.to_resume(tmp_path, small("fedmap", sigma2=3.0))
    with pytest.raises(ConfigError, match=r"^method is 'fedavg' but the run in .* has 'fedmap'"):
        checkpoint.to_resume(tmp_path, small("fedavg", lr=3.0))
    with pytest.raises(ConfigError, match="there is nothing to resume"):
        checkpoint.to_resume(tmp_path / "nowhere", small("fedmap"))
    assert checkpoint.to_resume(tmp_path, small("fedmap", rounds=9)).round == 1


def test_a_broken_checkpoint_is_named(tmp_path):
    (tmp_path / checkpoint.FILE).write_bytes(b"\x00" * 100)
    with pytest.raises(
        BayflowerError, match=r"checkpoint .* cannot be read .* remove it to start anew"
    ):
        checkpoint.read(tmp_path)


@pytest.mark.parametrize("engine", ["fused", "loop"])
def test_changed_data_are_noticed_by_a_resumed_run(tmp_path, engine):
    """Client 1's samples are doubled and relabelled between the checkpoint and --resume."""
    execute(small_prepared("fedper", engine, rounds=1, local_epochs=1), out=tmp_path)
    rest = small_prepared("fedper", engine, rounds=2, local_epochs=1)
    start = checkpoint.to_resume(tmp_path, rest.run)
    assert start.data["clients"].keys() == {str(data.client) for data in rest.federation.clients}
    clients = list(rest.federation.clients)
    one = clients[1]
    clients[1] = one._replace(
        x_train=np.concatenate([one.x_train, one.x_train]),
        y_train=(np.concatenate([one.y_train, one.y_train]) + 1) % 10,
    )
    other = rest._replace(federation=rest.federation._replace(clients=tuple(clients)))
    (fault,) = execute(other, out=tmp_path, resume=start).faults
    assert fault.startswith("client 1: its data have changed since the checkpoint")
    assert checkpoint.read(tmp_path).faults == [fault]


def test_states_that_another_engine_keeps_are_not_replaced_by_nothing(tmp_path):
    """Clients in other processes have their own files; such a checkpoint has no states."""
    prepared = small_prepared("fedper", "fused", rounds=2)
    execute(small_prepared("fedper", "fused", rounds=1), out=tmp_path)
    start = checkpoint.to_resume(tmp_path, prepared.run)
    for engine in ("fused", "loop"):
        with pytest.raises(ConfigError, match="start them from nothing; resume with --engine ray"):
            execute(prepared._replace(engine=engine), resume=start._replace(clients={}))
    with pytest.raises(ConfigError, match="resume with --engine fused or loop"):
        prints.check_states(start, prepared.halves, here=False)
    assert prints.check_states(start, prepared.halves, here=True) is None
