"""Networks of many kinds: stacked, with the numbers of the loop engine; what cannot be done is one
clear line.
"""

from __future__ import annotations

import pytest
import torch
from conftest import some
from devices import DEVICES
from torch import nn
from torch.func import functional_call, grad, vmap
from zoo import CLASSES, ONE_ROUND, RANDOM, WORDS, Case, agree, federation, halves_of
from zoomany import BROUGHT, LAYERS

from bayflower.config import parse
from bayflower.errors import ConfigError
from bayflower.fused.run import run_fused
from bayflower.maths import curvature
from bayflower.networks.model import Batch, Model
from bayflower.stacked import chance
from bayflower.stacked.masked import mask_norms, real_samples
from bayflower.stacked.plainly import weight_norm
from bayflower.stacked.rewriting import Seen, passing

FIVE = ("fedavg", "fedper", "maml", "metavd", "moon")
ONE_STEP = {"local_steps": 1, "lr": 0.005}
LOW = ("text-lstm", "gru", "ft-transformer", "bag-mean", "swin")
CHEAP = {
    ("fedavg", "gru"),
    ("fedavg", "transformer-time-first"),
    ("maml", "bag-mean"),
    ("metavd", "instance-norm"),
    ("fedavg", "text-lstm"),
    ("moon", "ft-transformer"),
    ("fedavg", "vit"),
    ("maml", "gru-cell"),
    ("fedper", "distances"),
}
ALL = {**LAYERS, **BROUGHT}
# methods with states and derivatives of their own kind, on networks of one layer
MORE = {("fedbps", "lstm-time-first"), ("fedbps", "lstm-cell"), ("pfedvmp", "attention")}


def tolerance(name: str, device: str) -> float:
    """Return how near two engines must be with a network in float64."""
    if name in ("resnet18", "mobilenet", "shufflenet"):
        # BatchNorm over three samples of one place makes large numbers of small ones
        return 1e-4 if (name, device) == ("shufflenet", "cuda") else 1e-6
    # torch's kernel for the slopes of weight_norm on a GPU has six digits only
    return 1e-5 if (name, device) == ("weight-norm", "cuda") else 1e-9


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pair", some([(m, n) for n in ALL for m in FIVE], CHEAP), ids=str)
def test_a_step_of_a_stack_is_that_of_the_loop(pair, device):
    method, name = pair
    inner: dict[str, float] = {"inner_lr": 0.001} if method in ("maml", "metavd") else {}
    if (
        inner and name == "shufflenet"
    ):  # each step behind BatchNorm of three samples magnifies rounding
        inner["adapt_steps"] = 1
    if pair == ("metavd", "squeezenet"):
        with pytest.raises(ConfigError, match="no linear layer before its head"):
            agree(method, ALL[name])
        return
    agree(method, ALL[name], tolerance(name, device), device=device, **ONE_STEP, **inner)


# on a GPU the loop engine maps torch's RMSNorm over samples: torch is slow at it, and says so
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "pair", some([(m, n) for n in LAYERS for m in ("fedbps", "fedmap", "pfedvmp")], MORE), ids=str
)
def test_methods_with_curvature_and_posteriors_agree(pair, device):
    agree(pair[0], LAYERS[pair[1]], tolerance(pair[1], device), device=device, **ONE_STEP)


@pytest.mark.parametrize("device", DEVICES)
def test_a_view_behind_convolutions_is_stacked_in_float32(device):
    """On a GPU the convolutions of a stack have another layout than torch's."""
    yes = {"stacking": "yes", "dtype": "float32", "device": device}
    agree("fedavg", LAYERS["viewed"], 1e-4, **{**ONE_STEP, **yes})


