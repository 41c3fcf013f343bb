"""BatchNorm over real samples: torch's own numbers on them, first and second derivatives, any
memory order; training in bfloat16.
"""

from __future__ import annotations

import pytest
import torch
from conftest import small_prepared, some, worst_difference
from devices import DEVICES
from torch import nn
from torch.func import functional_call, grad, vmap

from bayflower.config import parse
from bayflower.engines import execute
from bayflower.errors import ConfigError
from bayflower.networks.papers import build
from bayflower.stacked.masked import Norm, mask_norms, real_samples, settled

CLIENTS, SAMPLES, CHANNELS = 4, 5, 3
REAL = [5, 3, 2, 4]


def stack(
    device: str, dtype: torch.dtype = torch.float64, area: tuple[int, ...] = (4, 6)
) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(CLIENTS, SAMPLES, CHANNELS, *area, generator=draw, dtype=torch.float64) * 2 + 7
    weight, bias, aim = (
        torch.randn(CLIENTS, *shape, generator=draw, dtype=torch.float64)
        for shape in ((3,), (3,), x.shape[1:])
    )
    mask = (torch.arange(SAMPLES) < torch.tensor(REAL)[:, None]).to(dtype)
    return tuple(one.to(device, dtype) for one in (x, mask, weight, bias, aim))


def by_torch(x, weight, bias, aim):
    """A loss of torch's own layer on real samples alone."""
    out = nn.functional.batch_norm(x, None, None, weight, bias, training=True, eps=0.1)
    return (out * aim).square().sum()


def by_us(x, mask, weight, bias, aim):
    out = Norm.apply(x, mask, weight, bias, 0.1)[0]
    return ((out * aim).square() * mask.reshape(-1, *[1] * (x.ndim - 1))).sum()


@pytest.mark.parametrize("device", DEVICES)
# the last needs several pieces in a kernel
@pytest.mark.parametrize("area", [(4, 6), (), (40, 120)])
@pytest.mark.parametrize("swapped", [False, True])
def test_values_and_derivatives_are_torchs(device, area, swapped):
    x, mask, weight, bias, aim = stack(device, area=area)
    if swapped and area:  # what a convolution over all samples of a client leaves behind
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    values = vmap(by_us)(x, mask, weight, bias, aim)
    firsts = vmap(grad(by_us, argnums=(0, 2, 3)))(x, mask, weight, bias, aim)

    def length(loss):
        return lambda *given: sum(
            part.square().sum()
            for part in grad(loss, argnums=(0, len(given) - 3, len(given) - 2))(*given)
        )

    seconds = vmap(grad(length(by_us), argnums=(0, 2, 3)))(x, mask, weight, bias, aim)
    for client, real in enumerate(REAL):
        given = (x[client, :real], weight[client], bias[client], aim[client, :real])
        torch.testing.assert_close(values[client], by_torch(*given), rtol=1e-10, atol=1e-10)
        for found, want in (
            (firsts, grad(by_torch, argnums=(0, 1, 2))(*given)),
            (seconds, grad(length(by_torch), argnums=(0, 1, 2))(*given)),
        ):
            for mine, yours in zip(found, want, strict=True):
                mine = mine[client, :real] if mine.ndim == x.ndim else mine[client]
                torch.testing.assert_close(mine, yours, rtol=1e-8, atol=1e-8)
        assert not firsts[0][client, real:].any()  # nothing flows into padding


@pytest.mark.parametrize("device", DEVICES)
def test_a_map_over_maps_and_a_client_without_samples(device):
    x, mask, weight, bias, aim = stack(device)
    many = torch.stack([x, x.flip(1), -x])
    want = torch.stack([vmap(by_us)(one, mask, weight, bias, aim) for one in many])
    got = vmap(vmap(by_us), in_dims=(0, None, None, None, None))(many, mask, weight, bias, aim)
    torch.testing.assert_close(got, want)
    slopes = vmap(grad(by_us))(x, mask * 0, weight, bias, aim)
    assert torch.isfinite(slopes).all()
    assert not slopes.any()


@pytest.mark.parametrize("device", DEVICES)
def test_float32_loses_nothing_far_from_zero(device):
    x, mask, weight, bias, _ = (one.double() for one in stack(device, torch.float32))
    x = x + 1000
    want = vmap(Norm.apply, in_dims=(0, 0, 0, 0, None))(x, mask, weight, bias, 1e-5)
    got = vmap(Norm.apply, in_dims=(0, 0, 0, 0, None))(
        x.float(), mask.float(), weight.float(), bias.float(), 1e-5
    )
    for mine, yours in zip(got, want, strict=True):
        torch.testing.assert_close(mine.double(), yours, rtol=2e-3, atol=2e-3)


def test_running_statistics_are_those_of_real_samples():
    x, mask, *_ = stack("cpu")
    layer, torchs = mask_norms(nn.BatchNorm2d(CHANNELS).double()), nn.BatchNorm2d(CHANNELS).double()
    with real_samples(mask[1]):
        layer(x[1])
    torchs(x[1, : REAL[1]])
    torch.testing.assert_close(layer.running_mean, torchs.running_mean)
    torch.testing.assert_close(layer.running_var, torchs.running_var)


# -- evaluation, and bfloat16 ----------------------------------------------------------------------
NEAR = {
    torch.bfloat16: {"rtol": 2**-7, "atol": 1e-3},
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float64: {"rtol": 1e-13, "atol": 1e-13},
}


