"""Functions in plain operations, as stacks and second derivatives need them: torch's numbers."""

from __future__ import annotations

import pytest
import torch
from devices import DEVICES
from torch import nn
from torch.func import grad, vmap

from bayflower.stacked import chance
from bayflower.stacked.lstm import Lstm, plain
from bayflower.stacked.rewriting import Seen, passing


def test_attention_without_dropout_is_torchs():
    draw = torch.Generator().manual_seed(0)
    for more in ({}, {"add_bias_kv": True, "add_zero_attn": True}, {"kdim": 6, "vdim": 4}):
        layer = nn.MultiheadAttention(8, 2, dropout=0.3, **more).double()
        sizes = (more.get("kdim", 8), more.get("vdim", 8))
        q = torch.randn(5, 3, 8, generator=draw, dtype=torch.float64)
        k, v = (torch.randn(7, 3, n, generator=draw, dtype=torch.float64) for n in sizes)
        hidden = torch.zeros(3, 7, dtype=torch.bool)
        hidden[1, 4:] = True
        apart = torch.rand(6, 5, 7, generator=draw) < 0.2
        for given in ({}, {"key_padding_mask": hidden}, {"attn_mask": apart[0]}):
            want = layer.eval()(q, k, v, **given)
            with passing(Seen(), train=False, stacked=True):
                got = layer(q, k, v, **given)
            for mine, yours in zip(got, want, strict=True):
                torch.testing.assert_close(mine, yours)
        out, weights = layer.train().forward(q, k, v, need_weights=False)
        assert weights is None
        with chance.step(1), passing(Seen(), train=True, stacked=False):
            _, weights = layer(q, k, v, average_attn_weights=False)
        with chance.step(1), chance.one_pass():
            kept = chance.kept(tuple(weights.shape), 0.3, torch.device("cpu"))
        assert torch.equal(weights != 0, kept)
        assert out.shape == (5, 3, 8)


def test_attention_of_functions_is_torchs():
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 5, 8, generator=draw, dtype=torch.float64) for _ in range(3))
    nowhere = torch.ones(5, 5, dtype=torch.bool).tril(-1)  # the first query may look nowhere
    for given in (
        {},
        {"is_causal": True},
        {"scale": 0.2},
        {"attn_mask": nowhere},
        {"attn_mask": torch.randn(5, 5, generator=draw, dtype=torch.float64)},
    ):
        want = nn.functional.scaled_dot_product_attention(q, k, v, **given)
        with passing(Seen(), train=False, stacked=True):
            got = nn.functional.scaled_dot_product_attention(q, k, v, **given)
        torch.testing.assert_close(got, want)
    few = (k[:, :2], v[:, :2])
    want = nn.functional.scaled_dot_product_attention(q, *few, enable_gqa=True)
    with passing(Seen(), train=False, stacked=True):
        got = nn.functional.scaled_dot_product_attention(q, *few, enable_gqa=True)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("device", DEVICES)
def test_a_layer_of_lstms_is_the_plain_formula(device):
    """Values, slopes and second derivatives, alone, stacked, and mapped twice."""
    draw = torch.Generator().manual_seed(0)
    clients, times, batch, wide = 3, 5, 2, 4
    shapes = ((times, batch, 4 * wide), (4 * wide, wide), (batch, wide), (batch, wide))
    given = [
        torch.randn(clients, *one, generator=draw, dtype=torch.float64).to(device) for one in shapes
    ]
    every = (0, 1, 2, 3)

    def loss(fn):
        def one(*inputs):
            hs, c = fn(*inputs)[:2]
            return hs.square().sum() + (c * c.cos()).sum()

        return one

    def bent(fn):
        return lambda *inputs: sum(
            (slope * slope.sin()).sum() for slope in grad(loss(fn), argnums=every)(*inputs)
        )

    for make in (
        loss,
        lambda fn: grad(loss(fn), argnums=every),
        lambda fn: grad(bent(fn), argnums=every),
    ):
        want, got = (vmap(make(fn))(*given) for fn in (plain, Lstm.apply))
        torch.testing.assert_close(got, want)
        alone = make(Lstm.apply)(*(one[1] for one in given))
        for mine, yours in zip(
            torch.utils._pytree.tree_leaves(alone),
            torch.utils._pytree.tree_leaves(want),
            strict=True,
        ):
            torch.testing.assert_close(mine, yours[1])
        twice = vmap(vmap(make(Lstm.apply)), (0, None, 0, 0))(
            torch.stack([given[0], -given[0]]),
            given[1],
            *(torch.stack([one, one]) for one in given[2:]),
        )
        for mine, yours in zip(
            torch.utils._pytree.tree_leaves(twice),
            torch.utils._pytree.tree_leaves(want),
            strict=True,
        ):
            torch.testing.assert_close(mine[0], yours)


def test_a_view_of_another_layout_is_a_copy():
    """`view` and `view_as` of numbers that lie in another order, and of a dtype as ever."""
    x = torch.arange(24.0).reshape(2, 3, 4).permute(0, 2, 1)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        x.view(2, 12)
    with passing(Seen(), train=False, stacked=True):
        for found in (x.view(2, 12), x.view(-1, 12), x.view((2, 12)), x.view_as(torch.ones(2, 12))):
            assert torch.equal(found, x.reshape(2, 12))
        seen = torch.arange(4.0).view(2, 2)
        assert seen.view(torch.int32).dtype == torch.int32
        with pytest.raises(RuntimeError, match="invalid for input of size"):
            x.view(5, 5)


@pytest.mark.parametrize("device", DEVICES)
def test_a_root_mean_square_norm_is_torchs(device):
    """With and without weights, over one and two axes; its slopes under vmap too."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(4, 3, 5, generator=draw, dtype=torch.float64).to(device)
    for size, eps in (((5,), None), ((3, 5), 1e-3)):
        weight = torch.rand(size, generator=draw, dtype=torch.float64).to(device)
        for given in (weight, None):
            want = nn.functional.rms_norm(x, size, given, eps)
            with passing(Seen(), train=False, stacked=True):
                torch.testing.assert_close(nn.functional.rms_norm(x, size, given, eps), want)

        def slope(x, weight, size=size, eps=eps):
            return nn.functional.rms_norm(x, size, weight, eps).square().sin().sum()

        alone = torch.stack([grad(slope)(one, weight) for one in x[:, None]])
        with passing(Seen(), train=False, stacked=True):
            together = vmap(grad(slope), (0, None))(x[:, None], weight)
        torch.testing.assert_close(together, alone)
