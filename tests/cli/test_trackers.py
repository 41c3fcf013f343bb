"""MLflow and Weights & Biases in their local modes: a database in a folder, files of an offline
run. The tests are skipped where the libraries are not installed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from test_tools import said

from bayflower.errors import ConfigError
from bayflower.files.trackers import Wanted, located
from bayflower.files.tracking import flat

WORK = ["--clients=2", "--set=keep=0.1", "--set=local_epochs=1", "--set=calibration=off"]
WORK += ["--set=device=cpu", "--set=checkpoint_every=1", "--set=evaluate_every=1"]
# importing the libraries warns, and that is theirs
pytestmark = pytest.mark.filterwarnings("ignore")


def needs(name: str) -> None:
    """Skip a test whose library is not there."""
    pytest.importorskip(
        name,
        reason=f"{name} is not installed: pip install 'bayflower[{name}]'",
        exc_type=ImportError,
    )


def result(folder: str) -> dict:
    return json.loads(Path(folder, "result.json").read_text())


@pytest.mark.parametrize("name", ["mlflow", "wandb", "tensorboard"])
def test_a_missing_library_is_one_line_before_anything_starts(name, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"pip install 'bayflower\[{name}\]'"):
        Wanted(**{name: True if name == "tensorboard" else "x"}).check()


def test_options_are_handed_on_and_folders_become_databases(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert located("http://h:5000") == "http://h:5000"
    assert located("runs/m") == f"sqlite:///{tmp_path}/runs/m/mlflow.db"
    words = Wanted(True, "runs/m", "p", "study").words()
    assert words == [
        *("--tensorboard", "--mlflow", f"sqlite:///{tmp_path}/runs/m/mlflow.db"),
        *("--wandb", "p", "--track-group", "study"),
    ]
    assert Wanted(group="study").words() == []


@pytest.mark.slow
def test_mlflow_has_numbers_settings_tags_and_files(tmp_path, monkeypatch, capsys):
    needs("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.chdir(tmp_path)
    words = ["--out", "one", "--mlflow", "track", *WORK]
    said(monkeypatch, capsys, "run", "fedmap", "--rounds=2", *words)
    client = MlflowClient(tracking_uri=located("track"))
    where = client.get_experiment_by_name("bayflower").experiment_id
    (run,) = client.search_runs([where])
    assert run.info.status == "FINISHED"
    assert run.data.tags["method"] == "fedmap"
    assert run.data.params["rounds"] == "2"
    assert run.data.params["sigma2"] == str(result("one")["config"]["sigma2"])
    # the same run goes on
    said(monkeypatch, capsys, "run", "fedmap", "--rounds=3", *words, "--resume")
    (again,) = client.search_runs([where])
    assert again.info.run_id == run.info.run_id
    rounds = result("one")["rounds"]
    for name in ("train_loss", "personal/accuracy", "bytes_up"):
        history = client.get_metric_history(run.info.run_id, name)
        want = [(one["round"], pytest.approx(flat(one)[name])) for one in rounds]
        assert sorted((one.step, one.value) for one in history) == want
    final = result("one")["final"]["personal"]["accuracy"]
    assert again.data.metrics["final/personal/accuracy"] == pytest.approx(final)
    assert {one.path for one in client.list_artifacts(run.info.run_id)} == {
        *("result.json", "report.html")
    }
    # runs of a study are runs of their own
    words = ["--seeds=2", "--rounds=1", "--out=study", "--mlflow=track", "--jobs=1", *WORK]
    said(monkeypatch, capsys, "compare", "fedavg", "local", *words)
    found = client.search_runs([where], "tags.`group` = 'study'")
    assert {(one.data.tags["method"], one.data.tags["seed"]) for one in found} == {
        (method, seed) for method in ("fedavg", "local") for seed in ("0", "1")
    }
    assert {one.info.status for one in found} == {"FINISHED"}


def offline(folder: Path) -> list[dict]:
    """Return what the files of an offline run hold, record by record."""
    from google.protobuf.json_format import MessageToDict
    from wandb.proto import wandb_internal_pb2

    found = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in logged(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            found.append(MessageToDict(record, preserving_proto_field_name=True))
    return found


def logged(text: bytes, block: int = 32768, head: int = 7) -> list[bytes]:
    """Return the records of a log in LevelDB's format: in blocks, parts with checksum, length and
    kind (1 = whole, 2 = first, 3 = middle, 4 = last), after a header of the file.
    """
    found, at, parts = [], head, b""
    while at + head <= len(text):
        if block - at % block < head:  # what is left of a block is filled up
            at += block - at % block
            continue
        size, kind = int.from_bytes(text[at + 4 : at + 6], "little"), text[at + 6]
        parts += text[at + head : at + head + size]
        at += head + size
        if kind in (1, 4):
            found.append(parts)
            parts = b""
    return found


@pytest.mark.slow
def test_weights_and_biases_have_numbers_settings_tags_and_files(tmp_path, monkeypatch, capsys):
    needs("wandb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    words = ["--out", "one", "--wandb", "tries", *WORK]
    said(monkeypatch, capsys, "run", "fedmap", "--rounds=2", *words)
    said(monkeypatch, capsys, "run", "fedmap", "--rounds=3", *words, "--resume")
    records = offline(tmp_path / "one")
    runs = [one["run"] for one in records if "run" in one]
    assert len({run["run_id"] for run in runs}) == 1  # the same run went on
    assert runs[0]["project"] == "tries"
    assert "fedmap" in runs[0]["tags"]
    config = {item["key"]: item["value_json"] for item in runs[0]["config"]["update"]}
    assert config["rounds"] == "2"
    losses: dict[int, float] = {}
    for one in records:
        items = one.get("history", {}).get("item", [])
        row = {
            item.get("key") or "/".join(item["nested_key"]): json.loads(item["value_json"])
            for item in items
        }
        if "train_loss" in row:
            losses[row["round"]] = row["train_loss"]
    want = {one["round"]: pytest.approx(one["train_loss"]) for one in result("one")["rounds"]}
    assert losses == want
    assert any("artifact" in json.dumps(list(one)) for one in records)
    assert Path("one/report.html").exists()


@pytest.mark.slow
def test_without_a_login_a_line_says_what_to_do(monkeypatch, tmp_path):
    needs("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    sys.modules.pop("wandb.api", None)
    with pytest.raises(ConfigError, match=r"wandb login, or .* WANDB_MODE=offline"):
        Wanted(wandb="x").check()
