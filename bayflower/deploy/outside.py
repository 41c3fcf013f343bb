"""Certificates of an authority elsewhere: a hospital's own, or one whose key is in a hardware
module. Its key never comes here, and no private key leaves the folder that needs it.

`requests` makes a new key beside each certificate of a folder, and a request that the authority
signs. `accept` checks what was signed, has the folder trust the authority, and takes both into use.
Nothing changes before all certificates of the folder are there and right.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ..errors import ConfigError
from . import keys
from .layout import Deployment

NEXT = ".next.key"  # behind the stem of a certificate: the key of the one that was asked for


class Place(NamedTuple):
    """A certificate of a deployment: its folder, its stem, and the name of its request."""

    folder: Path
    stem: str
    name: str

    @property
    def next(self) -> Path:
        """The key of the certificate that was asked for."""
        return self.folder / f"{self.stem}{NEXT}"


class Signed(NamedTuple):
    """A certificate that was checked, and the certificates between it and the authority."""

    place: Place
    chain: list[x509.Certificate]


def places(deployment: Deployment) -> list[Place]:
    """Return the certificates of the folders that are on this machine."""
    found = []
    if deployment.has_server():
        stems = sorted({"server", deployment.gate_stem()})
        found += [Place(deployment.server, stem, stem) for stem in stems]
    for client, folder in deployment.client_folders().items():
        found.append(Place(folder, "runtime", f"client-{client}-runtime"))
    return [place for place in found if place.folder.exists()]


def requests(deployment: Deployment, out: Path) -> list[Path]:
    """Return the requests written to the new folder `out`, one for each certificate. Their keys
    wait beside the ones in use.
    """
    if out.exists():
        raise ConfigError(f"{out} exists already and is not overwritten; choose another folder")
    asked = places(deployment)
    out.mkdir(parents=True)
    done = []
    for place in asked:
        place.next.unlink(missing_ok=True)  # an earlier request that came to nothing
        key = ec.generate_private_key(ec.SECP384R1())
        keys.new_file(place.next, keys.private_pem(key), 0o600)
        owner = (place.folder / f"{place.stem}.key").stat()
        if os.getuid() == 0:
            os.chown(place.next, owner.st_uid, owner.st_gid)
        hosts = keys.names_of(place.folder / f"{place.stem}.crt")
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        request = (
            x509.CertificateSigningRequestBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])]))
            .add_extension(x509.SubjectAlternativeName(keys.general_names(hosts)), critical=False)
            .add_extension(usage, critical=False)
            .sign(key, hashes.SHA384())
        )
        path = out / f"{place.name}.csr"
        keys.new_file(path, request.public_bytes(serialization.Encoding.PEM), 0o644)
        done.append(path)
    return done


def accept(deployment: Deployment, signed: Path, authority: Path, only: bool) -> list[Path]:
    """Take the certificates in the folder `signed` (NAME.crt) into use, and trust `authority`;
    `only`: and no other. Return the files written.
    """
    roots = certificates(authority)
    found = [checked(place, signed / f"{place.name}.crt", roots) for place in places(deployment)]
    done = trust(deployment, roots, only)
    for place, chain in found:
        text = "".join(keys.pem(one).decode() for one in dict.fromkeys([*chain, *roots]))
        keys.replace_file(place.folder / f"{place.stem}.crt", text)
        place.next.replace(place.folder / f"{place.stem}.key")
        done.append(place.folder / f"{place.stem}.crt")
    return done


def checked(place: Place, path: Path, roots: Sequence[x509.Certificate]) -> Signed:
    """Return a certificate with its chain; raise with the reason if it cannot be used."""
    if not place.next.exists():
        raise ConfigError(
            f"no certificate was asked for in {place.folder}; run first: bayflower deploy requests "
            "DIR OUT"
        )
    own, *between = certificates(path)
    key = serialization.load_pem_private_key(place.next.read_bytes(), None)
    if own.public_key() != key.public_key():
        raise ConfigError(
            f"{path} is not for the key of {place.next}; sign the newest request, {place.name}.csr"
        )
    missing = set(keys.names_of(place.folder / f"{place.stem}.crt")) - set(keys.hosts_of(own))
    if missing:
        raise ConfigError(
            f"{path} is not for {', '.join(sorted(missing))}; sign it with the names of the request"
        )
    now = datetime.datetime.now(datetime.UTC)
    if not own.not_valid_before_utc <= now < own.not_valid_after_utc:
        raise ConfigError(f"{path} is not valid now; look at its dates and at this machine's clock")
    if not serves(own):
        raise ConfigError(f"{path} is no certificate of a TLS server (extended key usage)")
    chain = [own]
    while not any(issued(chain[-1], root) for root in roots):
        above = [one for one in between if one not in chain and issued(chain[-1], one)]
        if not above:
            raise ConfigError(
                f"{path} does not lead to the given authority; add the certificates between them, "
                "or name the authority that signed"
            )
        chain.append(above[0])
    return Signed(place, chain)


def serves(certificate: x509.Certificate) -> bool:
    """Return whether a certificate may be a TLS server's."""
    try:
        usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return True
    return ExtendedKeyUsageOID.SERVER_AUTH in usage


def issued(certificate: x509.Certificate, by: x509.Certificate) -> bool:
    """Return whether `by`, an authority, has signed a certificate."""
    try:
        limits = by.extensions.get_extension_for_class(x509.BasicConstraints).value
        certificate.verify_directly_issued_by(by)
    except (x509.ExtensionNotFound, ValueError, TypeError, InvalidSignature):
        return False
    return limits.ca


def trust(deployment: Deployment, roots: Sequence[x509.Certificate], only: bool) -> list[Path]:
    """Add authorities to the ca.crt of every folder on this machine; return the files."""
    folders = [deployment.server] if deployment.has_server() else []
    folders += deployment.client_folders().values()
    done = []
    for folder in folders:
        if folder.exists():
            path = folder / "ca.crt"
            old = [] if only else keys.valid_certificates(path)
            new = [keys.pem(one).decode() for one in roots]
            keys.replace_file(path, "".join(dict.fromkeys([*new, *old])))
            done.append(path)
    return done


def certificates(path: Path) -> list[x509.Certificate]:
    """Return the certificates of a file, at least one."""
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} has no certificate in PEM form ({error})") from None
