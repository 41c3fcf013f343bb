"""Networks that make tensors and fill them, draw numbers by functions of torch, or do what cannot
be mapped over clients: stacked with the loop engine's numbers, or one by one with a reason that
their author understands.
"""

from __future__ import annotations

import pytest
import torch
from conftest import some, worst_difference
from torch import nn
from torch.nn import functional
from zoo import CLASSES, Case, agree, halves_of, on_two_engines

from bayflower.config import parse
from bayflower.fused.trial import tried
from bayflower.networks.model import Model
from bayflower.stacked import chance, filled
from bayflower.stacked.rewriting import Seen, passing

METHODS = ("fedavg", "fedbps", "fedmap", "maml", "metavd", "pfedvmp")
FEW = {("steps", "fedbps"), ("noise", "fedavg"), ("classes", "fedavg")}


class Steps(nn.Module):
    """Outputs of a recurrent cell, written one after the other into a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.drop = nn.GRUCell(6, 5), nn.Dropout(0.3)
        self.between, self.fc = nn.Linear(5, 5), nn.Linear(5, CLASSES)

    def forward(self, x):
        hidden = torch.zeros(x.shape[0], 5, dtype=x.dtype)
        found = torch.empty(x.shape[0], x.shape[1], 5, dtype=x.dtype, device=x.device)
        for time in range(x.shape[1]):
            hidden = self.cell(x[:, time], hidden)
            found[:, time] = self.drop(hidden)
        return self.fc(torch.relu(self.between(found.mean(1))))


class Noise(nn.Module):
    """A bottleneck with a distribution of torch, and sums that are added up in place."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.log = nn.Linear(30, 8), nn.Linear(30, 8)
        self.between, self.fc = nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x):
        x = x.flatten(1)
        mean, std = torch.tanh(self.mean(x)), torch.exp(0.1 * self.log(x))
        if self.training:
            mean = torch.distributions.Normal(mean, std).rsample() + torch.normal(mean, 0.1 * std)
            mean = mean + torch.normal(0.0, 0.1, mean.shape).to(x) + torch.normal(0.1, std)
            mean = mean + torch.randn(size=mean.shape, requires_grad=False).to(x)
        total = torch.full((x.shape[0], 8), 0.5, dtype=x.dtype)
        total[:, ::2] = mean[:, ::2]
        total.add_(std)
        return self.fc(torch.relu(self.between(total)))


class Mask(nn.Module):
    """Attention that looks back only; its mask is a tensor of ones."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.between, self.fc = nn.Linear(6, 6), nn.Linear(6, 5), nn.Linear(5, CLASSES)

    def forward(self, x):
        times = x.shape[1]
        later = torch.ones(times, times, dtype=torch.bool).triu(1)
        weight = (self.query(x) @ x.transpose(1, 2)).masked_fill(later, float("-inf")).softmax(-1)
        found = torch.zeros(size=x.shape, dtype=x.dtype)
        found[:, 1:] = (weight @ x)[:, 1:]
        return self.fc(torch.relu(self.between(found.mean(1))))


class Classes(nn.Module):
    """Inputs as classes: a row of zeros and a one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.between = nn.Linear(7, 6), nn.Linear(6, 6)
        self.fc = nn.Linear(6, CLASSES)

    def forward(self, x):
        x = functional.one_hot(x.long(), 7).to(self.first.weight.dtype)
        return self.fc(torch.relu(self.between(torch.relu(self.first(x)).mean(1))))


NETWORKS = {
    "steps": Case(Steps, (5, 6)),
    "noise": Case(Noise, (5, 6)),
    "mask": Case(Mask, (5, 6)),
    "classes": Case(Classes, (5,), 7),
}


@pytest.mark.parametrize(
    "pair", some([(n, m) for n in NETWORKS for m in METHODS], FEW), ids=lambda pair: "-".join(pair)
)
def test_they_are_stacked_with_the_loops_numbers(pair):
    name, method = pair
    agree(method, NETWORKS[name], local_steps=2)


def test_numbers_are_those_of_the_step_whatever_torchs_generator_has():
    run = parse("fedavg", {"dtype": "float64"})
    halves = halves_of("fedavg", Model(Noise, CLASSES), run)
    params, buffers = halves.initial
    x = torch.linspace(-1, 1, 60, dtype=torch.float64).reshape(2, 5, 6)
    found = []
    for seed, key in ((0, 1), (5, 1), (5, 2)):
        torch.manual_seed(seed)
        with chance.step(key):
            found.append(halves.model.forward(params, buffers, x, True)[0])
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0], found[2])


