"""`mapped` against torch.func.vmap, on the trees of clients and servers."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from bayflower.stacked import mapped as module
from bayflower.stacked.mapped import mapped
from bayflower.tree import flatten


class State(NamedTuple):
    params: dict[str, Tensor]
    count: Tensor


def trees():
    draw = torch.Generator().manual_seed(4)
    state = State(
        {"w": torch.randn(5, 3, 2, generator=draw), "b": torch.randn(5, 2, generator=draw)},
        torch.arange(5),
    )
    shared = State({"w": torch.randn(3, 2, generator=draw), "b": torch.zeros(2)}, torch.tensor(7))
    return state, shared, torch.randn(5, 4, 3, generator=draw)


def work(state, shared, x):
    def loss(params):
        return ((x @ params["w"] + params["b"] - shared.params["b"]) ** 2).mean()

    slope = grad(loss)(state.params)
    after = {name: one - 0.1 * slope[name] for name, one in state.params.items()}
    return State(after, state.count + shared.count), {"fixed": shared.params["w"], "x": x.sum()}


def same(one, two):
    for a, b in zip(one, two, strict=True):
        a, b = flatten(a), flatten(b)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_results_are_those_of_vmap_bit_for_bit():
    given = trees()
    found, wanted = (way(work, in_dims=(0, None, 0))(*given) for way in (mapped, vmap))
    same(found, wanted)
    assert isinstance(found[0], State)
    # nobody's own: copies for all clients
    assert found[1]["fixed"].shape == (5, 3, 2)
    state, _, x = given
    same(mapped(lambda s, y: (s, {"y": y}))(state, x), (state, {"y": x}))


def test_stacks_of_stacks_are_mapped_too():
    x = torch.randn(2, 3, 4)
    inner = mapped(lambda one: {"s": one.square().sum()})
    assert torch.allclose(mapped(inner)(x)["s"], x.square().sum(-1))
    assert torch.allclose(vmap(inner)(x)["s"], x.square().sum(-1))


def test_an_error_leaves_no_level_behind():
    def wrong(one):
        raise RuntimeError("no")

    for _ in range(3):
        with pytest.raises(RuntimeError, match="no"):
            mapped(wrong)(torch.ones(2))
    assert not torch._C._functorch.get_interpreter_stack()
    with pytest.raises(RuntimeError, match="randomness"):
        mapped(lambda one: one + torch.rand(()))(torch.ones(2))
    with pytest.raises(ValueError, match="leading axis"):
        mapped(lambda one: one, (None,))(torch.ones(2))


def test_another_pytorch_maps_by_its_own_function(monkeypatch):
    monkeypatch.setattr(module, "available", lambda: False)
    given = trees()
    assert not hasattr(mapped(work, (0, None, 0)), "func")
    same(mapped(work, (0, None, 0))(*given), vmap(work, in_dims=(0, None, 0))(*given))
