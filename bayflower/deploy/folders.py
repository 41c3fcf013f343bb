"""`bayflower deploy init`: make a deployment's folder, and renew its certificates."""

from __future__ import annotations

import dataclasses
import datetime
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import ConfigError
from ..policy import rules
from . import compose, keys
from .layout import (
    ABOVE,
    CONTAINER_USER,
    INNER_HOSTS,
    POLICY,
    PORT,
    STATE_KEY,
    UPPER,
    Deployment,
    write,
)


def init(
    folder: Path,
    *,
    clients: int,
    hosts: Sequence[str] = (),
    port: int = PORT,
    days: int = 365,
    name: str = "",
    image: str = "",
    cpus: float = 1.0,
    memory: str = "2g",
    encrypt: bool = False,
    part: Mapping[str, Any] | None = None,
) -> Deployment:
    """Make a deployment's folder with keys, certificates and compose files; return it. Nothing is
    overwritten.
    """
    if clients < 1:
        raise ConfigError(f"clients must be at least 1, got {clients}")
    if days < 1:
        raise ConfigError(
            f"days must be at least 1, got {days}; the certificates are valid for that long"
        )
    if not 1 <= port <= 65535:
        raise ConfigError(f"port must be in [1, 65535], got {port}")
    hosts = keys.check_hosts(hosts)
    plain = re.sub("[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")
    name = name or f"bayflower-{plain or 'federation'}"
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,50}", name):
        raise ConfigError(
            f"name must be at most 51 lower-case letters, digits, - and _, got {name!r}"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"{folder} exists already and is not overwritten; choose another folder, or remove it"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o755)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be created ({error.strerror}); choose another folder"
        ) from None
    try:
        return fill(
            folder.resolve(),
            clients,
            hosts,
            port,
            days,
            name,
            image or f"bayflower:{__version__}",
            cpus,
            memory,
            compose.write,
            encrypt,
            dict(part or {}),
        )
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # an incomplete deployment is of no use
        raise


def fill(
    folder: Path,
    clients: int,
    hosts: list[str],
    port: int,
    days: int,
    name: str,
    image: str,
    cpus: float,
    memory: str,
    write_compose: Any,
    encrypt: bool,
    part: Mapping[str, Any],
) -> Deployment:
    """Make everything below `folder`; `part` says which part of a tree it is."""
    end = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)).strftime("%Y-%m-%d")
    uid, gid = (os.getuid(), os.getgid()) if os.getuid() else (CONTAINER_USER, CONTAINER_USER)
    whole = Deployment(
        name,
        "all",
        clients,
        tuple(hosts) or ("gate",),
        port,
        image,
        f"{uid}:{gid}",
        end,
        cpus=cpus,
        memory=memory,
        encrypt=encrypt,
        folder=folder,
        **part,
    )
    machines = [
        dataclasses.replace(whole, name=f"{name}-server", role="server", folder=folder / "server")
    ]
    machines += [
        dataclasses.replace(
            whole, name=f"{name}-client-{k}", role="client", client=k, folder=folder / f"client-{k}"
        )
        for k in whole.numbers()
    ]
    (folder / "ca").mkdir(mode=0o700)
    authority = keys.make_authority(folder / "ca", f"{name} authority", days)
    (folder / "server" / "nodes").mkdir(parents=True)
    keys.make_certificate(authority, folder / "server", "server", [*hosts, *INNER_HOSTS], days)
    outer = [host for host in INNER_HOSTS if host != "superlink"]  # it cannot pose as the SuperLink
    keys.make_certificate(authority, folder / "server", "gate", [*hosts, *outer], days)
    inner = [ABOVE] if whole.kind == UPPER else []  # what a region's SuperNode is called there
    for k in whole.numbers():
        own = folder / f"client-{k}"
        (own / "data").mkdir(parents=True)
        keys.new_file(own / POLICY, rules.written().encode(), 0o644)
        public = keys.make_node_key(own, f"{name} client-{k}")
        keys.new_file(folder / "server" / "nodes" / f"client-{k}.pub", public, 0o644)
        if encrypt:
            keys.make_secret(own / STATE_KEY)
        keys.make_certificate(
            authority,
            own,
            "runtime",
            [f"supernode-{k}", "supernode", *inner, "localhost", "127.0.0.1"],
            days,
        )
    for machine in machines:
        keys.new_file(machine.folder / "ca.crt", (folder / "ca" / "ca.crt").read_bytes(), 0o644)
        keys.make_secret(machine.folder / "executor.secret")
        write(machine)
        if hosts:
            write_compose(machine)
    write(whole)
    if not hosts:
        write_compose(whole)
    if os.getuid() == 0:
        for path in (
            path
            for machine in machines
            for path in machine.folder.glob("*")
            if path.suffix in (".key", ".secret")
        ):
            os.chown(path, uid, gid)
    return whole


