"""`bayflower deploy init --regions`: a folder for each part of a deployment with regions."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..files.texts import write_json
from . import folders
from .layout import ABOVE, PORT, REGION, TREE, UPPER, Deployment


def init(
    folder: Path,
    *,
    clients: int,
    regions: int,
    hosts: Sequence[str] = (),
    region_hosts: Sequence[str] = (),
    port: int = PORT,
    **more: Any,
) -> list[Deployment]:
    """Make the folders of a deployment with regions; return the server's and those of the regions.
    Clients are dealt to regions in blocks.
    """
    if not 1 <= regions <= clients:
        raise ConfigError(f"regions must be in [1, {clients}] (clients), got {regions}")
    if bool(hosts) != bool(region_hosts) or (hosts and len(region_hosts) != regions):
        raise ConfigError(
            f"give --hosts of the server and {regions} --region-hosts, one for each region, or "
            "neither if everything runs on one machine"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"{folder} exists already and is not overwritten; choose another folder, or remove it"
        )
    parent, name = folder.resolve(), compose_name(folder)
    parent.mkdir(parents=True, exist_ok=True)
    try:
        tree = {"total": clients, "regions": regions}
        known = {"port": port, **more}
        upper = folders.init(
            parent / UPPER,
            clients=regions,
            hosts=hosts,
            name=f"{name}-upper",
            part={**tree, "kind": UPPER},
            **known,
        )
        made, first = [upper], 0
        for region in range(regions):
            number = clients // regions + (region < clients % regions)
            part: dict[str, Any] = {**tree, "kind": REGION, "region": region, "first": first}
            part |= {"above": upper.address()}
            part |= {} if hosts else {"network": f"{upper.name}_federation"}
            own = folders.init(
                parent / f"region-{region}",
                clients=number,
                hosts=region_hosts[region : region + 1],
                name=f"{name}-region-{region}",
                part=part,
                **known,
            )
            (upper.folder / f"client-{region}").rename(own.folder / "server" / ABOVE)
            made.append(own)
            first += number
        write_json(parent / TREE, {"parts": [one.folder.name for one in made]})
        return made
    except BaseException:
        shutil.rmtree(parent, ignore_errors=True)  # an incomplete deployment is of no use
        raise


def compose_name(folder: Path) -> str:
    """Return the beginning of the names of a tree's deployments."""
    plain = "".join(one if one.isalnum() else "-" for one in folder.resolve().name.lower())
    return f"bayflower-{plain.strip('-')[:24] or 'tree'}"
