"""Blocks of clients: who is in which, where they are, and when one moves. Nothing is started."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from conftest import small, small_prepared

from bayflower.data import ClientData
from bayflower.engines import execute, prepare
from bayflower.errors import ConfigError
from bayflower.fused.workers.blocks import BLOCKS, ROUNDS, Balance, divided, placed


def client(number: int, samples: int) -> ClientData:
    x, y = np.zeros((samples, 2), np.float32), np.zeros(samples, np.int64)
    return ClientData(number, x, y, x[:1], y[:1])


def test_every_client_is_in_one_block_and_blocks_weigh_about_the_same():
    sizes = [5, 90, 7, 40, 40, 12, 33, 80, 21, 60]
    clients = [client(number, size) for number, size in enumerate(sizes)]
    blocks = divided(clients, 3)
    assert max(map(len, blocks)) == 3
    assert sorted(one.client for block in blocks for one in block) == list(range(10))
    assert [[one.client for one in block] for block in blocks] == [
        [1, 4, 2],
        [7, 6, 0],
        [9, 8],
        [3, 5],
    ]
    assert blocks == divided(clients[::-1], 3)  # in whatever order they come


def test_without_a_size_there_are_sixteen_blocks():
    clients = [client(number, 9) for number in range(100)]
    assert [len(block) for block in divided(clients, 0)] == [7] * 4 + [6] * (BLOCKS - 4)
    assert [len(block) for block in divided(clients[:5], 0)] == [1] * 5


def test_costly_blocks_are_placed_first():
    assert placed([1, 8, 2, 5, 4], [0, 3]) == {1: 0, 3: 3, 4: 3, 2: 0, 0: 3}  # ten each


def after(balance: Balance, home: dict[int, int], slow: dict[int, float], rounds: int) -> None:
    """Note rounds in which each sample takes 1 ms, and longer on slow workers."""
    samples = dict(enumerate(balance.samples))
    for _ in range(rounds):
        times = {block: 1e-3 * samples[block] * slow[worker] for block, worker in home.items()}
        balance.note(times, samples, home)


def test_equal_workers_keep_their_blocks():
    balance, home = Balance([100] * 8), {block: block % 2 for block in range(8)}
    after(balance, home, {0: 1.0, 1: 1.05}, 10)
    assert balance.move(home, [0, 1]) is None


def test_a_slow_worker_gives_blocks_away_until_all_take_as_long():
    balance, home = Balance([100] * 8), {block: block % 2 for block in range(8)}
    slow = {0: 3.0, 1: 1.0}
    moves = []
    for _ in range(12):
        after(balance, home, slow, 1)
        if (found := balance.move(home, [0, 1])) is not None:
            moves.append(found)
            home[found[0]] = found[1]
    assert [worker for _, worker in moves] == [1, 1]  # from four blocks each to two and six
    assert sorted(home.values()) == [0, 0, 1, 1, 1, 1, 1, 1]


def test_a_moment_of_load_moves_nothing():
    balance, home = Balance([100] * 4), {0: 0, 1: 0, 2: 1, 3: 1}
    after(balance, home, {0: 1.0, 1: 1.0}, ROUNDS)
    after(balance, home, {0: 9.0, 1: 1.0}, 2)
    assert balance.move(home, [0, 1]) is None
    after(balance, home, {0: 9.0, 1: 1.0}, 1)
    assert balance.move(home, [0, 1]) is not None


def test_a_costly_block_is_known_by_its_time_not_by_its_samples():
    """Block 0 costs as much as all others together: the two that are beside it move away."""
    balance, home = Balance([100] * 4), {0: 0, 1: 0, 2: 1, 3: 1}
    for _ in range(ROUNDS):
        times = {0: 0.6, 1: 0.2, 2: 0.2, 3: 0.2}
        balance.note(times, dict.fromkeys(range(4), 100), home)
    assert balance.move(home, [0, 1]) == (1, 1)


@pytest.mark.parametrize("workers", ["x", "-1", "2.5", ""])
def test_a_wrong_number_of_workers_is_refused(workers):
    with pytest.raises(ConfigError, match="workers must be a number or auto, got"):
        small("fedmap", workers=workers)


def test_workers_are_for_the_fused_engine():
    with pytest.raises(ConfigError, match="workers need engine fused, got loop"):
        prepare(small("fedmap", workers=2), "loop")


def test_without_ray_one_line_says_what_to_install(monkeypatch):
    found = importlib.util.find_spec
    hidden = lambda name, *more: None if name == "ray" else found(name, *more)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    with pytest.raises(ConfigError, match=r"workers need Ray, .* pip install 'bayflower\[simul"):
        execute(small_prepared("fedmap", "fused", workers=2))


def test_states_on_disk_need_one_process():
    prepared = small_prepared("fedmap", "fused", workers=2, client_states="disk")
    with pytest.raises(ConfigError, match="client_states=disk needs one process"):
        execute(prepared)
