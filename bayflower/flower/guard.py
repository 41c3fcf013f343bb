"""The guard of a site: every message to a ClientApp passes it, and every reply.

It is a Flower mod. With `policy` in the node's configuration, requests are checked against that
file before data are read, and replies before they leave. With `audit-dir`, what was asked and what
left is written to a hash-chained log there (`files/audit.py`). Both are set by whoever starts the
SuperNode, never by the server. Without them the guard does nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MessageType,
    RecordDict,
)
from flwr.clientapp.typing import ClientAppCallable

from .. import methods
from ..config import Run, Training, convert_fields
from ..data import ClientData
from ..errors import ConfigError, PolicyError
from ..files.audit import Audit
from ..files.journal import one_line
from ..networks.model import Batch
from ..policy import rules
from ..policy.ledger import Ledger
from ..policy.rows import Memory, Part
from ..rounds.solo import Samples
from . import records

log = logging.getLogger("bayflower")
REFUSED = 6  # Flower's error code of a mod whose precondition failed
ASKED = ("labels", "inputs", "sums")  # what the first question may ask for
# caps in the log: on the characters of a text and of a name, and on the names of a record
LONGEST, NAME, MOST_NAMES = 20_000, 200, 2000
MOST_CHANGES = 3  # small changes of data that are logged at once
GUARD: ContextVar[Guard | None] = ContextVar("GUARD", default=None)  # of the message in work


def guarded(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Return the reply, or an error that names client and rule if the site's policy forbids it."""
    config = context.node_config
    if GUARD.get() is not None or not (config.get("policy") or config.get("audit-dir")):
        return call_next(message, context)
    client = config.get("partition-id", "?")
    try:
        guard = Guard.of(context)
    except ConfigError as error:  # a site without a readable policy answers nothing
        return refusal(message, client, error)
    mark = GUARD.set(guard)
    try:
        guard.asked(message, context)
        reply = call_next(message, context)
        guard.leaves(message, reply)
        return reply
    except PolicyError as error:
        guard.write("refused", message, why=one_line(str(error)))
        return refusal(message, client, error)
    except Exception as error:
        guard.write("failed", message, why=one_line(f"{type(error).__name__}: {error}"))
        raise
    finally:
        GUARD.reset(mark)


def refusal(message: Message, client: Any, error: Exception) -> Message:
    """Return the error that the server gets, and log it."""
    text = one_line(f"client {client} refuses this request: {error}")
    log.warning("%s", text)
    return Message(Error(REFUSED, text), reply_to=message)


