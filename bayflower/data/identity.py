"""Who a client is. Numbers of clients are dealt out anew by every seed; an identity is the same
wherever the same client takes part, and different wherever it is another one.

A natural site is known by its name: it is the same in every run on its data set. A client that a
partition drew is known by the partition, the seed and its part: client 3 of another seed has other
samples and is another client. Without these facts a client is known by its seed and number alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .source import Names

# of a partition's description: what deals clients out without changing what a part is
DEALT = (
    *("parts", "used", "kept", "pooled", "seed", "num_clients", "new_clients"),
    *("train_sizes", "test_sizes", "calibration_sizes", "test_fraction"),
)


class Identity(NamedTuple):
    """One client of a run."""

    client: int  # its number in this run
    name: str  # for a person
    id: str  # equal in two runs if and only if it is the same client
    new: bool  # it took part in no round
    lasting: bool  # whether other seeds can have the same client


def identities(
    partition: Mapping[str, Any],
    seed: int,
    sites: Sequence[str],
    clients: Sequence[int],
    new_clients: Sequence[int],
) -> list[Identity]:
    """Return the clients of a run, from its result file's facts; `sites` has the names of natural
    sites by number of client, () if there are none.
    """
    parts, kind = partition.get("parts"), str(partition.get("kind", ""))
    owners = partition.get("natural_clients")
    if not sites and kind == "natural" and isinstance(owners, list) and isinstance(parts, list):
        sites = [str(owners[part]) for part in parts]  # a file from before there were names
    made = drawn_by(partition)
    found, never = [], set(new_clients)
    for client in (*clients, *new_clients):
        new = client in never
        if client < len(sites):
            found.append(Identity(client, shown(sites[client]), f"site:{sites[client]}", new, True))
        else:
            known = isinstance(parts, list) and client < len(parts)
            who = f"part-{parts[client]}" if known and parts else f"client-{client}"
            name = f"client {client}"
            found.append(Identity(client, name, f"{made}seed-{seed}/{who}", new, False))
    return found


def shown(site: str) -> str:
    """Return a site's name for a person: `site 3` where the data have only a number."""
    return f"site {site}" if site.isdigit() else site


def whose(text: str, names: Mapping[int, str]) -> list[int]:
    """Return the clients that are called so, as shown or without the word `site`."""
    return [one for one, name in names.items() if text in (name, name.removeprefix("site "))]


def called(names: Names, client: int) -> dict[str, Any]:
    """Return what a personal model's card says: names of client, classes and columns."""
    site = shown(names.sites[client]) if client < len(names.sites) else ""
    return {"columns": names.columns, "classes": names.classes, "site": site}


def drawn_by(partition: Mapping[str, Any]) -> str:
    """Return a text that tells one way of drawing clients from others."""
    how = {key: value for key, value in partition.items() if key not in DEALT}
    if not how:
        return ""
    how["total"] = (partition.get("num_clients") or 0) + (partition.get("new_clients") or 0)
    text = json.dumps(how, sort_keys=True, default=str)
    return f"{how.get('kind', 'own')}-{hashlib.sha256(text.encode()).hexdigest()[:6]}/"


def reported(names: Any) -> Names:
    """Return the names that a client reported; those that are no lists of texts are left out."""
    found = {}
    for key in Names._fields:
        some = names.get(key) if isinstance(names, Mapping) else None
        good = isinstance(some, list | tuple) and all(isinstance(one, str) for one in some)
        found[key] = tuple(one[:200] for one in some) if good and some else ()
    return Names(**found)
