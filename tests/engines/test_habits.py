"""Habits of networks that people bring: they write into their input, call layers by keyword, wrap
another network. They have the numbers of a plain loop, or are refused before anything starts.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from zoo import CLASSES, Case, agree, federation

from bayflower import fit
from bayflower.networks.check import check_fit
from bayflower.networks.model import Model


class Scaled(nn.Module):
    """Scales its input in place, as many do with pictures; its layers are called by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out, self.fc = nn.Linear(12, 8), nn.Linear(8, 5), nn.Linear(5, CLASSES)

    def forward(self, x):
        x -= 0.5
        x.div_(0.5)
        return self.fc(input=torch.relu(self.out(input=torch.tanh(self.first(x)))))


# -- networks that write into their input -------------------------------------------------------
@pytest.mark.parametrize("method", ["fednp", "fedbps", "metavd"])
def test_clients_with_a_network_that_writes_into_its_input_are_a_stack(method):
    agree(method, Case(Scaled, (12,)), local_steps=2)


def test_a_network_that_writes_into_its_input_leaves_the_samples_alone():
    data = federation(Case(Scaled, (12,))).clients[0]
    x, before = torch.as_tensor(data.x_train), data.x_train.copy()
    model = Model(Scaled, CLASSES, "scaled")
    model.look_for_head(x)
    check_fit(model, x)
    model.forward(*model.initial(0), x, train=False)
    assert torch.equal(x, torch.as_tensor(before))
    assert model.manner.writes
    assert model.unstackable is None


@pytest.mark.parametrize("stacking", ["yes", "no"])
def test_samples_stay_as_they_are_from_one_test_to_the_next(stacking):
    """Oracle: the personal model alone, on samples that nobody has seen before."""
    some = federation(Case(Scaled, (12,)), (12, 10)).clients
    clients = [((one.x_train, one.y_train), (one.x_test, one.y_test)) for one in some]
    found = fit(
        *("fedbps", [((x.copy(), y), (v.copy(), w)) for (x, y), (v, w) in clients]),
        model=Scaled,
        **{"rounds": 2, "local_epochs": 1, "batch_size": 4, "evaluate_every": 1},
        **{"calibration": "off", "stacking": stacking, "progress": False},
    )
    rows = [row for row in found.metrics_rows if row["model"] == "personal"]
    for row, (_, (x, y)) in zip(rows, clients, strict=True):
        model, mine = found.personal(row["client"]), x.copy()
        for _ in range(2):
            shares = model.predict_proba(mine)
            nll = -torch.as_tensor(shares).log()[range(len(y)), y].mean()
            assert abs(float(nll) - row["nll"]) < 1e-5
        assert (mine == x).all()
