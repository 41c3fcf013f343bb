"""Runs side by side: each has the bits it has alone, whatever becomes of the others."""

from __future__ import annotations

import json
import threading
from functools import partial

import pytest
import torch
from conftest import assert_same_bits, small_prepared, some
from prefork import bayflower
from torch import nn

from bayflower.engines import Prepared, execute
from bayflower.errors import BayflowerError, ConfigError
from bayflower.files.checkpoint import read, to_resume
from bayflower.fused import choice
from bayflower.fused.beside import JointPhase, side_by_side
from bayflower.methods import METHODS
from bayflower.study.plan import Entry, Study
from bayflower.testing.runs import same_outcome
from bayflower.tree import flatten

MORE = {"rounds": 2, "evaluate_every": 0, "dtype": "float64", "new_clients": 0}
SOME = ("metavd",)  # a broadcast to each client, with noise
# torch's softplus and sigmoid give the last numbers of a tensor other last bits than the rest
ROUNDED = ("pvi", "fednp", "pfedgp", "pfedbayes", "fedivon", "fedep", "fedep-ft", "fedsep", "fedcp")


class Dropping(nn.Sequential):
    """A network with random layers."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Dropout(0.4))
        self.append(nn.Linear(12, 10))


def made(method, seed, **more):
    return small_prepared(method, "fused", **{**MORE, "seed": seed, **more})


def same_run(one, two):
    """Raise unless two runs are the same to the bit, their clients' states among them."""
    same_outcome(one, two)
    assert one.client_states.keys() == two.client_states.keys()
    for client, state in one.client_states.items():
        assert_same_bits(state, two.client_states[client])
    losses = [[record["train_loss"] for record in run.rounds] for run in (one, two)]
    assert losses[0] == losses[1]


def near_run(one, two):
    """Raise unless the states of two runs are the same but for rounding."""
    for mine, yours in (
        (one.server_state, two.server_state),
        *((state, two.client_states[client]) for client, state in one.client_states.items()),
    ):
        torch.testing.assert_close(flatten(mine), flatten(yours), rtol=1e-7, atol=1e-9)


def side(*jobs):
    """Return what jobs (a prepared run and the options of `execute`) give side by side, and how
    many of them trained in one stack.
    """
    seen = []

    def one(prepared, more, seat):
        seen.append(seat.beside)
        return execute(prepared, **more, seat=seat)

    given = [(job, {}) if isinstance(job, Prepared) else job for job in jobs]
    found = side_by_side([partial(one, prepared, more) for prepared, more in given])
    return found, seen[0].together


@pytest.mark.parametrize("method", some(METHODS, SOME))
def test_seeds_side_by_side_have_the_bits_of_seeds_alone(method):
    alone = [execute(made(method, seed)) for seed in range(3)]
    found, most = side(*(made(method, seed) for seed in range(3)))
    trains = bool(made(method, 0).halves.client.phases("train"))
    assert most == (3 if trains else 0)
    for one, two in zip(alone, found, strict=True):
        (near_run if method in ROUNDED else same_run)(one, two)
        assert any("side by side" in text for text in two.remarks) == trains
    with pytest.raises(AssertionError):
        near_run(alone[0], found[1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "method", ["fedmap", "pfedvmp", "metavd", "fednp", "scaffold", "fedrep", "fedpop"]
)
@pytest.mark.parametrize("graphs", [True, False])
def test_a_gpu_gives_each_seed_its_numbers(method, graphs):
    """Several rounds, so that steps are recorded and replayed."""
    more = {"device": "cuda", "cuda_graphs": graphs, "rounds": 4}
    alone = [execute(made(method, seed, **more)) for seed in range(3)]
    found, most = side(*(made(method, seed, **more) for seed in range(3)))
    assert most == 3
    for one, two in zip(alone, found, strict=True):
        near_run(one, two)


@pytest.mark.parametrize(
    ("more", "most"),
    [
        ({"fraction_train": 0.6, "rounds": 3, "new_clients": 2}, 2),
        ({"crop_padding": 1, "flip": 0.5, "mixup": 0.2, "schedule": "cosine"}, 2),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (
                ({"class_weights": "client", "label_smoothing": 0.1, "dtype": "float32"}, 2),
                ({"max_fused": 7}, 0),
                ({"stacking": "no"}, 0),
            )
        ),
    ],
    ids=lambda more: "-".join(more) if isinstance(more, dict) else "",
)
def test_every_draw_of_a_run_is_its_own(more, most):
    """Samples of clients, batches, augmentation, schedules and chunks follow each run's seed and
    settings.
    """
    alone = [execute(made("fedavg-ft", seed, **more)) for seed in (4, 9)]
    found, together = side(*(made("fedavg-ft", seed, **more) for seed in (4, 9)))
    assert together == most
    for one, two in zip(alone, found, strict=True):
        same_run(one, two)


def test_random_layers_follow_each_runs_seed():
    model = {"model": "test_beside:Dropping"}
    alone = [execute(made("fedper", seed, **model)) for seed in (4, 9)]
    found, together = side(*(made("fedper", seed, **model) for seed in (4, 9)))
    assert together == 2
    for one, two in zip(alone, found, strict=True):
        same_run(one, two)


def test_runs_that_are_not_alike_train_apart():
    """One with another learning rate and one with another network have their own numbers."""
    given = [{"lr": 0.01}, {"lr": 0.02}, {"model": "linear"}]
    alone = [execute(made("fedavg", 1, **more)) for more in given]
    found, together = side(*(made("fedavg", 1, **more) for more in given))
    assert together == 0
    for one, two in zip(alone, found, strict=True):
        same_run(one, two)


