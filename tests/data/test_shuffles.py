"""Random numbers for many clients at once are those of numpy's generators, one a client."""

from __future__ import annotations

import numpy as np
import pytest

from bayflower.contract import Phase
from bayflower.data import batches, shuffles
from bayflower.maths.optim import Optimizer

CLIENTS = [*range(600), 10**6, 2**32 - 1]


@pytest.mark.parametrize(("size", "times"), [(1, 3), (2, 1), (13, 2), (64, 1), (100, 3)])
def test_permutations_are_numpys(size, times):
    found = shuffles.permutations(7, "batches/train/local", CLIENTS, 3, size, times)
    assert found.shape == (len(CLIENTS), times, size)
    for row, client in enumerate(CLIENTS):
        own = batches.rng(7, "batches/train/local", client, 3)
        assert found[row].tolist() == [own.permutation(size).tolist() for _ in range(times)]


def test_keys_are_numpys():
    found = shuffles.first_keys(2**32 - 1, "layers/a", CLIENTS, 5)
    want = [int(batches.rng(2**32 - 1, "layers/a", one, 5).integers(2**62)) for one in CLIENTS]
    assert found.tolist() == want
    assert batches.layers_keys(9, "a", CLIENTS, 5).tolist() == [
        batches.layers_key(9, "a", one, 5) for one in CLIENTS
    ]
    assert batches.noise_keys(9, "a", "eps", CLIENTS, 5).tolist() == [
        batches.noise_key(9, "a", "eps", one, 5) for one in CLIENTS
    ]


@pytest.mark.parametrize("clients", [[3, 1], CLIENTS[:60], [*CLIENTS[:20], 2**32], CLIENTS])
def test_generators_are_numpys_and_begin_anew(clients):
    """Also after numbers of 32 bits, of which a generator keeps one half for later."""
    every = shuffles.generators(2**32 - 1, "batches/a", clients, 5)
    for client, one in zip(clients, every, strict=True):
        own = batches.rng(2**32 - 1, "batches/a", client, 5)
        assert one.permutation(12).tolist() == own.permutation(12).tolist()
        assert one.integers(2**31, dtype=np.int32) == own.integers(2**31, dtype=np.int32)
        assert one.bit_generator.state["has_uint32"] == own.bit_generator.state["has_uint32"]


def test_a_state_that_is_not_numpys_is_not_used(monkeypatch):
    monkeypatch.setattr(shuffles, "keys_of", lambda words: np.zeros((len(words), 2), np.uint64))
    for client, one in zip(CLIENTS, shuffles.generators(7, "x", CLIENTS, 3), strict=True):
        assert one.integers(2**62) == batches.rng(7, "x", client, 3).integers(2**62)


def test_clients_that_run_out_of_numbers_ask_their_own_generator(monkeypatch):
    real = shuffles.philox
    monkeypatch.setattr(shuffles, "philox", lambda keys, blocks: real(keys, 3))
    found = shuffles.permutations(7, "x", CLIENTS, 3, 17, 1)
    for row, client in enumerate(CLIENTS):
        assert found[row, 0].tolist() == batches.rng(7, "x", client, 3).permutation(17).tolist()


def test_another_shuffle_of_numpy_is_noticed(monkeypatch):
    class Other:
        def permutation(self, size):
            return np.arange(size)

        def integers(self, most):
            return 5

    monkeypatch.setattr(shuffles, "generator", lambda words: Other())
    assert shuffles.permutations(7, "x", CLIENTS, 3, 17, 1) is None
    assert shuffles.first_keys(7, "x", CLIENTS, 3) is None


def test_few_clients_and_large_numbers_are_left_to_numpy():
    assert shuffles.permutations(7, "x", CLIENTS[:9], 3, 17, 1) is None
    assert shuffles.permutations(7, "x", [*CLIENTS, 2**32], 3, 17, 1) is None
    assert shuffles.permutations(7, "x", CLIENTS, 3, 1000, 1) is None


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("given", [{"epochs": 3}, {"steps": 7, "batches": 2}])
def test_tables_of_many_clients_are_the_plans_of_each(coupled, given):
    """Sizes with a last batch that is full, short, or one sample; many clients of one size, and few
    of another.
    """
    phase = Phase("local", Optimizer("sgd", 0.1), batch_size=5, **given)
    sizes = [11] * 600 + [10] * 3 + [13] * 2 + [3, 5]
    clients = list(range(len(sizes)))
    steps = max(batches.num_steps(size, phase, coupled) for size in set(sizes))
    width = max(batches.largest_batch(size, phase, coupled) for size in set(sizes))
    keys = {"seed": 3, "round": 2, "purpose": "train"}
    known = batches.layout(sizes, phase, coupled=coupled, steps=steps, width=width)
    table = batches.table(known, clients, phase.name, **keys)
    for place, (size, client) in enumerate(zip(sizes, clients, strict=True)):
        plan = batches.plan(size, phase, client=client, coupled=coupled, **keys)
        for step, groups in enumerate(plan):
            for group, rows in enumerate(groups):
                assert table[step, place, group, : len(rows)].tolist() == rows.tolist()
                assert (table[step, place, group, len(rows) :] == -1).all()
        assert (table[len(plan) :, place] == -1).all()