def test_normal_has_the_means_and_deviations_that_are_asked_for():
    mean = torch.tensor([-1.0, 0.0, 4.0]).repeat(20_000, 1)
    std = torch.tensor([0.5, 1.0, 3.0]).expand(20_000, 3)
    with chance.step(3), passing(Seen(), train=True, stacked=False):
        for drawn in (torch.normal(mean, std), torch.normal(mean, 2.0) / 2 * std):
            assert drawn.shape == mean.shape
            assert float((drawn.std(0) / std[0] - 1).abs().max()) < 0.02
        assert float((torch.normal(mean, std).mean(0) - mean[0]).abs().max()) < 0.08
        assert torch.normal(2.0, 0.1, (4, 3), dtype=torch.float64).dtype == torch.float64
        assert torch.normal(2.0, std).shape == (20_000, 3)
        own = torch.Generator().manual_seed(1)
        mine = torch.normal(mean, std, generator=own)
    assert torch.equal(mine, torch.normal(mean, std, generator=torch.Generator().manual_seed(1)))


def test_tensors_are_made_of_the_samples_only_where_that_is_needed():
    x = torch.ones(2, 3)
    kinds = [(torch.zeros, (4, 2)), (torch.ones, ((4, 2),)), (torch.full, ((4, 2), 7.0))]
    for torchs, size in kinds:
        make = filled.FUNCTIONS[torchs]
        assert make(*size) is NotImplemented  # no samples
        with filled.made_of(x):
            assert torch.equal(make(*size), torchs(*size))
            found = make(*size, dtype=torch.int32, device="cpu")
            assert torch.equal(found, torchs(*size, dtype=torch.int32))
            assert make(*size, requires_grad=True) is NotImplemented
            assert make(*size, pin_memory=True) is NotImplemented
    with filled.made_of(x):
        assert filled.FUNCTIONS[torch.empty](3).shape == (3,)
        assert torch.equal(
            filled.FUNCTIONS[torch.full](size=(2,), fill_value=3), torch.full((2,), 3)
        )
    seen = Seen()
    assert not seen.again(RuntimeError("something else"))
    assert seen.again(RuntimeError("vmap: inplace arithmetic(self, *extra_args) is not possible"))
    assert not seen.again(RuntimeError("vmap: inplace arithmetic, once more"))


# -- what is not stacked ---------------------------------------------------------------------------
class Between(nn.Module):
    """Two layers with something between them."""

    def __init__(self, change) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 8), nn.Linear(8, 8)
        self.norm, self.fc, self.change = nn.BatchNorm1d(8), nn.Linear(8, CLASSES), change

    def forward(self, x):
        return self.fc(self.change(self, torch.tanh(self.second(torch.tanh(self.first(x))))))


REASONS = {
    "multinomial": (
        lambda net, h: h * (1 + torch.multinomial(h.detach().softmax(-1), 1)),
        "it draws random numbers by a function of torch that has none for stacks",
    ),
    "item": (lambda net, h: h * h.detach().abs().max().item(), "it reads a number out of a tensor"),
    "branch": (lambda net, h: h if h.sum() > 0 else -h, "it reads a number out of a tensor"),
    "some": (
        lambda net, h: torch.stack([row + row[row > 0].sum() for row in h]),
        "a shape in it depends on the values of a tensor",
    ),
    "folded": (
        lambda net, h: net.norm(h.repeat(3, 1)).reshape(3, -1, 8).mean(0),
        "samples, so that it cannot be told which rows are padding",
    ),
}


@pytest.mark.parametrize("name", REASONS)
def test_reasons_are_those_of_the_network(name):
    change, reason = REASONS[name]
    case = Case(lambda: Between(change), (12,))
    loop, fused = on_two_engines("fedavg", case, batch_size=4)
    assert reason in fused.remarks[0]
    assert worst_difference(fused.server_state, loop.server_state) == 0
    said = tried(Model(case.factory, CLASSES), torch.ones(4, 12)).training
    assert reason in (said or "") or name == "multinomial"


def test_doctor_knows_networks_that_fill_tensors():
    found = tried(Model(Steps, CLASSES), torch.ones(4, 5, 6))
    assert (found.training, found.second_derivatives, found.curvature) == (None, None, None)
