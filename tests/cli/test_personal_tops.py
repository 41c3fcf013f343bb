"""Personal models that are more than the user's network: each top against its formula written out,
and from a run to a file to predictions, with us and without us.
"""

from __future__ import annotations

import csv
import math

import numpy as np
import pytest
import torch
from conftest import small
from personalruns import NEW, TRAINED, end_of, expected, trained
from plainsteps import both
from test_personal import without_us
from torch import nn
from typer.testing import CliRunner

from bayflower.cli import app
from bayflower.errors import BayflowerError, ConfigError
from bayflower.maths import processes
from bayflower.maths.processes import Kernel, Known
from bayflower.maths.tops import Top, Topped, derive, put, samples_of
from bayflower.networks.model import Model
from bayflower.personal import export, load_personal
from bayflower.rounds import solo

TOPPED = ("gpfl", "fedcp", "pfedgp")
KERNEL = Kernel(8.0, 1.0, 1e-3)


def normals(*shape: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=draw, dtype=torch.float64)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def test_a_gate_and_a_split_are_their_formulas():
    """Each coordinate of each sample by itself."""
    x, plain = normals(6, 5), network()
    z, weight, bias = plain[:2](x).detach(), plain[2].weight.detach(), plain[2].bias.detach()
    gated = put(network(), "2", Top("gate")).double()
    known = {**plain.state_dict(), "2.0.scale": normals(4), "2.0.shift": normals(1, 4)[0]}
    known |= {"2.1.weight": known.pop("2.weight"), "2.1.bias": known.pop("2.bias")}
    gated.load_state_dict(known)
    for row in range(6):
        inner = [
            max(float(z[row, d] * known["2.0.scale"][d] + known["2.0.shift"][d]), 0.0)
            for d in range(4)
        ]
        want = weight @ torch.tensor(inner, dtype=torch.float64) + bias
        torch.testing.assert_close(gated(x)[row].detach(), want)
    split = put(network(), "2", Top("split", {"temperature": 0.7})).double()
    known = {**plain.state_dict(), "2.0.context": normals(4), "2.0.weight": normals(8, 4)}
    known |= {f"2.0.{n}": normals(8 + i)[:8] for i, n in enumerate(("bias", "norm", "normbias"))}
    both = normals(3, 8)
    known |= {"2.1.weight": both, "2.1.bias": known.pop("2.bias")}
    del known["2.weight"]
    split.load_state_dict(known)
    for row in range(6):
        out = known["2.0.weight"] @ (z[row] * known["2.0.context"]) + known["2.0.bias"]
        normal = (out - out.mean()) / (out.var(unbiased=False) + 1e-5).sqrt()
        a = (normal * known["2.0.norm"] + known["2.0.normbias"]).clamp(min=0)
        logits = bias.clone()
        for d in range(4):
            share = 1 / (1 + math.exp(-float(a[d] - a[4 + d]) / 0.7))
            logits += both[:, d] * share * z[row, d] + both[:, 4 + d] * (1 - share) * z[row, d]
        torch.testing.assert_close(split(x)[row].detach(), logits)


def plain_processes(known: Known, z: torch.Tensor) -> torch.Tensor:
    """Textbook regression with noise 1/ω at each node: k_*ᵀ (K + Ω⁻¹)⁻¹ (κ/ω), on its samples."""

    def kernel(p, q):
        p, q = p / p.norm(), q / q.norm()
        return 8.0 * math.exp(-float((p - q).square().sum()) / 2)

    found = torch.ones(len(z), known.signs.shape[1], dtype=torch.float64)
    points, shares = np.polynomial.hermite_e.hermegauss(20)
    for node, signs in enumerate(known.signs):
        rows = [i for i in range(known.side.shape[1]) if known.side[node, i] != 0]
        gram = torch.tensor(
            [
                [kernel(known.features[i], known.features[j]) + 1e-3 * (i == j) for j in rows]
                for i in rows
            ]
        ).double()
        omega = known.omega[node, rows]
        noisy = gram + torch.diag(1 / omega)
        for q in range(len(z)):
            cross = torch.tensor([kernel(known.features[i], z[q]) for i in rows]).double()
            solved = torch.linalg.solve(noisy, cross)
            mean = float(solved @ (known.side[node, rows] / 2 / omega))
            std = math.sqrt(8.001 - float(solved @ cross))
            left = sum(
                share / (1 + math.exp(-(mean + std * point)))
                for point, share in zip(points, shares / shares.sum(), strict=True)
            )
            for c, sign in enumerate(signs):
                found[q, c] *= {1.0: left, -1.0: 1 - left, 0.0: 1.0}[float(sign)]
    return found


