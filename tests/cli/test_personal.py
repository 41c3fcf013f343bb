"""Personal models: the same predictions from their files, with us and without us; new clients;
uncertainty.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import some
from personalruns import NEW, TRAINED, end_of, expected, trained
from safetensors.torch import load_file

from bayflower.data import load_client
from bayflower.errors import ConfigError
from bayflower.methods import METHODS
from bayflower.personal import export, load_personal, personalise
from bayflower.personal.runs import open_run

OWN = {
    name
    for name, row in METHODS.items()
    if row.stem
    in (
        "metavd",
        "fednp",
        "fedbps",
        "fedla",
        "pfedvmp",
        "fedproto",
        "pfedbayes",
        "pvi",
        "fedep",
        "fedpac",
        "fedbe",
        "fedivon",
        "fedpop",
        "qlsd",
    )
}
EXPORTED = [name for name, row in METHODS.items() if row.client.one_network]
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
    known = dict(numpy.load(folder / "expected.npz"))
    x, want = known.pop("x"), known["probabilities"]
    if (folder / "model.pt2").exists():
        program = torch.export.load(folder / "model.pt2").module()
        for size in (1, 3, len(x)):
            got = program(torch.tensor(x[:size]))
            for name, value in known.items():
                off = abs(got[name].detach().double().numpy() - value[:size])
                assert (off <= 1e-5 + 1e-4 * abs(value[:size])).all(), (folder, name, off.max())
        print("pt2", folder.name)
    if (folder / "model.onnx").exists():
        import onnxruntime
        session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
        (name,) = [one.name for one in session.get_inputs()]
        for size in (1, 2, len(x)):
            (got,) = session.run(["probabilities"], {name: x[:size]})
            assert abs(got - want[:size]).max() < 1e-5, folder
        print("onnx", folder.name)
assert "bayflower" not in sys.modules
"""


@pytest.mark.parametrize(
    # posteriors of other kinds in use are those of test_personal_kinds.py
    "method",
    some(EXPORTED, {"pfedvmp"}),
)
def test_every_methods_model_comes_back_from_its_file(method, runs, tmp_path):
    """Trained and new clients: the card has the run's own numbers, and the loaded model gives
    `predict`'s probabilities as a point and those of `judge` calibrated.
    """
    for client in (TRAINED, NEW):
        card = export(runs(method), client, tmp_path / str(client), ("safetensors",))
        model = load_personal(tmp_path / str(client))
        x, want, row = expected(runs(method), client)
        end = end_of(runs(method), client)
        said, y = model.uncertainty(x), end.data.test.y.numpy()
        assert isinstance(model, torch.nn.Module)
        assert np.abs(said.point - want.numpy()).max() < 1e-6
        with torch.no_grad():
            assert np.abs(model(x).exp().numpy() - said.probabilities).max() < 1e-6
        judged, number = end.taken.one.judged["test"], len(y)
        nll = -np.log(model.predict_proba(x)[np.arange(number), y]).sum()
        assert nll == pytest.approx(float(judged.tallies["calibrated"].nll), abs=1e-6)
        assert int((model.predict(x) == y).sum()) == int(judged.tallies["calibrated"].correct)
        assert card["metrics"]["nll"] == pytest.approx(nll / number, abs=1e-6)
        assert int(said.sets[np.arange(number), y].sum()) == int(
            judged.trusts["calibrated"].covered
        )
        assert said.sets.sum() == int(judged.trusts["calibrated"].set_size)
        for name, above in said.alarms.items():
            assert int(above.sum()) == int(judged.alarms[name])
        block = card["uncertainty"]
        point = block["tests"]["test"]["point"]
        assert point["accuracy"] == pytest.approx(row["accuracy"])
        assert point["nll"] == pytest.approx(row["nll"], rel=1e-4)
        assert point["ece"] == pytest.approx(row["ece"], rel=1e-4)
        assert card["never_trained"] == (client == NEW)
        assert (tmp_path / str(client) / "card.json").stat().st_mode & 0o777 == 0o600
        assert sum(card["data"]["train_per_class"]) == card["data"]["num_train"]
        assert (
            card["data"]["num_held_out"]
            == len(end.data.held.y)
            == block["held_out"]["num_examples"]
        )
        fitted = {"laplace", "own"} if method in OWN else {"laplace"}
        fitted = set() if METHODS[method].stem == "pfedgp" else fitted
        assert set(block["held_out"]["nll"]["fitted"]) == fitted
        assert (block["posterior"] is not None) == (block["used"] == "posterior")


def remember(folder, x):
    """Write what the loaded model says of x beside it, for a process without us."""
    said = load_personal(folder).uncertainty(x)
    known = {"probabilities": said.probabilities, "doubt": said.doubt, "distance": said.distance}
    np.savez(folder / "expected.npz", x=x, **known)
    return said


