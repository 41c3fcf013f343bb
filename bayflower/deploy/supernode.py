"""Flower's SuperNode that runs only the app bundles its owner has pinned.

In Flower whoever controls the SuperLink decides which code runs at the clients: a SuperNode runs
any bundle that it is sent. This one compares the digest of every bundle with `apps` of the site's
policy before it keeps it. Any other bundle is answered with an error and one line in the log.

    python -m bayflower.deploy.supernode [--policy FILE] [--audit-dir DIR] …   as flower-supernode …

Without --policy only the bundle of the installed version of Bayflower runs. The policy is read for
every run, so a change needs no restart.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import re
import sys
from collections.abc import Callable
from logging import ERROR
from pathlib import Path
from typing import Any

from ..errors import BayflowerError
from ..files.audit import Audit
from ..flower.bundle import digest, resolved
from ..policy import rules

NEEDED = ("state", "object_store", "receive", "get_run", "get_fab")  # arguments that are replaced
PLAIN = r"[\w.-]+/[\w.-]+ [\w.+-]+"  # publisher/app version: they become part of a path
INVALID_BUNDLE = 7  # Flower's error code


class RefusedError(Exception):
    """A bundle that may not run here; the text says why."""


class Door:
    """What a SuperNode lets in."""

    def __init__(self, policy: Path | None, audit_dir: Path | None) -> None:
        self.policy = policy
        self.audit = Audit(audit_dir / "audit.jsonl") if audit_dir else None

    def allowed(self) -> dict[str, str]:
        """Return the digests of the bundles that may run, with their entries in the policy."""
        policy = rules.read(self.policy) if self.policy else rules.Policy()
        return resolved(policy.apps)

    def check(self, run: Any, fab: Any) -> str:
        """Return the digest of a run's bundle; raise if it may not run here."""
        name = f"{run.fab_id} {run.fab_version}".strip()[:100] or "without a name"
        if "agent" in str(run.primary_task_type):
            raise RefusedError(
                f"run {run.run_id} asks for an agent app ({name}); only ClientApps run"
            )
        plain = re.fullmatch(PLAIN, f"{run.fab_id} {run.fab_version}")
        if not plain or not fab.hash_str == run.fab_hash == hashlib.sha256(fab.content).hexdigest():
            raise RefusedError(
                f"the name or the hash of the app of run {run.run_id} is not its own"
            )
        try:
            found = digest(fab.content)
        except ValueError as error:
            raise RefusedError(
                f"the app bundle of run {run.run_id} ({name}) is refused: {error}"
            ) from None
        try:
            known = self.allowed()
        except BayflowerError as error:
            raise RefusedError(str(error)) from None
        if found not in known:
            raise RefusedError(
                f"the app of run {run.run_id} ({name}, {found}) is not pinned in this site's "
                "policy and does not run here; its owner pins it under apps, or installs the "
                "version of Bayflower that the server has"
            )
        return found

    def write(self, event: str, run: int, **facts: Any) -> None:
        """Write a line about a run to the site's log."""
        if self.audit is not None:
            self.audit.write(event, side="client", flower_run=str(run), kind="app", **facts)


def watched(original: Callable[..., Any], door: Door) -> Callable[..., Any]:
    """Return Flower's function that fetches a message and, for a new run, its bundle, with the
    bundle checked before it is kept.
    """
    from flwr.app import Error, Message
    from flwr.supercore import log
    from flwr.supernode import start_client_internal as inner

    def fetch(**given: Any) -> Any:
        got: dict[str, Any] = {}

        def receive() -> Any:
            got["message"] = given["receive"]()
            return got["message"]

        def get_run(number: int) -> Any:
            got["run"] = given["get_run"](number)
            return got["run"]

        def get_fab(*words: Any) -> Any:
            fab = given["get_fab"](*words)
            found = door.check(got["run"], fab)
            door.write("app admitted", got["run"].run_id, app=found)
            return fab

        try:
            mine = {"receive": receive, "get_run": get_run, "get_fab": get_fab}
            return original(**{**given, **mine})
        except RefusedError as error:
            message, number = got["message"][0], got["run"].run_id
            log(ERROR, "refused: %s", error)
            door.write("app refused", number, why=str(error))
            reply = Message(Error(INVALID_BUNDLE, f"refused: {error}"), reply_to=message)
            inner._insert_message(reply, given["state"], given["object_store"])
            return number

    return fetch


def main() -> None:
    """Serve until stopped."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--policy", type=Path)
    parser.add_argument("--audit-dir", type=Path)
    ours, rest = parser.parse_known_args()
    door = Door(ours.policy, ours.audit_dir)
    try:
        pinned = door.allowed()
    except BayflowerError as error:
        sys.exit(f"bayflower: {error}")
    from flwr.supernode import start_client_internal as inner
    from flwr.supernode.cli import flower_supernode

    original = getattr(inner, "_pull_and_store_message", None)
    known = inspect.signature(original).parameters if original else {}
    if (
        not original
        or any(name not in known for name in NEEDED)
        or not callable(getattr(inner, "_insert_message", None))
    ):
        sys.exit(
            "bayflower: this version of Flower fetches apps in another way, so they cannot be "
            "checked; install the version in constraints.txt"
        )
    setattr(inner, "_pull_and_store_message", watched(original, door))  # noqa: B010
    print(f"apps that may run here: {', '.join(sorted(pinned))}", flush=True)
    sys.argv = ["flower-supernode", *rest]
    flower_supernode()


if __name__ == "__main__":
    main()
