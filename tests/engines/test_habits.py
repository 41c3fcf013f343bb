"""Habits of networks that people bring: they write into their input, call layers by keyword, wrap
another network. They have the numbers of a plain loop, or are refused before anything starts.
"""

from __future__ import annotations

import pytest
import torch
from conftest import some, worst_difference
from torch import nn
from torch.nn.utils import prune
from zoo import CLASSES, Case, agree, federation, on_two_engines

from bayflower import fit
from bayflower.errors import ConfigError
from bayflower.networks.check import check_fit, check_layers
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


REFUSED = {
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4)), "is lazy"),
    "slopes": (lambda: Net(masked), "'first.weight' of model .* has a hook on its gradient"),
    "spectral norm": (lambda: Net(nn.utils.spectral_norm), "parametrizations.spectral_norm"),
    "list": (Remembers, r"keeps 'means\[0\]' from one call to the next"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_done_otherwise_than_its_author_thinks_is_refused(name):
    factory, said = REFUSED[name]
    known = named(factory)
    with given(known), pytest.raises(ConfigError, match=said):
        check_fit(build_own(known.name, (12,), CLASSES, ""), torch.randn(5, 12))
    if name == "slopes":  # modules that exist already
        with pytest.raises(ConfigError, match=said):
            named(factory())


# -- what a pass leaves behind ------------------------------------------------------------------
class Shown(nn.Module):
    """Keeps weights of attention and features for a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.look = nn.Linear(4, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.fc, self.weights = nn.Linear(8, CLASSES), None

    def forward(self, x):
        y = torch.relu(self.into(x.reshape(len(x), 3, 4)))
        y, self.weights = self.look(y, y, y)
        self.features = y.mean(1)
        return self.fc(self.features)


def pruned(layer: nn.Module) -> None:
    prune.l1_unstructured(layer, "weight", amount=0.4)


class Alternates(Shown):
    """Reads in training what its last pass has left."""

    def forward(self, x):
        before = self.weights if self.training else None
        found = super().forward(x)
        return found if before is None else found + before.mean()


LEFT = {
    "shown": Shown,
    "weight norm": lambda: Net(nn.utils.weight_norm),
    "pruned": lambda: Net(pruned),
}
FIRST = {("fedavg", "shown"), ("fedbps", "weight norm"), ("pfedvmp", "pruned")}


def checked(factory) -> Model:
    model = Model(factory, CLASSES)
    check_fit(model, torch.linspace(-1, 1, 60).reshape(5, 12))
    return model


@pytest.mark.parametrize(
    "pair",
    some([(m, n) for n in LEFT for m in ("fedavg", "maml", "fedbps", "pfedvmp")], FIRST),
    ids=lambda pair: "-".join(pair),
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_what_is_written_before_it_is_read_is_put_back(pair, monkeypatch):
    """Stacked, with the numbers of the loop; nothing of a pass is left in a layer."""
    method, name = pair
    model = checked(LEFT[name])
    assert model.manner.left
    before = plain_tensors(model)
    monkeypatch.setattr("zoo.Model", lambda *given: model)
    agree(method, Case(LEFT[name], (12,)), local_steps=2)
    after = plain_tensors(model)
    assert [one[:2] for one in after] == [one[:2] for one in before]
    assert all(one[2] is two[2] and one[2].is_leaf for one, two in zip(before, after, strict=True))


def plain_tensors(model: Model) -> list[tuple[str, str, torch.Tensor]]:
    """Return the tensors that layers keep as plain attributes."""
    modules = [model.module_for(train) for train in (False, True)]
    parts = [one for module in modules for one in module.named_modules()]
    return [
        (path, name, value)
        for path, part in parts
        for name, value in vars(part).items()
        if isinstance(value, torch.Tensor)
    ]


def test_what_only_training_reads_is_refused():
    with pytest.raises(ConfigError, match=r"keeps 'weights' from one call to the next"):
        checked(Alternates)


def test_networks_that_exist_already_may_be_compiled_and_have_left_something():
    own = Shown()
    own(torch.zeros(2, 12))
    for module in (own, torch.compile(own, backend="eager")):
        known = named(module)
        assert isinstance(known.factory(), Shown)
        with given(known):
            check_fit(build_own(known.name, (12,), CLASSES, ""), torch.zeros(3, 12))
    assert own.weights.grad_fn is not None  # somebody else's stays as it was
    with pytest.raises(ConfigError, match=r"without torch\.compile"):  # of an app: other names
        check_layers(torch.compile(own, backend="eager"), "own")


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
