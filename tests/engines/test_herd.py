"""The fused engine on workers without Ray: bits do not depend on how many workers there are, which
of them has which clients, and at which call one dies. `test_workers.py` has the same with Ray.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import assert_same_bits, small_prepared, some, worst_difference
from herecrew import HereCrew
from torch import nn

from bayflower import methods
from bayflower.config import parse
from bayflower.engines import Prepared, execute, prepare
from bayflower.errors import BayflowerError
from bayflower.fused.run import run_fused
from bayflower.fused.workers.run import run_workers
from bayflower.fused.workers.worker import Worker
from bayflower.rounds.result import result

# eight clients in four blocks, of which six train in a round; so some blocks have one, some two
WORK: dict[str, Any] = {
    "num_clients": 8,
    "new_clients": 2,
    "rounds": 3,
    "fraction_train": 0.75,
    "evaluate_every": 2,
    "local_epochs": 1,
    "new_client_epochs": 1,
    "worker_block": 2,
}
TIMES = ("seconds", "usage", "faults")


def ready(method: str, **changes: Any) -> Prepared:
    return small_prepared(method, "fused", **{**WORK, **changes})


def on(crew: Any, prepared: Prepared, **more: Any) -> Any:
    """Return the outcome of a run on a crew."""
    return run_workers(prepared.run, prepared.federation, prepared.halves, crew=crew, **more)


def alone(prepared: Prepared) -> Any:
    """Return the outcome of a run in one process."""
    return run_fused(prepared.run, prepared.federation, prepared.halves)


def numbers(prepared: Prepared, outcome: Any) -> dict[str, Any]:
    """Return all that a run's result says but for its times and deaths."""
    found = result(prepared.run, "fused", prepared.federation, prepared.halves, outcome)
    rounds = [{k: v for k, v in one.items() if k not in TIMES} for one in found["rounds"]]
    return {**{k: v for k, v in found.items() if k not in TIMES}, "rounds": rounds}


def assert_same(prepared: Prepared, first: Any, second: Any) -> None:
    assert_same_bits(first.server_state, second.server_state)
    assert first.client_states.keys() == second.client_states.keys()
    for client, state in first.client_states.items():
        assert_same_bits(state, second.client_states[client])
    assert numbers(prepared, first) == numbers(prepared, second)


@pytest.mark.parametrize("method", some([row.name for row in methods.ROWS], {"fedper"}))
def test_one_by_one_all_have_the_bits_of_one_process(method):
    prepared = ready(method, stacking="no")
    peace = alone(prepared)
    for number in (1, 2, 4):
        assert_same(prepared, on(HereCrew(number), prepared), peace)


@pytest.mark.parametrize("method", some([row.name for row in methods.ROWS], {"fedmap"}))
def test_stacks_are_the_same_on_one_two_and_four_workers(method):
    """Stacked: the same bits on any number of workers, and near those of one stack of all."""
    changes = {"dtype": "float64", "optimizer": "sgd", "lr": 0.05, "stacking": "yes"}
    prepared = ready(method, rounds=2, new_clients=0, evaluate_every=0, **changes)
    found = {number: on(HereCrew(number), prepared) for number in (1, 2, 4)}
    assert_same(prepared, found[1], found[2])
    assert_same(prepared, found[1], found[4])
    assert worst_difference(found[1].server_state, alone(prepared).server_state, 1e-9) < 1e-6


class Deep(nn.Sequential):
    """A network of one's own."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10))


class Conv(nn.Sequential):
    """A network with a large convolution, which a CPU trains one by one."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(1, 64, 3), nn.ReLU(), nn.Conv2d(64, 80, 3), nn.ReLU())
        self.append(nn.Flatten()).append(nn.Linear(1280, 10))


VARIANTS: dict[str, dict[str, Any]] = {
    "calibration": {"calibration": "shrunk"},
    "convolutions": {"model": "test_herd:Conv", "stacking": "auto"},
    "batch norm": {"model": "mlp-bn"},
    "no limits": {"robust": "off"},
    "all updates are compared": {"robust": "median"},
    "secure sums": {"secure": "sum"},
    "a network of one's own": {"model": "test_herd:Deep"},
}


@pytest.mark.parametrize("variant", some(VARIANTS, ()))
def test_settings_of_all_kinds_give_the_bits_of_one_process(variant):
    prepared = ready("fedmap", **{"stacking": "no", "rounds": 2, **VARIANTS[variant]})
    assert_same(prepared, on(HereCrew(2), prepared), alone(prepared))


@pytest.mark.parametrize("noise", some(["global", "client"], {"client"}))
def test_numbers_and_their_intervals_are_those_of_one_process(tmp_path, noise):
    draw = np.random.default_rng(5)
    x = draw.normal(size=(240, 3)).astype(np.float32)
    y = (x.sum(1) + draw.normal(size=240)).astype(np.float32)
    np.savez(tmp_path / "numbers.npz", x=x, y=y, client=np.repeat(np.arange(6), 40))
    given = {"dataset": str(tmp_path / "numbers.npz"), "partition": "natural", "rounds": 2}
    given |= {"task": "regression", "device": "cpu", "stacking": "no", "noise": noise}
    prepared = prepare(parse("fedmap", {**given, "worker_block": 2}), "fused")
    assert_same(prepared, on(HereCrew(2), prepared), alone(prepared))