def test_a_run_goes_on_beside_new_ones_and_one_that_fails_ends_alone(tmp_path):
    """Runs may be in different rounds: one resumed after its second round, one that has fewer, one
    that ends in its second round by an error.
    """
    alone = [execute(made("fedmap", seed, rounds=3)) for seed in range(2)]
    execute(made("fedmap", 1, rounds=2, checkpoint_every=2), out=tmp_path)
    rest = made("fedmap", 1, rounds=3, checkpoint_every=2)
    assert read(tmp_path).round == 2

    def end(records):
        if len(records) == 2:
            raise BayflowerError("enough")

    found, together = side(
        made("fedmap", 0, rounds=3),
        (rest, {"resume": to_resume(tmp_path, rest.run)}),
        (made("fedmap", 2, rounds=3), {"progress": end}),
    )
    assert together == 2
    same_run(alone[0], found[0])
    same_outcome(alone[1], found[1])
    assert isinstance(found[2], BayflowerError)
    assert str(found[2]) == "enough"


def test_too_little_memory_for_all_and_errors_inside_the_stack(monkeypatch):
    """Out of memory: one run at a time from then on. Another error: each run answers it as alone,
    one by one, and says so.
    """
    alone = [execute(made("fedavg", seed)) for seed in range(2)]
    calls = []

    def full(self, *given):
        calls.append(1)
        raise torch.OutOfMemoryError("no memory is left")

    with monkeypatch.context() as patch:
        patch.setattr(JointPhase, "run", full)
        found, together = side(*(made("fedavg", seed) for seed in range(2)))
    assert (together, len(calls)) == (0, 1)
    for one, two in zip(alone, found, strict=True):
        same_run(one, two)

    def broken(self, *given):
        raise RuntimeError("a layer has no rule")

    def measured(engine, ordered, sent):
        return full(engine) if len(ordered) > len(engine.stack.clients) else 0

    with monkeypatch.context() as patch:  # while the memory of all runs is measured
        patch.setattr(choice, "clients_that_fit", measured)
        found, _ = side(*(made("fedavg", seed) for seed in range(2)))
    assert [type(one) for one in found] == [torch.OutOfMemoryError] * 2

    monkeypatch.setattr(JointPhase, "run", broken)
    found, _ = side(*(made("fedavg", seed) for seed in range(2)))
    slow = [execute(made("fedavg", seed, stacking="no")) for seed in range(2)]
    for one, two in zip(slow, found, strict=True):
        same_run(one, two)
        assert any("a layer has no rule" in text for text in two.remarks)


def test_an_interrupt_ends_every_run(monkeypatch):
    """The interrupt comes in the thread that waits for the others."""
    rounds, wait = [], threading.Thread.join

    def interrupted(self, timeout=None):
        if timeout is None:
            return wait(self)
        raise KeyboardInterrupt

    def seen(records):
        rounds.append(len(records))

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        side(*((made("fedavg", seed, rounds=500), {"progress": seen}) for seed in range(2)))
    assert max(rounds, default=0) < 500
    assert threading.active_count() == before


# -- studies --------------------------------------------------------------------------------------
WORDS = ("compare", "fedavg", "local", "--seeds", "2", "--rounds", "1", "--clients", "4")
WORDS += ("--set", "keep=0.2", "--set", "stacking=yes", "--set", "calibration=off")


def test_a_comparison_side_by_side_has_the_numbers_of_one_run_after_another(tmp_path):
    """The same files and numbers; a run of which the result is gone is done again, alone."""
    said = {}
    for how in ("--together", "--apart"):
        done = bayflower(*WORDS, how, "--jobs", "1", "--out", how[2:], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        said[how] = done.stdout
    assert "fedavg: 2 seeds side by side" in said["--together"]
    assert "side by side" not in said["--apart"]
    numbers = {}
    for how in ("together", "apart"):
        found = sorted((tmp_path / how).rglob("result.json"))
        assert len(found) == 4
        numbers[how] = [json.loads(path.read_text())["final"] for path in found]
    assert numbers["together"] == numbers["apart"]
    gone = next((tmp_path / "together").rglob("result.json"))
    kept = gone.read_text()
    gone.unlink()
    done = bayflower(*WORDS, "--together", "--out", "together", cwd=tmp_path)
    assert "3 of 4 runs are there already" in done.stdout, done.stderr
    assert json.loads(gone.read_text())["final"] == json.loads(kept)["final"]


@pytest.mark.parametrize(("engine", "jobs"), [("loop", 0), ("fused", 2)])
def test_seeds_side_by_side_need_one_process_of_the_fused_engine(engine, jobs, tmp_path):
    with pytest.raises(ConfigError, match="together trains seeds side by side"):
        Study((Entry("fedavg", "fedavg", {}),), (0, 1), tmp_path, engine, jobs, True)


@pytest.mark.slow
def test_a_table_side_by_side_has_the_numbers_of_one_run_after_another(tmp_path):
    """`reproduce`: the same numbers, and a line for each run."""
    said, numbers = {}, {}
    for how in ("--together", "--apart"):
        words = ("reproduce", "fedmap-1", "--quick", "--seeds", "2", "--rounds", "3", how)
        words += ("--where", "method=fedavg", "--results", str(tmp_path / how[2:]))
        done = bayflower(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        said[how] = done.stdout + done.stderr
        found = [json.loads(path.read_text()) for path in (tmp_path / how[2:]).glob("*.json")]
        numbers[how] = {one["seed"]: one["result"]["final"] for one in found}
    assert len(numbers["--together"]) == 2
    assert numbers["--together"] == numbers["--apart"]
    assert all(text.count(": done, ") == 2 for text in said.values())
