"""Certificate authority, server certificates and node keys. Each private key is made in the folder
that needs it, readable by its owner only.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ..errors import BayflowerError, ConfigError

HOST = re.compile(
    r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,62}))*\.?"
)
EARLIER = datetime.timedelta(hours=1)  # tolerance for machines whose clock is behind


class Authority(NamedTuple):
    """A certificate authority in memory."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate


def new_file(path: Path, content: bytes, mode: int) -> None:
    """Write a new file; raise if it exists. It has its mode from the start."""
    try:
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        raise ConfigError(
            f"{path} exists already and is not overwritten; choose another folder, or remove it"
        ) from None
    with os.fdopen(number, "wb") as file:
        os.fchmod(number, mode)
        file.write(content)


def replace_file(path: Path, text: str) -> None:
    """Write a file that everyone may read; a reader sees the old content or the new one."""
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    new_file(part, text.encode(), 0o644)
    part.replace(path)


def check_hosts(hosts: Sequence[str]) -> list[str]:
    """Return the hosts if each is a name or an address without a port."""
    for host in hosts:
        if not (is_address(host) or HOST.fullmatch(host)):
            raise ConfigError(
                f"host {host!r} is neither a name nor an address; give it without https:// and "
                "without a port"
            )
    return list(hosts)


def is_address(host: str) -> bool:
    """Return whether `host` is an IPv4 or IPv6 address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def make_authority(folder: Path, name: str, days: int) -> Authority:
    """Return a new authority; its key and certificate are written to `folder`."""
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    certificate = (
        builder(subject, subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.KeyUsage(False, False, False, False, False, True, True, False, False),
            critical=True,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    new_file(folder / "ca.key", private_pem(key), 0o600)
    new_file(folder / "ca.crt", pem(certificate), 0o644)
    return Authority(key, certificate)


def load_authority(folder: Path) -> Authority:
    """Return the authority that `make_authority` wrote."""
    try:
        key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
        certificate = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    except (OSError, ValueError) as error:
        raise BayflowerError(
            f"the authority in {folder} cannot be read ({error}); restore it from a back-up"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise BayflowerError(
            f"{folder / 'ca.key'} is not a key made by Bayflower; restore it from a back-up"
        )
    return Authority(key, certificate)


def make_certificate(
    authority: Authority, folder: Path, stem: str, hosts: Sequence[str], days: int
) -> None:
    """Write `stem`.key and `stem`.crt: a server certificate for all of `hosts`, followed by the
    authority's.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    names = general_names(hosts)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])])
    certificate = (
        builder(subject, authority.certificate.subject, key.public_key(), days)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(
            x509.KeyUsage(True, False, False, False, False, False, False, False, False),
            critical=True,
        )
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()),
            critical=False,
        )
        .sign(authority.key, hashes.SHA384())
    )
    new_file(folder / f"{stem}.key", private_pem(key), 0o600)
    new_file(folder / f"{stem}.crt", pem(certificate) + pem(authority.certificate), 0o644)


def general_names(hosts: Sequence[str]) -> list[x509.GeneralName]:
    """Return names and addresses as a certificate has them."""
    return [
        x509.IPAddress(ipaddress.ip_address(host)) if is_address(host) else x509.DNSName(host)
        for host in dict.fromkeys(hosts)
    ]


def make_node_key(folder: Path, comment: str) -> bytes:
    """Write node.key and node.pub (P-384, as Flower's node authentication asks for); return the
    public key.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    line = public + f" {comment}\n".encode()
    new_file(folder / "node.key", private, 0o600)
    new_file(folder / "node.pub", line, 0o644)
    return line


def make_secret(path: Path) -> None:
    """Write 32 random bytes in hexadecimal: the token with which an executor authenticates."""
    new_file(path, secrets.token_hex(32).encode(), 0o600)


def expiry(path: Path) -> datetime.datetime:
    """Return when a certificate expires."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
    except (OSError, ValueError) as error:
        raise BayflowerError(
            f"the certificate {path} cannot be read ({error}); renew it with: bayflower deploy "
            "renew DIR"
        ) from None


def first_pem(path: Path) -> str:
    """Return the first certificate of a file, as text."""
    return pem(x509.load_pem_x509_certificate(path.read_bytes())).decode()


def valid_certificates(path: Path) -> list[str]:
    """Return the certificates of a file that have not expired, as texts; [] without the file."""
    if not path.exists():
        return []
    now = datetime.datetime.now(datetime.UTC)
    found = x509.load_pem_x509_certificates(path.read_bytes())
    return [pem(one).decode() for one in found if one.not_valid_after_utc > now]


def names_of(path: Path) -> list[str]:
    """Return the names and addresses a certificate in a file is for."""
    return hosts_of(x509.load_pem_x509_certificate(path.read_bytes()))


def hosts_of(certificate: x509.Certificate) -> list[str]:
    """Return the names and addresses a certificate is for."""
    try:
        known = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    names = known.value
    return [
        *names.get_values_for_type(x509.DNSName),
        *(str(one) for one in names.get_values_for_type(x509.IPAddress)),
    ]


def builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    """Return a builder with the fields that all our certificates share."""
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLIER)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def pem(certificate: x509.Certificate) -> bytes:
    """Return a certificate as text."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a private key as text."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
