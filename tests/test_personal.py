"""Personal models: the same predictions from their files, with us and without us; new clients;
uncertainty.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import NEEDED, SMALL
from safetensors.torch import load_file

import bayflower
from bayflower import cli
from bayflower.config import parse
from bayflower.data import load_client
from bayflower.engines import prepare, run_to_result
from bayflower.errors import BayflowerError, ConfigError
from bayflower.methods import METHODS
from bayflower.personal import export, load_personal, personalise
from bayflower.personal.runs import client_state, kept, open_run
from bayflower.rounds import solo

TRAINED, NEW = 1, 5  # of five clients that train and two that do not
BAYESIAN = {
    name
    for name, row in METHODS.items()
    if row.stem in ("metavd", "fednp", "fedbps", "fedla", "fedmap", "pfedvmp")
}
WITHOUT_US = """
import json, sys
from pathlib import Path
class Nobody:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("bayflower", "flwr"):
            raise ImportError(f"{name} was imported")
sys.meta_path.insert(0, Nobody())
import numpy, torch
for folder in map(Path, sys.argv[1:]):
    x, want = (torch.tensor(array) for array in numpy.load(folder / "expected.npz").values())
    got = torch.export.load(folder / "model.pt2").module()(x)
    assert (got - want).abs().max() < 1e-5, (folder, float((got - want).abs().max()))
    again = torch.export.load(folder / "model.pt2").module()(x[:3])
    assert torch.equal(got[:3].argmax(1), again.argmax(1))
    if (folder / "model.onnx").exists():
        import onnxruntime
        session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
        (name,) = [one.name for one in session.get_inputs()]
        for size in (1, 2, len(x)):
            (got,) = session.run(None, {name: x[:size].numpy()})
            assert abs(got - want[:size].numpy()).max() < 1e-5, folder
        print("onnx", folder.name)
    print("pt2", folder.name)
assert "bayflower" not in sys.modules
"""


def trained(folder: Path, method: str, engine: str = "fused", **changes) -> Path:
    """Return the folder of a short run."""
    values = {
        **SMALL,
        **NEEDED.get(method, {}),
        "device": "cpu",
        "stacking": "no",
        "checkpoint_every": 1,
        **changes,
    }
    run_to_result(prepare(parse(method, values), engine), folder)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of each method's short run, made when it is first asked for."""
    root, known = tmp_path_factory.mktemp("runs"), {}

    def of(method: str) -> Path:
        if method not in known:
            known[method] = trained(root / method, method)
        return known[method]

    return of


