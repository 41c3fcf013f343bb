"""Trees: names, round trips, selections."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from bayflower.errors import BayflowerError
from bayflower.tree import Tensors, choose, digest, flatten, map_tree, put, stack, take, unflatten


class Inner(NamedTuple):
    scale: Tensor
    parts: Tensors


class Outer(NamedTuple):
    count: Tensor
    params: Tensors
    inner: Inner


def example(value: float = 1.0) -> Outer:
    return Outer(
        torch.tensor(3), {"a.b": torch.full((2, 2), value)}, Inner(torch.tensor(value), {})
    )


def test_names_and_round_trip():
    flat = flatten(example())
    assert set(flat) == {"count", "params/a.b", "inner/scale"}
    back = unflatten(Outer, flat)
    assert back.inner.parts == {}
    assert torch.equal(back.params["a.b"], example().params["a.b"])


def test_missing_and_unknown_names_are_errors():
    flat = flatten(example())
    with pytest.raises(BayflowerError, match="Outer needs 'count', which is missing"):
        unflatten(Outer, {name: value for name, value in flat.items() if name != "count"})
    with pytest.raises(BayflowerError, match="has no field 'extra'"):
        unflatten(Outer, {**flat, "extra": torch.zeros(1)})
    with pytest.raises(BayflowerError, match="has no field 'inner/extra'"):
        unflatten(Outer, {**flat, "inner/extra": torch.zeros(1)})


def test_stack_take_put_choose():
    many = stack([example(1.0), example(2.0), example(3.0)])
    assert take(many, 1).params["a.b"][0, 0] == 2
    changed = put(many, torch.tensor([2, 0]), stack([example(9.0), example(8.0)]))
    assert changed.inner.scale.tolist() == [8.0, 2.0, 9.0]
    assert many.inner.scale.tolist() == [1.0, 2.0, 3.0]
    picked = choose(torch.tensor([True, False, True]), changed, many)
    assert picked.inner.scale.tolist() == [8.0, 2.0, 9.0]
    assert choose(torch.tensor(False), changed, many).inner.scale.tolist() == [1.0, 2.0, 3.0]


def test_digest_sees_names_types_shapes_and_bits():
    same = digest(example())
    assert digest(example()) == same
    assert digest(example(1.0000001)) != same
    assert digest(map_tree(lambda t: t.double() if t.is_floating_point() else t, example())) != same
    assert digest({"a": torch.zeros(2, 3)}) != digest({"a": torch.zeros(3, 2)})
    assert digest({"a": torch.zeros(2)}) != digest({"b": torch.zeros(2)})


def test_what_is_no_tree_is_refused():
    with pytest.raises(TypeError, match="got float"):
        map_tree(lambda leaf: leaf, {"a": 1.0})
