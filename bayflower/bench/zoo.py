"""The suite of networks that people bring: whether clients of each train as a stack or why not, how
much faster than one by one, and whether the numbers are the same.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

from ..engines import Prepared, execute
from ..files.records import Outcome
from ..files.store import MemoryStore
from ..tree import flatten, unflatten, worst_difference
from . import networks
from .cases import Options, Say, free, timed, why
from .networks import MANY, NETWORKS, SAMPLES

METHODS = ("fedmap", "pfedvmp", "fednp", "metavd", "fedbps")
FEW = 3  # clients on a CPU
UNEQUAL = (8, 7, 5)  # samples of clients whose numbers are compared
ZERO = 1e-10  # tensors below it have no digits to compare
COMPARED: dict[str, Any] = {
    "batch_size": 8,
    "local_epochs": 1,
    "local_steps": 1,
    "lr": 0.005,
    "dtype": "float64",
    "tf32": False,
}


def brought(options: Options, say: Say) -> Iterator[dict[str, Any]]:
    """Yield a row a network and method."""
    for name in options.workloads or tuple(NETWORKS):
        if name not in NETWORKS:
            yield {"case": name, "failed": f"not a network; those are {', '.join(NETWORKS)}"}
            continue
        for method in options.methods or METHODS:
            row: dict[str, Any] = {"case": f"{method} on {name}", "network": name, "method": method}
            try:
                row |= speeds(name, method, options, say)
                row |= {"failed": None}
            except Exception as error:  # one case that cannot run must not end the others
                row |= {"failed": why(error)}
            free()
            if row["failed"] is None:
                row |= compared(name, method, options, say)
                free()
            yield row


def speeds(name: str, method: str, options: Options, say: Say) -> dict[str, Any]:
    """Return the time of a round stacked, and one by one."""
    warm, rounds = (3, options.rounds or 5) if options.gpu else (1, options.rounds or 2)
    clients = options.clients[0] if options.clients else MANY if options.gpu else FEW
    found: dict[str, Any] = {"clients": clients}
    ways = ("yes", "no") if options.one_by_one else ("yes",)
    for way in ways:
        more = {"stacking": way, "num_clients": clients, "tf32": options.tf32}
        values = options.values(name, warm + rounds, **more)
        run = networks.prepared(name, method, values)
        say(f"{method} on {name}, {'a stack' if way == 'yes' else 'one by one'}")
        taken = timed(run, warm, options.seconds, test=True)
        if way == "no":
            return found | {"one_by_one_ms": taken.row()["ms"]}
        found |= taken.row() | {
            "weights": run.halves.model.num_parameters,
            "trained": "; ".join(taken.remarks) or "stacked",
            "remark": None,
            "data": f"{clients} clients with {SAMPLES} samples each, made in memory; batch "
            f"{networks.SETTINGS['batch_size']}; {'TF32' if options.tf32 else 'float32'}",
        }
    return found


def compared(name: str, method: str, options: Options, say: Say) -> dict[str, Any]:
    """Return how far a stacked step in float64 is from the loop engine's, norm by norm; where there
    is no Flower, from one client after another.
    """
    flower = importlib.util.find_spec("flwr") is not None
    other = "the loop engine" if flower else "one client after another"
    inner = {"inner_lr": 0.001} if method in networks.DROPPING else {}
    say(f"{method} on {name}, the numbers of {other}")
    values = options.values(name, 1, **COMPARED, **inner)

    def ready(engine: str, way: str) -> Prepared:
        return networks.prepared(name, method, values | {"stacking": way}, engine, UNEQUAL)

    try:
        outcomes = (
            execute(ready("fused", "yes")),
            (in_loop(ready("loop", "no")) if flower else execute(ready("fused", "no"))),
        )
        return {"apart": apart(*outcomes), "beside": other}
    except Exception as error:  # the times are worth having without it
        return {
            "apart": None,
            "how": f"{method} on {name}: not compared with {other}: {why(error)}",
        }


def in_loop(prepared: Prepared) -> Outcome:
    """Return the loop engine's outcome with the states of its clients."""
    from ..flower.loop import run_loop  # needs flwr

    run, _, clients, halves = prepared
    memory, kind = MemoryStore(), halves.client.state_type
    kept: dict[int, Any] = {}
    outcome = run_loop(run, clients, halves, store=memory)
    for (_, client), states in memory.kept.items():
        if states:
            kept[client] = unflatten(kind, states[0].state)
    return outcome._replace(client_states=kept)


def apart(stack: Outcome, alone: Outcome) -> float:
    """Return the largest difference of two outcomes' states, as a share."""
    worst = worst_difference(stack.server_state, alone.server_state, ZERO)
    for client, state in alone.client_states.items():
        if flatten(state):
            worst = max(worst, worst_difference(stack.client_states[client], state, ZERO))
    return worst