class Guard:
    """The policy and the log of one site, and the message in work."""

    def __init__(self, policy: rules.Policy | None, folder: Path | None) -> None:
        self.policy = policy  # None: everything is allowed, and logged
        self.audit = Audit(folder / "audit.jsonl") if folder else None
        self.ledger = Ledger(folder / "ledger.json") if folder and policy else None
        self.memory = Memory(folder / "rows") if folder and policy and policy.min_change else None

    @classmethod
    def of(cls, context: Context) -> Guard:
        """Return the guard of a node."""
        config = context.node_config
        path, folder = str(config.get("policy") or ""), str(config.get("audit-dir") or "")
        if path and not folder:
            raise ConfigError(
                "the node's configuration has policy, but no audit-dir, in which the site counts "
                "requests; add audit-dir"
            )
        policy = rules.read(Path(path)) if path else None
        return cls(policy, Path(folder) if folder else None)

    def write(self, event: str, message: Message, **facts: Any) -> None:
        """Write a line about a message to the site's log."""
        if self.audit is not None:
            about = message.metadata
            self.audit.write(
                event,
                side="client",
                flower_run=str(about.run_id),
                message=about.message_id,
                kind=about.message_type,
                **facts,
            )

    # -- before -----------------------------------------------------------------------------------
    def asked(self, message: Message, context: Context) -> None:
        """Log a request; raise if the policy forbids it."""
        record = message.content.get(records.HEADER)
        head = dict(record) if isinstance(record, ConfigRecord) else {}
        facts: dict[str, Any] = {
            name: value if isinstance(value, (int, bool)) else str(value)[:LONGEST]
            for name, value in head.items()
        }
        if message.metadata.message_type == MessageType.QUERY:
            facts["config"] = {
                key: str(value)[:LONGEST]
                for key, value in context.run_config.items()
                if value != ""
            }
        source = str(message.metadata.src_node_id)
        self.write("asked", message, source=source, header=facts, **described(message.content))
        if self.policy is None:
            return
        self.check_header(self.policy, message.metadata.message_type, head)
        if self.ledger is not None and message.metadata.message_type != MessageType.QUERY:
            self.ledger.admit(self.policy)

    def check_header(self, policy: rules.Policy, kind: str, head: Mapping[str, Any]) -> None:
        """Raise if the policy forbids what a message's header asks for."""
        if kind == MessageType.QUERY:
            policy.check_sends(name for name in ASKED if head.get(name))
            return
        if "instructions" not in head or "method" not in head:
            return  # not a message of ours; the app will say so
        method = str(head["method"])
        policy.check_method(method)
        options, training = told(method, str(head["instructions"]))
        policy.check_settings({**dataclasses.asdict(training), **dataclasses.asdict(options)})
        if isinstance(head.get("round"), int):
            policy.check_round(head["round"])
        wanted = [records.METRICS]
        wanted += [records.UPDATE] if kind == MessageType.TRAIN else []
        wanted += [records.TALLY] if head.get("evaluate") else []
        wanted += [records.CALIBRATION] if "calibration" in head else []
        policy.check_sends(wanted)

    def check_runs(self, runs: Iterable[Run], data_dir: str) -> None:
        """Raise if the policy forbids a run by its settings; `data_dir` is the folder of data that
        the node names, "" if the run may name one.
        """
        if (policy := self.policy) is None:
            return
        for run in runs:
            policy.check_method(run.method)
            policy.check_settings(run.flat())
            policy.check_round(run.settings.rounds)
            policy.check_network(run.settings.model)
            files = [run.data.dataset, *([run.data.test] if "/" in run.data.test else [])]
            folder = [run.data.data_dir] if run.data.data_dir and not data_dir else []
            policy.check_data(data_dir, *files, *folder)

    def use(self, parts: Callable[[], Mapping[str, Part]]) -> None:
        """Note, or refuse, samples that differ by few from those that were used before."""
        if self.memory is None or (policy := self.policy) is None:
            return
        refuse = policy.small_change == "refuse"
        changes = self.memory.used(parts(), policy.min_change, refuse)
        for change in changes[:MOST_CHANGES]:  # in the site's own logs only: they name classes
            text = f"{change}: the difference of two answers may tell of them (min_change)"
            log.warning("%s", text)
            if self.audit is not None:
                self.audit.write("small change", side="client", why=text)
        if refuse and changes:
            raise rules.refused(
                "min_change",
                f"fewer than {policy.min_change} samples differ from data that were used before; "
                "the owner of this site finds which in its log",
            )

    # -- after ------------------------------------------------------------------------------------
    def leaves(self, message: Message, reply: Message) -> None:
        """Log what leaves the site; raise if the policy forbids it."""
        if reply.has_error():
            self.write("failed", message, why=one_line(str(reply.error.reason)))
            return
        facts = described(reply.content)
        if self.policy is not None:
            self.policy.check_sends(name for name in reply.content if name != records.HEADER)
            self.policy.check_bytes(facts["bytes"])
            if self.ledger is not None:
                self.ledger.sends(self.policy, facts["bytes"])
        self.write("sent", message, **facts)


def described(content: RecordDict) -> dict[str, Any]:
    """Return names, types and shapes of a message's arrays, names of its numbers, its bytes and its
    digest: equal on both sides.
    """
    named: dict[str, Any] = {}
    for name, record in content.items():
        if len(record) > MOST_NAMES:
            named[name[:LONGEST]] = f"{len(record)} entries"
        elif isinstance(record, ArrayRecord):
            named[name[:LONGEST]] = {
                key[:NAME]: f"{one.dtype}{list(one.shape)}"[:NAME] for key, one in record.items()
            }
        else:
            named[name[:LONGEST]] = sorted(key[:NAME] for key in record)
    return {"records": named, "bytes": records.num_bytes(content), "digest": digest(content)}


def digest(content: RecordDict) -> str:
    """Return a SHA-256 over names and values of a message's records."""
    seal = hashlib.sha256()
    for name, record in sorted(content.items()):
        seal.update(f"{name}|{type(record).__name__}|{len(record)}|".encode())
        for key, value in sorted(record.items()):
            if isinstance(value, Array):
                seal.update(f"{key}|{value.dtype}|{list(value.shape)}|{len(value.data)}|".encode())
                seal.update(value.data)
            else:
                seal.update(f"{key}|{value!r}|".encode())
    return seal.hexdigest()


def raw_parts(data: ClientData) -> dict[str, Part]:
    """Return a client's samples as they were read."""
    x, y = [data.x_train], [data.y_train]
    if data.x_held is not None and data.y_held is not None:
        x, y = [*x, data.x_held], [*y, data.y_held]
    train = Part(np.concatenate(x), np.concatenate(y))
    return {"training samples": train, "test samples": Part(data.x_test, data.y_test)}


def sample_parts(data: Samples) -> dict[str, Part]:
    """Return a client's samples as its own code made them."""

    def part(*some: Batch) -> Part:
        return Part(
            *(np.concatenate([getattr(one, k).cpu().numpy() for one in some]) for k in "xy")
        )

    held = [] if data.held is None else [data.held]
    return {"training samples": part(data.train, *held), "test samples": part(data.test)}


@lru_cache(maxsize=64)
def told(method: str, instructions: str) -> tuple[Any, Training]:
    """Return the settings of the method and of training, cached in the process."""
    said = json.loads(instructions)
    options = convert_fields(methods.get(method).config, said["options"])
    return options, convert_fields(Training, said["training"])
