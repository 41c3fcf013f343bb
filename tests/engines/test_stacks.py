"""The fused engine's parts: who trains when, padding, and the ways out where stacking does not work
or does not pay.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import assert_same_bits, small_prepared, worst_difference
from torch import nn
from torch.func import vmap

from bayflower.engines import execute
from bayflower.files.checkpoint import read
from bayflower.flower.loop import run_loop
from bayflower.fused import choice, phases
from bayflower.fused.engine import Fused
from bayflower.fused.fixed import Fixed
from bayflower.fused.memory import Live
from bayflower.fused.run import run_fused
from bayflower.methods import get
from bayflower.networks.model import Model
from bayflower.rounds.halves import Halves
from bayflower.stacked.masked import mask_norms, real_samples
from bayflower.tree import to

SGD = {"optimizer": "sgd", "lr": 0.05, "momentum": 0.9, "dtype": "float64"}


def on(model: Model, method: str = "fedmap", **settings):
    """Return (run, federation, halves) of a small run with another model."""
    prepared = small_prepared(method, **settings)
    row, run = get(method), prepared.run
    halves = Halves(
        row.server(run.options, model.anatomy),
        row.client(run.options, run.training, model),
        model,
        model.initial(0, run.settings.torch_dtype()),
    )
    return run, prepared.federation, halves


def test_segments_are_the_clients_still_training_at_each_step():
    lengths = np.array([9, 7, 7, 4, 1])
    for allowed in ([1, 2, 3, 4, 5], [2, 5], [5]):
        steps = [size for size, times in phases.segments(lengths, allowed) for _ in range(times)]
        assert len(steps) == 9
        for step, size in enumerate(steps):
            assert size == min(s for s in allowed if s >= (lengths > step).sum())
    assert phases.segments(np.array([]), [1]) == []


def test_pieces_cover_every_sample():
    sizes = np.array([0, 25, 7, 10, 3])
    for piece in (4, 10, 30):
        for number, count in enumerate(phases.active(sizes, piece)):
            assert all(size <= number * piece for size in sizes[count:])
        assert len(phases.active(sizes, piece)) * piece >= 25
    assert phases.active(np.array([0, 0]), 4) == [1]


def test_recorded_sizes_are_few_and_reach_all():
    assert phases.allowed_sizes(20) == list(range(1, 21))
    many = phases.allowed_sizes(5000)
    assert len(many) <= phases.MOST_SIZES
    assert many[0] == 1
    assert many[-1] == 5000


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_clients_that_have_finished_do_not_move_when_sizes_are_rounded_up(monkeypatch, optimizer):
    """With more clients than recordings a step takes finished clients along: neither parameters nor
    moments may move.
    """
    settings = {
        "dataset": "synthetic",
        "num_clients": 5,
        "new_clients": 0,
        "keep": 1.0,
        "batch_size": 128,
        "dtype": "float64",
    }
    exact = execute(small_prepared("fedmap", "fused", **settings, optimizer=optimizer))
    monkeypatch.setattr(phases, "MOST_SIZES", 2)
    rounded = execute(small_prepared("fedmap", "fused", **settings, optimizer=optimizer))
    assert worst_difference(rounded.server_state, exact.server_state) < 1e-12
    assert worst_difference(rounded.client_states, exact.client_states) < 1e-12


def test_batchnorm_leaves_padding_out():
    norm = nn.BatchNorm2d(3).double()
    masked, x = mask_norms(nn.BatchNorm2d(3).double()), torch.randn(6, 3, 4, 4, dtype=torch.float64)
    want = norm(x[:4])
    with real_samples(torch.tensor([1.0, 1, 1, 1, 0, 0])):
        got = masked(torch.cat([x[:4], torch.full((2, 3, 4, 4), 1e6, dtype=torch.float64)]))
    torch.testing.assert_close(got[:4], want)
    torch.testing.assert_close(masked.running_var, norm.running_var)
    torch.testing.assert_close(masked.running_mean, norm.running_mean)
    assert masked.num_batches_tracked == norm.num_batches_tracked == 1


def test_repeated_tensors_are_kept_once_and_spread_when_they_change():
    fixed = Fixed({"shared": torch.ones(1, 2).expand(3, 2), "own": torch.arange(3.0)})
    assert fixed.tree["shared"].stride(0) == 0
    fixed.load({"shared": torch.full((1, 2), 5.0).expand(3, 2), "own": torch.zeros(3)})
    assert fixed.tree["shared"].tolist() == [[5.0, 5.0]] * 3
    with pytest.raises(ValueError, match="no longer is"):
        fixed.load({"shared": torch.rand(3, 2), "own": torch.zeros(3)})
    assert fixed.unlike({"shared": torch.rand(3, 2), "own": fixed.tree["own"]})
    fixed.spread()
    assert fixed.tree["shared"].stride(0) == 2


# -- ways out ------------------------------------------------------------------------------------
class Peeks(nn.Module):
    """A layer that looks at values, which vmap does not allow."""

    def forward(self, x):
        return x * (2.0 if x.abs().max().item() > 1e9 else 1.0)


def test_a_layer_that_cannot_be_stacked_is_trained_one_by_one_and_named(caplog):
    model = Model(lambda: nn.Sequential(nn.Flatten(), Peeks(), nn.Linear(64, 10)), 10, "peeks")
    run, federation, halves = on(model)
    fused = run_fused(run, federation, halves)
    assert "cannot be stacked" in fused.remarks[0]
    assert "cannot be stacked" in caplog.text
    loop = run_loop(run, federation, halves)
    assert_same_bits(fused.server_state, loop.server_state)
    for view, tallies in loop.new_clients.items():
        assert_same_bits(fused.new_clients[view], tallies)


class OwnNorm(nn.BatchNorm1d):
    """Somebody's own BatchNorm, whose formula we do not know."""


