"""A user's own network and data in Flower apps: all five methods, own training loops, and what is
refused before training.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from conftest import some
from flwr.app import ArrayRecord
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from usernet import EASY, FIVE, Net, load, personal, run, strategy_of

from bayflower import clients, methods
from bayflower.clients import Plug
from bayflower.config import describe
from bayflower.data.loaders import pair
from bayflower.errors import BayflowerError, ConfigError
from bayflower.flower.loop import InProcessGrid, contexts
from bayflower.networks.check import checked_model
from bayflower.networks.model import Model

# personal models are tested in test_personal.py
make_client_app = partial(clients.make_client_app, export=())
X = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize("method", some(FIVE, {"fednp"}))
def test_all_five_methods_on_a_users_network(method, tmp_path):
    strategy = run(
        make_client_app(method, model=Net, data=load, state=tmp_path),
        method,
        rounds=2,
        **EASY.get(method, {}),
    )
    assert strategy.faults == []
    assert personal(strategy) > 0.6  # three classes: guessing gives a third


@pytest.mark.parametrize(
    "method",
    some(sorted(set(methods.METHODS) - set(FIVE)), ["fedbn", "scaffold"]),
)
def test_every_other_method_takes_it_too(method, tmp_path):
    more = (
        {"dropout_layer": "first"}
        if "dropout_layer" in {setting[1] for setting in describe(method)}
        else {}
    )
    assert (
        run(
            make_client_app(method, model=Net, data=load, state=tmp_path),
            method,
            rounds=1,
            local_epochs=1,
            **more,
        ).faults
        == []
    )


def test_frozen_layers_stay_and_never_travel(tmp_path):
    """The strategy sends, receives and returns no frozen layer; the clients' network has the values
    its factory gives.
    """
    strategy = run(
        make_client_app("fedavg", model=Net, data=load, state=tmp_path), "fedavg", rounds=1
    )
    assert not any(name.startswith("stem") or name == "grid" for name in strategy.state.params)
    assert "again.weight" in strategy.state.params
    assert "twin.weight" not in strategy.state.params  # tied: one parameter under its first name
    model, other = Model(Net, 3), Model(Net, 3)
    assert set(model.constants) == {"stem.weight", "stem.bias", "grid"}
    assert all(torch.equal(value, other.constants[name]) for name, value in model.constants.items())
    params, buffers = model.initial(0)
    twice = {**params, "again.weight": 2 * params["again.weight"]}
    module = model.made(0)
    module.again.weight.data.mul_(2)
    module.stem.load_state_dict(
        {"weight": model.constants["stem.weight"], "bias": model.constants["stem.bias"]}
    )
    # tied weights move together
    assert torch.allclose(model.forward(twice, buffers, X, False)[0], module.eval()(X), atol=1e-6)


def test_curvature_of_a_network_with_frozen_and_tied_layers_is_that_of_single_gradients():
    from bayflower.maths.curvature import diagonal
    from bayflower.networks.model import Batch

    model = Model(Net, 3)
    params, buffers = model.initial(0, torch.float64)
    x, mask = X.double(), torch.ones(6, dtype=torch.float64)
    found = diagonal(model, params, buffers, Batch(x, Y, mask), "empirical")
    slow = {name: torch.zeros_like(value) for name, value in params.items()}
    for i in range(6):
        leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
        loss = nn.functional.cross_entropy(
            model.forward(leaves, buffers, x[i : i + 1], False)[0], Y[i : i + 1]
        )
        for name, grad in zip(
            leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True
        ):
            slow[name] += grad.square()
    assert found.keys() == slow.keys()
    assert all(torch.allclose(found[name], slow[name], rtol=1e-9, atol=1e-15) for name in slow)


# -- the split into base and head ----------------------------------------------------------------
@pytest.mark.parametrize(
    ("head", "names"),
    [
        (None, {"fc.weight", "fc.bias"}),
        ("first", {"first.weight", "first.bias"}),
        (["fc", "first"], {"first.weight", "first.bias", "fc.weight", "fc.bias"}),
    ],
)
def test_heads_by_rule_by_name_and_by_prefixes(head, names):
    model = checked_model(Net, X, Y, head)
    assert model.head_names == names
    assert model.head_layers == (
        ("fc",) if head is None else ("first",) if head == "first" else ("first", "fc")
    )
    assert model.num_classes == 3
    assert model.anatomy.head_names == names


def test_the_head_that_is_named_stays_on_the_client(tmp_path):
    strategy = run(
        make_client_app("fedper", model=Net, data=load, head=["first", "fc"], state=tmp_path),
        "fedper",
        rounds=1,
    )
    assert set(strategy.state.params) == {
        "norm.weight",
        "norm.bias",
        "again.weight",
        "again.bias",
        "twin.bias",
    }


def test_metavds_layer_by_name(tmp_path):
    strategy = run(
        make_client_app("metavd", model=Net, data=load, layer="first", state=tmp_path),
        "metavd",
        rounds=1,
        dropout_layer="first",
    )
    assert strategy.faults == []
    assert strategy.half.broadcast(strategy.state, 0).log_alpha.shape == (12, 64)
    with pytest.raises(ConfigError, match="dropout_layer 'frist' is no linear layer"):
        run(
            make_client_app("metavd", model=Net, data=load, state=tmp_path),
            "metavd",
            dropout_layer="frist",
        )
    with pytest.raises(
        BayflowerError, match=r"layer 'again' shares its weight with 'twin\.weight'"
    ):
        run(
            make_client_app("metavd", model=Net, data=load, layer="again", state=tmp_path),
            "metavd",
            dropout_layer="again",
        )


# -- what is refused, before training ------------------------------------------------------------
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(self.embed(x.flatten(1)))


class Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.fc = nn.GRUCell(64, 8), nn.Linear(8, 3)
        self.h = torch.zeros(1, 8)

    def forward(self, x):
        before = self.h.to(x.device).expand(len(x), 8)  # a plain tensor stays on the CPU
        self.h = self.cell(x.flatten(1), before).detach()[:1]
        return self.fc(self.h).expand(len(x), 3)


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 3)

    def forward(self, x):
        return {"scores": self.fc(x.flatten(1))}


class Double(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 3).double())

    def forward(self, x):
        return super().forward(x.double())


def chain(*layers):
    return lambda: nn.Sequential(nn.Flatten(), *layers)


REFUSED = {
    "unknown head": (Net, {"head": "fcc"}, "has no layer 'fcc' for its head; did you mean 'fc'?"),
    "no head": (
        chain(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 3, 8), nn.Flatten()),
        {},
        "has no head: no layer is called head",
    ),
    "whole": (
        chain(nn.Linear(64, 3)),
        {},
        "the head 1 is the whole network; pfedvmp needs layers before it",
    ),
    "tied": (Tied, {}, "layer 'out' of the head shares 'out.weight' with 'embed.weight'"),
    "no parameters": (chain(), {}, "model Sequential has no parameters"),
    "frozen": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 3)).requires_grad_(False),
        {},
        "has no trainable parameters",
    ),
    "frozen head": (
        chain(nn.Linear(64, 5), nn.Linear(5, 3).requires_grad_(False)),
        {},
        "the head 2 has no trainable",
    ),
    "few outputs": (
        chain(nn.Linear(64, 5), nn.Linear(5, 2)),
        {},
        "label 2 has no output: layer '2' has 2 outputs, so labels must be in 0",
    ),
    "one output": (
        chain(nn.Linear(64, 5), nn.Linear(5, 1)),
        {},
        "label 2 has no output: layer '2' has 1 output, for two classes",
    ),
    "shape": (
        chain(nn.Linear(60, 5), nn.Linear(5, 3)),
        {},
        r"layer '1' \(Linear\(in_features=60, .* cannot take a batch of shape",
    ),
    "lazy": (chain(nn.LazyLinear(3)), {}, r"layer '1' \(LazyLinear\) is lazy"),
    "parallel": (lambda: nn.DataParallel(Net()), {}, "is a DataParallel; give the network inside"),
    "complex": (
        chain(nn.Linear(64, 3, dtype=torch.cfloat)),
        {},
        "parameter '1.weight' of model Sequential is complex; keep it as real numbers",
    ),
    "converted": (Double, {}, "parameter '1.weight' was made as float64, but parameters have"),
    "hidden state": (Hidden, {}, "model Hidden keeps 'h' from one call to the next"),
    "softmax": (
        chain(nn.Linear(64, 5), nn.Linear(5, 3), nn.Softmax(1)),
        {},
        "layer '3' of model Sequential is a Softmax; leave it out",
    ),
    "flat": (
        chain(nn.Linear(64, 5), nn.Linear(5, 1), nn.Flatten(0)),
        {},
        r"layer '3' of model Sequential gives \(4,\) for 4 samples",
    ),
    "dict": (Wrapped, {}, "model Wrapped returns a dict without logits; forward"),
    "instance": (nn.Linear(3, 3), {}, "model must be a factory, got a Linear"),
    "not a module": (lambda: "net", {}, r"model\(\) must return a torch.nn.Module, got str"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_networks_are_refused_before_training_with_the_layers_name(case, tmp_path):
    net, options, text = REFUSED[case]
    app = make_client_app("pfedvmp", model=net, data=load, state=tmp_path, **options)
    strategy = strategy_of("pfedvmp")
    with pytest.raises(BayflowerError, match=text):
        strategy.start(
            InProcessGrid(app, contexts(range(3))),
            ArrayRecord(Net().state_dict()),
            num_rounds=1,
            timeout=60,
        )
    assert strategy.records == []
    assert not any(tmp_path.iterdir())


def test_a_trial_shows_whether_a_network_draws_random_numbers():
    model = checked_model(Net, X, Y)
    assert model.draws
    assert model.for_stacks(gpu=False).draws is None  # functions may differ there


@pytest.mark.parametrize("method", some(("fedmap", "pfedvmp", "metavd"), ["fedmap"]))
def test_recurrent_layers_and_whole_numbers_as_inputs(method, tmp_path):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.lstm, self.fc = (
                nn.Embedding(20, 6),
                nn.LSTM(6, 8, batch_first=True),
                nn.Linear(8, 2),
            )

        def forward(self, x):
            return self.fc(self.lstm(self.embed(x))[0][:, -1])

    def words(context):
        x = torch.randint(
            20,
            (120, 4),
            generator=torch.Generator().manual_seed(int(context.node_config["partition-id"])),
        )
        y = (x[:, -1] > 9).long()
        return (x[:80], y[:80]), (x[80:], y[80:])

    more = {**EASY.get(method, {}), **({"dropout_layer": "fc"} if method == "metavd" else {})}
    app = make_client_app(
        method,
        model=Words,
        data=words,
        state=tmp_path,
        layer="fc" if method == "metavd" else "",
    )
    strategy = run(app, method, rounds=2, net=Words, **more)
    assert strategy.faults == []
    assert personal(strategy) > 0.6


# -- data ----------------------------------------------------------------------------------------
def test_data_as_tensors_arrays_sets_and_loaders():
    dataset = TensorDataset(X, Y)
    dicts = [{"img": x, "label": int(y)} for x, y in zip(X, Y, strict=True)]

    class Listed(torch.utils.data.Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, i):
            return dicts[i]

    arrays = (X, Y), (X.double().numpy(), Y.numpy()), (X, Y.float()), (X, Y[:, None])
    for source in (
        *arrays,
        dataset,
        DataLoader(dataset, batch_size=2, shuffle=True),
        Listed(),
        DataLoader(Listed(), batch_size=4),
    ):
        x, y = pair(source, "train")
        assert torch.equal(x, X)
        assert torch.equal(y, Y)
        assert (x.dtype, y.dtype) == (torch.float32, torch.int64)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ([1, 2, 3], "train must be a pair"),
        ((X, Y[:3]), "6 samples and 3 labels"),
        ((X.to(torch.uint8), Y), "type uint8; turn them into floats"),
        (DataLoader([{"a": 1, "b": 2}]), "keys a, b; they need a label"),
    ],
)
def test_data_that_cannot_be_used_are_named(source, text):
    with pytest.raises(ConfigError, match=text):
        pair(source, "train")


def test_labels_must_be_class_numbers_and_nodes_must_say_who_they_are():
    with pytest.raises(ConfigError, match="labels must be whole numbers"):
        checked_model(Net, X, torch.rand(6))
    with pytest.raises(ConfigError, match="label -1 has no output"):
        checked_model(Net, X, Y - 1)
    (context,) = contexts([0])
    context.node_config.clear()
    with pytest.raises(ConfigError, match="no partition-id"):
        Plug("fedmap", model=Net, data=load).site(context)
    with pytest.raises(ConfigError, match="data must return"):
        Plug("fedmap", model=Net, data=lambda _: 3).site(*contexts([0]))


def test_both_sides_must_name_the_same_method(tmp_path):
    with pytest.raises(
        BayflowerError, match="this client was made for fedmap, but the server runs fedavg"
    ):
        run(make_client_app("fedmap", model=Net, data=load, state=tmp_path), "fedavg")
    with pytest.raises(ConfigError, match="method 'fedmapp' is not known; did you mean 'fedmap'"):
        make_client_app("fedmapp", model=Net, data=load)
