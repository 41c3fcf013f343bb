"""What a server believes of dropout follows what clients say, and no further than it should; so
MetaVD's defaults learn.
"""

from __future__ import annotations

import pytest
import torch
from conftest import assert_same_bits, worst_difference
from vdplain import BASES, server

from bayflower.config import parse
from bayflower.engines import execute, prepare
from bayflower.maths import beliefs, hypernet
from bayflower.metrics import summarise


@pytest.mark.slow
@pytest.mark.parametrize("base", BASES)
def test_the_defaults_learn_as_their_base_does(base):
    """Digits, every setting as it comes, 8 rounds: the hypernetwork once drove alpha to its limits
    in two rounds, and all was chance.
    """
    bare, with_dropout = (
        execute(
            prepare(
                parse(
                    method,
                    {
                        "rounds": 8,
                        "device": "cpu",
                        "evaluate_every": 0,
                        "calibration": "off",
                        "stacking": "yes",
                        **settings,
                    },
                )
            )
        )
        for method, settings in ((base, {}), ("metavd", {"base": base}))
    )
    accuracy = [
        summarise(outcome.views["personal"])["accuracy"] for outcome in (bare, with_dropout)
    ]
    assert accuracy[0] > 0.3  # of ten classes
    assert accuracy[1] > accuracy[0] - 0.05
    assert 0.05 < with_dropout.rounds[-1]["dropout_rate"] < 0.2


def test_a_step_that_reaches_too_far_is_taken_in_part():
    """Belief and velocity go the same share of the way; log alpha of each client moves by no more
    than the reach, up to the mean.
    """
    half, far = server(hyper_reach=0.1), server(hyper_reach=0)
    start = {
        "w.weight": torch.randn(8, 64, generator=torch.Generator().manual_seed(0)),
        "head.weight": torch.zeros(1, 1),
    }
    state = half.init(start, {}, (0, 1, 2))
    asked = (0, 2), torch.full((2, 512), 0.05).double(), torch.tensor([0.25, 0.75]).double()
    near, wide = (beliefs.followed(one.config, state.belief, *asked) for one in (half, far))
    part = (near.psi["2.bias"] / wide.psi["2.bias"]).mean()  # of a bias that began at 0
    assert float(part) in (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128)
    for name in ("psi", "embeddings"):
        before, cut, whole = (getattr(one, name) for one in (state.belief, near, wide))
        for key, value in before.items():
            torch.testing.assert_close(
                cut[key] - value, part * (whole[key] - value), rtol=1e-3, atol=1e-6
            )
    for name in ("psi_velocity", "embedding_velocity"):
        for key, value in getattr(wide, name).items():
            torch.testing.assert_close(getattr(near, name)[key], part * value)
    moved = torch.stack(
        [half.log_alpha(state._replace(belief=near), c) - half.log_alpha(state, c) for c in (0, 2)]
    )
    assert 0.02 < float(moved.square().mean().sqrt()) <= 0.1


def together(half, state, clients, counts, steps):
    """The belief after these clients, in this order, said how far their log alpha moved."""
    total = {"num_examples": torch.tensor(sum(counts[client] for client in clients))}
    for client in clients:
        total |= beliefs.line(client, torch.tensor(counts[client]), steps[client])
    return beliefs.after(half.config, state.belief, total)


@pytest.mark.parametrize("posterior", ["hyper", "global", "own"])
@pytest.mark.parametrize("momentum", [0.0, 0.3])
@pytest.mark.parametrize(("reach", "shares"), [(0.0, 20), (0.1, 20), (0.1, 1)])
def test_rounds_are_those_of_clients_one_by_one(posterior, momentum, reach, shares, monkeypatch):
    """A client that comes later starts at rest, one that stays away keeps its velocity; float32,
    as in a run. No round depends on who replied first. With one share looked at, smaller ones are
    searched for afterwards.
    """
    monkeypatch.setattr(hypernet, "SHARES", shares)
    settings = {"embedding_momentum": momentum, "hyper_momentum": 2 * momentum}
    half = server(posterior=posterior, hyper_reach=reach, hyper_clip=0.5, server_lr=0.7, **settings)
    draw = torch.Generator().manual_seed(0)
    start = {
        "w.weight": torch.randn(4, 16, generator=draw),
        "head.weight": torch.zeros(1, 1),
    }
    state = half.init(start, {}, tuple(range(12)))
    counts = {client: 3 + client for client in range(12)}
    want = state.belief
    for clients in ((0, 2, 11), (11, 1, 2), (2, 0)):
        steps = {client: 0.3 * torch.randn(64, generator=draw) for client in clients}
        got = together(half, state, clients, counts, steps)
        assert_same_bits(got, together(half, state, clients[::-1], counts, steps))
        whole = sum(counts[client] for client in clients)
        shares = {client: counts[client] / whole for client in clients}
        want = one_by_one(half.config, want, steps, shares)
        assert worst_difference(got, want) < 1e-6
        assert set(got.embedding_velocity) == set(want.embedding_velocity)
        state, want = state._replace(belief=got), got
    assert {name: int(count) for name, count in state.belief.seen.items() if count} == {
        "0": 2,
        "1": 1,
        "2": 3,
        "11": 2,
    }