@pytest.mark.slow
def test_private_sums_count_their_budget():
    settings = {"dp": "client", "dp_noise": 3.0, "dp_clip": 0.5, "dp_epsilon": 20.0}
    prepared = ready("fedavg", stacking="no", fraction_train=1.0, **settings)
    found, other = on(HereCrew(2), prepared), alone(prepared)
    assert found.privacy["epsilon"] == other.privacy["epsilon"]
    assert found.privacy["rounds"] == WORK["rounds"]


def test_diverged_training_is_named_as_in_one_process():
    settings = {"lr": 1e30, "optimizer": "sgd", "robust": "off"}
    one = execute(ready("fedavg", **settings))
    found = on(HereCrew(2), ready("fedavg", **settings))
    assert any("reply not used" in text for text in one.faults)
    assert found.faults == one.faults


# -- deaths ----------------------------------------------------------------------------------------
# a worker and the call at which it dies; what it is doing then
DEATHS = {
    "before it has clients": (1, "adopt", 1),
    "with half of its clients": (1, "adopt", 2),
    "asked whether to stack": (0, "decide", 1),
    "in the first round, whose updates all come here": (1, "train", 1),
    "in a later round": (1, "train", 2),
    "in the last round": (0, "train", 3),
    "adding sums": (None, "merge", 1),
    "in a test": (0, "test", 1),
    "in the last test": (1, "test", 2),
    "holding out": (1, "hold", 1),
    "scoring": (0, "score", 1),
    "judging new clients": (1, "judge", 1),
    "judging": (0, "judge", 2),
    "handing over its states": (1, "states", 1),
    "at the very end": (1, "drop", 1),
}
USUAL = {"adding sums"}


@pytest.fixture(scope="module")
def peace():
    prepared = ready("fedmap", stacking="no", calibration="shrunk")
    return prepared, alone(prepared)


@pytest.mark.parametrize("when", some(DEATHS, USUAL))
def test_a_worker_that_dies_changes_nothing(peace, when):
    prepared, wanted = peace
    crew = HereCrew(3 if when == "adding sums" else 2, dies=DEATHS[when])
    found = on(crew, prepared)
    assert crew.lost == (when != "at the very end") or crew.dead
    if when != "at the very end":
        assert sum("a worker died" in line for line in found.faults) == 1, found.faults
    assert_same(prepared, found, wanted)


@pytest.mark.parametrize("when", some(DEATHS, {"in the last round"}))
@pytest.mark.parametrize("folder", some([True, False], {True}))
def test_a_machine_that_dies_takes_the_run_back_and_changes_nothing(peace, tmp_path, when, folder):
    """The states that its workers returned are gone. Without a folder: back to the start."""
    prepared, wanted = peace
    settings = {"stacking": "no", "calibration": "shrunk", "checkpoint_every": 1}
    prepared = ready("fedmap", **settings)
    crew = HereCrew(2, dies=DEATHS[when], machine=True)
    shown: list[int] = []
    more = {"out": tmp_path} if folder else {}
    found = on(crew, prepared, progress=lambda records: shown.append(len(records)), **more)
    assert shown == sorted(shown)  # nobody sees rounds go backwards
    if when == "in the last round":
        back = "round 2" if folder else "the start"
        assert any(f"back to {back}" in line for line in found.faults), found.faults
    assert_same(prepared, found, wanted)


def test_the_last_worker_that_dies_ends_the_run():
    with pytest.raises(BayflowerError, match="all workers have died"):
        on(HereCrew(1, dies=(0, "train", 2)), ready("fedmap", stacking="no"))


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_with_another_number_of_workers(peace, tmp_path):
    from bayflower.files import checkpoint

    prepared, _ = peace
    short = ready("fedmap", stacking="no", calibration="shrunk", rounds=2)
    on(HereCrew(3), short, out=tmp_path)
    found = on(HereCrew(2), prepared, resume=checkpoint.read(tmp_path))
    assert_same(prepared, found, peace[1])


class Slow(Worker):
    """A worker that says it takes four times as long, if its number is 1."""

    number = 0

    def train(self, *given: Any) -> Any:
        report, *rest = super().train(*given)
        if self.number == 1:
            report.seconds.update({block: 4 * time for block, time in report.seconds.items()})
        return report, *rest


@pytest.mark.slow
def test_clients_of_a_slow_worker_move_and_no_bit_changes():
    """More rounds than copies are kept for, so these are replaced in between."""
    prepared = ready("fednp", rounds=20, stacking="no", evaluate_every=0, fraction_train=1.0)
    crew = HereCrew(2, kind=Slow)
    crew.actors[1].number = 1
    found = on(crew, prepared)
    assert found.usage["moved_blocks"] >= 1
    assert "copied" in {name for _, name in crew.asked}
    assert crew.lost == 0
    assert_same(prepared, found, alone(prepared))


@pytest.mark.slow
def test_blocks_moved_by_a_death_can_be_lost_again():
    prepared = ready("fednp", rounds=6, stacking="no")
    wanted = alone(prepared)

    class Twice(HereCrew):
        def call(self, worker: int, name: str, *args: Any, returns: int = 1) -> Any:
            if name == "train" and worker in (0, 2) and len(self.dead) < 2:
                rounds = sum(one == (worker, name) for one in self.asked)
                if rounds == 2 + worker:
                    self.dead.add(worker)
            return super().call(worker, name, *args, returns=returns)

    crew = Twice(3)
    assert_same(prepared, on(crew, prepared), wanted)
    assert crew.lost == 2
