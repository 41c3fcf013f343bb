"""A slow oracle for methods that share a part of the model: an ordinary module, torch.optim and
loops over clients and rounds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

from bayflower.data import ClientData, batches
from bayflower.engines import Prepared
from bayflower.maths.exact import Total
from bayflower.rounds import solo

LR, MOMENTUM = 0.05, 0.9
Phases = list[tuple[str, Callable[[str], bool]]]


def plain_training(
    prepared: Prepared, start: dict, data: ClientData, phases: Phases, round: int, purpose: str
) -> nn.Module:
    """Return an ordinary module trained from `start` on a client's data with torch.optim."""
    samples = solo.samples(data, torch.device("cpu"), torch.float64).train
    model = prepared.halves.model
    module = model.factory().double().train()
    module.load_state_dict(copy.deepcopy(start))
    lengths = {phase.name: phase for phase in prepared.halves.client.phases("train")}
    for name, moves in phases:
        for key, value in module.named_parameters():
            value.requires_grad_(moves(key))
        stepper = torch.optim.SGD(
            [v for v in module.parameters() if v.requires_grad], lr=LR, momentum=MOMENTUM
        )
        keys = {
            "seed": 0,
            "client": data.client,
            "round": round,
            "purpose": purpose,
            "coupled": model.coupled,
        }
        for (rows,) in batches.plan(len(data.y_train), lengths[name], **keys):
            stepper.zero_grad()
            nn.functional.cross_entropy(module(samples.x[rows]), samples.y[rows]).backward()
            stepper.step()
    return module


def plain_rounds(
    prepared: Prepared, shared: Callable[[str], bool], phases: Phases, rounds: int = 2
):
    """Return (the shared part, each client's own part) after plain training; `phases` are (name,
    which parameters move).
    """
    halves, training = prepared.halves, prepared.run.training
    start = {**halves.initial[0], **halves.initial[1]}
    globally = {name: value.clone() for name, value in start.items() if shared(name)}
    own = {
        data.client: {n: v.clone() for n, v in start.items() if not shared(n)}
        for data in prepared.federation.clients[:3]
    }
    for round in range(1, rounds + 1):
        sums: dict[str, torch.Tensor] = {}
        weight = 0
        for data in prepared.federation.clients[:3]:
            module = plain_training(
                prepared, {**globally, **own[data.client]}, data, phases, round, "train"
            )
            after = {name: value.detach().clone() for name, value in module.state_dict().items()}
            own[data.client] = {name: value for name, value in after.items() if not shared(name)}
            for name, value in after.items():
                if shared(name):
                    sums[name] = sums.get(name, 0) + len(data.y_train) * value
            weight += len(data.y_train)
        globally = {
            name: v / weight if v.is_floating_point() else (v / weight).round().long()
            for name, v in sums.items()
        }
    assert training.lr == LR
    return globally, own


def half_rounds(prepared: Prepared, rounds: int = 2):
    """Return the same from the halves."""
    server, client, _, (params, buffers) = prepared.halves
    clients = prepared.federation.clients[:3]
    state = server.init(params, buffers, tuple(data.client for data in clients))
    states = {data.client: client.init(params, buffers) for data in clients}
    for round in range(1, rounds + 1):
        total = Total()
        for data in clients:
            samples = solo.samples(data, torch.device("cpu"), torch.float64).train
            broadcast = server.broadcast(state, data.client)
            states[data.client], update, _ = solo.train(
                client,
                states[data.client],
                broadcast,
                samples,
                seed=0,
                client=data.client,
                round=round,
            )
            total.add(server.statistic(state, data.client, update))
        state = server.finalise(state, total.value())
    return server.shared(state), {k: {**one.params, **one.buffers} for k, one in states.items()}


def assert_rounds_agree(prepared: Prepared, shared: Callable[[str], bool], phases: Phases) -> None:
    """Assert that the halves give what plain torch gives, for every tensor of server and clients,
    and test what they say they test.
    """
    want, got = plain_rounds(prepared, shared, phases), half_rounds(prepared)
    for mine, yours in (
        (got[0], want[0]),
        *((got[1][client], want[1][client]) for client in want[1]),
    ):
        assert mine.keys() == yours.keys()
        for name, value in yours.items():
            torch.testing.assert_close(mine[name].double(), value.double(), rtol=1e-8, atol=1e-10)
    assert_views_agree(prepared, want[0], want[1], phases)


def assert_views_agree(
    prepared: Prepared, globally: dict, own: dict[int, dict], phases: Phases
) -> None:
    """Assert that "before" is the shared part with the own part, and "personal" that model after
    one more local training.
    """
    server, client, model, (params, buffers) = prepared.halves
    for data in prepared.federation.clients[:3]:
        start, samples = (
            {**globally, **own[data.client]},
            solo.samples(data, torch.device("cpu"), torch.float64),
        )
        broadcast = server.broadcast_type(
            *(
                {name: start[name] for name in names if name in globally}
                for names in (params, buffers)
            )
        )
        state = client.init(params, buffers)
        state = state._replace(
            **{f: {n: start[n] for n in getattr(state, f)} for f in ("params", "buffers")}
        )
        tuned = solo.adapt(
            client, state, broadcast, samples.train, "finetune", seed=0, client=data.client, round=2
        )
        before = model.factory().double()
        before.load_state_dict(start)
        after = plain_training(prepared, start, data, phases, 2, "finetune")
        for view, module in (("before", before.eval()), ("personal", after.eval())):
            with torch.no_grad():
                want = torch.softmax(module(samples.test.x), 1)
            torch.testing.assert_close(
                client.predict(view, tuned, broadcast, samples.test.x, {}),
                want,
                rtol=1e-7,
                atol=1e-9,
            )
