"""FedROD against golden vectors, a weighted softmax, and two rounds in plain torch."""

from __future__ import annotations

import pytest
import torch
from conftest import small
from plainsteps import assert_equal, both, half_rounds, mean, numbers, plain_sgd
from torch import nn

from bayflower.clients.ditto import with_own
from bayflower.clients.fedrod import Client
from bayflower.config import Training
from bayflower.errors import ConfigError
from bayflower.maths.gradients import grad_and_value
from bayflower.networks.model import Batch, Model
from bayflower.rounds import solo
from bayflower.strategies.fedavg import State as Broadcast
from bayflower.strategies.fedrod import Config


def doubles(value):
    return torch.tensor(value, dtype=torch.float64)


def linear(classes, outputs=None):
    """A network whose features are its inputs."""
    return Model(lambda: nn.Sequential(nn.Identity(), nn.Linear(2, outputs or classes)), classes)


def of_counts(counts):
    """Training data with so many samples of each class, and one that is padding."""
    y = torch.cat([torch.full((n,), k) for k, n in enumerate(counts)] + [torch.tensor([2])])
    mask = torch.ones(len(y), dtype=torch.float64)
    mask[-1] = 0
    return Batch(torch.zeros(len(y), 2).double(), y, mask)


def test_golden_losses_and_gradients(baselines):
    """[eq. 7] and [eq. 8] with absent classes and a padded row; what each gradient may reach."""
    known, phase = baselines["fedrod"], Training().phase("local")
    batch = Batch(doubles(known["z"]), torch.tensor(known["y"]), doubles(known["mask"]))
    sent = Broadcast(
        {"1.weight": doubles(known["head_weight"]), "1.bias": doubles(known["head_bias"])}, {}
    )
    own = {"1.weight": doubles(known["personal_weight"]), "1.bias": doubles(known["personal_bias"])}
    for gamma, name in ((1.0, "generic_loss"), (0.5, "generic_loss_gamma_half")):
        half = Client(Config(gamma), Training(), linear(4))
        state = half.init(*linear(4).initial(0, torch.float64))._replace(params=own)
        work = half.begin(state, sent, of_counts(known["counts"]))
        loss, _ = half.loss(work.params, work, batch, {}, phase)
        want = known[name] + known["personal_loss"]
        assert float(loss) == pytest.approx(want, rel=1e-9)
        logits, n = doubles(known["logits"]), doubles(known["counts"]) ** gamma
        slow = (n * logits.exp())[:3]  # classes without samples drop out by themselves
        slow = slow[range(3), batch.y[:3]] / slow.sum(1)
        assert float(-slow.log().mean()) == pytest.approx(known[name], rel=1e-9)
    half = Client(Config(), Training(), linear(4))
    work = half.begin(
        half.init(*linear(4).initial(0))._replace(params=own), sent, of_counts(known["counts"])
    )
    grads, _ = grad_and_value(
        lambda params: half.loss(params, work, batch, {}, phase), has_aux=True
    )(work.params)
    by_logit = doubles(known["grad_logits"])
    want = {"1.weight": by_logit.T @ batch.x, "1.bias": by_logit.sum(0)}
    personal = {
        "1.weight": doubles(known["grad_personal_weight"]),
        "1.bias": doubles(known["grad_personal_bias"]),
    }
    for name, value in {**want, **with_own(personal)}.items():
        torch.testing.assert_close(grads[name], value, rtol=1e-9, atol=1e-11)
    assert float(grads["1.weight"][2:].abs().max()) == 0.0  # classes that the client lacks
    probs = half.predict(
        "before", half.init(*linear(4).initial(0))._replace(params=own), sent, batch.x, {}
    )
    torch.testing.assert_close(probs, doubles(known["personal_logits"]).softmax(1))


def test_golden_single_logit(baselines):
    """Two classes as one logit: shifted by gamma log(n_1/n_0)."""
    known = baselines["fedrod"]["one_logit"]
    half = Client(Config(), Training(), linear(2, 1))
    prior = half.prior(of_counts(known["counts"]))
    logits = doubles(known["logits"])[:, None] + prior
    got = half.model.nll(logits, torch.tensor(known["y"]))
    torch.testing.assert_close(got, doubles(known["nll"]), rtol=1e-9, atol=1e-11)
    one_sided = half.prior(of_counts([5, 0]))
    assert float(one_sided) == -1e4


