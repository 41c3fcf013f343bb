"""The example projects run, the stock app becomes each of the five methods by at most ten lines,
and documents show what is there.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
import venv
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from bayflower.clients import make_client_app
from bayflower.errors import BayflowerError, ConfigError
from bayflower.flower import processes
from bayflower.flower.guard import guarded
from bayflower.flower.loop import contexts
from bayflower.flower.processes import Flower
from bayflower.flower.tryout import importable, try_app
from bayflower.personal import load_personal

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
FIVE = ("pfedvmp", "fednp", "metavd", "fedmap", "fedbps")


def changed(diff: Path) -> int:
    """Return how many lines a diff removes and adds."""
    lines = diff.read_text().splitlines()
    return sum(line[:1] in "+-" and line[:3] not in ("+++", "---") for line in lines if line)


def patched(folder: Path, method: str) -> Path:
    """Return a copy of the stock app with a method's diff applied."""
    app = folder / method
    shutil.copytree(EXAMPLES / "fedavg_app", app)
    diff = app / "diffs" / f"{method}.diff"
    done = subprocess.run(
        ["git", "apply", "--unsafe-paths", f"--directory={app}", str(diff)],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return app


def test_the_stock_app_runs_without_us(tmp_path, capsys):
    """Flower's own FedAvg on our in-process grid."""
    app = EXAMPLES / "fedavg_app"
    assert not any("bayflower" in path.read_text() for path in (app / "stockapp").glob("*.py"))
    try_app(app, 3, {"num-server-rounds": 2})
    assert "accuracy on the clients' test data" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("method", FIVE)
def test_ten_lines_make_it_one_of_the_five_methods(method, tmp_path, capsys):
    app = patched(tmp_path, method)
    assert changed(app / "diffs" / f"{method}.diff") <= 10
    # the app draws its first weights from torch's generator, which other tests have used
    torch.manual_seed(0)
    try_app(
        app,
        3,
        {"num-server-rounds": 6 if method == "metavd" else 4},
        {"state-dir": str(tmp_path / "state")},
    )
    accuracy = float(capsys.readouterr().out.rsplit(":", 1)[1])
    assert accuracy > (0.5 if method != "metavd" else 0.2)
    folders = sorted((tmp_path / "state").glob("*/client-*/personal"))
    assert len(folders) == 3
    with importable(app):
        from stockapp.task import Net, load_data

        _, test = load_data(0, 3, 32)
        model, program = load_personal(folders[0], model=Net), load_personal(folders[0])
    x = next(iter(test))[0]
    assert model.card["method"] == method
    assert float(abs(model.predict_proba(x) - program.predict_proba(x)).max()) < 1e-5


def test_the_readme_shows_the_diff():
    readme = (ROOT / "README.md").read_text()
    for line in (EXAMPLES / "fedavg_app" / "diffs" / "fedmap.diff").read_text().splitlines():
        if line[:1] in ("+", "-") and line[:3] not in ("+++", "---"):
            assert line in readme, line


@pytest.mark.slow
def test_a_resnet_of_ones_own(tmp_path, capsys):
    try_app(EXAMPLES / "resnet_images", 3, {"num-server-rounds": 3}, {"state-dir": str(tmp_path)})
    said = capsys.readouterr().out
    assert float(said.split("accuracy ")[1].split(",")[0]) > 0.6
    with importable(EXAMPLES / "resnet_images"):
        from resnetapp.task import ResNet, load_data

        _, (x, _) = load_data(1, 3, "")
    (folder,) = tmp_path.glob("*/client-1/personal")
    found = load_personal(folder, model=ResNet).uncertainty(x[:5])
    assert found.probabilities.shape == found.point.shape == (5, 10)


@pytest.mark.slow
def test_hospitals(tmp_path, capsys):
    """Made-up patients with a line that says so; the real file's layout by get_data.py."""
    settings = {"num-server-rounds": 3, "data-dir": str(tmp_path / "data")}
    try_app(EXAMPLES / "heart_hospitals", 4, settings, {"state-dir": str(tmp_path / "a")})
    said = capsys.readouterr().out
    assert "made-up patients are used, the numbers mean nothing; get the four processed" in said
    assert "personal models: accuracy" in said
    draw = np.random.default_rng(0)
    raw = tmp_path / "raw"
    raw.mkdir()
    for name in ("cleveland", "hungarian", "switzerland", "va"):
        rows = [
            ",".join(
                [
                    *(
                        "?" if draw.random() < 0.1 else f"{value:.1f}"
                        for value in draw.normal(size=13)
                    ),
                    str(draw.integers(5)),
                ]
            )
            for _ in range(60)
        ]
        (raw / f"processed.{name}.data").write_text("\n".join(rows) + "\n")
    call = [
        sys.executable,
        str(EXAMPLES / "heart_hospitals" / "get_data.py"),
        str(raw),
        str(tmp_path / "data"),
    ]
    assert subprocess.run(call, capture_output=True, text=True).returncode == 0
    data = np.load(tmp_path / "data" / "heart.npz")
    assert data["x"].shape == (240, 13)
    assert np.isnan(data["x"]).any()
    assert set(data["y"]) == {0, 1}
    try_app(EXAMPLES / "heart_hospitals", 4, settings, {"state-dir": str(tmp_path / "b")})
    assert "made-up" not in capsys.readouterr().out


def test_what_is_no_app_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not describe a Flower app"):
        try_app(tmp_path, 1)
    with pytest.raises(ConfigError, match="no run-config key 'rounds'; it has num-server-rounds"):
        try_app(EXAMPLES / "fedavg_app", 1, {"rounds": 3})
    with pytest.raises(ConfigError, match="num-server-rounds must be of type int"):
        try_app(EXAMPLES / "fedavg_app", 1, {"num-server-rounds": "three"})
    shutil.copytree(EXAMPLES / "fedavg_app", tmp_path / "app")
    (tmp_path / "app" / "stockapp" / "client_app.py").unlink()
    with pytest.raises(BayflowerError, match="client_app:app cannot be loaded"):
        try_app(tmp_path / "app", 1)


def test_the_app_travels_as_a_simulation_sends_it(tmp_path):
    """Ray sends a copy of the whole ClientApp with every message; the copies answer, and share the
    data that one of them has loaded.
    """
    cloudpickle = pytest.importorskip("ray.cloudpickle")
    app = make_client_app("fedmap", model=partial(nn.Linear, 2, 2), data=two_points, state=tmp_path)
    copies = [cloudpickle.loads(cloudpickle.dumps(app)) for _ in range(2)]
    plugs = [bound_to(copy._registered_funcs["train.default"]) for copy in copies]
    assert plugs[0].name == plugs[1].name
    (context,) = contexts([0])
    assert plugs[0].site(context) is plugs[1].site(context)


def bound_to(function):
    """Return the object whose method a function calls in the end, below the mods around it."""
    while not hasattr(function, "__self__"):
        inside = [cell.cell_contents for cell in function.__closure__]
        (function,) = (one for one in inside if callable(one) and one is not guarded)
    return function.__self__


def two_points(context):
    """Data of a client: as few as can be."""
    part = torch.eye(2), torch.tensor([0, 1])
    return part, part


def finished(flower: Flower, run: str) -> str:
    """Return how a run ended."""
    end = time.monotonic() + 240
    while not (status := flower.status(run)).startswith("finished") and time.monotonic() < end:
        flower.watch()
        time.sleep(1)
    return status


@pytest.mark.flower
def test_flwr_run_on_each_example(tmp_path, monkeypatch):
    """The three apps as Flower itself starts them: `flwr run DIR` in its simulation, which installs
    what an app lists. No package registry has Bayflower, and none is asked.
    """
    ours = processes.environment

    def theirs(*args) -> dict[str, str]:
        env = {**ours(*args), "UV_OFFLINE": "1"}
        del env["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"]
        return env

    monkeypatch.setattr(processes, "environment", theirs)
    with Flower("ray", 4, tmp_path) as flower:
        for name in ("fedavg_app", "resnet_images", "heart_hospitals"):
            shutil.copytree(
                EXAMPLES / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__")
            )
            run = flower.submit(tmp_path / name, {"num-server-rounds": 1})
            assert finished(flower, run) == "finished:completed", (
                name,
                (tmp_path / "logs" / "superlink.log").read_text()[-3000:],
            )
        assert (flower.folder / "home" / "runtime-envs").is_dir()  # Flower's installer was at work


@pytest.mark.flower
def test_the_flwr_run_of_the_documentation(tmp_path):
    """The command of docs/running.md as it stands, but for fewer rounds and its folder."""
    page = (ROOT / "docs" / "running.md").read_text()
    (block,) = [
        text
        for text in re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
        if text.startswith("flwr run")
    ]
    command = block.replace("rounds=5", "rounds=1").replace(
        "/full/path/to/a/folder", str(tmp_path / "out")
    )
    with Flower("ray", 10, tmp_path) as flower:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=ROOT,
            env=flower.env,
            capture_output=True,
            text=True,
            timeout=300,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out" / "result.json").read_text())["method"] == "fedmap"


@pytest.mark.flower
def test_a_fresh_environment_with_only_pip_install(tmp_path):
    """`pip install .` into an empty environment; there each diff is applied to the stock app and
    run.
    """
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "-c",
        str(ROOT / "constraints.txt"),
        str(ROOT),
    ]
    done = subprocess.run(install, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    for method in FIVE:
        app = patched(tmp_path, method)
        call = [
            str(python),
            "-m",
            "bayflower",
            "try",
            str(app),
            "--set",
            "num-server-rounds=2",
            "--state-dir",
            str(tmp_path / "state" / method),
        ]
        done = subprocess.run(
            call,
            capture_output=True,
            text=True,
            timeout=300,
            cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        )
        assert done.returncode == 0, done.stderr
        assert "accuracy on the clients' test data" in done.stdout
        assert (
            len(list((tmp_path / "state" / method).glob("*/client-*/personal/model.safetensors")))
            == 3
        )