def test_a_norm_of_somebodys_own_is_not_padded():
    model = Model(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 8), OwnNorm(8), nn.Linear(8, 10)),
        10,
        "own",
    )
    assert "OwnNorm" in model.unstackable
    run, federation, halves = on(model)
    assert "cannot leave padding out" in run_fused(run, federation, halves).remarks[0]


@pytest.mark.parametrize(
    ("faster", "remark"), [("stack", None), ("single", "times faster than stacked")]
)
def test_on_a_cpu_the_faster_way_is_taken_and_kept(monkeypatch, tmp_path, faster, remark):
    """The clock is ours; what it decides is written to the checkpoint."""
    real = choice.seconds

    def seconds(fn, times=3):
        fn()  # the measured steps really run
        stacked = (
            "stack" if "step" in fn.__qualname__ and "single" not in fn.__qualname__ else "single"
        )
        return 1e-6 if stacked == faster else 1.0

    monkeypatch.setattr(choice, "seconds", seconds)
    prepared = small_prepared("fedmap", "fused", stacking="measured", checkpoint_every=1)
    outcome = execute(prepared, out=tmp_path)
    assert (
        (outcome.remarks[0] if outcome.remarks else None) is None
        if remark is None
        else remark in outcome.remarks[0]
    )
    assert read(tmp_path).config["stacking"] == ("yes" if faster == "stack" else "no")
    assert real(lambda: None) < 1


FEW = {"num_clients": 2, "new_clients": 0}


@pytest.mark.parametrize(
    ("layers", "settings", "remark"),
    [
        ((), {}, None),
        (
            (
                nn.Unflatten(1, (1, 8, 8)),
                nn.Conv2d(1, 64, 3, padding=1),
                nn.Conv2d(64, 64, 3, padding=1),
                nn.Conv2d(64, 1, 3, padding=1),
                nn.Flatten(),
            ),
            {},
            "for large convolutions on a CPU",
        ),
        ((nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 1, 3, padding=1), nn.Flatten()), {}, None),
        ((), FEW, "fewer than 3 train in the average step"),
    ],
)
def test_on_a_cpu_no_clock_decides_by_itself(monkeypatch, layers, settings, remark):
    """With a clock two runs of one seed could differ in rounding, which Adam makes steps of behind
    BatchNorm.
    """
    monkeypatch.setattr(choice, "seconds", lambda fn, times=3: pytest.fail("a clock was asked"))
    model = Model(lambda: nn.Sequential(nn.Flatten(), *layers, nn.Linear(64, 10)), 10, "small")
    run, federation, halves = on(model, "fedavg", stacking="auto", rounds=1, **settings)
    outcome = run_fused(run, federation, halves)
    assert bool(outcome.remarks) == (remark is not None)
    assert remark is None or remark in outcome.remarks[0]
    assert outcome.rounds[0]["stacked"] == (0 if remark else 5)


