"""doctor, cite and tracking: what they say is so."""

from __future__ import annotations

import json
import re
import socket
import sys
import types
from importlib import metadata

import pytest
import torch
from conftest import small_prepared

from bayflower import cli, methods
from bayflower.api import progress as api_progress
from bayflower.cli import cite, doctor, terminal
from bayflower.engines import execute
from bayflower.errors import ConfigError
from bayflower.files import tracking


def said(monkeypatch, capsys, *words: str, code: int = 0) -> str:
    monkeypatch.setattr(sys, "argv", ["bayflower", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert (end.value.code or 0) == code
    return capsys.readouterr().out


# -- doctor --------------------------------------------------------------------------------------
def test_doctor_finds_what_is_there(tmp_path, monkeypatch, capsys):
    (tmp_path / "heart.npz").write_bytes(b"")
    (tmp_path / "FashionMNIST").mkdir()
    content = json.loads(said(monkeypatch, capsys, "doctor", "--data-dir", str(tmp_path), "--json"))
    found = {one["what"]: one for one in content["findings"]}
    assert content["ok"]
    assert found["torch"]["seen"] == metadata.version("torch")
    assert found["flwr"]["state"] == "ok"
    assert found["data: heart"]["seen"] == str(tmp_path / "heart.npz")
    assert found["data: fmnist"]["state"] == "ok"
    assert found["data: cifar10"] == {
        "what": "data: cifar10",
        "state": "missing",
        "seen": f"not in {tmp_path}",
        "remedy": "set download=true once",
    }
    assert ("cuda:0" in found) == torch.cuda.is_available()
    assert "data: heart" in said(monkeypatch, capsys, "doctor", "--data-dir", str(tmp_path))


def test_doctor_says_how_a_network_is_trained(tmp_path, monkeypatch, capsys):
    (tmp_path / "mynets.py").write_text(
        "import torch\nfrom torch import nn\n\n\n"
        "class Text(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.words, self.body = nn.Embedding(9, 4), nn.GRU(4, 4, 2, dropout=0.1)\n"
        "        self.fc = nn.Linear(4, 3)\n\n"
        "    def forward(self, x):\n"
        "        return self.fc(self.body(self.words(x.long()).transpose(0, 1))[0][-1])\n\n\n"
        "class Peeks(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.fc = nn.Linear(5, 3)\n\n"
        "    def forward(self, x):\n"
        "        return self.fc(x) * (2.0 if x.abs().max().item() > 1e9 else 1.0)\n"
    )
    monkeypatch.chdir(tmp_path)

    def about(*more, code=0):
        call = ("doctor", "--data-dir", str(tmp_path), "--json", *more)
        content = json.loads(said(monkeypatch, capsys, *call, code=code))
        return {one["what"]: one for one in content["findings"] if "model" in one["what"]}

    text = about("--model", "mynets:Text", "--input", "5", "--words", "9")
    assert {one["state"] for one in text.values()} == {"ok"}
    assert "trained in stacks" in text["model: mynets:Text"]["seen"]
    assert "follow from the seed" in text["model: random layers"]["seen"]
    peeks = about("--model", "mynets:Peeks", "--input", "5")
    assert peeks["model: mynets:Peeks"]["state"] == "missing"
    assert "one by one: it reads a number out of a tensor" in peeks["model: mynets:Peeks"]["seen"]
    assert peeks["model: random layers"]["seen"] == "none"
    ours = about("--model", "lenet5", "--input", "1x28x28")
    assert "61,706 parameters; clients are trained in stacks" in ours["model: lenet5"]["seen"]
    for wrong, text in (
        (("--model", "mynets:Nobody", "--input", "5"), "cannot be imported"),
        (("--model", "mynets:Text", "--input", "five"), "shape of one sample"),
    ):
        monkeypatch.setattr(sys, "argv", ["bayflower", "doctor", *wrong])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert end.value.code == 2
        assert text in capsys.readouterr().err


@pytest.mark.parametrize(("stacked", "text"), [(0, "(one by one)"), (7, "(7 clients in a stack)")])
def test_the_progress_line_says_how_clients_are_trained(monkeypatch, capsys, stacked, text):
    monkeypatch.setattr(api_progress, "LINE_SECONDS", -1.0)
    with terminal.bar(3, "FedAvg", hidden=False) as update:
        update([{"round": 1, "train_loss": 0.5, "stacked": stacked}])
    assert capsys.readouterr().out == f"FedAvg: round 1 of 3, loss 0.5000  {text}\n"


def test_doctor_says_when_a_port_is_taken_and_when_no_engine_answers(monkeypatch, tmp_path):
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        port = one.getsockname()[1]
        assert doctor.free_port(port).state == "missing"
    assert doctor.free_port(port).state == "ok"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.docker().seen == "no docker program"
    program = tmp_path / "docker"
    program.write_text("#!/bin/sh\necho 'Cannot connect to the Docker daemon' >&2\nexit 1\n")
    program.chmod(0o755)
    assert doctor.docker() == (
        "docker",
        "missing",
        "Cannot connect to the Docker daemon",
        "start the Docker engine",
    )
    program.write_text("#!/bin/sh\necho 27.1\n")
    assert doctor.docker() == ("docker", "ok", "engine 27.1", "")


def test_doctor_reads_certificates_and_keys(tmp_path, monkeypatch, capsys):
    from bayflower.deploy import keys

    authority = keys.make_authority(tmp_path, "test", 400)
    keys.make_certificate(authority, tmp_path, "server", ["localhost"], 10)
    found = {one.what.rsplit("/", 1)[-1]: one for one in doctor.certificates(tmp_path)}
    assert found["server.crt"].state == "missing"
    assert "9 days" in found["server.crt"].seen or "10 days" in found["server.crt"].seen
    assert all(one.state != "wrong" for one in found.values())
    key = next(tmp_path.glob("**/server.key"))
    key.chmod(0o644)
    assert f"others can read this key (mode 644) chmod 600 {key}" in " ".join(
        f"{one.seen} {one.remedy}" for one in doctor.certificates(tmp_path) if one.state == "wrong"
    )
    said(monkeypatch, capsys, "doctor", "--deployment", str(tmp_path), code=1)
    next(tmp_path.glob("**/server.crt")).write_text("nonsense")
    assert any("cannot be read" in one.seen for one in doctor.certificates(tmp_path))
    assert doctor.certificates(tmp_path / "nothing")[0].state == "missing"


# -- cite ----------------------------------------------------------------------------------------
def test_every_method_can_be_cited(monkeypatch, capsys):
    for row in methods.ROWS:
        keys = [entry[1] for entry in cite.entries([row.name])]
        entry = cite.entry_of(row)
        assert (
            (entry is not None and entry[1] in keys)
            if row.stem != "local"
            else keys == ["beutel2020flower", "bayflower"]
        )
    text = said(monkeypatch, capsys, "cite", "fedmap", "metavd")
    assert len(re.findall(r"^@\w+\{\w+,$", text, re.MULTILINE)) == 5
    assert text.count("{") == text.count("}")


def test_citations_agree_with_the_table_of_methods():
    """Years and arXiv numbers of the table are those of the entries."""
    for row in methods.ROWS:
        fields = (cite.entry_of(row) or ("", "", {}))[2]
        fields = {**dict(re.findall(r"(\w+) = \{([^}]*)\}", fields.get(cite.RAW, ""))), **fields}
        for year in re.findall(r"\b(20\d\d)\b,? ", row.paper + " "):
            assert fields["year"] == year, row.name
        for number in re.findall(r"arXiv (\d+\.\d+)", row.paper):
            assert fields["eprint"] == number, row.name


def test_a_run_is_cited_with_its_data(tmp_path, monkeypatch, capsys):
    (tmp_path / "result.json").write_text(json.dumps({"method": "pfedvmp", "dataset": "cifar100"}))
    keys = [
        entry["key"]
        for entry in json.loads(said(monkeypatch, capsys, "cite", str(tmp_path), "--json"))
    ]
    assert keys == ["pfedvmp", "krizhevsky2009cifar", "beutel2020flower", "bayflower"]
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not the result of a run"):
        cite.entries([str(tmp_path)])


# -- tracking ------------------------------------------------------------------------------------
def test_every_number_of_every_round_is_tracked_once_under_its_round():
    seen: list[tuple[int, dict]] = []
    outcome = execute(
        small_prepared("fedmap", "loop", rounds=3),
        tracking.each_round(lambda *one: seen.append(one)),
    )
    together: dict[int, dict] = {}
    for round, numbers in seen:
        assert not together.get(round, {}).keys() & numbers.keys()
        together.setdefault(round, {}).update(numbers)
    for record in outcome.rounds:
        assert together[record["round"]] == {
            name: value for name, value in tracking.flat(record).items() if name != "round"
        }
    assert all("personal/accuracy" in numbers for numbers in together.values())


def test_tensorboard_files_have_the_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tracking.TensorBoard(tmp_path) as board:
        outcome = execute(small_prepared("fedavg", "fused", rounds=2), tracking.each_round(board))
    events = EventAccumulator(str(tmp_path)).Reload()
    for name in ("train_loss", "personal/accuracy"):
        want = [(record["round"], tracking.flat(record)[name]) for record in outcome.rounds]
        assert [(one.step, pytest.approx(one.value)) for one in events.Scalars(name)] == want


def test_without_tensorboard_a_line_says_what_to_install(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'bayflower\[tensorboard\]'"):
        tracking.TensorBoard(tmp_path)


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_the_recipes_reach_their_services(package, monkeypatch, tmp_path):
    """The blocks of docs/tracking.md with fakes of wandb and mlflow: every round arrives, steps
    never go back.
    """
    from test_docs import blocks
    from usernet import Net, load

    calls: list[tuple[int, dict]] = []
    fake = types.ModuleType(package)
    fake.init = fake.start_run = lambda **_: None
    fake.log = fake.log_metrics = lambda numbers, step: calls.append((step, numbers))
    monkeypatch.setitem(sys.modules, package, fake)
    (text,) = [
        text
        for language, text in blocks("docs/tracking.md")
        if language == "python" and f"import {package}" in text
    ]
    space: dict = {}
    exec(compile(text, package, "exec"), space)
    assert (
        len(
            [
                line
                for line in text.splitlines()
                if package in line and not line.startswith("import")
            ]
        )
        == 2
    )
    from flwr.app import ArrayRecord

    from bayflower.clients import make_client_app
    from bayflower.flower.loop import InProcessGrid, contexts

    app = make_client_app("fedmap", model=Net, data=load, export=(), state=tmp_path)
    space["strategy"].start(
        InProcessGrid(app, contexts(range(2))), ArrayRecord(Net().state_dict()), num_rounds=2
    )
    steps = [step for step, _ in calls]
    assert steps == sorted(steps)
    assert {"train_loss", "bytes_up"} <= set(calls[0][1])
    assert any("personal/accuracy" in numbers for step, numbers in calls if step == 2)