@pytest.mark.parametrize("posterior", ["hyper", "global", "own"])
def test_who_replied_first_changes_no_bit(posterior):
    """Twelve clients in float64, whose sums would differ in their last bits."""
    half = server(posterior=posterior)
    draw = torch.Generator().manual_seed(0)
    start = {
        "w.weight": torch.randn(4, 16, dtype=torch.float64, generator=draw),
        "head.weight": torch.zeros(1, 1, dtype=torch.float64),
    }
    clients = tuple(range(12))
    state = half.init(start, {}, clients)
    counts = {client: 3 + client for client in clients}
    steps = {c: torch.randn(64, dtype=torch.float64, generator=draw) for c in clients}
    first = together(half, state, clients, counts, steps)
    for order in (clients[::-1], clients[5:] + clients[:5]):
        assert_same_bits(first, together(half, state, order, counts, steps))


def one_by_one(config, belief, steps, shares):
    """The next belief, each client's embedding a tensor of its own, by gradients of the sum."""
    names = [str(client) for client in steps]
    seen = {name: count + (name in names) for name, count in belief.seen.items()}
    if config.posterior != "hyper":
        mean = sum(shares[client] * step.double() for client, step in steps.items())
        asked = {str(client): step.double() for client, step in steps.items()}
        asked = {"all": mean} if config.posterior == "global" else asked
        moved = {
            name: (belief.embeddings[name] + config.server_lr * step).clamp(-8.5, 8.5).float()
            for name, step in asked.items()
        }
        return belief._replace(embeddings={**belief.embeddings, **moved}, seen=seen)
    psi = {name: value.double().requires_grad_() for name, value in belief.psi.items()}
    own = {name: belief.embeddings[name].double().requires_grad_() for name in names}
    known = {**psi, **own}
    ways = {}
    along = {c: (hypernet.output(psi, own[str(c)]) * steps[c].double()).sum() for c in steps}
    pull = sum(shares[client] * value for client, value in along.items())
    ways |= dict(zip(psi, torch.autograd.grad(pull, psi.values(), retain_graph=True), strict=True))
    for client, value in along.items():
        ways[str(client)] = torch.autograd.grad(value, own[str(client)], retain_graph=True)[0]
    velocity, after = {}, {}
    for group, momentum, old in (
        (psi, config.hyper_momentum, belief.psi_velocity),
        (own, config.embedding_momentum, belief.embedding_velocity),
    ):
        norm = torch.cat([ways[name].flatten() for name in group]).norm()
        for name in group:
            cut = ways[name] * min(1.0, config.hyper_clip / float(norm + 1e-6))
            rest = torch.zeros_like(cut)
            velocity[name] = cut - config.hyper_decay * known[name] + momentum * old.get(name, rest)
            after[name] = known[name] + config.server_lr * velocity[name]

    def there(part):
        some = {name: value + part * (after[name] - value) for name, value in known.items()}
        return some, torch.stack([hypernet.output(some, some[name]) for name in names])

    part = 1.0
    while config.hyper_reach and (there(part)[1] - there(0)[1]).square().mean() ** 0.5 > 0.1:
        part /= 2
    found = {name: value.detach().float() for name, value in there(part)[0].items()}
    speed = {name: (part * value).detach().float() for name, value in velocity.items()}

    def only(some, names, old):
        return {**old, **{name: some[name] for name in names}}

    return belief._replace(
        psi=only(found, psi, {}),
        psi_velocity=only(speed, psi, {}) if config.hyper_momentum else {},
        embeddings=only(found, names, belief.embeddings),
        embedding_velocity=only(speed, names, belief.embedding_velocity)
        if config.embedding_momentum
        else {},
        seen=seen,
    )
