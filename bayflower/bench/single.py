"""The suite that times the steps of clients that are trained one by one."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from ..data import batches
from ..engines import Prepared
from .cases import WARM_UP, Options, Say, described, free, loaded, timed, why

ROUNDS = 5  # that count


def single(options: Options, say: Say) -> Iterator[dict[str, Any]]:
    """Yield a row a workload, method and way: the time of a client's step, with all that a round
    has besides. On a GPU steps are recorded, or started from Python; on a CPU they are plain.
    """
    ways = ("recorded", "plain") if options.gpu else ("plain",)
    usual = ("pfl-cifar10",) if options.gpu else ("digits",)
    for workload in options.workloads or usual:
        for method in options.methods or ("fedavg",):
            for way in ways:
                case = f"{method} on {workload}, {way}"
                row: dict[str, Any] = {"case": case, "workload": workload, "method": method}
                row |= {"way": way, "precision": "tf32" if options.tf32 else "float32"}
                try:
                    more = {"stacking": "no", "cuda_graphs": way == "recorded"}
                    rounds = WARM_UP + (options.rounds or ROUNDS)
                    values = options.values(workload, rounds, **more, tf32=options.tf32)
                    prepared = loaded(method, values, workload=workload)
                    say(f"{case}: {WARM_UP} + {options.rounds or ROUNDS} rounds")
                    row |= timed(prepared, WARM_UP, options.seconds).row()
                    number = steps_of_a_round(prepared)
                    row |= {
                        "steps": round(number),
                        "ms_a_step": row["ms"] / number,
                        "data": described(prepared.federation),
                        "failed": None,
                    }
                    say(f"{case}: {row['ms_a_step']:.3f} ms a step")
                except Exception as error:  # one case that cannot run must not end the others
                    row |= {"failed": why(error)}
                free()
                yield row


def steps_of_a_round(prepared: Prepared) -> float:
    """Return how many steps the clients of a round take together, on average."""
    half, clients = prepared.halves.client, prepared.federation.clients
    taken = statistics.mean(
        sum(
            batches.num_steps(len(data.y_train), phase, half.model.coupled)
            for phase in half.phases("train")
        )
        for data in clients
    )
    return taken * max(1, round(prepared.run.settings.fraction_train * len(clients)))
