"""What keeps a federation alive for years: an authority that is followed by another, backups whose
parts belong together, encryption at rest, and a list of the software.
"""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path

import pytest
import torch
import yaml
from conftest import assert_same_bits, small_prepared
from handshake import accepted
from town import FAST
from typer.testing import CliRunner

from bayflower import cli
from bayflower.deploy import backup, folders, keys, layout
from bayflower.errors import BayflowerError, ConfigError
from bayflower.files import atomic, checkpoint, vault
from bayflower.files.store import DiskStore, Saved
from bayflower.flower import records
from bayflower.flower.loop import InProcessGrid, contexts, federation_app, make_strategy

SECRET = b"\x01" * 32


# -- the authority ---------------------------------------------------------------------------------
def test_a_new_authority_overlaps_the_old_one(tmp_path):
    """At no time is a machine left out whose ca.crt was replaced before the server's
    certificate.
    """
    made = folders.init(tmp_path / "fed", clients=2, hosts=["fl.example.org"], days=20)
    old = shutil.copy(made.folder / "client-0" / "ca.crt", tmp_path / "old.crt")
    with pytest.raises(ConfigError, match=r"expires in .* days.*bayflower deploy rollover DIR"):
        folders.renew(made, 400)
    with pytest.raises(ConfigError, match="longer than 10 days"):
        folders.rollover(made, 10)
    folders.rollover(made, 800)
    both = made.folder / "client-0" / "ca.crt"
    assert accepted(made.server, old)
    assert accepted(made.server, both)
    folders.renew(made, 700)
    assert accepted(made.server, both)
    assert not accepted(made.server, old)
    assert keys.expiry(made.server / "server.crt") > keys.expiry(old)
    assert both.read_text().count("BEGIN CERTIFICATE") == 2
    assert stat.S_IMODE((made.folder / "ca" / "ca.key").stat().st_mode) == 0o600
    # an authority that has expired goes out of every ca.crt
    ended = (made.folder / "ca" / "bundle.pem").read_text()
    elsewhere = tmp_path / "ended"
    elsewhere.mkdir()
    keys.make_authority(elsewhere, "ended", 0)  # valid until now
    keys.replace_file(
        made.folder / "ca" / "bundle.pem", ended + keys.first_pem(elsewhere / "ca.crt")
    )
    folders.renew(made, 600)
    assert both.read_text() == ended


# -- encryption at rest ----------------------------------------------------------------------------
@pytest.fixture
def key(tmp_path, monkeypatch) -> Path:
    path = tmp_path / "state.key"
    path.write_text(SECRET.hex() + "\n")
    monkeypatch.setenv(vault.VARIABLE, str(path))
    return path


def test_states_and_personal_models_are_encrypted(tmp_path, key, monkeypatch):
    """No number of a state is on the disk; each damaged byte, another key and none are refused."""
    state = {"w": torch.full((50,), 1234.5)}
    disk = DiskStore(tmp_path / "state")
    disk.save("run", 0, Saved(1, "", state, {}, {}, {}))
    path = tmp_path / "state" / "run" / "client-0" / "round-1.safetensors"
    content = path.read_bytes()
    assert content.startswith(vault.MAGIC)
    assert state["w"].numpy().tobytes()[:8] not in content
    assert b"state/w" not in content
    assert_same_bits(disk.load("run", 0)[0].state, state)
    for place in range(len(vault.MAGIC), len(content), 37):
        hurt = bytearray(content)
        hurt[place] ^= 1
        with pytest.raises(BayflowerError, match="cannot be decrypted"):
            vault.opened(bytes(hurt), "it")
    key.write_text((b"\x02" * 32).hex())
    with pytest.raises(BayflowerError, match="encrypted with another key"):
        atomic.load_tensors(path, "x", "client state")
    key.write_text("short")
    with pytest.raises(ConfigError, match="64 hexadecimal digits; make one with: openssl rand"):
        disk.save("run", 0, Saved(2, "", state, {}, {}, {}))
    monkeypatch.delenv(vault.VARIABLE)
    with pytest.raises(ConfigError, match=f"is encrypted; name its key file in {vault.VARIABLE}"):
        disk.load("run", 0)  # and the file is not renamed
    assert path.read_bytes() == content
    disk.save("plain", 0, Saved(1, "", state, {}, {}, {}))
    monkeypatch.setenv(vault.VARIABLE, str(key))
    key.write_text(SECRET.hex())
    assert_same_bits(disk.load("plain", 0)[0].state, state)  # written before there was a key


@pytest.mark.parametrize("length", [0, 1, 6, 7, 8, 20])
def test_parts_of_a_large_file_cannot_be_left_out_or_moved(key, monkeypatch, length):
    monkeypatch.setattr(vault, "PART", 7)
    content = bytes(range(length))
    made = vault.seal(content, SECRET)
    assert vault.opened(made, "it") == content
    assert vault.seal(content, SECRET) != made
    head = len(vault.MAGIC) + vault.SALT
    cut = made[: head + 8 + 7 + 16]  # the first part alone
    if length > 7:
        second = made[head + 31 : head + 62]
        for wrong in (cut, made[:head] + second + made[head : head + 31], made[:head]):
            with pytest.raises(BayflowerError, match="cannot be decrypted"):
                vault.opened(wrong, "it")


