"""FedProto against golden vectors, and two rounds against plain torch."""

from __future__ import annotations

import pytest
import torch
from conftest import small, small_prepared
from plainsteps import assert_equal, both, half_rounds, numbers, plain_sgd
from torch import nn

from bayflower.clients.fedproto import Client, prototype_head
from bayflower.config import Training
from bayflower.contract import Work
from bayflower.errors import ConfigError
from bayflower.maths.classmessages import ClassMessage
from bayflower.maths.classwise import class_means
from bayflower.maths.exact import Total
from bayflower.networks.model import Batch, Model
from bayflower.rounds import solo
from bayflower.strategies.fedproto import Config, Server, State


def doubles(value):
    return torch.tensor(value, dtype=torch.float64)


def network(features, classes):
    """A network whose features are its inputs."""
    return Model(lambda: nn.Sequential(nn.Identity(), nn.Linear(features, classes)), classes)


@pytest.mark.parametrize("average", ["count", "mean"])
def test_golden_prototypes(baselines, average):
    """[eq. 3] and [eq. 6], against all features of a class pooled; one row is padding."""
    known, model = baselines["fedproto"], network(3, 4)
    server = Server(Config(proto_average=average, min_count=1), model.anatomy)
    state = server.init(*model.initial(0, torch.float64), (0, 1, 2))
    assert state.params == {}
    total, pooled = Total(), {}
    rows = zip(known["features"], known["labels"], known["mask"], strict=True)
    for client, (z, y, mask) in enumerate(rows):
        z, y, mask = doubles(z), torch.tensor(y), doubles(mask)
        counts, means = class_means(z, y, mask, 4)
        assert counts.tolist() == known["counts"][client]
        torch.testing.assert_close(means * counts[:, None], doubles(known["sums"][client]))
        sent = counts > 0
        message = ClassMessage(mask.sum().long(), {}, {}, counts, means[sent], {})
        assert server.check(state, client, message) is None
        total.add(server.statistic(state, client, message))
        for row, k, real in zip(z, y.tolist(), mask.tolist(), strict=True):
            if real:
                pooled.setdefault(k, []).append(row)
    after = server.finalise(state, total.value())
    assert after.known.tolist() == known["known"]
    want = doubles(known[f"centroids_{average}"])
    torch.testing.assert_close(after.centroids, want, rtol=1e-9, atol=1e-11)
    if average == "count":
        for k, found in pooled.items():
            torch.testing.assert_close(after.centroids[k], torch.stack(found).mean(0))


def test_golden_pull_gradient_and_distances(baselines):
    """The second term of [eq. 7] and its gradient; [eq. 8] as a head."""
    known = baselines["fedproto"]
    batch = known["batch"]
    half = Client(Config(batch["weight"]), Training(), network(3, 4))
    centroids, there = doubles(known["centroids_count"]), torch.tensor(known["known"])
    work = Work({}, {}, State({}, {}, centroids, there))
    z = doubles(batch["z"]).requires_grad_()
    data = Batch(z, torch.tensor(batch["y"]), doubles(batch["mask"]))
    pull = half.weight(work) * half.pull(z, work, data)
    torch.testing.assert_close(pull, doubles(batch["pull"]), rtol=1e-9, atol=1e-11)
    (grad,) = torch.autograd.grad(pull, z)
    torch.testing.assert_close(grad, doubles(batch["grad_z"]), rtol=1e-9, atol=1e-11)
    params, _ = network(3, 4).initial(0, torch.float64)
    head = prototype_head(centroids, there, params, "1")
    logits = z.detach() @ head["1.weight"].T + head["1.bias"]
    far = doubles(batch["squared_distance"])
    want = (-far / 2).masked_fill(~there, -torch.inf).softmax(1)
    torch.testing.assert_close(logits.softmax(1), want)
    torch.testing.assert_close(want, doubles(batch["probabilities"]), rtol=1e-9, atol=1e-11)


def test_two_rounds_equal_plain_torch():
    """[eq. 7] with a weight that matters; in the second round there are prototypes."""
    lam = 3.0
    case = both("fedproto", proto_weight=lam, min_count=2)
    own, centroids = {}, {}
    for round, (state, states, updates) in enumerate(half_rounds(case, 2), start=1):
        sums, counts = {}, {}
        for client in case.clients:
            samples = case.samples[client]
            place = {row.numpy().tobytes(): int(y) for row, y in zip(*samples[:2], strict=True)}

            def pull(module, x, place=place, centroids=centroids):
                terms = []
                for row in x:
                    z, k = module.base(row[None])[0], place[row.numpy().tobytes()]
                    near = centroids.get(k)
                    terms.append(z.new_zeros(()) if near is None else (z - near).square().mean())
                return lam * torch.stack(terms).mean()

            start = own.get(client, case.start)
            module, _ = plain_sgd(case, start, client, round, pull)
            own[client] = numbers(module)
            assert_equal(states[client].params, own[client])
            z = module.base(samples.x).detach()
            for k in range(10):
                mine = z[samples.y == k]
                if len(mine) >= 2:
                    sums[k] = sums.get(k, 0) + mine.sum(0)
                    counts[k] = counts.get(k, 0) + len(mine)
            assert not updates[client].params
        centroids = {**centroids, **{k: sums[k] / counts[k] for k in sums}}
        assert state.known.tolist() == [k in centroids for k in range(10)]
        for k, want in centroids.items():
            torch.testing.assert_close(state.centroids[k], want)


def test_the_nearest_known_prototype_predicts():
    prepared = small_prepared("fedproto")
    half, initial = prepared.halves.client, prepared.halves.initial
    server = prepared.halves.server
    data = solo.samples(prepared.federation.clients[0], torch.device("cpu"), torch.float32)
    state, sent = half.init(*initial), server.init(*initial, (0,))
    assert torch.equal(*(half.predict(v, state, sent, data.test.x, {}) for v in half.views()))
    z = half.model.forward_features(*initial, data.test.x, train=False)[1]
    there = torch.arange(10) % 3 != 0
    centroids = z[torch.arange(10) % len(z)] + 0.1
    sent = sent._replace(centroids=centroids * there[:, None], known=there)
    probs = half.predict("personal", state, sent, data.test.x, {})
    far = torch.cdist(z, centroids).masked_fill(~there, torch.inf)
    assert torch.equal(probs.argmax(1), far.argmin(1))
    assert float(probs[:, ~there].abs().max()) == 0.0
    torch.testing.assert_close(probs, (-far.square() / 2).softmax(1), rtol=1e-4, atol=1e-6)


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="proto_weight must be finite and not negative"):
        small("fedproto", proto_weight=-1)
    with pytest.raises(ConfigError, match="min_count must be at least 1"):
        small("fedproto", min_count=0)
    bare = Model(lambda: nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2, bias=False)), 2)
    with pytest.raises(ConfigError, match="must be one Linear layer with a bias; got 1"):
        Client(Config(), Training(), bare)
    model = network(3, 4)
    server = Server(Config(), model.anatomy)
    state = server.init(*model.initial(0), (0,))
    sent = ClassMessage(torch.tensor(3), {}, {}, torch.tensor([4, 0, 0, 0]), torch.ones(1, 3), {})
    assert "more than num_examples = 3" in (server.check(state, 0, sent) or "")
