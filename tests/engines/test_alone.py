"""Recorded steps of one client at a time: the bits of plain steps, and no recording where it would
have other numbers.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from conftest import some, worst_difference
from devices import DEVICES
from torch import nn
from zoo import CLASSES, Case, dense, federation, halves_of, on_two_engines

from bayflower.config import parse
from bayflower.contract import Survey, Work
from bayflower.fused import alone, engine
from bayflower.fused.alone import CHECKS, MOST, RecordedStep, RecordedSteps
from bayflower.fused.run import run_fused
from bayflower.maths.optim import Optimizer
from bayflower.networks.manner import Manner
from bayflower.networks.model import Batch, Model
from bayflower.stacked.replay import Graphs


class Again:
    """A recording that does the work again, on a CPU."""

    every = 0  # replays of all

    def __init__(self, owner) -> None:
        self.owner, self.replays = owner, 0

    def replay(self) -> None:
        self.replays += 1
        Again.every += 1
        self.owner.body(self.owner.step)


class OnCpu(RecordedStep):
    def new_graph(self):
        return Again(self)

    def recording(self, graph):
        return nullcontext()

    def body(self, step) -> None:
        self.step = step
        super().body(step)


def graphs() -> Graphs:
    found = Graphs(torch.device("cpu"))
    found.on = True
    return found


@pytest.fixture
def recorders(monkeypatch) -> list[RecordedSteps]:
    """Those that were made; on a CPU, too, they record."""
    found: list[RecordedSteps] = []

    def made(manner, _):
        found.append(RecordedSteps(manner, graphs()))
        return found[-1]

    monkeypatch.setattr(Again, "every", 0)
    monkeypatch.setattr(alone, "RecordedStep", OnCpu)
    monkeypatch.setattr(engine, "RecordedSteps", made)
    return found


METHODS = ("ditto", "fedavg", "fedbps", "fedivon", "fedmap", "fednp", "maml", "metavd", "moon")
METHODS += ("pfedvmp", "scaffold", "fedrep")
NETWORKS = {
    "dropout": Case(dense(lambda: nn.Dropout(0.3)), (12,)),
    "norm": Case(dense(lambda: nn.BatchNorm1d(8)), (12,)),
}
FEW = {("dropout", "fednp"), ("norm", "fedavg"), ("dropout", "scaffold"), ("dropout", "fedrep")}


@pytest.mark.parametrize(
    "pair", some([(n, m) for n in NETWORKS for m in METHODS], FEW), ids=lambda pair: "-".join(pair)
)
@pytest.mark.usefixtures("recorders")
def test_recorded_steps_have_the_bits_of_plain_ones(pair):
    name, method = pair
    more = {"local_steps": 7, "rounds": 2, "batch_size": 3, "stacking": "no"}
    inner = {"inner_lr": 0.001} if method in ("maml", "metavd") else {}
    loop, fused = on_two_engines(method, NETWORKS[name], **more, **inner)
    assert Again.every > 2 * CHECKS
    assert worst_difference(fused.server_state, loop.server_state) == 0
    for client, state in loop.client_states.items():
        assert worst_difference(fused.client_states[client], state) == 0
    losses = [[record["train_loss"] for record in one.rounds] for one in (loop, fused)]
    assert losses[0] == losses[1]


@pytest.mark.usefixtures("recorders")
def test_settings_that_change_a_step_are_in_it():
    more = {"optimizer": "adamw", "schedule": "cosine", "class_weights": "client", "bf16": False}
    more |= {"label_smoothing": 0.1, "clip_norm": 1.0, "local_steps": 6, "stacking": "no"}
    loop, fused = on_two_engines("fedavg", NETWORKS["dropout"], rounds=2, **more)
    assert Again.every > 2 * CHECKS
    assert worst_difference(fused.server_state, loop.server_state) == 0


@pytest.mark.parametrize("odd", [{"strays": True}, {"changes": True}, {"left": {"h": None}}, {}])
def test_networks_that_are_no_functions_of_their_samples_are_not_recorded(odd):
    manner = Manner()
    vars(manner).update(odd)
    steps = RecordedSteps(manner, graphs())
    steps.take("train", swapping, work(1.0), *arguments(1.0))
    assert bool(steps.known) == (not odd)


# -- one step --------------------------------------------------------------------------------------
def work(value: float) -> Work:
    params = {"w": torch.full((3,), value), "before": torch.full((3,), -value)}
    nothing = Survey({}, {})
    opt = Optimizer("sgd", 0.1).init(params)
    return Work(params, {"n": torch.zeros((), dtype=torch.int64)}, {}, nothing, opt)


def arguments(value: float, key: int = 3):
    batch = Batch(torch.full((2, 3), value), torch.zeros(2, dtype=torch.int64), torch.ones(2))
    return (batch,), {}, key, None


def swapping(now, groups, noise, key, weights):
    """Moves w, and keeps what it was."""
    moved = now.params["w"] + groups[0].x.sum() * 0.1
    params = {"w": moved, "before": now.params["w"]}
    return now._replace(params=params, buffers={"n": now.buffers["n"] + 1}), {"loss": moved.sum()}


def test_what_moves_inside_the_work_is_not_overwritten_first():
    recorder = OnCpu(graphs())
    now, want = work(1.0), work(1.0)
    for number in range(8):
        given = arguments(float(number))
        now, info = recorder.take(swapping, now, *given)
        want, told = swapping(want, *given)
        assert torch.equal(now.params["w"], want.params["w"])
        assert torch.equal(now.params["before"], want.params["before"])
        assert int(now.buffers["n"]) == number + 1
        assert torch.equal(info["loss"], told["loss"])
    assert recorder.graph.replays == 7


def test_a_finished_client_keeps_its_numbers():
    steps = RecordedSteps(Manner(), graphs())
    steps.known["one"] = recorder = OnCpu(graphs())
    for _ in range(4):
        now, _ = recorder.take(swapping, work(1.0), *arguments(1.0))
    first = steps.done(now)
    before = first.params["w"].clone()
    recorder.take(swapping, work(5.0), *arguments(2.0))
    assert torch.equal(first.params["w"], before)
    assert not torch.equal(now.params["w"], before)


class Stale(OnCpu):
    """Its recording has kept the first batch."""

    def replay(self, given):
        state, _, *rest = given
        return super().replay((state, self.args[1], *rest))


@pytest.mark.parametrize("what", ["work", "loss"])
def test_a_recording_with_other_numbers_is_not_used(what):
    def step(now, groups, noise, key, weights):
        after, info = swapping(now, groups, noise, key, weights)
        return (now, info) if what == "loss" else (after, {"loss": torch.ones(())})

    recorder = Stale(graphs())
    now, want = work(1.0), work(1.0)
    for number in range(6):
        given = arguments(float(number))
        now, info = recorder.take(step, now, *given)
        want, told = step(want, *given)
        assert torch.equal(now.params["w"], want.params["w"])
        assert torch.equal(info["loss"], told["loss"])
    assert recorder.refused


def test_a_step_that_cannot_be_recorded_stays_plain():
    class Refusing(OnCpu):
        def recording(self, graph):
            raise RuntimeError("operation not permitted when stream is capturing")

    recorder = Refusing(graphs())
    for number in range(4):
        after, _ = recorder.take(swapping, work(1.0), *arguments(float(number)))
        torch.testing.assert_close(after.params["w"], torch.full((3,), 1.0 + 0.6 * number))
    assert recorder.refused


def test_no_more_shapes_are_recorded_than_fit():
    steps = RecordedSteps(Manner(), graphs())
    for size in range(1, 3 * MOST):
        batch = Batch(torch.ones(size, 3), torch.zeros(size, dtype=torch.int64), torch.ones(size))
        steps.take("train", swapping, work(1.0), (batch,), {}, 1, None)
    assert len(steps.known) == MOST


# -- on a GPU --------------------------------------------------------------------------------------
def alone_on(device: str, method: str, case: Case, **more):
    data = federation(case)
    usual = {"dtype": "float64", "stacking": "no", "device": device, "rounds": 2, "local_steps": 7}
    run = parse(method, {**usual, "num_clients": len(data.clients), "batch_size": 3, **more})
    return run_fused(run, data, halves_of(method, Model(case.factory, CLASSES, "own"), run))


class Drawing(nn.Module):
    """Draws numbers by torch's generator, as a recording does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.fc = nn.Linear(12, 8), nn.Linear(8, CLASSES)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        if self.training:
            h = h * (1 + torch.multinomial(h.detach().softmax(-1), 1))
        return self.fc(h)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.fc = nn.Linear(12, 8), nn.Linear(8, CLASSES)

    def forward(self, x):
        h = self.first(x)
        return self.fc(torch.tanh(h) if h.sum() > 0 else torch.relu(h))


ON_GPU = {**NETWORKS, "drawing": Case(Drawing, (12,)), "branching": Case(Branching, (12,))}


@pytest.mark.parametrize("method", ["fedavg", "fednp", "metavd"])
@pytest.mark.parametrize("name", ON_GPU)
@pytest.mark.parametrize("device", DEVICES[1:])
def test_a_gpu_has_the_numbers_of_plain_steps(name, method, device, monkeypatch):
    recorded: list[bool] = []
    record = RecordedStep.record

    def noted(self, *args):
        recorded.append(record(self, *args))
        return recorded[-1]

    monkeypatch.setattr(RecordedStep, "record", noted)
    inner = {"inner_lr": 0.001} if method == "metavd" else {}
    yes, no = (
        alone_on(device, method, ON_GPU[name], cuda_graphs=on, **inner) for on in (True, False)
    )
    assert worst_difference(yes.server_state, no.server_state) < 1e-9
    assert recorded
    assert any(recorded) == (name != "branching")