@pytest.mark.parametrize("kind", NEAR, ids=str)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_evaluation_is_torchs_and_maps_over_clients(affine, device, kind):
    """The layer as torch has it, client by client; on a GPU the stack takes `settled` by itself."""
    draw = torch.Generator().manual_seed(3)
    x = (torch.randn(CLIENTS, 8, 3, 4, 6, generator=draw) * 2 + 7).to(device, kind)
    wide = torch.promote_types(kind, torch.float32)
    layers = [nn.BatchNorm2d(3, affine=affine).to(device, wide).eval() for _ in range(CLIENTS)]
    for layer in layers:
        for value in layer.state_dict().values():
            if value.is_floating_point():
                value.copy_(torch.rand(value.shape, generator=draw) + 0.5)
    pairs = zip(layers, x, strict=True)
    want = torch.stack([layer(part.to(wide)).to(kind) for layer, part in pairs])
    names = ("running_mean", "running_var", *(("weight", "bias") if affine else ()))
    values = [torch.stack([dict(layer.state_dict())[n] for layer in layers]) for n in names]
    given = [*values, None, None][:4]
    axes = tuple(None if value is None else 0 for value in given)
    got = vmap(lambda *some: settled(*some, 1e-5), (0, *axes))(x, *given)
    assert got.dtype == kind
    torch.testing.assert_close(got, want, **NEAR[kind])
    if device == "cpu":
        return
    module = mask_norms(nn.Sequential(nn.BatchNorm2d(3, affine=affine).to(device, wide).eval()))
    held = {f"0.{name}": value for name, value in zip(names, values, strict=True)}
    got = vmap(lambda one, part: functional_call(module, one, (part,)))(held, x)
    torch.testing.assert_close(got, want, **NEAR[kind])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", some(["resnet20", "lenet5", "mlp-bn"], ["lenet5", "mlp-bn"]))
def test_a_training_pass_in_bfloat16_is_near_and_keeps_the_dtypes(name, device):
    model = build(name, (3, 16, 16) if name != "mlp-bn" else (20,), 4).for_stacks(
        gpu=device == "cuda"
    )
    params, buffers = (
        {n: v.to(device).expand(2, *v.shape).clone() for n, v in part.items()}
        for part in model.initial(0)
    )
    x = torch.randn(
        2,
        6,
        *((3, 16, 16) if name != "mlp-bn" else (20,)),
        generator=torch.Generator().manual_seed(0),
    ).to(device)
    y, mask = (
        torch.arange(12, device=device).reshape(2, 6) % 4,
        torch.tensor([[1.0] * 6, [1.0] * 4 + [0.0] * 2], device=device),
    )

    def loss(params, buffers, x, y, mask):
        logits, features, after = model.forward_features(params, buffers, x, train=True, mask=mask)
        return model.mean_nll(logits, y, mask), (logits, features, after)

    exact, (logits, features, after) = vmap(grad(loss, has_aux=True))(params, buffers, x, y, mask)
    model.bf16 = True
    rough, (near, close, then) = vmap(grad(loss, has_aux=True))(params, buffers, x, y, mask)
    assert {one.dtype for one in (near, close, *rough.values())} == {torch.float32}
    assert all(then[key].dtype == value.dtype for key, value in after.items())
    real = mask.bool()
    assert 0 < (near - logits)[real].norm() / logits[real].norm() < 0.1
    assert (close - features)[real].norm() / features[real].norm() < 0.1
    wrong, whole = (
        torch.cat([value.flatten() for value in part.values()])
        for part in ({n: rough[n] - exact[n] for n in exact}, exact)
    )
    assert wrong.norm() / whole.norm() < 0.3
    test = vmap(lambda p, b, x: model.forward(p, b, x, train=False)[0])
    model.bf16 = False
    want = test(params, buffers, x)
    model.bf16 = True
    # tests are in full precision
    torch.testing.assert_close(test(params, buffers, x), want, rtol=0, atol=0)


@pytest.mark.parametrize(
    "method",
    some(
        ["fedper", "pfedvmp", "fedmap", "fednp", "metavd", "fedbps", "moon", "maml"],
        ["pfedvmp"],
    ),
)
def test_runs_in_bfloat16_end_near_those_in_float32(method):
    settings = {"rounds": 2, "optimizer": "sgd", "lr": 0.02, "keep": 0.15, "new_clients": 0}
    exact, rough = (
        execute(small_prepared(method, bf16=bf16, **settings)) for bf16 in (False, True)
    )
    assert 0 < worst_difference(rough.server_state, exact.server_state, 1e-3) < 0.3
    assert all(value.dtype != torch.bfloat16 for value in tensors(rough.server_state))


def tensors(tree):
    from bayflower.tree import flatten

    return flatten(tree).values()


def test_bfloat16_and_float64_do_not_go_together():
    with pytest.raises(
        ConfigError, match="bf16 needs dtype=float32, got dtype=float64; remove one of the two"
    ):
        parse("fedavg", {"bf16": True, "dtype": "float64"})


def test_the_layers_of_a_stack_are_the_modules(monkeypatch):
    net, x = (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).double(),
        stack("cpu", area=(6, 6))[0],
    )
    params = dict(net.named_parameters())
    with real_samples(torch.ones(SAMPLES, dtype=torch.float64)):
        got = functional_call(mask_norms(net), params, (x[0],))
    again = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).double()
    torch.testing.assert_close(got, functional_call(again, params, (x[0],)))
