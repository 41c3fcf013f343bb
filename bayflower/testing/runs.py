"""What whole runs and whole totals of a method must keep."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from ..engines import Prepared, execute
from ..files import checkpoint
from ..files.records import Outcome
from ..files.store import MemoryStore
from ..flower.loop import run_loop
from ..fused.run import run_fused
from ..maths.exact import Total
from ..methods import get, handed_on
from ..tree import digest, stack, unflatten
from .bench import Bench, assert_same_bits, worst_difference


def check_broadcasts(bench: Bench) -> None:
    """Raise unless the stacked broadcasts are those of each client."""
    stacked = bench.server.broadcasts(bench.state, tuple(bench.clients))
    each = [bench.server.broadcast(bench.state, client) for client in bench.clients]
    assert worst_difference(stacked, stack(each), zero=1e-12) < 1e-12


def check_fast_total(bench: Bench) -> None:
    """Raise unless `total` of stacked updates finalises to what the exact sum of their statistics
    does, whole or in two parts. The bench has float64.
    """
    updates = [bench.padded(client) for client in bench.clients]
    parts: list[Any] = []
    for piece in (slice(0, 3), slice(3, None)):
        parts.append(
            bench.server.total(bench.state, tuple(bench.clients[piece]), stack(updates[piece]))
        )
    if parts[0] is None:
        pytest.skip("the method has no fast total")
    joined: dict[str, Any] = {
        name: sum(part[name] for part in parts if name in part)
        for name in {name for part in parts for name in part}
    }
    joined = {
        name: value for name, value in joined.items() if name not in bench.server.negligible(joined)
    }
    exact = Total()
    for client, update in zip(bench.clients, updates, strict=True):
        exact.add(
            bench.server.statistic(
                bench.state, client, bench.server.unpack(bench.state, bench.client.pack(update))
            )
        )
    want = exact.value()
    at_once: Any = bench.server.total(bench.state, tuple(bench.clients), stack(updates))
    for total in (at_once, joined):
        assert worst_difference({name: total[name] for name in want}, want) < 1e-12
        got, expected = (bench.server.finalise(bench.state, one) for one in (total, want))
        # solving with matrices of condition 1e7 (pFedVMP) costs that many digits
        assert worst_difference(got, expected, zero=1e-12) < 1e-9


def same_outcome(one: Outcome, two: Outcome) -> None:
    """Raise unless two runs have the same server state and tests, to the bit."""
    assert_same_bits(one.server_state, two.server_state)
    for view, tallies in two.views.items():
        for client, tally in tallies.items():
            assert_same_bits(one.views[view][client], tally)


def check_repeats(first: Outcome, made: Callable[[int], Prepared]) -> None:
    """Raise unless the same seed gives the bits of `first`, and another seed others; `made` returns
    the run with a seed.
    """
    same_outcome(first, execute(made(0)))
    other = execute(made(1))
    assert digest(other.views["personal"][0]) != digest(first.views["personal"][0])


def check_goes_on(
    whole: Outcome, made: Callable[[int], Prepared], folder: Path, stopped: bytes | None = None
) -> None:
    """Raise unless two rounds, then one more from the file, equal the three of `whole`; `made`
    returns the run with a number of rounds and a checkpoint in every one. `stopped` is the file
    after two rounds, where it is known.
    """
    if stopped is None:
        execute(made(2), out=folder)
    else:
        (folder / checkpoint.FILE).write_bytes(stopped)
    rest = made(3)
    resume = checkpoint.to_resume(folder, rest.run)
    assert resume.round == 2
    outcome = execute(rest, out=folder, resume=resume)
    same_outcome(outcome, whole)
    assert [record["train_loss"] for record in outcome.rounds] == [
        record["train_loss"] for record in whole.rounds
    ]


def outcomes(prepared: Prepared) -> tuple[Outcome, Outcome]:
    """Return (loop, fused) outcomes, with the loop's client states read back from its store."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    fused = run_fused(prepared.run, prepared.federation, prepared.halves)

    memory = MemoryStore()
    loop = run_loop(prepared.run, prepared.federation, prepared.halves, store=memory)
    states: dict[int, Any] = {
        client: unflatten(prepared.halves.client.state_type, saved[0].state)
        for (_, client), saved in memory.kept.items()
        if saved
    }
    return loop._replace(client_states=states), fused


def compare(loop: Outcome, fused: Outcome, tolerance: float) -> None:
    """Raise unless both engines have the same numbers: states norm-wise, losses, bytes, tests."""
    zero = tolerance / 10
    assert worst_difference(fused.server_state, loop.server_state, zero) < tolerance
    for client, state in loop.client_states.items():
        assert worst_difference(fused.client_states[client], state, zero) < tolerance, client
    for one, two in zip(loop.rounds, fused.rounds, strict=True):
        assert one["train_loss"] == pytest.approx(two["train_loss"], rel=max(tolerance, 1e-6))
        assert {k: one[k] for k in ("round", "bytes_up", "bytes_down", "num_clients")} == {
            k: two[k] for k in ("round", "bytes_up", "bytes_down", "num_clients")
        }
        assert ("personal" in one) == ("personal" in two)
    assert loop.views.keys() == fused.views.keys()
    assert loop.new_clients.keys() == fused.new_clients.keys()
    for mine, yours in ((loop.views, fused.views), (loop.new_clients, fused.new_clients)):
        for view in mine:
            assert mine[view].keys() == yours[view].keys()
            for client, tally in mine[view].items():
                assert float(yours[view][client].nll) == pytest.approx(
                    float(tally.nll), rel=max(tolerance * 100, 1e-5)
                )
                assert int(yours[view][client].num_examples) == int(tally.num_examples)


def check_no_flwr(methods: Iterable[str]) -> None:
    """Raise unless the halves of `methods` are imported in a process without flwr."""
    names = list(methods)
    kinds = [kind for name in names for kind in (get(name).server, get(name).client)]
    modules = sorted({kind.__module__ for kind in kinds})
    code = (
        "import importlib, sys; sys.modules['flwr'] = None\n"
        f"for module in {modules!r}:\n    importlib.import_module(module)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **handed_on(names)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"a half imports flwr, or cannot be imported:\n{done.stderr}"
