"""Functions in plain operations, as stacks and second derivatives need them: torch's numbers."""

from __future__ import annotations

import torch
from torch import nn

from bayflower.stacked import chance
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