def test_processes_are_textbook_regression_and_padding_changes_nothing():
    """Seven samples and two of padding, three classes; with and without matrices made before."""
    signs = torch.tensor([[1.0, 1.0, -1.0], [1.0, -1.0, 0.0]]).double()
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 2])
    features, z = normals(9, 4), normals(5, 4)
    side = torch.cat([signs[:, labels], torch.zeros(2, 2).double()], 1)
    gram = KERNEL.within(processes.unit(features))
    omega = processes.fit(gram, side / 2, side.abs(), 20).omega
    known = Known(features, side, omega, signs, torch.tensor([2.0, 2.0, 3.0]).double())
    want = plain_processes(known, z)
    even = (1 - 1e-6) * want / want.sum(1, keepdim=True) + 1e-6 / 3
    got = processes.probabilities(KERNEL, known, z)
    torch.testing.assert_close(got, even, rtol=1e-6, atol=1e-8)
    made = processes.derived(KERNEL, features, side, omega)
    torch.testing.assert_close(processes.probabilities(KERNEL, known, z, made), got)
    certain = processes.classes(
        signs, torch.sigmoid(made[0] @ KERNEL.between(processes.unit(features), processes.unit(z)))
    )
    assert float((certain - got).abs().max()) > 0.02  # the variance matters
    model = Model(network, 3)
    top = Topped(model, Top("processes", KERNEL._asdict()))
    numbers = {f"2.{name}": value for name, value in known._asdict().items()}
    params = {n: v.detach() for n, v in network().named_parameters() if not n.startswith("2.")}
    module = top.module(params, numbers)
    assert samples_of(module.state_dict(), "2") == 9
    x = normals(4, 5)
    with torch.no_grad():
        inner = module[:2](x)
        torch.testing.assert_close(module(x).exp(), processes.probabilities(KERNEL, known, inner))
        torch.testing.assert_close(top.forward(params, numbers, x, train=False)[0], module(x))


@pytest.mark.slow
@pytest.mark.parametrize("method", TOPPED)
def test_engine_file_and_command_line_say_the_same(method, tmp_path):
    """Without calibration the file's predictions have the run's own accuracy and NLL; BatchNorm in
    the network.
    """
    changes = {"calibration": "off", "model": "mlp-bn", "keep": 0.3}
    if method == "pfedgp":  # others train before a test, and a stack rounds differently
        changes["stacking"] = "yes"
    folder = trained(tmp_path / "run", method, **changes)
    for client in (TRAINED, NEW):
        card = export(folder, client, tmp_path / str(client))
        x, want, row = expected(folder, client)
        model, y = load_personal(tmp_path / str(client)), end_of(folder, client).data.test.y
        said = model.predict_proba(x)
        assert np.abs(said - want.numpy()).max() < 1e-5
        nll = -np.log(said[np.arange(len(y)), y.numpy()]).mean()
        assert nll == pytest.approx(row["nll"], rel=1e-4)
        assert (said.argmax(1) == y.numpy()).mean() == pytest.approx(row["accuracy"])
        assert card["metrics"]["nll"] == pytest.approx(row["nll"], rel=1e-4)
        assert "another head" in card["load"]["without"]
        factory = end_of(folder, client).half.model.factory  # as of a network of the user's own
        own = load_personal(tmp_path / str(client), model=factory)
        assert np.array_equal(own.predict_proba(x), said)
    np.savez(tmp_path / "new.npz", x=x.numpy())
    told, out = tmp_path / str(NEW), tmp_path / "scores.csv"
    done = CliRunner().invoke(
        app, ["predict", str(told), str(tmp_path / "new.npz"), "--out", str(out)]
    )
    assert done.exit_code == 0, done.output
    with out.open() as stream:
        rows = list(csv.DictReader(stream))
    shown = np.array([[float(row[f"p{k}"]) for k in range(10)] for row in rows])
    assert np.abs(shown - said).max() < 1e-4


@pytest.mark.slow
def test_programs_give_the_same_in_a_process_without_us(tmp_path):
    folders = []
    for method in TOPPED:
        folder = trained(tmp_path / f"run-{method}", method)
        card = export(folder, TRAINED, tmp_path / method, ("safetensors", "pt2", "onnx"))
        assert card["files"] == {
            "safetensors": "model.safetensors",
            "pt2": "model.pt2",
            "onnx": "model.onnx",
        }
        x = expected(folder, TRAINED)[0].numpy()
        said = load_personal(tmp_path / method).uncertainty(x)
        known = {"probabilities": said.probabilities, "doubt": said.doubt}
        np.savez(tmp_path / method / "expected.npz", x=x, **known)
        folders.append(tmp_path / method)
        if method == "pfedgp":
            assert "variance of its Gaussian processes" in card["uncertainty"]["why"]
    told = without_us(folders, tmp_path)
    assert told == [f"{kind} {method}" for method in TOPPED for kind in ("pt2", "onnx")]


def test_matrices_beyond_memory_are_made_in_every_pass(monkeypatch):
    top = put(network(), "2", Top("processes", KERNEL._asdict()), 3)
    monkeypatch.setattr("bayflower.maths.tops.DERIVED", 2)
    assert derive(top)[2].inverse is None
    monkeypatch.undo()
    assert derive(top)[2].inverse.shape == (2, 3, 3)


def test_a_model_that_is_more_and_has_no_top_is_refused(monkeypatch):
    case = both("fedper")
    halves = case.prepared.halves
    sent = halves.server.init(*halves.initial, ())
    monkeypatch.setattr("bayflower.clients.fedper.Client.one_network", False)
    with pytest.raises(BayflowerError, match="more than the network"):
        solo.numbers(halves.client, halves.client.init(*halves.initial), sent, normals(1, 64))
    with pytest.raises(ConfigError, match="fedper is more than the network, so it cannot be calib"):
        small("fedper", calibration="shrunk")