def rollover(deployment: Deployment, days: int) -> list[Path]:
    """Make a new authority that overlaps the old one: every ca.crt then trusts both, and `renew`
    signs with the new one. Return the files written.

    Nothing else changes, so that machines can get their new ca.crt one after another while the old
    certificates are in use.
    """
    need_authority(deployment, "rollover")
    home = deployment.folder / "ca"
    last = keys.expiry(home / "ca.crt")
    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    if end <= last:
        raise ConfigError(
            f"the authority is valid until {last:%Y-%m-%d}, longer than {days} days; set --days to "
            "more than that"
        )
    old = keys.valid_certificates(home / "bundle.pem") or [keys.first_pem(home / "ca.crt")]
    fresh = home / ".new"
    fresh.mkdir(mode=0o700)
    keys.make_authority(fresh, f"{deployment.name} authority", days)
    number = sum(1 for _ in home.glob("old-*.key")) + 1
    (home / "ca.key").rename(home / f"old-{number}.key")
    (home / "ca.crt").rename(home / f"old-{number}.pem")
    for name in ("ca.key", "ca.crt"):
        (fresh / name).rename(home / name)
    fresh.rmdir()
    bundle = "".join([keys.first_pem(home / "ca.crt"), *old])
    return trust(deployment, bundle)


def trust(deployment: Deployment, bundle: str) -> list[Path]:
    """Write the certificates that all machines trust; return the files."""
    keys.replace_file(deployment.folder / "ca" / "bundle.pem", bundle)
    there = [deployment.server, *deployment.client_folders().values()]
    files = [folder / "ca.crt" for folder in there if folder.exists()]
    for file in files:
        keys.replace_file(file, bundle)
    return files


def need_authority(deployment: Deployment, command: str) -> None:
    """Raise if the authority's key is not in the deployment's folder."""
    if deployment.role != "all" or not (deployment.folder / "ca" / "ca.key").exists():
        raise ConfigError(
            f"{deployment.folder} does not contain the authority's key; run {command} in the "
            "folder made by bayflower deploy init, or, if another authority signs, bayflower "
            "deploy requests"
        )


def renew(deployment: Deployment, days: int) -> list[Path]:
    """Replace every certificate in the deployment's folder by a new one for the same hosts; return
    the files written. After a rollover, certificates of authorities that have expired go out of
    every ca.crt.
    """
    need_authority(deployment, "renew")
    authority = keys.load_authority(deployment.folder / "ca")
    last = (
        keys.expiry(deployment.folder / "ca" / "ca.crt") - datetime.datetime.now(datetime.UTC)
    ).days
    if days > last:
        raise ConfigError(
            f"the authority's own certificate expires in {last} days; set --days to at most that, "
            "or make a new authority that overlaps this one with: bayflower deploy rollover DIR"
        )
    done = []
    if (bundle := deployment.folder / "ca" / "bundle.pem").exists():
        done += trust(deployment, "".join(keys.valid_certificates(bundle)))
    for folder, stem in [
        *((deployment.server, stem) for stem in sorted({"server", deployment.gate_stem()})),
        *((own, "runtime") for own in deployment.client_folders().values()),
    ]:
        if not folder.exists():
            continue  # the folder was moved to its machine
        names = keys.names_of(folder / f"{stem}.crt")
        owner = (folder / f"{stem}.key").stat()
        fresh = folder / ".renewed"
        fresh.mkdir()
        keys.make_certificate(authority, fresh, stem, names, days)
        for suffix in (".key", ".crt"):
            os.chown(
                fresh / f"{stem}{suffix}", owner.st_uid, owner.st_gid
            ) if suffix == ".key" else None
            (fresh / f"{stem}{suffix}").replace(folder / f"{stem}{suffix}")
        fresh.rmdir()
        done.append(folder / f"{stem}.crt")
    return done
