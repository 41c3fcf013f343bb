"""`bayflower.fit` and `bayflower.compare`: from data and a network of one's own to personal models,
and that a run from Python is the run of the command line.
"""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from prefork import bayflower as command
from torch import nn

import bayflower
from bayflower.data import save
from bayflower.data.objects import read_objects
from bayflower.data.parts import Reading

SITES = ("Aachen", "Bern", "Cork")
SHORT = {"rounds": 3, "lr": 0.02, "local_epochs": 2, "device": "cpu", "evaluate_every": 1}


class Net(nn.Module):
    """A network of one's own."""

    def __init__(self, num_classes: int, width: int = 8) -> None:
        super().__init__()
        self.first, self.fc = nn.Linear(5, width), nn.Linear(width, num_classes)

    def forward(self, x):
        return self.fc(torch.relu(self.first(x)))


def clients(rows: int = 60) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return three classes of rows; sites differ in where the classes are."""
    draw, found = np.random.default_rng(0), {}
    for number, name in enumerate(SITES):
        x = draw.normal(size=(rows, 5)).astype(np.float32)
        found[name] = (x, (x[:, :3] + 0.3 * number * x[:, 2:5]).argmax(1))
    return found


def same(one: dict, other: dict, but: tuple[str, ...] = ("seconds",)) -> None:
    """Compare two results, but for times and folders."""
    for a, b in zip(one["rounds"], other["rounds"], strict=True):
        assert {k: v for k, v in a.items() if k not in but} == {
            k: v for k, v in b.items() if k not in but
        }
    assert one["final"] == other["final"]


def typed_run(folder: Path) -> None:
    """Do the run of `fit("fedmap", clients(), model=Net, **SHORT)` by the command line; the network
    is in a module of the current folder.
    """
    Path("nets.py").write_text(
        "import torch\nfrom torch import nn\n\n\nclass Net(nn.Module):\n"
        "    def __init__(self, num_classes):\n        super().__init__()\n"
        "        self.first, self.fc = nn.Linear(5, 8), nn.Linear(8, num_classes)\n\n"
        "    def forward(self, x):\n        return self.fc(torch.relu(self.first(x)))\n"
    )
    save(read_objects(clients(), Reading()), "mine.npz")
    words = [f"--set {key}={value}" for key, value in SHORT.items()]
    typed = (
        f"run fedmap --dataset mine.npz --set partition=natural --model nets:Net --out {folder} "
        f"{' '.join(words)}"
    )
    command(*typed.split())


@pytest.mark.slow
def test_a_run_from_python_is_the_run_of_the_command_line(tmp_path, monkeypatch):
    """The same numbers, bit for bit, and a folder that other commands read."""
    monkeypatch.chdir(tmp_path)
    found = bayflower.fit("fedmap", clients(), model=Net, out="python", **SHORT)
    typed_run(Path("typed"))
    other = bayflower.Result.load("typed", model=Net)
    same(found.result, other.result)
    given = clients()["Bern"][0][:7]
    said = found.personal("Bern").predict_proba(given)
    assert np.array_equal(other.personal("Bern").predict_proba(given), said)
    command("results", "python", "--out", "table.csv")
    assert Path("table.csv").read_text().count("\n") == len(found.metrics) + 1
    assert found.report().read_text().count("Bern") > 0


@pytest.mark.slow
def test_the_command_line_exports_a_network_of_ones_own(tmp_path, monkeypatch):
    """The exported program says the same without the class, and no card causes an import."""
    monkeypatch.chdir(tmp_path)
    typed_run(Path("typed"))
    command("export", "typed", "models", "--client", "1")
    given = clients()["Bern"][0][:7]
    said = bayflower.load_personal("models", model=Net).predict_proba(given)
    assert np.allclose(bayflower.load_personal("models").predict_proba(given), said, atol=1e-6)
    assert "nets" not in sys.modules


def test_import_is_light_and_digits_need_neither_flower_nor_ray():
    """`import bayflower` loads neither torch nor flwr, nor do the command line's help and lists;
    `fit` on digits does without the simulation extra, and gradients without torch's compiler.
    """
    program = (
        "import sys, bayflower\n"
        "assert not {'torch', 'flwr', 'ray', 'numpy', 'pandas'} & set(sys.modules)\n"
        "assert {'fit', 'compare', 'Method', 'Result', 'load_personal'} <= set(dir(bayflower))\n"
        "import bayflower.cli\n"
        "assert not {'torch', 'flwr', 'ray', 'pandas'} & set(sys.modules)\n"
        "sys.modules['ray'] = None  # as if it were not installed\n"
        "done = bayflower.fit('fedmap', 'digits', rounds=1, num_clients=2, device='cpu')\n"
        "assert not {'flwr', 'torch._dynamo'} & set(sys.modules)\n"
        "print(done.result['num_clients'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("2\n", "")  # and quiet


def test_a_function_sees_every_round_once_and_can_end_the_run(tmp_path):
    seen = []

    def on_round(round, numbers):
        seen.append((round, numbers))
        return round == 2

    stopped = bayflower.fit("fedmap", clients(), model=Net, callbacks=on_round, **SHORT)
    assert [round for round, _ in seen] == [1, 2]
    assert all("personal/accuracy" in numbers and "train_loss" in numbers for _, numbers in seen)
    whole = bayflower.fit("fedmap", clients(), model=Net, **{**SHORT, "rounds": 2})
    same(stopped.result, whole.result)
    assert stopped.result["config"]["rounds"] == 2


@pytest.mark.parametrize("engine", ["fused", pytest.param("loop", marks=pytest.mark.slow)])
def test_early_stopping_sees_no_test_sample(engine, tmp_path):
    """Other test samples lead to the same number of rounds; the run is one of that many rounds on
    all training samples.
    """
    base = {k: (x[:40], y[:40]) for k, (x, y) in clients().items()}
    tests = {k: (x[40:], y[40:]) for k, (x, y) in clients().items()}
    worse = {k: (x, (y + 1) % 3) for k, (x, y) in tests.items()}
    how = {**SHORT, "rounds": 12, "engine": engine, "model": Net, "calibration": "off"}
    chosen = []
    for number, part in enumerate((tests, worse)):
        both = {name: (base[name], part[name]) for name in base}
        found = bayflower.fit("fedmap", both, patience=2, out=tmp_path / str(number), **how)
        chosen.append(len(found.result["rounds"]))
    assert chosen[0] == chosen[1] < 12
    both = {name: (base[name], tests[name]) for name in base}
    whole = bayflower.fit("fedmap", both, **{**how, "rounds": chosen[0]})
    same(bayflower.Result.load(tmp_path / "0").result, whole.result)


def test_a_result_shows_itself_and_a_bar_is_drawn_in_a_notebook(monkeypatch):
    """In a notebook: a bar that is drawn again, and tables. Names are never taken for HTML."""
    drawn: list[str] = []

    class Handle:
        def update(self, picture):
            drawn.append(picture)

    def display(picture, display_id):
        drawn.append(picture)
        return Handle()

    class ZMQInteractiveShell:  # the name by which a kernel is known
        pass

    shell = ZMQInteractiveShell()
    shown = types.SimpleNamespace(HTML=str, display=display)
    fake = types.SimpleNamespace(get_ipython=lambda: shell, display=shown)
    monkeypatch.setitem(sys.modules, "IPython", fake)
    names = ("<b>Aachen", "Bern", "Cork")
    data = dict(zip(names, clients().values(), strict=True))
    both = bayflower.compare(["fedmap", "local"], data, model=Net, calibration="off", **SHORT)
    assert any("FedMAP" in one or "fedmap" in one for one in drawn)
    assert "3 of 3 rounds" in drawn[-1]
    page = both["local"]._repr_html_()
    assert "&lt;b&gt;Aachen" in page
    assert "<b>Aachen" not in page
    assert both._repr_html_().count("<tr>") == 3
    assert {one.result["method"] for one in both.results} == {"fedmap", "local"}
    assert len(both.metrics) == sum(len(one.metrics) for one in both.results)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(bayflower.ConfigError, match="pip install pandas, or take metrics_rows"):
        _ = both["local"].metrics
    assert both["local"].metrics_rows[0]["name"] == names[0]


def test_a_module_starts_from_its_own_weights():
    """Fused and loop start from the module's weights; another module is another run."""
    torch.manual_seed(5)
    start = Net(3)
    before = {name: value.clone() for name, value in start.state_dict().items()}
    still = {**SHORT, "rounds": 1, "lr": 1e-12, "calibration": "off", "optimizer": "sgd"}
    for engine in ("fused", "loop"):
        found = bayflower.fit("fedavg", clients(), model=start, engine=engine, **still)
        after = found.personal("Cork").network.state_dict()
        for name, value in before.items():
            assert torch.allclose(after[name], value, atol=1e-9)
    assert all(torch.equal(start.state_dict()[name], value) for name, value in before.items())
    other = bayflower.fit("fedavg", clients(), model=Net(3), **still)
    assert other.result["config"]["model"] != found.result["config"]["model"]
