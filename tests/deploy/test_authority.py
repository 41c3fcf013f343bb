"""Certificates of an authority elsewhere, whose key is never in the deployment's folder."""

from __future__ import annotations

import datetime
import shutil
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID
from handshake import accepted
from typer.testing import CliRunner

from bayflower import cli
from bayflower.deploy import folders, keys, layout, outside
from bayflower.errors import ConfigError

HOST = "fl.example.org"


class House:
    """A hospital's authority: a root with an RSA key, and one below it that signs requests."""

    def __init__(self) -> None:
        self.root_key = rsa.generate_private_key(65537, 2048)
        self.root = self.authority("root", self.root_key.public_key(), "root", self.root_key)
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.between = self.authority("between", self.key.public_key(), "root", self.root_key)

    def name(self, text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def authority(self, who, public, by, signer) -> x509.Certificate:
        made = keys.builder(self.name(who), self.name(by), public, 300)
        return made.add_extension(x509.BasicConstraints(True, None), True).sign(
            signer, hashes.SHA256()
        )

    def sign(self, asked: Path, signed: Path, days: int = 30, names: list[str] | None = None):
        """Sign all requests of a folder, as openssl or a module would."""
        signed.mkdir()
        for path in asked.glob("*.csr"):
            request = x509.load_pem_x509_csr(path.read_bytes())
            assert request.is_signature_valid
            made = keys.builder(
                request.subject, self.between.subject, request.public_key(), max(days, 1)
            )
            if days < 1:
                made = made.__class__(
                    request.subject, self.between.subject, request.public_key()
                ).serial_number(7)
                now = datetime.datetime.now(datetime.UTC)
                made = made.not_valid_before(now - datetime.timedelta(days=9))
                made = made.not_valid_after(now - datetime.timedelta(days=1))
            known = request.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            chosen = known if names is None else keys.general_names(names)
            made = made.add_extension(x509.SubjectAlternativeName(list(chosen)), False)
            own = made.sign(self.key, hashes.SHA256())
            (signed / f"{path.stem}.crt").write_bytes(keys.pem(own) + keys.pem(self.between))


@pytest.fixture(scope="module")
def house() -> House:
    return House()


@pytest.fixture
def made(tmp_path, house) -> layout.Deployment:
    (tmp_path / "root.pem").write_bytes(keys.pem(house.root))
    return folders.init(tmp_path / "fed", clients=2, hosts=[HOST], days=20)


def command(*words: object) -> str:
    done = CliRunner().invoke(cli.app, ["deploy", *map(str, words)])
    if done.exception:
        raise done.exception
    return done.output


def test_machine_by_machine_another_authority_takes_over(made, house, tmp_path):
    """Each machine has only its own folder. At no time is a client shut out whose folder trusts the
    new authority already; in the end the old one is trusted by nobody.
    """
    old = shutil.copy(made.folder / "client-0" / "ca.crt", tmp_path / "old.crt")
    machines = [made.folder / "client-0", made.folder / "client-1", made.folder / "server"]
    for only in (False, True):
        for folder in machines:
            private = {path: path.read_bytes() for path in folder.glob("*.key")}
            out, signed = (
                tmp_path / f"asked-{folder.name}-{only}",
                tmp_path / f"{folder.name}-{only}",
            )
            command("requests", folder, out)
            assert not [path for path in out.iterdir() if b"PRIVATE" in path.read_bytes()]
            assert all(path.read_bytes() == content for path, content in private.items())
            house.sign(out, signed)
            words = ["--authority", tmp_path / "root.pem", *(["--only"] if only else [])]
            command("accept", folder, signed, *words)
            assert not list(folder.glob("*.next.key"))
            for path in folder.glob("*.key"):
                assert stat.S_IMODE(path.stat().st_mode) == 0o600
                changed = path.read_bytes() != private[path]
                assert changed == (path.name != "node.key")
            assert accepted(made.server, made.folder / "client-0" / "ca.crt")
    assert accepted(made.server, tmp_path / "root.pem")
    assert not accepted(made.server, old)
    for folder in machines:
        assert (folder / "ca.crt").read_bytes() == keys.pem(house.root)
    assert HOST in keys.names_of(made.server / "gate.crt")
    assert "superlink" not in keys.names_of(made.server / "gate.crt")


def test_what_cannot_be_used_is_refused_and_changes_nothing(made, house, tmp_path):
    server = layout.read(made.server)
    root = tmp_path / "root.pem"
    before = {path: path.read_bytes() for path in made.server.rglob("*") if path.is_file()}

    def refused(signed: Path, words: str, authority: Path = root) -> None:
        with pytest.raises(ConfigError, match=words):
            outside.accept(server, signed, authority, only=True)
        for path, content in before.items():
            assert path.read_bytes() == content

    refused(tmp_path, "no certificate was asked for")
    outside.requests(server, tmp_path / "first")
    house.sign(tmp_path / "first", tmp_path / "early")
    with pytest.raises(ConfigError, match="is not overwritten"):
        outside.requests(server, tmp_path / "first")
    outside.requests(server, tmp_path / "asked")
    refused(tmp_path / "early", "is not for the key")
    house.sign(tmp_path / "asked", tmp_path / "ended", days=0)
    refused(tmp_path / "ended", "is not valid now")
    house.sign(tmp_path / "asked", tmp_path / "other", names=["else.example.org"])
    refused(tmp_path / "other", rf"is not for .*{HOST}")
    house.sign(tmp_path / "asked", tmp_path / "good")
    refused(tmp_path / "good", "does not lead to the given authority", made.server / "ca.crt")
    half = tmp_path / "half"
    shutil.copytree(tmp_path / "good", half)
    (half / "server.crt").unlink()
    refused(half, "server.crt has no certificate")
    bare = x509.load_pem_x509_certificates((tmp_path / "good" / "gate.crt").read_bytes())[0]
    (half / "server.crt").write_bytes((tmp_path / "good" / "server.crt").read_bytes())
    (half / "gate.crt").write_bytes(keys.pem(bare))  # without the one between
    refused(half, "does not lead to the given authority")
    # one that is no authority cannot be in a chain
    leaf = x509.load_pem_x509_certificates((tmp_path / "good" / "server.crt").read_bytes())[0]
    assert not outside.issued(leaf, leaf)
    outside.accept(server, tmp_path / "good", root, only=True)
    assert accepted(made.server, root)


def test_without_the_key_renew_says_what_to_do(made):
    (made.folder / "ca" / "ca.key").unlink()
    with pytest.raises(ConfigError, match="bayflower deploy requests"):
        folders.renew(made, 10)
