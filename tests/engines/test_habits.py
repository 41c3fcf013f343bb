"""Habits of networks that people bring: they write into their input, call layers by keyword, wrap
another network. They have the numbers of a plain loop, or are refused before anything starts.
"""

from __future__ import annotations

import pytest
import torch
from conftest import worst_difference
from torch import nn
from torch.nn.utils import prune
from zoo import CLASSES, Case, agree, federation, on_two_engines

from bayflower import fit
from bayflower.errors import ConfigError
from bayflower.networks.check import check_fit
from bayflower.networks.model import Model
from bayflower.networks.own import build_own, given, named


class Scaled(nn.Module):
    """Scales its input in place, as many do with pictures; its layers are called by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out, self.fc = nn.Linear(12, 8), nn.Linear(8, 5), nn.Linear(5, CLASSES)

    def forward(self, x):
        x -= 0.5
        x.div_(0.5)
        return self.fc(input=torch.relu(self.out(input=torch.tanh(self.first(x)))))


# -- networks that write into their input -------------------------------------------------------
@pytest.mark.parametrize("method", ["fednp", "fedbps", "metavd"])
def test_clients_with_a_network_that_writes_into_its_input_are_a_stack(method):
    agree(method, Case(Scaled, (12,)), local_steps=2)


def test_a_network_that_writes_into_its_input_leaves_the_samples_alone():
    data = federation(Case(Scaled, (12,))).clients[0]
    x, before = torch.as_tensor(data.x_train), data.x_train.copy()
    model = Model(Scaled, CLASSES, "scaled")
    model.look_for_head(x)
    check_fit(model, x)
    model.forward(*model.initial(0), x, train=False)
    assert torch.equal(x, torch.as_tensor(before))
    assert model.manner.writes
    assert model.unstackable is None


@pytest.mark.parametrize("stacking", ["yes", "no"])
def test_samples_stay_as_they_are_from_one_test_to_the_next(stacking):
    """Oracle: the personal model alone, on samples that nobody has seen before."""
    some = federation(Case(Scaled, (12,)), (12, 10)).clients
    clients = [((one.x_train, one.y_train), (one.x_test, one.y_test)) for one in some]
    found = fit(
        *("fedbps", [((x.copy(), y), (v.copy(), w)) for (x, y), (v, w) in clients]),
        model=Scaled,
        **{"rounds": 2, "local_epochs": 1, "batch_size": 4, "evaluate_every": 1},
        **{"calibration": "off", "stacking": stacking, "progress": False},
    )
    rows = [row for row in found.metrics_rows if row["model"] == "personal"]
    for row, (_, (x, y)) in zip(rows, clients, strict=True):
        model, mine = found.personal(row["client"]), x.copy()
        for _ in range(2):
            shares = model.predict_proba(mine)
            nll = -torch.as_tensor(shares).log()[range(len(y)), y].mean()
            assert abs(float(nll) - row["nll"]) < 1e-5
        assert (mine == x).all()


# -- what is refused before anything starts -----------------------------------------------------
class Net(nn.Module):
    """Two layers, and something that is done with the first or its output."""

    def __init__(self, change=None, between=torch.tanh) -> None:
        super().__init__()
        self.first, self.fc, self.between = nn.Linear(12, 8), nn.Linear(8, CLASSES), between
        self.means = [torch.zeros(8)]
        if change is not None:
            change(self.first)

    def forward(self, x):
        return self.fc(self.between(self.first(x)))


class Remembers(Net):
    """Takes a running mean, which it keeps in a list."""

    def forward(self, x):
        y = self.first(x)
        if self.training:
            self.means[0] = 0.9 * self.means[0].to(y) + 0.1 * y.detach().mean(0)
        return self.fc(y - self.means[0].to(y))


def masked(layer: nn.Module) -> None:
    layer.weight.register_hook(lambda slope: slope.clamp(min=0))


def pruned(layer: nn.Module) -> None:
    prune.l1_unstructured(layer, "weight", amount=0.4)


REFUSED = {
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4)), "is lazy"),
    "compiled": (lambda: torch.compile(Net(), backend="eager"), "without torch.compile"),
    "slopes": (lambda: Net(masked), "'first.weight' of model .* has a hook on its gradient"),
    "weight norm": (
        lambda: Net(nn.utils.weight_norm),
        "layer 'first' .*; take torch.nn.utils.parametrizations.weight_norm",
    ),
    "spectral norm": (lambda: Net(nn.utils.spectral_norm), "parametrizations.spectral_norm"),
    "pruned": (lambda: Net(pruned), "call prune.remove"),
    "list": (Remembers, r"keeps 'means\[0\]' from one call to the next"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_what_would_be_done_otherwise_than_its_author_thinks_is_refused(name):
    factory, said = REFUSED[name]
    known = named(factory)
    with given(known), pytest.raises(ConfigError, match=said):
        check_fit(build_own(known.name, (12,), CLASSES, ""), torch.randn(5, 12))
    if name in ("slopes", "compiled"):  # modules that exist already
        with pytest.raises(ConfigError, match=said):
            named(factory())


# -- heads --------------------------------------------------------------------------------------
class Wrapped(nn.Module):
    """A network inside, which has whatever is asked of the outer one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential()
        self.inner.body, self.inner.head = nn.Linear(12, 8), nn.Linear(8, CLASSES)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


