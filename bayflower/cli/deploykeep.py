"""`bayflower deploy`: keys, certificates and backups of a federation that runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..deploy import folders, layout
from ..errors import ConfigError
from .deploy import Folder, app
from .deployed import hand_over, note, reach


@app.command()
def register(
    folder: Folder,
    anew: Annotated[
        bool,
        typer.Option(
            "--anew", help="nodes.json was lost: refuse all nodes it does not name, then register"
        ),
    ] = False,
) -> None:
    """Register the client keys in DIR/server/nodes with the SuperLink; `up` does it too."""
    server, _ = reach(folder)
    if server is None:
        hand_over(folder, ["register", "/server", *(["--anew"] if anew else [])])
        return
    from ..deploy import server as servers

    servers.register(server, note, anew)


@app.command()
def unregister(
    folder: Folder, client: Annotated[int, typer.Argument(help="number of the client")]
) -> None:
    """Refuse a client's key from now on, for instance because it left or needs a new key."""
    server, _ = reach(folder)
    if server is None:
        hand_over(folder, ["unregister", "/server", str(client)])
        return
    from ..deploy import server as servers

    servers.unregister(server, client)
    print(f"client {client} is refused from now on")


@app.command()
def renew(
    folder: Folder,
    days: Annotated[int, typer.Option(help="days for which the new certificates are valid")] = 180,
) -> None:
    """Replace the certificates of the server and of the clients' training processes. Restart these
    programs afterwards.
    """
    for path in folders.renew(layout.read(folder), days):
        print(f"written: {path}")


@app.command()
def rollover(
    folder: Folder,
    days: Annotated[int, typer.Option(help="days for which the new authority is valid")] = 730,
) -> None:
    """Make a new authority that overlaps the old one, before that expires.

    Every machine trusts both at first. Copy the new ca.crt to each machine and restart its
    programs; then `bayflower deploy renew DIR` signs with the new one.
    """
    for path in folders.rollover(layout.read(folder), days):
        print(f"written: {path} (trusts the old and the new authority)")
    print(
        f"now copy {folder}/ca/bundle.pem as ca.crt to machines whose folder is not here, restart "
        f"all programs, then: bayflower deploy renew {folder}"
    )


@app.command()
def requests(
    folder: Folder,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="a new folder for the requests")],
) -> None:
    """Ask an authority elsewhere for this machine's certificates: one signing request each. The
    private keys stay here.
    """
    from ..deploy import outside

    for path in outside.requests(layout.read(folder), out):
        print(f"written: {path}")
    print(
        f"now have them signed (NAME.csr gives NAME.crt), then: bayflower deploy accept {folder} "
        "SIGNED --authority ROOT.pem"
    )


@app.command()
def accept(
    folder: Folder,
    signed: Annotated[Path, typer.Argument(metavar="SIGNED", help="folder with NAME.crt files")],
    authority: Annotated[Path, typer.Option(help="the authority's certificate, in PEM form")],
    only: Annotated[
        bool, typer.Option("--only", help="trust no other authority from now on")
    ] = False,
) -> None:
    """Use certificates that an authority elsewhere has signed, and trust it: on the clients'
    machines first, then on the server's. Restart the programs afterwards.
    """
    from ..deploy import outside

    for path in outside.accept(layout.read(folder), signed, authority, only):
        print(f"written: {path}")


@app.command()
def backup(
    folder: Folder,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="a new folder for the backup")],
) -> None:
    """Save this machine's runs and client states; raise unless they belong to the same round."""
    from ..deploy import backup as backups
    from ..deploy.local import local_of

    deployment = layout.read(folder)
    backups.backup(deployment, out, local_of(deployment) is not None, note)
    print(f"written: {out}; keep it as safe as the data. Keys and certificates are not in it")


@app.command()
def restore(
    folder: Folder,
    saved: Annotated[Path, typer.Argument(metavar="BACKUP", help="what `backup` wrote")],
) -> None:
    """Bring back this machine's part of a backup; what is there is moved aside (processes) or
    overwritten file by file (containers, which must be up).
    """
    from ..deploy import backup as backups
    from ..deploy.local import local_of

    deployment = layout.read(folder)
    local = local_of(deployment)
    running = local is not None and local.any_alive()
    content = backups.restore(deployment, saved, local is not None, running, note)
    for name, facts in content["runs"].items():
        print(
            f"{name}: round {facts['round']}; go on with: bayflower deploy submit {folder} "
            f"--resume --name {name}"
        )


@app.command()
def decrypt(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a file that is encrypted")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="a new file")],
) -> None:
    """Write a plain copy of an encrypted file; BAYFLOWER_KEY_FILE names the key."""
    from ..deploy import keys
    from ..files import vault

    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror})") from None
    if not vault.is_sealed(content):
        raise ConfigError(f"{file} is not encrypted")
    keys.new_file(out, vault.opened(content, str(file)), 0o600)


@app.command()
def sbom(
    out: Annotated[
        str, typer.Argument(metavar="OUT", help="a new file; - for standard output")
    ] = "-",
) -> None:
    """List the software of this installation, or image, as CycloneDX (JSON)."""
    import json

    from ..deploy import keys
    from ..deploy.sbom import document

    text = json.dumps(document(), indent=1)
    if out == "-":
        print(text)
    else:
        keys.new_file(Path(out), text.encode(), 0o644)