def test_equal_counts_are_the_plain_loss():
    half = Client(Config(), Training(), linear(4))
    prior = half.prior(of_counts([7, 7, 7, 7]))
    logits, y = torch.randn(5, 4).double(), torch.tensor([0, 1, 2, 3, 0])
    torch.testing.assert_close(half.model.nll(logits + prior, y), half.model.nll(logits, y))


@pytest.mark.parametrize("start", ["zero", "copy"])
def test_two_rounds_equal_plain_torch(start):
    """[eq. 7] and [eq. 8] as two trainings side by side: the second on features of the first."""
    case = both("fedrod", rod_start=start)
    world, own = case.start, {}
    head = [name for name in case.start if name.startswith("head")]
    for round, (state, states, updates) in enumerate(half_rounds(case, 2), start=1):
        models = {}
        for client in case.clients:
            samples = case.samples[client]
            counts = torch.bincount(samples.y, minlength=10).double()
            place = {row.numpy().tobytes(): int(y) for row, y in zip(*samples[:2], strict=True)}
            begin = (
                case.start
                if start == "copy"
                else {n: torch.zeros_like(case.start[n]) for n in head}
            )
            mine = {n: own.get(client, begin)[n].clone().requires_grad_() for n in head}

            def both_losses(module, x, counts=counts, place=place, mine=mine):
                y = torch.tensor([place[row.numpy().tobytes()] for row in x])
                z = module.base(x)
                logits = module.head(z)
                odds = counts * logits.exp()
                balanced = -(odds[range(len(y)), y] / odds.sum(1)).log().mean()
                top = logits.detach() + z.detach() @ mine["head.weight"].T + mine["head.bias"]
                personal = nn.functional.cross_entropy(top, y)
                grads = torch.autograd.grad(personal, list(mine.values()))
                with torch.no_grad():
                    for value, grad in zip(mine.values(), grads, strict=True):
                        value -= 0.05 * grad
                return balanced - nn.functional.cross_entropy(logits, y)  # in its place

            models[client] = numbers(plain_sgd(case, world, client, round, both_losses)[0])
            own[client] = {n: value.detach() for n, value in mine.items()}
            assert_equal(updates[client].params, models[client])
            assert_equal(states[client].params, own[client])
        world = mean(case, models)
        assert_equal(state.params, world)


def test_views_are_sums_of_heads_and_a_new_client_fits_its_head():
    case = both("fedrod")
    half, samples = case.prepared.halves.client, case.samples[case.clients[0]]
    sent = Broadcast(*case.prepared.halves.initial)
    fresh = half.init(*case.prepared.halves.initial)
    keys = {"seed": 0, "client": 9, "round": 1}
    state = solo.adapt(half, fresh, sent, samples, "new", **keys)
    _, z, _ = half.model.forward_features(*sent, samples.x, train=False)
    top = half.model.forward(*sent, samples.x, train=False)[0]
    top = top + z @ state.params["head.weight"].T + state.params["head.bias"]
    got = half.predict("personal", state, sent, samples.x, {})
    torch.testing.assert_close(got, top.softmax(1))
    assert not torch.allclose(got, half.predict("global", state, sent, samples.x, {}), atol=1e-3)
    tuned = solo.adapt(half, state, sent, samples, "finetune", **keys)
    assert torch.equal(half.predict("before", tuned, sent, samples.x, {}), got)
    assert not torch.allclose(half.predict("personal", tuned, sent, samples.x, {}), got, atol=1e-3)


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="rod_gamma must be finite and not negative"):
        small("fedrod", rod_gamma=-1)
    with pytest.raises(ConfigError, match="fedrod gives classes that a client lacks"):
        small("fedrod", label_smoothing=0.1)
    net = Model(
        lambda: nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 2)), 2, head=("1", "2")
    )
    with pytest.raises(ConfigError, match="must be one Linear layer; got 1, 2"):
        Client(Config(), Training(), net)
