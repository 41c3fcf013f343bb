"""What the slow oracles of the baselines share: rounds of the halves beside rounds in plain torch,
client by client.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from conftest import small_prepared
from torch import nn

from bayflower.data import batches
from bayflower.engines import Prepared
from bayflower.maths.exact import Total
from bayflower.networks.model import Batch
from bayflower.rounds import solo

LR = 0.05
Named = dict[str, torch.Tensor]


class Both(NamedTuple):
    """A method with three clients of unequal size, plain SGD and float64."""

    prepared: Prepared
    clients: list[int]
    samples: dict[int, Batch]
    start: Named


def both(method: str, **settings: Any) -> Both:
    usual = {"optimizer": "sgd", "lr": LR, "dtype": "float64", "keep": 0.15}
    prepared = small_prepared(method, **{**usual, **settings})
    data = prepared.federation.clients[:3]
    samples = {
        one.client: solo.samples(one, torch.device("cpu"), torch.float64).train for one in data
    }
    assert len({len(one.y) for one in samples.values()}) > 1
    return Both(
        prepared, [one.client for one in data], samples, copy.deepcopy(prepared.halves.initial[0])
    )


def half_rounds(case: Both, rounds: int):
    """Yield (server state, client states, updates) after each round of the halves."""
    halves = case.prepared.halves
    state = halves.server.init(*halves.initial, tuple(case.clients))
    states = {client: halves.client.init(*halves.initial) for client in case.clients}
    for round in range(1, rounds + 1):
        total, updates = Total(), {}
        for client in case.clients:
            broadcast = halves.server.broadcast(state, client)
            keys = {"seed": 0, "client": client, "round": round}
            states[client], updates[client], _ = solo.train(
                halves.client, states[client], broadcast, case.samples[client], **keys
            )
            sent = halves.server.unpack(state, halves.client.pack(updates[client]))
            assert halves.server.check(state, client, sent) is None
            total.add(halves.server.statistic(state, client, sent))
        state = halves.server.finalise(state, total.value())
        yield state, dict(states), updates


def plain_sgd(
    case: Both,
    start: Named,
    client: int,
    round: int,
    extra: Callable,
    after: Callable | None = None,
) -> tuple[nn.Module, int]:
    """Return (a module after SGD on cross-entropy + extra(module, x), the number of steps);
    `after(phase, module)` sees every iterate.
    """
    module = case.prepared.halves.model.factory().double()
    module.load_state_dict(copy.deepcopy(start))
    samples, count = case.samples[client], 0
    for phase in case.prepared.halves.client.phases("train"):
        for (rows,) in batches.plan(
            len(samples.y),
            phase,
            seed=0,
            client=client,
            round=round,
            purpose="train",
            coupled=False,
        ):
            module.zero_grad()
            loss = nn.functional.cross_entropy(module(samples.x[rows]), samples.y[rows]) + extra(
                module, samples.x[rows]
            )
            loss.backward()
            with torch.no_grad():
                for value in module.parameters():
                    value -= LR * value.grad
            count += 1
            if after:
                after(phase.name, module)
    return module, count


def numbers(module: nn.Module) -> Named:
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def mean(case: Both, values: dict[int, Named], weighted: bool = True) -> Named:
    """Return the mean over clients, by sample count or plain."""
    weight = {client: len(case.samples[client].y) if weighted else 1 for client in values}
    total = sum(weight.values())
    return {name: sum(weight[c] * values[c][name] for c in values) / total for name in case.start}


def zeros(like: Named) -> Named:
    return {name: torch.zeros_like(value) for name, value in like.items()}


def assert_equal(got: Named, want: Named, rtol: float = 1e-7, atol: float = 1e-10) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=rtol, atol=atol)
