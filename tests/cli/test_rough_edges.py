"""What people ran into: each is one clear line now, and nothing that was computed is lost."""

from __future__ import annotations

import importlib
import json

import numpy as np
import pytest
from prefork import bayflower
from safetensors.numpy import load_file
from typer.testing import CliRunner

from bayflower import __version__, methods
from bayflower.cli import app, doctor
from bayflower.config import parse
from bayflower.data import read_npz
from bayflower.engines import prepare, run_to_result
from bayflower.errors import BayflowerError, ConfigError
from bayflower.files.texts import finite, write_text, writing
from bayflower.personal import export, personalise
from bayflower.report import write_report
from bayflower.report.flat import write
from bayflower.rounds.result import diverged

QUICK = {"rounds": 2, "num_clients": 3, "keep": 0.1, "local_epochs": 1, "device": "cpu"}


def test_the_version_as_an_option():
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.output) == (0, f"{__version__}\n")


def test_doctor_tries_to_import_what_is_installed(monkeypatch):
    assert {one.what: one.state for one in doctor.versions()}["torchvision"] == "ok"

    def broken():
        raise BayflowerError("torchvision cannot be imported (operator nms does not exist)")

    monkeypatch.setattr("bayflower.data.vision.import_torchvision", broken)
    found = {one.what: one for one in doctor.versions()}["torchvision"]
    assert found.state == "wrong"
    assert "cannot be imported" in found.seen
    assert "pip install" in found.remedy
    real = importlib.import_module

    def fails(name, *more):
        if name == "safetensors":
            raise OSError("libfoo.so: cannot open shared object file")
        return real(name, *more)

    monkeypatch.setattr(doctor.importlib, "import_module", fails)
    found = {one.what: one for one in doctor.versions()}["safetensors"]
    assert (found.state, "libfoo.so" in found.seen) == ("wrong", True)


def no_constants(name: str):
    raise AssertionError(f"{name} in a result file")


