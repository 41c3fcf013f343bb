"""Programs of many clients: traced once, each with the numbers of its own client."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bayflower.personal import program
from bayflower.personal.network import Ready


class Net(nn.Module):
    """A network whose factor no tensor shows, with a list of objects as libraries keep them."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.kept = [object(), (1, object())]
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        return self.factor * self.layer(x)


@pytest.mark.slow
def test_clients_share_the_trace_but_no_number(tmp_path, monkeypatch):
    calls = []
    export = torch.export.export
    monkeypatch.setattr(
        torch.export, "export", lambda *now, **more: (calls.append(1), export(*now, **more))[1]
    )
    program.TRACED.clear()
    x, want = torch.randn(6, 5), []
    for client in range(3):
        torch.manual_seed(client)
        # the last client has another factor, which is no tensor: it is traced anew
        network = Net(2.0 if client == 2 else 1.0).eval()
        temperature = torch.tensor(1.0 + client, dtype=torch.float64)
        extras = {"affine/temperature": temperature, "affine/bias": torch.zeros(3).double()}
        path = tmp_path / f"{client}.pt2"
        made = program.Program(Ready(network, extras)).eval()
        assert program.exported(path, made, x, "pt2") == path.name
        want.append((network(x) / temperature).detach().softmax(-1))
    assert len(calls) == 2
    for client in range(3):
        got = torch.export.load(tmp_path / f"{client}.pt2").module()(x)["probabilities"]
        assert float((got.detach() - want[client]).abs().max()) < 1e-6


class Fixed(Net):
    """A network with a fixed number of samples in a batch."""

    def forward(self, x):
        return super().forward(x.reshape(len(x), 5))


def test_a_network_that_cannot_be_traced_is_tried_and_named_once(tmp_path, monkeypatch, caplog):
    calls, export = [], torch.export.export
    monkeypatch.setattr(
        torch.export, "export", lambda *now, **more: (calls.append(1), export(*now, **more))[1]
    )
    program.TRACED.clear()
    program.FAILED.clear()
    said = []
    for client in range(3):
        torch.manual_seed(client)
        made = program.Program(Ready(Fixed(1.0).eval())).eval()
        for kind in ("pt2", "onnx"):
            said.append(program.exported(tmp_path / str(client), made, torch.randn(6, 5), kind))
    assert len(calls) == 1
    assert len(set(said)) == 1
    assert said[0].startswith("not written: UserError: Constraints violated (batch)!")
    assert len([one for one in caplog.records if "was not written" in one.message]) == 1
    assert not list(tmp_path.iterdir())
    # another network is tried
    other = program.Program(Ready(Net(1.0).eval())).eval()
    assert program.exported(tmp_path / "x.pt2", other, torch.randn(6, 5), "pt2") == "x.pt2"


@pytest.mark.slow
def test_a_program_of_another_network_is_noticed(tmp_path, monkeypatch):
    """If the form did not tell two networks apart, the program is traced anew."""
    monkeypatch.setattr(program, "form", lambda made, example: "all alike")
    program.TRACED.clear()
    x = torch.randn(6, 5)
    for factor in (1.0, 3.0):
        torch.manual_seed(0)
        network = Net(factor).eval()
        made = program.Program(Ready(network)).eval()
        assert program.exported(tmp_path / "x.pt2", made, x, "pt2") == "x.pt2"
        got = torch.export.load(tmp_path / "x.pt2").module()(x)["point"].detach()
        assert float((got - network(x).detach().softmax(-1)).abs().max()) < 1e-6
