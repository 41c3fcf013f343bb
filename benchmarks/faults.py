"""The fault matrix: each failure, before, during and after local training, in a real federation of
containers.

    python benchmarks/faults.py                                  every fault, every position; writes
                                                                 docs/fault-matrix.json and .md
    python benchmarks/faults.py --position during --fault slow   some of it; rows of the file that
                                                                 are not run stay
    python benchmarks/faults.py --scaling                        round time with 3, 6 and 12 clients

Two clients train FedMAP on digits for three rounds; the fault comes in round 2. The reference is
the loop engine: server state, metrics and every client's state must have its bits. Needs root and a
Docker engine with the project's image (docs/deployment.md).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from faultpage import page
from lab import POSITIONS, Lab

from bayflower.config import parse
from bayflower.engines import execute, prepare
from bayflower.files import checkpoint, store
from bayflower.files.texts import read_json, write_json
from bayflower.metrics import summarise
from bayflower.tree import flatten

ROOT = Path(__file__).parent.parent
FILE = ROOT / "docs" / "fault-matrix.json"
SETTINGS = {
    "dataset": "digits",
    "batch_size": 16,
    "local_epochs": 20,
    "rounds": 3,
    "evaluate_every": 1,
}
ROUND = 2  # in which the fault comes
LONG_SECONDS = 75.0  # Flower gives a node up after two missed heartbeats, 60 s
SLOW = "48kbit"
SMALL_DISK = 4 * 2**20


def crash_supernode(lab: Lab, position: str, process: Any) -> Callable[[], None] | None:
    """Kill a SuperNode's container; its restart policy starts it again."""
    lab.crash("supernode-0")
    return None


def crash_clientapp(lab: Lab, position: str, process: Any) -> Callable[[], None] | None:
    """Kill the process of a ClientApp."""
    lab.crash_app("clientapp-0", "flwr-clientapp", process, 30.0 if position != "after" else 1.0)
    return None


def cut_for(seconds: float, client: int = 0) -> Callable[[Lab, str, Any], Callable[[], None]]:
    """Return a fault: a client is off the network for so long."""

    def cut(lab: Lab, position: str, process: Any) -> Callable[[], None]:
        def work() -> None:
            with lab.cut(client):
                time.sleep(seconds)

        thread = threading.Thread(target=work)
        thread.start()
        return thread.join

    return cut


def slow_link(lab: Lab, position: str, process: Any) -> Callable[[], None]:
    """Slow the link of a client down until the run ends."""
    lab.slow(0, SLOW)
    return lambda: lab.fast(0)


def crash_serverapp(lab: Lab, position: str, process: Any) -> Callable[[], None] | None:
    """Kill the process of the ServerApp."""
    lab.crash_app("serverapp", "flwr-serverapp", process)
    return None


def crash_superlink(lab: Lab, position: str, process: Any) -> Callable[[], None] | None:
    """Kill the SuperLink's container; its restart policy starts it again."""
    lab.crash("superlink")
    return None


def full_disk(lab: Lab, position: str, process: Any) -> Callable[[], None]:
    """Fill the disk of client 1 until the next round is over."""
    filler = lab.fill(1)
    until = ROUND + (position == "after")

    def work() -> None:
        try:
            lab.wait_for(lambda: process.poll() is not None or lab.round(lab.name) >= until)
        finally:
            filler.unlink(missing_ok=True)

    thread = threading.Thread(target=work)
    thread.start()
    return thread.join


# name: (what a person calls it, injection, victim, the final result must be the reference's)
FAULTS: dict[str, tuple[str, Any, int, bool]] = {
    "supernode": ("SuperNode killed and restarted", crash_supernode, 0, True),
    "clientapp": ("ClientApp process killed", crash_clientapp, 0, True),
    "cut": ("client off the network for 10 s", cut_for(10.0), 0, True),
    "long-cut": (
        f"client off the network for {LONG_SECONDS:.0f} s, longer than the heartbeat",
        cut_for(LONG_SECONDS),
        0,
        True,
    ),
    "slow": (f"link of a client at {SLOW}/s", slow_link, 0, True),
    "serverapp": ("ServerApp process killed", crash_serverapp, 0, True),
    "superlink": ("SuperLink killed and restarted", crash_superlink, 0, True),
    "disk": ("disk of a client full for one round", full_disk, 1, False),
}