def test_clients_of_a_deployment_get_a_key_each(tmp_path, key):
    made = folders.init(tmp_path / "fed", clients=2, encrypt=True)
    secrets = [(made.folder / f"client-{k}" / layout.STATE_KEY) for k in range(2)]
    assert len({path.read_text() for path in secrets}) == 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in secrets} == {0o600}
    services = yaml.safe_load((made.folder / "compose.yaml").read_text())["services"]
    assert services["clientapp-0"]["environment"] == {vault.VARIABLE: "/client/state.key"}
    assert "./client-0/state.key:/client/state.key:ro" in services["clientapp-0"]["volumes"]
    assert not any("state.key" in line for line in services["supernode-0"]["volumes"])
    atomic.save_tensors(tmp_path / "a.safetensors", {"w": torch.ones(3)}, {"format": "f"})
    words = ["deploy", "decrypt", str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")]
    assert CliRunner().invoke(cli.app, words).exit_code == 0
    assert not vault.is_sealed((tmp_path / "b.safetensors").read_bytes())
    assert atomic.load_tensors(tmp_path / "b.safetensors", "f", "file")[0]["w"].sum() == 3


# -- backups ---------------------------------------------------------------------------------------
class Sites(DiskStore):
    """The states of each client in its own folder of a deployment."""

    def folder(self, run: str, client: int) -> Path:
        return self.root / f"client-{client}" / "state" / run / f"client-{client}"


@pytest.mark.slow
def test_a_backup_brings_server_and_clients_back_to_one_round(tmp_path):
    """After a backup of round 2 the run goes on to round 5. Restored, it goes on from round 2 to
    the same bits, without a fault. Parts that do not belong together are refused.
    """
    made = folders.init(tmp_path / "fed", clients=2)
    results = made.folder / "local" / "results"
    prepared = small_prepared("fedper", **{**FAST, "rounds": 5, "num_clients": 2})
    run, federation, halves = prepared.run, prepared.federation, prepared.halves
    disk, everyone = Sites(made.folder), contexts(data.client for data in federation.clients)
    initial = records.to_arrays({**halves.initial[0], **halves.initial[1]})

    def go(rounds, start=None):
        def save(s, round, forced):
            known = (s.records, s.faults, s.roster.memory())
            content = checkpoint.make(run, s.run, round, s.state, {}, *known)
            checkpoint.write(results / "one", content)

        strategy = make_strategy(run, after_round=save, resume=start)
        grid = InProcessGrid(federation_app(run, federation, halves, disk), everyone)
        strategy.start(grid, initial, num_rounds=rounds)
        return strategy

    go(2)
    (results / "nodes.json").write_text("{}")
    content = backup.backup(made, tmp_path / "two", local=True)
    name = checkpoint.read(results / "one").run
    clients = {"0": [1, 2], "1": [1, 2]}
    assert content["runs"] == {"one": {"run": name, "round": 2, "clients": clients}}
    first = go(5, checkpoint.to_resume(results / "one", run))
    assert first.faults == []

    aside = tmp_path / "two" / "client-0" / "state"
    mixed = made.folder / "client-0" / "state"
    shutil.move(mixed, tmp_path / "five")
    shutil.copytree(aside, mixed)  # client 0 of round 2, the server of round 5
    with pytest.raises(BayflowerError, match="client 0 has no state of round 5 as the server's"):
        backup.backup(made, tmp_path / "mixed", local=True)
    shutil.rmtree(mixed)
    shutil.move(tmp_path / "five", mixed)

    with pytest.raises(ConfigError, match="are running; stop them first"):
        backup.restore(made, tmp_path / "two", local=True, running=True)
    said: list[str] = []
    backup.restore(made, tmp_path / "two", local=True, note=said.append)
    assert len(said) == 3
    assert (made.folder / "client-0" / "state-before-1").exists()
    again = go(5, checkpoint.to_resume(results / "one", run))
    assert again.faults == []
    assert_same_bits(again.state, first.state)

    file = next((tmp_path / "two").rglob("round-2.safetensors"))
    file.write_bytes(file.read_bytes() + b" ")
    with pytest.raises(BayflowerError, match="is not as it was saved; use another backup"):
        backup.restore(made, tmp_path / "two", local=True)


# -- software --------------------------------------------------------------------------------------
def test_the_software_is_listed(tmp_path):
    out = tmp_path / "sbom.json"
    assert CliRunner().invoke(cli.app, ["deploy", "sbom", str(out)]).exit_code == 0
    found = json.loads(out.read_text())
    known = {one["name"].lower(): one for one in found["components"]}
    assert found["bomFormat"] == "CycloneDX"
    assert known["torch"]["purl"] == f"pkg:pypi/torch@{known['torch']['version']}"
    assert {"flwr", "cryptography", "safetensors"} <= set(known)