class Replaced(Net):
    """Its head was taken off, as for features."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Identity()

    def forward(self, x):
        return self.head(super().forward(x))


@pytest.mark.parametrize(("kind", "head"), [(Wrapped, "inner.head"), (Replaced, "fc")])
def test_the_head_is_a_layer_with_parameters_of_the_network_itself(kind, head):
    known = named(kind)
    with given(known):
        model = build_own(known.name, (12,), CLASSES, "")
    assert model.head_layers == (head,)
    assert model.head_names == {f"{head}.weight", f"{head}.bias"}


class Repeated(Net):
    """Its head gets three rows a sample, one below the other."""

    def forward(self, x):
        return super().forward(x.repeat(3, 1)).unflatten(0, (3, -1)).mean(0)


class Tokens(Net):
    """Its head gets three rows a sample, side by side."""

    def forward(self, x):
        return super().forward(x[:, None].repeat(1, 3, 1)).mean(1)


@pytest.mark.parametrize("method", ["pfedvmp", "fednp", "pfedgp", "metavd"])
@pytest.mark.parametrize("kind", [Repeated, Tokens])
def test_methods_with_features_refuse_several_rows_a_sample_before_a_run(kind, method, tmp_path):
    some = federation(Case(kind, (12,)), (12, 10)).clients
    clients = [((one.x_train, one.y_train), (one.x_test, one.y_test)) for one in some]
    with pytest.raises(ConfigError, match="several rows a sample; name a"):
        fit(method, clients, model=kind, rounds=1, batch_size=4, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


class Caching(Net):
    """Keeps a constant for each size of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.ones = {}

    def forward(self, x):
        size = len(x)
        if size not in self.ones:
            self.ones[size] = torch.ones(size, 1)
        return super().forward(x * self.ones[size].to(x))


@pytest.mark.parametrize("method", ["fedbps", "maml"])
def test_what_a_network_keeps_of_its_trial_is_not_in_the_way(method):
    some = federation(Case(Caching, (12,)), (12, 10)).clients
    clients = [((one.x_train, one.y_train), (one.x_test, one.y_test)) for one in some]
    few = {"rounds": 1, "local_epochs": 1, "batch_size": 4, "calibration": "off"}
    assert not fit(method, clients, model=Caching, **few).result["faults"]


# -- why clients are not stacked -----------------------------------------------------------------
class Sign(torch.autograd.Function):
    """A function in the newer form, without one for stacks."""

    @staticmethod
    def forward(x):
        return x.sign()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g


def halved(layer: nn.Module) -> None:
    layer.register_full_backward_hook(lambda layer, slopes, given: slopes)


REASONS = {
    "hook": (lambda: Net(halved), "or a layer has a backward hook"),
    "function": (lambda: Net(between=Sign.apply), "generate_vmap_rule = True gives it one"),
    "order": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (3, 2, 2)), Ordered(), nn.Flatten(), nn.Linear(12, CLASSES)
        ),
        "another order in memory, such as channels_last",
    ),
}


class Ordered(nn.Module):
    def forward(self, x):
        return x.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", REASONS)
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_the_reason_is_said_in_the_words_of_its_author(name):
    factory, reason = REASONS[name]
    loop, fused = on_two_engines("fedavg", Case(factory, (12,)))
    assert reason in fused.remarks[0]
    assert worst_difference(fused.server_state, loop.server_state) < 1e-15
