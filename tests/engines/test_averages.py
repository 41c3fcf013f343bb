"""The table of averages against averages that are computed anew."""

from __future__ import annotations

from statistics import fmean

import numpy as np

from bayflower.rounds.averages import FIRST, Table


def test_the_table_has_the_averages_of_all_clients_whoever_comes_changes_and_goes():
    rng, numbers, table = np.random.default_rng(3), dict[int, list[float]](), Table()
    for _ in range(60):
        changed = rng.choice(5 * FIRST, 20, replace=False).tolist()
        for client in changed:
            numbers[client] = [*numbers.get(client, []), float(rng.normal())][-4:]
        table.note(numbers, changed)
        gone = rng.choice(5 * FIRST, 8, replace=False).tolist()  # known or not
        for client in gone:
            numbers.pop(client, None)
        table.drop(gone)
        clients, means, counts = table.all()
        assert len(clients) == len(numbers)
        for client, mean, count in zip(clients.tolist(), means, counts, strict=True):
            assert (mean, count) == (fmean(numbers[client]), len(numbers[client]))
            assert table.mean(client) == mean
    assert len(numbers) > FIRST  # there was not enough room at first