def expected(folder: Path, client: int) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Return (test inputs, probabilities by the method's own `predict`, that client's row of
    result.json).
    """
    opened = open_run(folder)
    data = solo.samples(
        load_client(opened.run.data, opened.run.settings.seed, client),
        torch.device("cpu"),
        torch.float32,
    )
    new = client >= opened.run.data.num_clients
    end = kept(opened, client, data, None if new else client_state(opened, client), None, "")
    with torch.no_grad():
        probs = end.half.predict("personal", end.state, end.broadcast, data.test.x, {})
    final = json.loads((folder / "result.json").read_text())["final"]
    block = final["new_clients" if new else "personal"]["per_client"]
    return data.test.x, probs, next(row for row in block if row["client"] == client)


@pytest.mark.parametrize("method", METHODS)
def test_every_methods_model_comes_back_from_its_file(method, runs, tmp_path):
    """Trained and new clients: the card has the run's own accuracy, and the loaded module
    `predict`'s probabilities.
    """
    for client in (TRAINED, NEW):
        card = export(runs(method), client, tmp_path / str(client), ("safetensors",))
        model = load_personal(tmp_path / str(client))
        x, want, row = expected(runs(method), client)
        assert isinstance(model, torch.nn.Module)
        with torch.no_grad():
            assert torch.allclose(model.predict_proba(x), want, atol=1e-6)
            assert torch.allclose(model(x).exp(), want, atol=1e-6)
        assert card["metrics"]["accuracy"] == pytest.approx(row["accuracy"])
        assert card["metrics"]["nll"] == pytest.approx(row["nll"], rel=1e-4)
        assert card["calibration"]["ece"] == pytest.approx(row["ece"], rel=1e-4)
        assert card["never_trained"] == (client == NEW)
        assert sum(card["data"]["train_per_class"]) == card["data"]["num_train"]
        assert (card["posterior"] is not None) == (method in BAYESIAN)
        if method in BAYESIAN:
            found = model.predict(x, samples=20)
            assert torch.allclose(found.mean.sum(1), torch.ones(len(x)), atol=1e-4)
            assert bool((found.std.sum(1) > 0).all())
            assert bool((found.information <= found.entropy + 1e-6).all())
            assert torch.equal(found.mean, model.predict(x, samples=20).mean)
        else:
            with pytest.raises(BayflowerError, match="ends with a point"):
                model.predict(x)


def test_models_give_the_same_in_a_process_without_us(runs, tmp_path):
    """One process that cannot import bayflower or flwr reads the exported programs, of images and
    of tables with missing values.
    """
    folders = []
    for method in ("fedmap", "pfedvmp", "metavd", "fedbps", "fednp", "fedbn", "local"):
        folder = tmp_path / method
        export(
            runs(method),
            TRAINED,
            folder,
            ("safetensors", "pt2", *(["onnx"] if method in ("fedmap", "fedbn") else [])),
        )
        x, want, _ = expected(runs(method), TRAINED)
        np.savez(folder / "expected.npz", x=x, want=want)
        folders.append(folder)
    draw = np.random.default_rng(0)
    x = (draw.normal(size=(300, 4)) * [1, 10, 100, 1000] + 50).astype(np.float32)
    y = (x[:, 1] > 50).astype(int)
    x[draw.random(x.shape) < 0.1] = np.nan
    np.savez(tmp_path / "table.npz", x=x, y=y, client=np.arange(300) % 5)
    out = trained(
        tmp_path / "run",
        "fedmap",
        dataset=str(tmp_path / "table.npz"),
        partition="natural",
        num_clients=4,
        new_clients=1,
        keep=1.0,
    )
    folder = tmp_path / "table"
    export(out, 0, folder, ("safetensors", "pt2", "onnx"))
    _, want, _ = expected(out, 0)
    run = open_run(out).run
    from bayflower.data.federation import _layout, _raw

    raw = _raw(_layout(run.data, run.settings.seed), run.data, run.settings.seed, 0)
    np.savez(folder / "expected.npz", x=raw.x_test, want=want)
    folders.append(folder)
    call = [sys.executable, "-W", "ignore", "-c", WITHOUT_US, *map(str, folders)]
    alone = {"PATH": "", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        call, capture_output=True, text=True, timeout=300, env=alone, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("pt2")] == [
        folder.name for folder in folders
    ]
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("onnx")] == [
        "fedmap",
        "fedbn",
        "table",
    ]


def test_weights_load_without_us_by_the_networks_own_names(runs, tmp_path):
    export(runs("fedbn"), TRAINED, tmp_path, ("safetensors",))
    x, want, _ = expected(runs("fedbn"), TRAINED)
    network = open_run(runs("fedbn")).halves.model.factory()
    network.load_state_dict(load_file(tmp_path / "model.safetensors"))
    with torch.no_grad():
        assert torch.allclose(torch.softmax(network.eval()(x), 1), want, atol=1e-6)


@pytest.mark.parametrize("method", ["fedmap", "fedper", "fedbps", "metavd", "maml"])
def test_a_new_clients_data_give_it_a_model(method, runs, tmp_path):
    """`personalise` on the file of a client that never trained: better than the model before it has
    seen its data.
    """
    opened = open_run(runs(method))
    data = load_client(opened.run.data, 0, NEW)
    x, y = np.concatenate([data.x_train, data.x_test]), np.concatenate([data.y_train, data.y_test])
    np.savez(
        tmp_path / "mine.npz", x=x, y=y, test=np.arange(len(y)) >= len(data.y_train), num_classes=10
    )
    card = personalise(runs(method), tmp_path / "mine.npz", tmp_path / "out", ("safetensors",))
    assert card["never_trained"]
    assert card["data"]["num_train"] == len(data.y_train)
    model = load_personal(tmp_path / "out")
    with torch.no_grad():
        right = (
            (
                model.predict_proba(torch.as_tensor(data.x_test)).argmax(1)
                == torch.as_tensor(data.y_test)
            )
            .double()
            .mean()
        )
    assert float(right) == pytest.approx(card["metrics"]["accuracy"])
    np.savez(tmp_path / "bad.npz", x=x[:, :, :4], y=y, num_classes=10)
    with pytest.raises(ConfigError, match="samples of shape"):
        personalise(runs(method), tmp_path / "bad.npz", tmp_path / "bad")
    np.savez(tmp_path / "many.npz", x=x, y=y + 1, num_classes=11)
    if y.max() == 9:
        with pytest.raises(ConfigError, match="label 10; the federation's models know 10 classes"):
            personalise(runs(method), tmp_path / "many.npz", tmp_path / "bad")


def test_states_are_found_wherever_an_engine_keeps_them(tmp_path):
    """The loop engine's checkpoint, and the fused engine's states on disk, give the same model as
    the fused checkpoint.
    """
    want = None
    for name, engine, more in (
        ("fused", "fused", {}),
        ("loop", "loop", {}),
        ("disk", "fused", {"client_states": "disk"}),
    ):
        out = trained(tmp_path / name, "fedmap", engine, **more)
        export(out, TRAINED, tmp_path / f"{name}-model", ("safetensors",))
        x, _, _ = expected(out, TRAINED)
        with torch.no_grad():
            got = load_personal(tmp_path / f"{name}-model").predict_proba(x)
        want = got if want is None else want
        assert torch.allclose(got, want, atol=1e-5), name


def test_clients_in_a_flower_app_save_their_models_after_the_last_round(tmp_path):
    """A network of the user's own with frozen and tied layers: by its factory, by the exported
    program, and as a plain state_dict.
    """
    import test_plug
    from flwr.app import ArrayRecord

    from bayflower.clients import make_client_app
    from bayflower.flower.loop import InProcessGrid, contexts

    app = make_client_app(
        "fedmap", model=test_plug.Net, data=test_plug.load, state=tmp_path, export=("pt2",)
    )
    strategy = test_plug.strategy_of("fedmap", run="mine")
    grid = InProcessGrid(app, contexts(range(3)))
    strategy.start(grid, ArrayRecord(test_plug.Net().state_dict()), num_rounds=2, timeout=60)
    for client, context in enumerate(contexts(range(3))):
        folder = tmp_path / "mine" / f"client-{client}" / "personal"
        _, (x, y) = test_plug.load(context)
        model = load_personal(folder, model=test_plug.Net)
        program = load_personal(folder)
        plain = test_plug.Net()
        plain.load_state_dict(load_file(folder / "model.safetensors"))
        with torch.no_grad():
            want = torch.softmax(plain.eval()(x), 1)
            assert torch.allclose(model.predict_proba(x), want, atol=1e-6)
            assert torch.allclose(program.predict_proba(x), want, atol=1e-5)
        tally = strategy.outcome.views["personal"][client]
        assert int((want.argmax(1) == y).sum()) == int(tally.correct)
        assert model.card["metrics"]["accuracy"] == pytest.approx(float(tally.correct) / len(y))
        assert bool((model.predict(x).std > 0).any())
        with pytest.raises(ConfigError, match="load it with load_personal"):
            program.predict(x)


def test_a_model_that_cannot_be_saved_is_said_and_the_test_still_counts(
    tmp_path, caplog, monkeypatch
):
    import test_plug

    from bayflower.clients import make_client_app
    from bayflower.personal import made

    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(made, "save_tensors", full)
    app = make_client_app(
        "fedavg", model=test_plug.Net, data=test_plug.load, state=tmp_path, export=()
    )
    strategy = test_plug.run(app, "fedavg", rounds=1)
    assert test_plug.personal(strategy) >= 0
    assert "the personal model of client 2 was not saved" in caplog.text
    assert "No space left on device" in caplog.text


# -- uncertainty ---------------------------------------------------------------------------------
def test_metavds_uncertainty_is_its_own_sampled_view(runs, tmp_path):
    """Weights drawn by hand, the slow way, from N(theta, alpha theta²)."""
    export(runs("metavd"), TRAINED, tmp_path, ("safetensors",))
    model = load_personal(tmp_path)
    x, _, _ = expected(runs("metavd"), TRAINED)
    opened = open_run(runs("metavd"))
    half, sent = opened.halves.client, opened.halves.server.broadcast(opened.server, TRAINED)
    (name,) = model.names
    assert name == half.weight
    theta = dict(model.network.named_parameters())[name].detach()
    assert torch.allclose(
        model._deviations()[name], sent.log_alpha.exp().sqrt() * theta.abs(), rtol=1e-5
    )
    draws = []
    generator = torch.Generator().manual_seed(7)
    for _ in range(400):
        weights = {key: value.detach().clone() for key, value in model.network.named_parameters()}
        weights[name] = theta * (
            1 + sent.log_alpha.exp().sqrt() * torch.randn(theta.shape, generator=generator)
        )
        draws.append(
            torch.softmax(torch.func.functional_call(model.network, weights, (x,)), 1).detach()
        )
    slow = torch.stack(draws)
    found = model.predict(x, samples=400)
    assert float((found.mean - slow.mean(0)).abs().max()) < 0.05
    assert float((found.std - slow.std(0)).abs().max()) < 0.05


def test_the_linear_posterior_is_that_of_a_linear_model_exactly(tmp_path):
    """A network that is linear in its weights: draws of the weights and draws of the logits have
    the same distribution.
    """
    from bayflower.personal.load import Personal
    from bayflower.personal.made import Ready

    torch.manual_seed(0)
    network = torch.nn.Linear(4, 3)
    std = {"weight": 0.5 * torch.rand(3, 4), "bias": 0.5 * torch.rand(3)}
    card = {"posterior": {"kind": "linear"}, "title": "test"}
    x = torch.randn(5, 4)
    found = Personal(Ready(network), card, std).predict(x, samples=20000)
    card["posterior"]["kind"] = "sampled"
    slow = Personal(Ready(network), card, std).predict(x, samples=20000)
    assert torch.allclose(found.mean, slow.mean, atol=0.01)
    assert torch.allclose(found.std, slow.std, atol=0.01)
    assert torch.allclose(found.information, slow.information, atol=0.01)


def test_more_data_make_fedmap_more_certain(runs, tmp_path):
    """The Laplace approximation by hand, from single gradients over the model's own labels, with
    the prior n/sigma².
    """
    export(runs("fedmap"), TRAINED, tmp_path, ("safetensors",))
    model, opened = load_personal(tmp_path), open_run(runs("fedmap"))
    data = solo.samples(
        load_client(opened.run.data, 0, TRAINED), torch.device("cpu"), torch.float32
    ).train
    name = "head.bias"
    prior = len(data.y) / opened.run.options.sigma2
    with torch.no_grad():
        p = model.predict_proba(data.x)
    slow = (p * (1 - p)).sum(0) + prior  # the Fisher information of a softmax's bias
    assert torch.allclose(model._deviations()[name], slow.rsqrt(), rtol=1e-4)


# -- files and the command line ------------------------------------------------------------------
def run_cli(*words: str) -> None:
    sys.argv = ["bayflower", *words]
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code in (0, None), words


def test_commands(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [])
    run_cli("export", str(runs("fedmap")), str(tmp_path / "a"), "--client", "1")
    said = capsys.readouterr().out
    assert "client 1, FedMAP: the client's own MAP model" in said
    assert "uncertainty: Laplace" in said
    assert (tmp_path / "a" / "model.pt2").exists()
    run_cli(
        "export", str(runs("fedmap")), str(tmp_path / "b.safetensors"), "--client", "1", "--json"
    )
    assert json.loads(capsys.readouterr().out)["client"] == 1
    one, other = (
        load_file(tmp_path / "b.safetensors"),
        load_file(tmp_path / "a" / "model.safetensors"),
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert bayflower.load_personal(tmp_path / "a" / "card.json").card["method"] == "fedmap"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["export", "RUN", "out", "--client", "99"], r"client must be in \[0, 6\], got 99"),
        (
            ["export", "nowhere", "out", "--client", "0"],
            "has no checkpoint.safetensors; give the --out of a run",
        ),
        (["personalise", "RUN", "out", "--data", "none.npz"], "no file none.npz"),
    ],
)
def test_what_cannot_be_exported_is_said_with_exit_code_2(
    words, text, runs, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys,
        "argv",
        ["bayflower", *(str(runs("fedmap")) if word == "RUN" else word for word in words)],
    )
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    import re

    assert re.search(text, " ".join(capsys.readouterr().err.split()))


def test_files_that_are_not_ours_are_refused(runs, tmp_path):
    with pytest.raises(ConfigError, match="json cannot be read"):
        load_personal(tmp_path)
    export(runs("fedmap"), TRAINED, tmp_path, ("safetensors",))
    with pytest.raises(ConfigError, match="the network does not fit"):
        load_personal(tmp_path, model=lambda: torch.nn.Linear(2, 2))
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_personal(tmp_path)
    (tmp_path / "card.json").write_text('{"format": "other"}')
    with pytest.raises(ConfigError, match="no card of a personal model"):
        load_personal(tmp_path)
