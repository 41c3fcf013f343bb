"""The suites that time whole runs: every method, more clients, many clients of which few take part,
and a CPU.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..data import Federation
from ..engines import Prepared, prepare, run_under_flower
from ..methods import METHODS
from ..tree import flatten
from .cases import (
    WARM_UP,
    Options,
    Say,
    Timing,
    data_bytes,
    described,
    free,
    loaded,
    on_pictures,
    parse,
    pictures,
    timed,
    why,
)

USUAL = (
    "fedper",
    "fedavg",
    "fedavg-ft",
    "fedrep",
    "pfedvmp",
    "pfedvmp-avg",
    "fedmap",
    "fedbps",
    "local",
)
CHUNK = 50  # clients at a time where chunks are shown
LOOP_WARM_UP, LOOP_ROUNDS = 1, 2
NO_FLOWER = (
    "flwr is not installed: one by one is the fused engine with stacking=no, the same "
    "training without Flower's messages"
)


def methods(options: Options, say: Say) -> Iterator[dict[str, Any]]:
    """Yield a row a method and workload: its round fused, and with one client after another on the
    same device.
    """
    rounds = options.rounds or 20
    names = options.methods or tuple(name for name in USUAL if name in METHODS)
    precisions = ("float32", "tf32") if options.tf32 else ("float32",)
    for workload in options.chosen_workloads():
        for method in names:
            for precision in precisions:
                case = f"{method} on {workload}, {precision}"
                row: dict[str, Any] = {
                    "case": case,
                    "workload": workload,
                    "method": method,
                    "precision": precision,
                }
                try:
                    values = options.values(workload, WARM_UP + rounds, tf32=precision == "tf32")
                    prepared = loaded(method, values, workload=workload)
                    say(f"{case}: fused, {WARM_UP} + {rounds} rounds")
                    row |= timed(prepared, WARM_UP, options.seconds, test=True).row()
                    row |= {"data": described(prepared.federation), "failed": None}
                    say(f"{case}: fused, {row['ms']:.2f} ms a round")
                except Exception as error:  # one case that cannot run must not end the others
                    yield row | {"failed": why(error)}
                    continue
                if options.one_by_one and precision == "float32":
                    row |= one_by_one(method, values, options, case, say, workload)
                yield row


def one_by_one(
    method: str, values: dict[str, Any], options: Options, case: str, say: Say, workload: str
) -> dict[str, Any]:
    """Return the times of the loop engine, or of the fused engine without stacks where there is no
    Flower.
    """
    with_flower = importlib.util.find_spec("flwr") is not None
    rounds = {"rounds": LOOP_WARM_UP + LOOP_ROUNDS}
    try:
        say(
            f"{case}: {'loop' if with_flower else 'one by one'}, {LOOP_WARM_UP} + {LOOP_ROUNDS} "
            "rounds"
        )
        prepared = loaded(
            method,
            values | rounds | ({} if with_flower else {"stacking": "no"}),
            "loop" if with_flower else "fused",
            workload,
        )
        found = timed(prepared, LOOP_WARM_UP, options.seconds).row()
    except Exception as error:  # the fused engine's row is worth having without it
        return {
            "one_by_one": why(error),
            "how": f"one by one not measured for {case}: {why(error)}",
        }
    say(f"{case}: one by one, {found['ms']:.1f} ms a round")
    return {
        "one_by_one": "loop" if with_flower else "fused, stacking=no",
        "one_by_one_ms": found["ms"],
        "one_by_one_round_ms": found["round_ms"],
        "how": None if with_flower else NO_FLOWER,
    }


def with_ratios(suite: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with every ratio that the rows so far allow: to one by one, to FedPer's
    round, to the loop engine's.
    """

    def ratio(above: Any, below: Any) -> float | None:
        return above / below if above and below else None

    def other(row: dict[str, Any], **wanted: str) -> Any:
        alike = [
            one
            for one in rows
            if all(one.get(key) == value for key, value in wanted.items())
            and all(one.get(key) == row.get(key) for key in ("workload", "precision"))
        ]
        return alike[0].get("ms") if alike else None

    if suite == "methods":
        return [
            row
            | {
                "one_by_one_ratio": ratio(row.get("one_by_one_ms"), row.get("ms")),
                "fedper_ratio": ratio(row.get("ms"), other(row, method="fedper")),
            }
            for row in rows
        ]
    if suite == "networks":
        return [
            row | {"one_by_one_ratio": ratio(row.get("one_by_one_ms"), row.get("ms"))}
            for row in rows
        ]
    if suite == "cpu":
        return [
            row
            | {"loop_ratio": ratio(row.get("ms"), other(row, method=row["method"], engine="loop"))}
            for row in rows
        ]
    return rows


