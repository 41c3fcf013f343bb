"""`bayflower deploy`: what init makes and refuses; the rest, with Flower's programs over TLS, is
marked flower.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from prefork import bayflower
from typer.testing import CliRunner

from bayflower import cli
from bayflower.deploy import compose, folders, keys, layout
from bayflower.errors import ConfigError

ROOT = Path(__file__).parents[2]


def private(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.suffix in (".key", ".secret")]


# -- init ----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def several(tmp_path_factory) -> Path:
    """A deployment for several machines."""
    folder = tmp_path_factory.mktemp("several") / "fed"
    folders.init(folder, clients=2, hosts=["fl.example.org", "192.0.2.7"], days=10)
    return folder


def test_each_machine_gets_what_it_needs_and_no_more(several):
    server = {
        "deployment.json",
        "compose.yaml",
        "ca.crt",
        "server.crt",
        "server.key",
        "gate.crt",
        "gate.key",
        "executor.secret",
        "nodes",
    }
    client = {
        "deployment.json",
        "compose.yaml",
        "ca.crt",
        "node.key",
        "node.pub",
        "runtime.crt",
        "runtime.key",
        "executor.secret",
        "data",
        "policy.toml",
    }
    assert {path.name for path in (several / "server").iterdir()} == server
    for k in range(2):
        assert {path.name for path in (several / f"client-{k}").iterdir()} == client
    assert {path.name for path in several.iterdir()} == {
        "ca",
        "server",
        "client-0",
        "client-1",
        "deployment.json",
    }


def test_private_keys_are_their_owners_alone_and_in_one_place(several):
    found = private(several)
    assert len(found) == 1 + 3 + 2 * 3
    for path in found:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    contents = [path.read_bytes() for path in found]
    assert len(set(contents)) == len(contents)
    public = b"".join(
        path.read_bytes() for path in several.rglob("*") if path.is_file() and path not in found
    )
    assert b"PRIVATE" not in public
    assert not any(content in public for content in contents)


def test_a_key_is_never_readable_while_it_is_written(tmp_path, monkeypatch):
    """The mode is given when the file is made, not afterwards."""
    modes = []
    opened = os.open
    monkeypatch.setattr(
        os,
        "open",
        lambda path, flags, mode=0o777: (modes.append(mode), opened(path, flags, mode))[1],
    )
    keys.new_file(tmp_path / "a.key", b"x", 0o600)
    assert modes == [0o600]


def test_the_certificate_is_for_the_names_clients_dial(several):
    assert {"fl.example.org", "192.0.2.7", "superlink", "gate", "localhost", "127.0.0.1"} <= set(
        keys.names_of(several / "server" / "server.crt")
    )
    gate = set(keys.names_of(several / "server" / "gate.crt"))
    assert {"fl.example.org", "192.0.2.7", "gate", "localhost"} <= gate
    assert "superlink" not in gate  # whoever has the gate's key cannot pose as the SuperLink
    authority = x509.load_pem_x509_certificate((several / "ca" / "ca.crt").read_bytes())
    server = x509.load_pem_x509_certificate((several / "server" / "server.crt").read_bytes())
    server.verify_directly_issued_by(authority)
    assert authority.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert 9 <= (server.not_valid_after_utc - server.not_valid_before_utc).days <= 10


def test_node_keys_are_what_flower_asks_for(several):
    key = serialization.load_ssh_private_key((several / "client-1" / "node.key").read_bytes(), None)
    public = serialization.load_ssh_public_key((several / "client-1" / "node.pub").read_bytes())
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert isinstance(key.curve, ec.SECP384R1)
    assert key.public_key() == public
    assert (several / "server" / "nodes" / "client-1.pub").read_bytes() == (
        several / "client-1" / "node.pub"
    ).read_bytes()


def test_nothing_is_overwritten(several):
    before = {path: path.read_bytes() for path in several.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="is not overwritten"):
        folders.init(several, clients=2)
    assert before == {path: path.read_bytes() for path in several.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--clients", "0"], "clients must be at least 1"),
        (["--hosts", "https://fl.example.org"], "neither a name nor an address"),
        (["--hosts", "fl.example.org:9092"], "neither a name nor an address"),
        (["--days", "0"], "days must be at least 1"),
        (["--port", "70000"], "port must be in"),
    ],
)
def test_init_refuses_with_a_remedy_and_leaves_nothing(tmp_path, words, text):
    done = bayflower("deploy", "init", str(tmp_path / "fed"), *words, cwd="/")
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert text in done.stderr
    assert not (tmp_path / "fed").exists()


def test_init_tells_the_expiry_and_what_comes_next(tmp_path):
    given = ("init", str(tmp_path / "fed"), "--clients", "1", "--days", "30")
    done = bayflower("deploy", *given, cwd="/")
    assert done.returncode == 0, done.stderr
    assert (
        f"valid until {keys.expiry(tmp_path / 'fed' / 'server' / 'server.crt'):%Y-%m-%d}"
        in done.stdout
    )
    assert "bayflower deploy up" in done.stdout


def test_certificates_are_renewed_under_the_same_authority_and_names(tmp_path):
    folders.init(tmp_path / "fed", clients=1, hosts=["fl.example.org"], days=40)
    made = layout.read(tmp_path / "fed")
    path, gate = made.server / "server.crt", made.server / "gate.crt"
    before = [path.read_bytes(), gate.read_bytes()]
    folders.renew(made, 20)
    assert path.read_bytes() != before[0]
    assert gate.read_bytes() != before[1]
    assert "superlink" not in keys.names_of(gate)
    assert "fl.example.org" in keys.names_of(path)
    x509.load_pem_x509_certificate(path.read_bytes()).verify_directly_issued_by(
        x509.load_pem_x509_certificate((tmp_path / "fed" / "ca" / "ca.crt").read_bytes())
    )
    assert stat.S_IMODE((made.server / "server.key").stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="the authority's own certificate expires"):
        folders.renew(made, 400)


def test_a_certificate_that_has_ended_is_refused_before_anything_starts(tmp_path, monkeypatch):
    folders.init(tmp_path / "fed", clients=1, days=1)
    import datetime

    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=3)
    for path in (tmp_path / "fed").rglob("*.crt"):
        assert keys.expiry(path) < later

    class Later(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return later

    monkeypatch.setattr("bayflower.cli.deployed.datetime.datetime", Later)
    done = CliRunner().invoke(cli.app, ["deploy", "up", str(tmp_path / "fed"), "--local"])
    assert isinstance(done.exception, ConfigError)
    assert "renew it" in str(done.exception)


# -- containers' file ----------------------------------------------------------------------------
def test_every_container_has_few_rights(several, tmp_path):
    folders.init(tmp_path / "one", clients=3)
    files = [tmp_path / "one" / "compose.yaml", *several.glob("*/compose.yaml")]
    assert len(files) == 4
    for file in files:
        content = yaml.safe_load(file.read_text())
        for name, service in content["services"].items():
            assert service["read_only"] is True, name
            assert service["cap_drop"] == ["ALL"], name
            assert service["security_opt"] == ["no-new-privileges:true"], name
            assert service["mem_limit"], name
            assert service["cpus"], name
            assert not service["user"].startswith("0"), name
            assert "privileged" not in service, name
            assert service["healthcheck"], name
            assert "--insecure" not in service["command"], name


def test_only_the_servers_own_containers_reach_the_superlink(tmp_path):
    """Whoever reaches it can start runs: Flower asks nobody who they are there."""
    folders.init(tmp_path / "one", clients=3)
    content = yaml.safe_load((tmp_path / "one" / "compose.yaml").read_text())
    near = {name for name, service in content["services"].items() if "core" in service["networks"]}
    assert near == {"superlink", "register", "gate", "serverapp"}
    assert content["networks"]["core"]["internal"] is True
    assert "ports" not in content["services"]["superlink"]


def test_the_gate_has_its_own_key_and_no_other(several):
    content = yaml.safe_load((several / "server" / "compose.yaml").read_text())
    seen = content["services"]["gate"]["volumes"]
    assert seen == [
        f"./{file}:/server/{file}:ro" for file in ("ca.crt", "gate.crt", "gate.key", "nodes")
    ]
    command = content["services"]["gate"]["command"]
    assert not any("server.key" in word or "secret" in word for word in command)


def test_app_code_sees_data_and_state_but_no_node_key(tmp_path):
    folders.init(tmp_path / "one", clients=2)
    services = yaml.safe_load((tmp_path / "one" / "compose.yaml").read_text())["services"]
    for k in range(2):
        seen = services[f"clientapp-{k}"]["volumes"]
        assert f"./client-{k}/data:/data:ro" in seen
        assert f"state-{k}:/state" in seen
        assert not any(
            "node.key" in volume or f"client-{1 - k}" in volume or f"state-{1 - k}" in volume
            for volume in seen
        )
        assert services[f"clientapp-{k}"]["networks"] == [f"client-{k}"]


def test_the_repositorys_compose_files_are_what_init_writes():
    build = {"context": "..", "dockerfile": "docker/Dockerfile"}
    plain = layout.Deployment(
        "bayflower", "all", 3, ("gate",), layout.PORT, f"bayflower:{compose.__version__}", "", ""
    )
    want = compose.content(
        plain,
        base="${BAYFLOWER_DEPLOYMENT:?make one with bayflower deploy init}",
        user="${BAYFLOWER_USER:-10001:10001}",
        build=build,
    )
    assert yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text()) == want
    assert yaml.safe_load((ROOT / "docker" / "insecure-trial.yaml").read_text()) == compose.trial(
        3, plain.image, build
    )
