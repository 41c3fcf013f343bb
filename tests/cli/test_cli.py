"""The command line as a person meets it: real processes, real files."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import numpy as np
import pytest
from prefork import bayflower

from bayflower import ConfigError, cli
from bayflower.flower.processes import Flower

QUICK = [
    "--rounds",
    "2",
    "--clients",
    "3",
    "--set",
    "keep=0.1",
    "--set",
    "local_epochs=1",
    "--set",
    "device=cpu",
]
METRICS = {
    "accuracy",
    "accuracy_mean",
    "balanced_accuracy",
    "nll",
    "ece",
    "ece_allclass",
    "mce",
    "fairness_cv",
    "fairness_std",
    "per_client",
}


def alone(*words: str, cwd=None) -> subprocess.CompletedProcess:
    """A process that a shell starts."""
    return subprocess.run(
        [sys.executable, "-m", "bayflower", *words],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
    )


@pytest.mark.parametrize("engine", ["fused", "loop"])
def test_run_writes_the_result_others_rely_on(tmp_path, engine):
    done = bayflower(
        "run",
        "fedmap",
        "--engine",
        engine,
        *QUICK,
        "--set",
        "new_clients=1",
        "--out",
        str(tmp_path / "run"),
    )
    assert done.returncode == 0, done.stderr
    assert "personal" in done.stdout and "written:" in done.stdout  # noqa: PT018
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    for key in (
        "method",
        "dataset",
        "partition",
        "engine",
        "device",
        "seed",
        "num_clients",
        "versions",
        "config",
        "rounds",
        "final",
    ):
        assert key in result, key
    assert [record["round"] for record in result["rounds"]] == [1, 2]
    for record in result["rounds"]:
        assert {"seconds", "bytes_up", "bytes_down", "train_loss"} <= record.keys()
    assert result["config"]["sigma2"] > 0
    for name in ("personal", "global", "new_clients"):
        block = result["final"][name]
        assert block.keys() >= METRICS
        assert block["model"] and block["clients"]  # noqa: PT018
    assert len(result["final"]["personal"]["per_client"]) == 3
    assert len(result["final"]["new_clients"]["per_client"]) == 1
    assert (tmp_path / "run").iterdir().__next__().name == "result.json"


def test_json_output_is_only_json(tmp_path):
    """That a new process is quiet is tested in test_fit.py."""
    done = bayflower("run", "local", *QUICK, "--json", "--out", str(tmp_path))
    assert done.returncode == 0
    assert json.loads(done.stdout)["final"]["global"] is None
    assert done.stderr == ""


def test_compare_gives_each_method_the_settings_it_has(tmp_path):
    done = bayflower(
        "compare",
        "fedmap",
        "fedprox",
        *QUICK,
        "--set",
        "sigma2=7",
        "--set",
        "mu=0.5",
        "--out",
        str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    for method, key, value in (("fedmap", "sigma2", 7.0), ("fedprox", "mu", 0.5)):
        assert (
            json.loads((tmp_path / method / "seed-0" / "result.json").read_text())["config"][key]
            == value
        )
    assert "fedmap" in done.stdout and "fedprox" in done.stdout  # noqa: PT018


def wrong_data(folder) -> dict[str, str]:
    np.savez(folder / "range.npz", x=np.zeros((40, 3)), y=np.array([0, 1, 0.5, 1] * 10))
    np.savez(folder / "short.npz", x=np.zeros((40, 3)), y=np.zeros(39, int))
    np.savez(folder / "nokey.npz", x=np.zeros((40, 3)))
    (folder / "text.npz").write_text("not a zip")
    return {"range": "classes", "short": "40", "nokey": "y", "text": "text.npz"}


BAD = [
    (["run", "fedmaq"], "method 'fedmaq' is not known; did you mean 'fedmap'?"),
    (
        ["run", "fedmap", "--set", "sigma=3"],
        "method 'fedmap' has no setting 'sigma'; did you mean 'sigma2'?",
    ),
    (["run", "fedavg", "--set", "sigma2=3"], "method 'fedavg' has no setting 'sigma2'"),
    (["run", "fedmap", "--set", "sigma2=-1"], "sigma2 must be positive and finite, got -1"),
    (["run", "fedmap", "--set", "sigma2=much"], "sigma2 must be a number, got 'much'"),
    (["run", "fedmap", "--set", "sigma2"], "--set needs KEY=VALUE, got 'sigma2'"),
    (["run", "fedmap", "--set", "rounds=3", "--rounds", "2"], "setting 'rounds' was given twice"),
    (["run", "fedmap", "--clients", "-1"], "num_clients must be at least 0, got -1"),
    (["run", "fedmap", "--rounds", "0"], "rounds must be at least 1, got 0"),
    (["run", "fedmap", "--set", "rounds=2.5"], "rounds must be a whole number, got '2.5'"),
    (
        ["run", "fedmap", "--engine", "warp"],
        "engine must be one of fused, loop, ray, deployment, got 'warp'",
    ),
    (
        ["run", "fedmap", "--engine", "deployment", "--port", "65536"],
        "'--port': 65536 is not in the range 0<=x<=65535",
    ),
    (["run", "fedmap", "--dataset", "nowhere.npz"], "nowhere.npz"),
    (["run", "fedmap", "--dataset", "imagenet"], "imagenet"),
    (["run", "fedmap", "--dataset", "digit"], "got 'digit'; did you mean 'digits'?"),
    (["run", "fedmap", "--dataset", "fmnist", "--set", "data_dir=empty"], "fmnist"),
    (["run", "fedmap", "--set", "model=vgg"], "model must be one of"),
    (["run", "fedmap", "--set", "model=cnn"], "model cnn needs images of at least 16×16"),
    (["run", "fedmap", "--set", "device=cuda:9"], "device 'cuda:9' was not found"),
    (["run", "fedmap", "--set", "fraction_train=0"], "fraction_train must be in (0, 1], got 0"),
    (["run", "fedmap", "--set", "download=maybe"], "download must be true or false, got 'maybe'"),
    (["compare", "fedmap", "fedavg", "--set", "xi=1"], "has no setting 'xi'"),
    (
        ["run", "fedmap", "--rounds", "2.5"],
        "'2.5' is not a valid integer. See bayflower run --help",
    ),
    (["run", "fedmap", "--roundz", "2"], "No such option '--roundz'"),
    (["run"], "Missing argument 'METHOD'"),
    (["runn"], "No such command 'runn'. Did you mean 'run'? See bayflower --help"),
]


def check_refusal(code: int, out: str, err: str, text: str) -> None:
    assert code == 2
    assert out == ""
    assert len(err.strip().splitlines()) == 1, err
    assert text in err
    assert err.startswith("bayflower: ")


@pytest.mark.parametrize(("words", "text"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_bad_settings_end_with_one_line_and_code_2(tmp_path, words, text, monkeypatch, capsys):
    """In this process, to save the time of importing torch twenty times; two of them in one of
    their own below.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bayflower", *words])
    # it changes logging for the whole process
    for module in (cli.run, cli.compare):
        monkeypatch.setattr(module, "quiet_logs", lambda verbose: None)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    check_refusal(stopped.value.code, *capsys.readouterr(), text)