class Plain(nn.Module):
    """A convolution without a layer for it, and weights of many dimensions without convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.mixed = (nn.Parameter(torch.ones(*s)) for s in ((5, 2, 3), (4, 4, 4, 6)))
        self.fc = nn.Linear(6, 10)

    def forward(self, x):
        rows = nn.functional.conv1d(x.view(len(x), 2, 32), self.kernel)
        cubes = rows.flatten(1)[:, :64].view(-1, 4, 4, 4)
        return self.fc(torch.einsum("nabc,abcd->nd", cubes, self.mixed))


class Squeezed(nn.Module):
    """A network that fails with few samples: with one, or with fewer than `least`."""

    def __init__(self, least: int = 0) -> None:
        super().__init__()
        self.least, self.conv, self.fc = least, nn.Conv2d(1, 6, 3), nn.Linear(12, 10)

    def forward(self, x):
        if len(x) < self.least:
            raise IndexError("too few samples")
        pooled = self.conv(x.view(-1, 1, 8, 8)).amax((2, 3)).squeeze()
        return self.fc(torch.cat([pooled, pooled.relu()], 1))


@pytest.mark.parametrize(
    ("network", "count"),
    [
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), 0),
        (Plain, 5 * 2 * 3 * 30),
        (Squeezed, 36 * 9 * 6),
        (lambda: Squeezed(least=3), float("inf")),
        (
            lambda: nn.Sequential(
                *(nn.Flatten(), nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 6, 3, padding=1)),
                *(nn.BatchNorm2d(6), nn.Conv2d(6, 6, 3, groups=6), nn.ConvTranspose2d(6, 2, 2)),
                *(nn.Flatten(), nn.Linear(98, 10)),
            ),
            64 * 9 * 6 + 36 * 9 * 6 + 36 * 4 * 12,
        ),
    ],
)
def test_multiplications_of_convolutions_are_counted(network, count):
    run, federation, halves = on(Model(network, 10, "counted"), "fedavg")
    assert choice.convolved(Fused(halves, federation.clients, run)) == count


def sender(halves, device="cpu"):
    """Return the function from clients to what they are sent in the first round."""
    state = to(halves.server.init(*halves.initial, (0, 1, 2, 3, 4)), device)
    return lambda chunk: halves.server.broadcast(state, chunk[0])


@pytest.mark.slow
def test_a_cpu_takes_no_more_clients_than_fit_into_its_memory(monkeypatch):
    prepared = small_prepared("fedmap", "fused", **SGD)
    whole = execute(prepared)
    engine = Fused(prepared.halves, prepared.federation.clients, prepared.run)
    assert [len(chunk) for chunk in engine.chunks([0, 1, 2, 3, 4], sender(prepared.halves))] == [5]
    each = choice.memory_of_one(engine, 0, sender(prepared.halves))
    monkeypatch.setattr(choice, "free_memory", lambda device: 3.0 * each / choice.SHARE)
    engine = Fused(prepared.halves, prepared.federation.clients, prepared.run)
    assert max(len(chunk) for chunk in engine.chunks([0, 1, 2, 3, 4], sender(prepared.halves))) < 3
    assert worst_difference(execute(prepared).server_state, whole.server_state) < 1e-10


def test_memory_on_a_cpu_is_that_of_activations_not_only_of_the_network():
    """A deep network of few weights: a client's step holds every layer's output, far more than the
    weights.
    """
    layers = [layer for _ in range(6) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.Tanh())]
    first = (nn.Flatten(), nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3, padding=1))
    model = Model(
        lambda: nn.Sequential(*first, *layers, nn.Flatten(), nn.Linear(256, 10)), 10, "deep"
    )
    needs = []
    for size in (4, 16):
        run, federation, halves = on(model, "fedavg", batch_size=size, dtype="float64")
        needs.append(
            choice.memory_of_one(Fused(halves, federation.clients, run), 0, sender(halves))
        )
    assert needs[1] - needs[0] > 12 * len(layers) * 256 * 8  # twelve more samples, in float64


def test_live_bytes_are_those_that_are_held_at_once():
    def work():
        kept = torch.zeros(1000, dtype=torch.float64)
        for _ in range(5):  # one after another: only one of them is alive
            torch.ones(3000, dtype=torch.float64).sum()
        return kept.view(10, 100) * 2  # a view takes nothing

    with Live() as live:
        made = vmap(lambda x: x.exp().sum())(work())
    assert live.most == pytest.approx(8 * 4000, abs=200)
    assert live.now == pytest.approx(made.untyped_storage().nbytes(), abs=100)


def test_one_by_one_has_the_bits_of_the_loop():
    prepared = small_prepared("pfedvmp", "fused", stacking="no")
    loop = run_loop(prepared.run, prepared.federation, prepared.halves)
    assert_same_bits(execute(prepared).server_state, loop.server_state)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_clients_that_do_not_fit_are_trained_in_chunks(monkeypatch):
    prepared = small_prepared("fedmap", "fused", device="cuda")
    free = torch.cuda.mem_get_info()
    monkeypatch.setattr(choice, "SURE", 0.0)
    engine = Fused(prepared.halves, prepared.federation.clients, prepared.run)
    sent = sender(prepared.halves, "cuda")
    each = choice.memory_of_one(engine, 0, sent)
    assert 0 < each < free[0] / 100
    monkeypatch.setattr(choice, "SHARE", 2.5 * each / free[0])
    assert all(len(chunk) <= 3 for chunk in engine.chunks([0, 1, 2, 3, 4], sent))