# -- numbers of torch ------------------------------------------------------------------------------
PLAIN = [
    name
    for name in LAYERS
    if name not in ("gru", "lstm", "attention-of-functions", "transformer-time-first", "conv3d")
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", PLAIN)
def test_outputs_and_slopes_are_torchs(name, device):
    """Without dropout, a client of a stack against torch's own layers."""
    case = LAYERS[name]
    data = federation(case)
    model, alone = Model(case.factory, CLASSES), case.factory().double().to(device)
    stacked = model.for_stacks(gpu=device == "cuda")
    params, buffers = (
        {
            n: torch.stack([v, v * 1.1, v * 0.9]).to(device)
            if v.is_floating_point()
            else torch.stack([v] * 3).to(device)
            for n, v in part.items()
        }
        for part in model.initial(0, torch.float64)
    )
    x = torch.stack([torch.as_tensor(c.x_train[:4]).double() for c in data.clients]).to(device)
    aim = torch.linspace(-1, 1, 4 * CLASSES, dtype=torch.float64, device=device).reshape(4, -1)

    def ours(params, buffers, x):
        ones = torch.ones(4, dtype=x.dtype, device=x.device)
        logits, after = stacked.forward(params, buffers, x, train=True, mask=ones)
        return (logits * aim).sum(), after

    slopes, after = vmap(grad(ours, has_aux=True))(params, buffers, x)
    own_params = {n: v[1].clone().requires_grad_() for n, v in params.items()}
    own_buffers = {n: v[1].clone() for n, v in buffers.items()}
    loss = (functional_call(alone.train(), {**own_params, **own_buffers}, (x[1],)) * aim).sum()
    want = torch.autograd.grad(loss, list(own_params.values()))
    near = 10 * tolerance(name, device)
    for (n, _), slope in zip(own_params.items(), want, strict=True):
        torch.testing.assert_close(slopes[n][1], slope, rtol=near, atol=1e-10)
    for n, value in own_buffers.items():
        torch.testing.assert_close(after[n][1], value, rtol=1e-8, atol=1e-10)


def test_a_bag_leaves_padding_out():
    """Every mode, a bag of padding alone among them."""
    x = torch.tensor([[1, 0, 3], [0, 0, 0], [2, 2, 4]])
    for mode in ("sum", "mean", "max"):
        for padding in (None, 0, -WORDS):
            layer = nn.EmbeddingBag(WORDS, 5, mode=mode, padding_idx=padding).double()
            with torch.no_grad():
                layer.weight.add_(0.3)
                want = layer(x)
                with passing(Seen(), train=False, stacked=True):
                    torch.testing.assert_close(layer(x), want)
    weights = torch.rand(3, 3, dtype=torch.float64)
    layer = nn.EmbeddingBag(WORDS, 5, mode="sum").double()
    with passing(Seen(), train=False, stacked=True):
        got = layer(x, per_sample_weights=weights)
    torch.testing.assert_close(got, layer(x, per_sample_weights=weights))


def test_instance_norm_remembers_real_samples_only():
    torchs, ours = (nn.InstanceNorm2d(3, track_running_stats=True).double() for _ in range(2))
    x = torch.randn(5, 3, 4, 4, dtype=torch.float64)
    want = torchs(x[:3])
    with real_samples(torch.tensor([1.0, 1, 1, 0, 0])):
        got = mask_norms(ours)(x)
    torch.testing.assert_close(got[:3], want)
    torch.testing.assert_close(ours.running_mean, torchs.running_mean)
    torch.testing.assert_close(ours.running_var, torchs.running_var)
    torch.testing.assert_close(ours.eval()(x), torchs.eval()(x))


def test_the_second_derivative_of_a_norm_of_weights_is_right():
    """Against differences; torch's own is wrong inside torch.func, so MAML does not use it."""
    draw = torch.Generator().manual_seed(0)
    v, x, way = (
        torch.randn(shape, generator=draw, dtype=torch.float64) for shape in ((5, 7), (7,), (5, 7))
    )
    g = torch.rand(5, 1, generator=draw, dtype=torch.float64) + 0.5

    def loss(v):
        return torch.tanh(weight_norm(v, g, 0) @ x).square().sum()

    def after(v):
        return loss(v - 0.5 * grad(loss)(v))

    found = (grad(after)(v) * way).sum()
    near = (after(v + 1e-6 * way) - after(v - 1e-6 * way)) / 2e-6
    torch.testing.assert_close(found, near, rtol=1e-6, atol=0)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on processors without bfloat16
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", some(LOW, set(LOW) - {"swin"}))
def test_a_training_pass_in_bfloat16_is_near(name, device):
    case = ALL[name]
    model = Model(case.factory, CLASSES).for_stacks(gpu=device == "cuda")
    params, buffers = (
        {n: torch.stack([v] * 2).to(device) for n, v in part.items()} for part in model.initial(0)
    )
    clients = federation(case).clients[:2]
    x = torch.stack([torch.as_tensor(one.x_train[:4]) for one in clients]).to(device)
    y = torch.stack([torch.as_tensor(one.y_train[:4]) for one in clients]).to(device)

    def loss(key, params, buffers, x, y):
        with chance.step(key):
            logits, _ = model.forward(params, buffers, x, train=True)
        return nn.functional.cross_entropy(logits, y)

    keys = torch.tensor([1, 2], device=device)
    exact = vmap(grad(loss, argnums=1))(keys, params, buffers, x, y)
    model.bf16 = True
    rough = vmap(grad(loss, argnums=1))(keys, params, buffers, x, y)
    assert {one.dtype for one in rough.values()} == {torch.float32}
    mine, yours = (
        torch.cat([value.flatten() for value in part.values()]) for part in (rough, exact)
    )
    assert 0 < float((mine - yours).norm() / yours.norm()) < 0.1


# -- curvature -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name", some(LAYERS, ("lstm-time-first", "gru-two-ways", "attention", "bag-mean", "conv1d"))
)
def test_curvature_of_any_layer_is_that_of_gradients_one_by_one(name):
    """The slow way: one backward pass for every class of every sample, by torch's own layers."""
    case = LAYERS[name]
    data = federation(case)
    model, alone = Model(case.factory, CLASSES), case.factory().double().eval()
    params, buffers = model.initial(3, torch.float64)
    client = data.clients[0]
    x, y = torch.as_tensor(client.x_train[:3]).double(), torch.as_tensor(client.y_train[:3])
    mask = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    found = curvature.diagonal(model, params, buffers, Batch(x, y, mask), "fisher")
    want = {n: torch.zeros_like(v) for n, v in params.items()}
    for sample in range(2):
        moving = {n: v.clone().requires_grad_() for n, v in params.items()}
        logits = functional_call(alone, {**moving, **buffers}, (x[sample : sample + 1],))[0]
        p = torch.softmax(logits, 0).detach()
        for label in range(CLASSES):
            loss = nn.functional.cross_entropy(logits[None], torch.tensor([label]))
            slopes = torch.autograd.grad(loss, list(moving.values()), retain_graph=True)
            for n, slope in zip(moving, slopes, strict=True):
                want[n] += p[label] * slope.square()
    for n in params:
        torch.testing.assert_close(found[n], want[n], rtol=1e-7, atol=1e-10)