def scaling(options: Options, say: Say) -> Iterator[dict[str, Any]]:
    """Yield rows over the number of clients, all with the same number of samples: at once, and in
    chunks.
    """
    train, test = 100, 20
    rounds = options.rounds or 10
    sizes = options.clients or ((10, 50, 200, 1000) if options.gpu else (5, 10, 20))
    for method in options.methods or ("fedper",):
        for clients in sizes:
            chunk = min(CHUNK, max(1, max(sizes) // 4))
            for most in (0, chunk) if clients > chunk else (0,):
                case = f"{method}, {clients} clients, " + (
                    f"{most} at a time" if most else "all at once"
                )
                row: dict[str, Any] = {
                    "case": case,
                    "method": method,
                    "clients": clients,
                    "max_fused": most,
                }
                try:
                    federation = pictures(clients, train, test, options.seed)
                    changes = {
                        "seed": options.seed,
                        "device": options.device,
                        "max_fused": most,
                        "rounds": WARM_UP + rounds,
                    }
                    say(f"{case}: {WARM_UP} + {rounds} rounds")
                    found = timed(
                        on_pictures(method, federation, {**changes, "stacking": "yes"}),
                        WARM_UP,
                        options.seconds,
                    ).row()
                    row |= found
                    row |= {
                        "rounds_per_second": 1000 / found["ms"],
                        "samples_per_second": round(1e3 * clients * train / found["ms"]),
                        "data_bytes": data_bytes(federation),
                        "failed": None,
                        "data": f"{train} samples of 28×28 a client, made in memory; cnn, batch 10",
                    }
                    say(f"{case}: {row['rounds_per_second']:.2f} rounds a second")
                except Exception as error:  # one case that cannot run must not end the others
                    row |= {"failed": why(error)}
                free()
                yield row


def cross_device(options: Options, say: Say) -> Iterator[dict[str, Any]]:
    """Yield rows of many clients of which a hundredth take part in a round: states on disk, and for
    comparison in memory.
    """
    train, test, rounds = 20, 5, options.rounds or 20
    for clients in options.clients or ((10_000,) if options.gpu else (400,)):
        federation: Federation | None = None
        for method in options.methods or ("fedper",):
            for home in ("disk", "device"):
                case = f"{method}, {clients} clients, states on {home}"
                row: dict[str, Any] = {
                    "case": case,
                    "method": method,
                    "clients": clients,
                    "client_states": home,
                }
                try:
                    federation = federation or pictures(clients, train, test, options.seed)
                    changes = {
                        "seed": options.seed,
                        "device": options.device,
                        "rounds": WARM_UP + rounds,
                        "client_states": home,
                        "fraction_train": max(0.01, 1 / clients),
                        "checkpoint_every": 10,
                        "stacking": "yes",
                    }
                    prepared = on_pictures(method, federation, changes)
                    say(f"{case}: {WARM_UP} + {rounds} rounds")
                    with tempfile.TemporaryDirectory(prefix="bayflower-bench-") as folder:
                        found = timed(prepared, WARM_UP, options.seconds, out=Path(folder)).row()
                        disk = sum(
                            path.stat().st_size
                            for path in Path(folder, "states").glob("shard-*.bin")
                        )
                    row |= (
                        found
                        | state_sizes(prepared, clients)
                        | {
                            "data_bytes": data_bytes(federation),
                            "disk_bytes": disk,
                            "failed": None,
                            "data": f"{train} samples of 28×28 a client, made in memory; cnn, "
                            "batch 10",
                            "how": "a checkpoint every 10 rounds, which is not counted",
                        }
                    )
                    say(f"{case}: {row['ms']:.1f} ms a round")
                except Exception as error:  # one case that cannot run must not end the others
                    row |= {"failed": why(error)}
                free()
                yield row


def state_sizes(prepared: Prepared, clients: int) -> dict[str, Any]:
    """Return the bytes of all clients' states and of those in one round."""
    state = prepared.halves.client.init(*prepared.halves.initial)
    one = sum(leaf.numel() * leaf.element_size() for leaf in flatten(state).values())
    sampled = max(1, round(prepared.run.settings.fraction_train * clients))
    return {
        "sampled": sampled,
        "all_states_bytes": one * clients,
        "sampled_states_bytes": one * sampled,
    }


def cpu(options: Options, say: Say) -> Iterator[dict[str, Any]]:
    """Yield rows of the same work on a CPU: the loop engine, the fused one as it chooses and
    stacked, Flower's simulation.
    """
    rounds = options.rounds or 5
    engines = {
        "loop": {},
        "fused": {"stacking": "auto"},
        "fused, stacking=yes": {"stacking": "yes"},
        "ray": {},
    }
    for workload in options.workloads or ("digits",):
        for method in options.methods or ("fedper",):
            for engine, more in engines.items():
                case = f"{engine}, {method} on {workload}"
                if engine == "ray" and not options.one_by_one:
                    continue
                row: dict[str, Any] = {
                    "case": case,
                    "workload": workload,
                    "method": method,
                    "engine": engine,
                }
                try:
                    say(f"{case}: 1 + {rounds} rounds")
                    values = options.values(workload, 1 + rounds, **more) | {"device": "cpu"}
                    row |= (
                        simulated(method, values)
                        if engine == "ray"
                        else in_process(method, values, engine.split(",")[0], options)
                    )
                    row |= {"failed": None}
                    say(f"{case}: {row['ms']:.1f} ms a round")
                except Exception as error:  # what is not installed is a row too
                    row |= {"failed": why(error)}
                yield row


def in_process(
    method: str, values: dict[str, Any], engine: str, options: Options
) -> dict[str, Any]:
    """Return a run of this process, and how the fused engine chose to train."""
    prepared = loaded(method, values, engine)
    found = timed(prepared, 1, options.seconds, test=engine == "fused").row()
    apart = "one by one" in (found["remark"] or "")
    return found | {
        "chosen": "one by one" if apart or engine == "loop" else "stacked",
        "data": described(prepared.federation),
    }


def simulated(method: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return a run of Flower's Ray simulation; what its rounds do not account for is its start and
    end.
    """
    prepared = prepare(parse(method, values), "ray")
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="bayflower-bench-") as folder:
        (result,) = run_under_flower(
            [prepared], values, Path(folder), 0, False, lambda status: None
        )
    wall = time.perf_counter() - begun
    taken = [record["seconds"] for record in result["rounds"]]
    found = Timing(taken, 1, wall, {}).row()
    return found | {
        "startup": round(wall - sum(taken), 3),
        "chosen": f"in processes, {os.cpu_count()} cores",
    }