@pytest.mark.parametrize("rate", ["1e8", "1e30"])
def test_a_run_that_diverges_is_one_line(tmp_path, rate):
    """Numbers that are far too large, and numbers that are none: a run stops after three rounds
    without a reply that can be used."""
    done = bayflower(
        *("run", "fedmap", "--rounds", "4", "--clients", "3", "--set", "keep=0.1"),
        *("--set", f"lr={rate}", "--out", str(tmp_path / "run")),
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert "diverged" in last
    assert "lower lr" in last


def test_a_loss_that_is_not_finite_is_a_remark(tmp_path):
    """The result file is there, and has no number that JSON does not know."""
    prepared = prepare(parse("fedmap", QUICK), "fused")
    usual = run_to_result(prepared)
    assert "diverged" not in (usual["remark"] or "")
    rounds = [{**record, "train_loss": float("nan")} for record in usual["rounds"]]
    assert "lower lr" in diverged(rounds)
    json.loads(json.dumps(finite({"rounds": rounds})), parse_constant=no_constants)


def test_numbers_that_are_not_finite_become_null():
    content = {"a": [1.0, float("nan"), {"b": float("inf")}], "c": (1, True, None, "nan")}
    assert finite(content) == {"a": [1.0, None, {"b": None}], "c": [1, True, None, "nan"]}


def test_tune_says_what_is_wrong_with_the_data_in_one_line(tmp_path):
    pytest.importorskip("optuna")
    done = bayflower(
        *("tune", "fedmap", "--trials", "1", "--dataset", "none.npz", "--rounds", "1"),
        *("--out", "tuned"),
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "no file none.npz" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("more", [{}, {"min_replies": 2}, {"rounds": 4}])
def test_an_error_in_a_half_is_named_with_its_place(monkeypatch, more):
    def loss(self, *_):
        return undefined_name  # noqa: F821

    monkeypatch.setattr(methods.get("fedmap").client, "loss", loss)
    prepared = prepare(parse("fedmap", {**QUICK, **more}), "loop")
    line = loss.__code__.co_firstlineno + 1
    with pytest.raises(BayflowerError) as failed:
        run_to_result(prepared)
    assert f"name 'undefined_name' is not defined (test_rough_edges.py, line {line})" in str(
        failed.value
    )
    assert "NameError" in str(failed.value)


def test_names_in_client_are_read_or_refused_without_numpys_words(tmp_path):
    names = np.array(["Bern", "Zug", "Chur"] * 20)
    np.savez(tmp_path / "a.npz", x=np.zeros((60, 3)), y=np.arange(60) % 2, client=names)
    assert read_npz(tmp_path / "a.npz").site_names() == ("Bern", "Chur", "Zug")
    names = names.astype(object)
    np.savez(tmp_path / "a.npz", x=np.zeros((60, 3)), y=np.arange(60) % 2, client=names)
    with pytest.raises(ConfigError, match="array of Python objects") as refused:
        read_npz(tmp_path / "a.npz")
    assert "pickle" not in str(refused.value)


@pytest.mark.parametrize(
    ("dataset", "shape"),
    [("digits", (1, 8, 8)), pytest.param("synthetic", (30,), marks=pytest.mark.slow)],
)
def test_a_new_client_with_one_class_needs_no_num_classes(tmp_path, dataset, shape):
    """The federation knows the classes; the new client has seen one."""
    given = {**QUICK, "dataset": dataset, "keep": 0.1 if dataset == "digits" else 1.0}
    run = parse("fedavg", {**given, "new_client_epochs": 1, "checkpoint_every": 1})
    run_to_result(prepare(run, "fused"), tmp_path / "run")
    x = np.random.default_rng(0).random((40, *shape)).astype(np.float32)
    np.savez(tmp_path / "one.npz", x=x, y=np.ones(40, int))
    made = personalise(tmp_path / "run", tmp_path / "one.npz", tmp_path / "m", ("safetensors",))
    assert made["network"]["num_classes"] == (10 if dataset == "digits" else 2)
    counts = made["data"]["train_per_class"]
    assert (counts[0], counts[1] > 0, sum(counts[2:])) == (0, True, 0)


@pytest.mark.slow
def test_export_takes_its_folder_by_out_as_run_and_predict_do(tmp_path):
    given = ["run", "fedavg", "--rounds", "1", "--clients", "3", "--set", "keep=0.1"]
    assert CliRunner().invoke(app, [*given, "--out", str(tmp_path / "run")]).exit_code == 0
    for name, words in (("a", ["{}"]), ("b", ["--out", "{}"])):
        at = [word.format(tmp_path / name) for word in words]
        done = CliRunner().invoke(app, ["export", str(tmp_path / "run"), *at, "--client", "1"])
        assert done.exit_code == 0, done.output
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert one.keys() == two.keys()
    assert all(np.array_equal(value, two[name]) for name, value in one.items())
    for words in ([], ["a", "--out", "b"]):
        with pytest.raises(ConfigError, match="name what to write once"):
            CliRunner().invoke(
                app, ["export", "run", *words, "--client", "1"], catch_exceptions=False
            )


def test_a_file_that_cannot_be_written_is_one_line(tmp_path):
    """The line names the file that was asked for, not the one that is written first."""
    (tmp_path / "file").write_text("")
    asked = tmp_path / "file" / "scores.csv"
    unwritten = pytest.raises(ConfigError, match=f"^{asked} cannot be written \\(.*writable")
    with unwritten, writing(asked):
        write_text(asked, "")
    with pytest.raises(ConfigError, match=f"^{asked} cannot be written"):
        write(asked, [{"method": "fedmap"}])
    with pytest.raises(ConfigError, match="none does not exist; name a file"):
        write_report([tmp_path], tmp_path / "none" / "report.html")


SQUEEZED = """
import torch

class Squeezed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc = torch.nn.Conv2d(1, 6, 3), torch.nn.Linear(12, 10)

    def forward(self, x):
        pooled = self.conv(x).amax((2, 3)).squeeze()
        return self.fc(torch.cat([pooled, pooled.relu()], 1))
"""


def test_a_network_without_a_pass_for_one_sample_is_named_before_training(tmp_path, monkeypatch):
    """Sets and exported models are for one sample; without them it trains, and nothing is lost."""
    (tmp_path / "squeezing.py").write_text(SQUEEZED)
    monkeypatch.syspath_prepend(str(tmp_path))
    given = {**QUICK, "model": "squeezing:Squeezed", "dataset": "digits"}
    with pytest.raises(ConfigError, match=r"Squeezed cannot predict for one sample.*flatten\(1\)"):
        prepare(parse("fedavg", given))
    folder = tmp_path / "run"
    run_to_result(prepare(parse("fedavg", {**given, "calibration": "off"})), folder)
    with pytest.raises(ConfigError, match="cannot predict for one sample alone"):
        export(folder, 0, tmp_path / "own")