# -- clear lines -----------------------------------------------------------------------------------
def fused(method: str, factory, shape: tuple[int, ...], words: int = 0, **settings):
    case = Case(factory, shape, words)
    data = federation(case)
    run = parse(method, {**ONE_ROUND, "num_clients": len(data.clients), **settings})
    return run_fused(run, data, halves_of(method, Model(factory, CLASSES, "zoo"), run))


def test_metavd_asks_for_a_linear_layer_with_one_row_a_sample():
    class Straight(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.fc = nn.EmbeddingBag(WORDS, 6), nn.Linear(6, CLASSES)

        def forward(self, x):
            return self.fc(self.words(x.long()))

    with pytest.raises(ConfigError, match="needs a linear layer, 'words' is of type EmbeddingBag"):
        fused("metavd", Straight, (6,), WORDS)
    assert fused("metavd", Straight, (6,), WORDS, dropout_layer="fc").remarks == ()
    with pytest.raises(ConfigError, match="several rows a sample"):
        fused(
            "metavd",
            RANDOM["transformer"].factory,
            (5,),
            WORDS,
            dropout_layer="body.layers.0.linear1",
        )


def test_a_norm_of_somebodys_own_with_running_statistics_is_not_padded():
    class OwnNorm(nn.InstanceNorm2d):
        """Somebody's own, whose formula we do not know."""

    model = Model(
        lambda: nn.Sequential(
            OwnNorm(3, track_running_stats=True), nn.Flatten(), nn.Linear(192, CLASSES)
        ),
        CLASSES,
    )
    assert "OwnNorm" in model.unstackable
    assert (
        Model(
            lambda: nn.Sequential(OwnNorm(3, affine=True), nn.Flatten(), nn.Linear(192, CLASSES)),
            CLASSES,
        ).unstackable
        is None
    )


def test_names_are_those_of_the_network():
    """A stack has the parameters of the network, whatever its layers become."""
    for case in LAYERS.values():
        model = Model(case.factory, CLASSES)
        assert model.for_stacks(gpu=True).shapes == model.shapes