def without_us(folders, home) -> list[str]:
    """Return what a process says that cannot import bayflower or flwr and reads the programs."""
    call = [sys.executable, "-W", "ignore", "-c", WITHOUT_US, *map(str, folders)]
    alone = {"PATH": "", "HOME": str(home), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(call, capture_output=True, text=True, timeout=300, env=alone, cwd=home)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_images_give_the_same_in_a_process_without_us(runs, tmp_path):
    """A sampled posterior by torch.export, and BatchNorm by ONNX."""
    kinds = {"metavd": "pt2", "fedbn": "onnx"}
    for method, kind in kinds.items():
        export(runs(method), TRAINED, tmp_path / method, ("safetensors", kind))
        remember(tmp_path / method, expected(runs(method), TRAINED)[0].numpy())
    said = without_us([tmp_path / method for method in kinds], tmp_path)
    assert said == ["pt2 metavd", "onnx fedbn"]


@pytest.mark.slow
def test_tables_give_the_same_in_a_process_without_us(tmp_path):
    """One process that cannot import bayflower or flwr reads the exported programs of a table with
    missing values.
    """
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
    run = open_run(out).run
    from bayflower.data.federation import _layout, _raw

    raw = _raw(_layout(run.data, run.settings.seed), run.data, run.settings.seed, 0)
    _, want, _ = expected(out, 0)
    assert np.abs(remember(folder, raw.x_test).point - want.numpy()).max() < 1e-6
    assert without_us([folder], tmp_path) == ["pt2 table", "onnx table"]


def test_weights_load_without_us_by_the_networks_own_names(runs, tmp_path):
    export(runs("fedbn"), TRAINED, tmp_path, ("safetensors",))
    x, want, _ = expected(runs("fedbn"), TRAINED)
    network = open_run(runs("fedbn")).halves.model.factory()
    network.load_state_dict(load_file(tmp_path / "model.safetensors"))
    with torch.no_grad():
        assert torch.allclose(torch.softmax(network.eval()(x), 1), want, atol=1e-6)


@pytest.mark.parametrize(
    "method", some(["fedmap", "fedper", "fedbps", "metavd", "maml"], ["fedper"])
)
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
    held = int(0.2 * len(data.y_train) + 0.5)
    assert card["data"]["num_held_out"] == held
    assert card["data"]["num_train"] == len(data.y_train) - held
    assert (
        f"client's {held} held-out samples, filled up to 30"
        in card["uncertainty"]["sets"]["promise"]
    )
    model = load_personal(tmp_path / "out")
    assert model.score(data.x_test, data.y_test) == pytest.approx(card["metrics"]["accuracy"])
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
    few = {"num_clients": 3, "new_clients": 0, "rounds": 1, "local_epochs": 1, "calibration": "off"}
    for name, engine, more in (
        ("fused", "fused", {}),
        ("loop", "loop", {}),
        ("disk", "fused", {"client_states": "disk"}),
    ):
        out = trained(tmp_path / name, "fedmap", engine, **few, **more)
        export(out, TRAINED, tmp_path / f"{name}-model", ("safetensors",))
        x, _, _ = expected(out, TRAINED)
        got = load_personal(tmp_path / f"{name}-model").predict_proba(x)
        want = got if want is None else want
        assert np.abs(got - want).max() < 1e-5, name


@pytest.mark.slow
def test_clients_in_a_flower_app_save_their_models_after_the_last_round(tmp_path):
    """A network of the user's own with frozen and tied layers: by its factory, by the exported
    program, and as a plain state_dict.
    """
    import usernet
    from flwr.app import ArrayRecord

    from bayflower.clients import make_client_app
    from bayflower.flower.loop import InProcessGrid, contexts

    app = make_client_app(
        "fedmap", model=usernet.Net, data=usernet.load, state=tmp_path, export=("pt2",)
    )
    strategy = usernet.strategy_of("fedmap", run="mine")
    grid = InProcessGrid(app, contexts(range(3)))
    strategy.start(grid, ArrayRecord(usernet.Net().state_dict()), num_rounds=2, timeout=60)
    for client, context in enumerate(contexts(range(3))):
        folder = tmp_path / "mine" / f"client-{client}" / "personal"
        _, (x, y) = usernet.load(context)
        model = load_personal(folder, model=usernet.Net)
        program = load_personal(folder)
        plain = usernet.Net()
        plain.load_state_dict(load_file(folder / "model.safetensors"))
        with torch.no_grad():
            want = torch.softmax(plain.eval()(x), 1)
        said, other = model.uncertainty(x), program.uncertainty(x)
        assert np.abs(said.point - want.numpy()).max() < 1e-6
        for a, b in zip(said, other, strict=True):
            if isinstance(a, np.ndarray):
                assert np.allclose(a, b, atol=1e-5, rtol=1e-4)
        tally = strategy.outcome.views["personal"][client]
        assert int((want.argmax(1) == y).sum()) == int(tally.correct)


def test_a_model_that_cannot_be_saved_is_said_and_the_test_still_counts(
    tmp_path, caplog, monkeypatch
):
    import usernet

    from bayflower.clients import make_client_app
    from bayflower.personal import made

    def full(*_args, **_more):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(made, "save_tensors", full)
    app = make_client_app("fedavg", model=usernet.Net, data=usernet.load, state=tmp_path, export=())
    strategy = usernet.run(app, "fedavg", rounds=1)
    assert usernet.personal(strategy) >= 0
    assert "the personal model of client 2 was not saved" in caplog.text
    assert "No space left on device" in caplog.text