class Reference:
    """What an undisturbed run gives: the loop engine's server state, metrics and client states."""

    def __init__(self, lab: Lab) -> None:
        with tempfile.TemporaryDirectory(prefix="bayflower-reference-") as name:
            self.want = execute(
                prepare(parse("fedmap", {**lab.settings, "checkpoint_every": 1}), "loop"),
                out=Path(name),
            )
            known = checkpoint.read(Path(name))
        assert known is not None
        assert known.round == lab.settings["rounds"]
        self.states = known.clients

    def equal(self, lab: Lab, name: str) -> bool:
        """Return whether a run has the reference's server state and metrics, to the bit."""
        return not self.differences(lab, name)

    def differences(self, lab: Lab, name: str) -> list[str]:
        """Return what of a run's server state and metrics has not the reference's bits."""
        known = checkpoint.read(lab.results(name))
        assert known is not None
        mine, wanted = (
            flatten(checkpoint.server_state(known, type(self.want.server_state))),
            flatten(self.want.server_state),
        )
        result = lab.result(name)
        scores = [  # a result also has the clients' names
            {key: value for key, value in one.items() if key != "name"}
            for one in result["final"]["personal"]["per_client"]
        ]
        expected = summarise(self.want.views["personal"])["per_client"]
        found = [
            f"server state: {key}"
            for key in sorted(mine.keys() | wanted.keys())
            if key not in mine or key not in wanted or not torch.equal(mine[key], wanted[key])
        ]
        if scores != expected:
            found.append(f"metrics: {scores} instead of {expected}, faults {result['faults']}")
        return found


def intact(
    lab: Lab, name: str, reference: Reference, equal: bool, missed: tuple[int, list[int]]
) -> bool:
    """Return whether every client has the state of the last round it took part in, whole and, where
    it must, with the reference's bits.
    """
    victim, left_out = missed
    for client, wanted in reference.states.items():
        own = left_out if client == victim else []
        last = max(set(range(1, lab.settings["rounds"] + 1)) - set(own))
        mine = {round: store.read(path) for round, path in lab.states(client, name).items()}
        if max(mine, default=0) != last or mine[last].state.keys() != wanted.keys():
            return False
        if equal and not all(
            torch.equal(mine[last].state[key], value) for key, value in wanted.items()
        ):
            return False
    return True


def run_row(lab: Lab, fault: str, position: str, reference: Reference) -> dict[str, Any]:
    """Return what one fault at one position did."""
    title, inject, victim, must = FAULTS[fault]
    name = lab.name = f"{fault}-{position}"
    started = time.monotonic()
    process = lab.submit(name)
    lab.wait_for_position(position, name, victim, ROUND, process)
    heal = inject(lab, position, process)
    code, said = lab.finish(process)
    if heal is not None:
        heal()
    row: dict[str, Any] = {
        "fault": fault,
        "title": title,
        "position": position,
        "code": code,
        "resumed": False,
        "rounds_repeated": 0,
    }
    if code:
        row |= {"resumed": True, "said": said, "rounds_repeated": max(0, ROUND - lab.round(name))}
        code, said = lab.finish(lab.submit(name, "--resume"))
        row["code_resumed"] = code
    row["seconds"] = round(time.monotonic() - started, 1)
    if code:
        return row | {"ok": False, "said": said}
    result = lab.result(name)
    same = reference.equal(lab, name)
    left_out = [
        record["round"]
        for record in result["rounds"]
        if record["num_clients"] < lab.deployment.clients
    ]
    kept = intact(lab, name, reference, must, (victim, left_out))
    row |= {
        "rounds": len(result["rounds"]),
        "left_out": left_out,
        "faults": result["faults"],
        "equal": same,
        "state_intact": kept,
        "round_seconds": [round(record["seconds"], 1) for record in result["rounds"]],
    }
    row["ok"] = (
        row["rounds"] == SETTINGS["rounds"]
        and kept
        and row["rounds_repeated"] <= 1
        and len(left_out) <= 1
        and (same or not must)
    )
    return row