@pytest.mark.parametrize(
    ("start", "words", "text"),
    [(bayflower, *BAD[0]), pytest.param(alone, *BAD[3], marks=pytest.mark.slow)],
)
def test_bad_settings_end_a_real_process(tmp_path, start, words, text):
    done = start(*words, cwd=tmp_path)
    check_refusal(done.returncode, done.stdout, done.stderr, text)


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_is_none_is_refused_from_python_too(tmp_path, port):
    with pytest.raises(ConfigError, match=re.escape(f"port must be in [0, 65535], got {port}")):
        Flower("deployment", 2, tmp_path, port=port)


def test_bad_data_files_end_with_one_line_and_code_2(tmp_path):
    for name, text in wrong_data(tmp_path).items():
        done = bayflower("run", "fedavg", "--dataset", str(tmp_path / f"{name}.npz"), cwd=tmp_path)
        assert done.returncode == 2, (name, done.stderr)
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
        assert text in done.stderr


def test_lists_for_people_and_programs():
    assert (
        next(row["name"] for row in json.loads(bayflower("methods", "--json").stdout)) == "fedmap"
    )
    settings = {
        row["name"]: row for row in json.loads(bayflower("settings", "fedmap", "--json").stdout)
    }
    assert settings["sigma2"]["meaning"].startswith("variance of the prior")
    assert all(row["meaning"] for row in settings.values())
    assert "cnn" in bayflower("models").stdout
    assert "Example" in bayflower("run", "--help").stdout
    assert bayflower("version").stdout.strip() == "0.1.0"


def test_an_out_folder_that_cannot_be_made_is_found_before_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    done = bayflower("run", "fedmap", *QUICK, "--out", str(tmp_path / "file" / "below"))
    assert done.returncode == 2
    assert "cannot be made" in done.stderr