def matrix(
    faults: list[str], positions: list[str], folder: Path, keep: Callable[[dict[str, Any]], None]
) -> list[dict[str, Any]]:
    """Return the rows asked for; `keep` is given each as it comes."""
    rows = []
    with Lab(folder, 2, SETTINGS, small={1: SMALL_DISK}) as lab:
        reference = Reference(lab)
        for fault in faults:
            for position in positions:
                if rows and (
                    rows[-1]["resumed"]
                    or not rows[-1]["ok"]
                    or rows[-1]["fault"] in ("supernode", "long-cut")
                ):
                    lab.healthy()
                try:
                    row = run_row(lab, fault, position, reference)
                except RuntimeError as error:
                    row = {
                        "fault": fault,
                        "title": FAULTS[fault][0],
                        "position": position,
                        "ok": False,
                        "resumed": False,
                        "said": str(error),
                    }
                rows.append(row)
                keep(row)
    return rows


def scaling(folder: Path, tell: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """Return seconds a round against the number of clients, light training, everything on one
    machine.
    """
    rows = []
    for clients in (3, 6, 12):
        settings = {**SETTINGS, "keep": 0.5, "min_size": 4, "local_epochs": 1, "rounds": 4}
        with Lab(folder / str(clients), clients, settings) as lab:
            code, said = lab.finish(lab.submit("scaling"), 900)
            if code:
                raise RuntimeError(said)
            seconds = [record["seconds"] for record in lab.result("scaling")["rounds"]][1:]
        rows.append(
            {
                "clients": clients,
                "containers": 3 + 2 * clients,
                "round_seconds": round(statistics.median(seconds), 2),
                "seconds_per_client": round(statistics.median(seconds) / clients, 2),
            }
        )
        tell(json.dumps(rows[-1]))
    return rows


def main() -> None:
    """Run what is asked for and write both files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fault", action="append", choices=list(FAULTS))
    parser.add_argument("--position", action="append", choices=POSITIONS)
    parser.add_argument("--scaling", action="store_true")
    parser.add_argument("--out", type=Path, default=FILE)
    given = parser.parse_args()
    content = read_json(given.out) or {"rows": [], "scaling": []}
    with tempfile.TemporaryDirectory(prefix="bayflower-faults-") as name:
        Path(name).chmod(0o755)
        if given.scaling:
            content["scaling"] = scaling(Path(name), lambda line: print(line, flush=True))
        else:

            def keep(row: dict[str, Any]) -> None:
                # another part of the matrix may write to it meanwhile
                content.update(read_json(given.out))
                known = {(one["fault"], one["position"]): one for one in [*content["rows"], row]}
                content["rows"] = [
                    known[key]
                    for key in sorted(
                        known, key=lambda key: (list(FAULTS).index(key[0]), POSITIONS.index(key[1]))
                    )
                ]
                write_json(given.out, content)
                print(json.dumps(row), flush=True)

            matrix(
                given.fault or list(FAULTS),
                given.position or list(POSITIONS),
                Path(name) / f"faults-{os.getpid()}",
                keep,
            )
            content.update(read_json(given.out))
    write_json(given.out, content)
    given.out.with_suffix(".md").write_text(
        page(content, __doc__.split("\n\n")[2].replace("\n", " ").strip())
    )
    sys.exit(0 if all(row["ok"] for row in content["rows"]) else 1)


if __name__ == "__main__":
    main()
