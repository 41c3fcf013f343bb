"""Private sums of methods whose sums are not those of a mean: what one client can change, against
loops over clients and classes; noise as declared; states that are defined whatever the noise; runs.
"""

from __future__ import annotations

import math

import pytest
import torch
from privateruns import BASE

from bayflower import methods
from bayflower.config import parse
from bayflower.engines import prepare, run_to_result
from bayflower.errors import BayflowerError, ConfigError
from bayflower.files import checkpoint
from bayflower.maths.classmessages import ClassMessage, pack_factors
from bayflower.maths.classwise import class_factors, class_labels, class_means
from bayflower.maths.exact import Total
from bayflower.maths.noisyclasses import restored_classes
from bayflower.privacy import accounting
from bayflower.privacy.discrete import Entropy
from bayflower.privacy.noisy import CHANGE, Mechanism, private_half
from bayflower.rounds.halves import make_halves
from bayflower.tree import flatten

pytest.importorskip("dp_accounting")
CLASSES, C = 3, 0.7
RULES = ("precision", "diag", "count_mean", "mean")
CASES = [("pfedvmp", {"centroid": rule}) for rule in RULES]
CASES += [("fedbps", {"ranking": one}) for one in ("paper", "printed")]


@pytest.fixture
def fixed(monkeypatch):
    monkeypatch.setattr(Entropy, "seed", 7)


def half_of(method, settings, draw):
    """Return a server half and its state in the middle of a run."""
    made = make_halves(parse(method, {"model": "mlp", "calibration": "off", **settings}), (6,), 3)
    state = made.server.init(*made.initial, (0, 1, 2))
    if method == "pfedvmp":
        centroids = torch.randn(state.centroids.shape, generator=draw)
        centroids[2] = 0
        return made.server, state._replace(
            centroids=centroids, known=torch.tensor([True, True, False])
        )
    mask = {n: torch.rand(v.shape, generator=draw) < 0.6 for n, v in state.mask.items()}
    return made.server, state._replace(mask=mask)


def update_of(half, state, draw, size=0.1, classes=(0, 1, 2), number=40):
    """Return what a client sends: numbers around those that it was sent, `size` of them apart."""
    expected = half.expects(state)
    params = {
        n: v + size * torch.randn(v.shape, generator=draw) for n, v in expected.params.items()
    }
    count = torch.tensor(number)
    if not isinstance(expected, ClassMessage):
        variance = {
            n: torch.rand(v.shape, generator=draw) * size + 1e-30 for n, v in params.items()
        }
        return expected._replace(num_examples=count, params=params, variance=variance)
    dim, rule = state.centroids.shape[1], half.config.centroid
    y = torch.tensor([classes[i % len(classes)] for i in range(number)])
    z = size * torch.randn(number, dim, generator=draw) + y[:, None]
    mask = torch.ones(number)
    counts, means = class_means(z, y, mask, CLASSES)
    spread = {}
    if rule == "precision":
        basis, weight, _ = class_factors(z, y, mask, CLASSES)
        spread = pack_factors(basis, weight, class_labels(y, mask, CLASSES), CLASSES)
    elif rule == "diag":
        spread = {"precision": torch.rand(len(set(classes)), dim, generator=draw) * size + 1e-20}
    return ClassMessage(count, params, expected.buffers, counts, means[counts > 0], spread)


# -- the slow oracle -------------------------------------------------------------------------------
def shortened(values, norm):
    size = math.sqrt(math.fsum(v * v for v in values))
    return [v * min(1.0, norm / size) if size else 0.0 for v in values]


def class_rows(half, state, update):
    """Return a client's natural parameters of all classes: dense matrices, class by class."""
    rule, dim = half.config.centroid, state.centroids.shape[1]
    found, place, low, high = [], 0, 0, 0
    for k in range(CLASSES):
        wide = {"precision": dim * (dim + 1) // 2, "diag": dim}.get(rule, 1)
        if not int(update.counts[k]):
            found += [0.0] * (wide + dim)
            continue
        apart = (update.means[place].double() - state.centroids[k].double()) / dim**0.5
        if rule == "precision":
            rank, spread = int(update.spread["ranks"][k]), update.spread
            matrix = half.config.alpha * torch.eye(dim).double()
            if 2 * rank > dim:
                root = torch.zeros(dim, dim).double()
                root[tuple(torch.triu_indices(dim, dim))] = spread["triangle"][high].double()
                matrix, high = matrix + root.T @ root, high + 1
            else:
                for row in range(low, low + rank):
                    vector = spread["basis"][row].double()
                    matrix = matrix + spread["weight"][row].double() * torch.outer(vector, vector)
                low += rank
            matrix = matrix / math.sqrt(float((matrix**2).sum()))
            for i, line in enumerate(matrix.tolist()):
                found += [line[i], *(math.sqrt(2) * one for one in line[i + 1 :])]
            found += (matrix @ apart).tolist()
        elif rule == "diag":
            own = update.spread["precision"][place].double()
            own = own / math.sqrt(float((own**2).sum()))
            found += [*own.tolist(), *(own * apart).tolist()]
        else:
            found += [1.0, *apart.tolist()]
        place += 1
    return found


def score_rows(update):
    every = [float(v) for n in sorted(update.variance) for v in update.variance[n].reshape(-1)]
    mean = math.fsum(every) / len(every)
    spread = math.sqrt(math.fsum((v - mean) ** 2 for v in every) / len(every))
    return [(v - mean) / spread for v in every]


def change_rows(half, state, update):
    """Return the change of the entries that the client was sent."""
    sent, entries = half.broadcast(state, 0).params, half.sent_entries(state)
    found = []
    for name in sorted(update.params):
        apart = (update.params[name].double() - sent[name].double()).reshape(-1)
        there = entries[name].reshape(-1) if entries else torch.ones(len(apart)).bool()
        found += apart[there].tolist()
    return found


def oracle_row(half, state, update):
    portion = (
        score_rows(update) if "variance" in update._fields else class_rows(half, state, update)
    )
    change = shortened(change_rows(half, state, update), C)
    rows = [math.sqrt(0.75) * v for v in change]
    return torch.tensor(rows + [math.sqrt(0.25) * v for v in shortened(portion, C)]).double()


# -- what one client can change --------------------------------------------------------------------
@pytest.mark.parametrize(("method", "settings"), CASES)
def test_one_client_moves_the_sum_by_no_more_than_the_clip(method, settings):
    draw = torch.Generator().manual_seed(3)
    half, state = half_of(method, settings, draw)
    private = private_half(half, Mechanism(C, 1.0, 4.0), None)
    sent, unit = half.broadcast(state, 0), private.mechanism.unit
    kinds = [
        {},
        {"size": 1e-12},
        {"size": 1e9},
        {"size": 30.0, "classes": (1,)},
        {"size": 5.0, "classes": (0, 2), "number": 6},
        {"size": 1.0, "number": 400},
    ]
    updates = [update_of(half, state, draw, **kind) for kind in kinds]
    rows = []
    for client, update in enumerate(updates):
        row = private.statistic(state, client, update)[CHANGE]
        assert torch.equal(row, private.summand(sent, client, update)[CHANGE])  # as clients do
        slow = oracle_row(half, state, update)
        torch.testing.assert_close(row.double() * unit, slow, rtol=1e-4, atol=2 * unit)
        rows.append(row)

    def exact(some):
        total = Total()
        for row in some:
            total.add({CHANGE: row})
        return total.value()[CHANGE]

    everyone, share = exact(rows), len(change_rows(half, state, updates[0]))
    for gone in range(len(rows)):
        others = exact([row for client, row in enumerate(rows) if client != gone])
        moved = (everyone - others).double() * unit
        assert float(moved.norm()) <= C
        assert float(moved[:share].norm()) <= C * math.sqrt(0.75) + unit * share**0.5
        assert float(moved[share:].norm()) <= C * math.sqrt(0.25) + unit * len(moved) ** 0.5
    bad = update_of(half, state, draw)
    name = sorted(bad.params)[0]
    broken = {**bad.params, name: bad.params[name] * math.inf}
    with pytest.raises(BayflowerError, match="not finite"):
        private.statistic(state, 0, bad._replace(params=broken))


def test_personal_entries_of_a_client_do_not_leave_it():
    draw = torch.Generator().manual_seed(4)
    half, state = half_of("fedbps", {}, draw)
    private = private_half(half, Mechanism(C, 1.0, 4.0), None)
    one = update_of(half, state, draw)
    other = one._replace(
        params={n: torch.where(state.mask[n], v + 9, v) for n, v in one.params.items()}
    )
    rows = [private.statistic(state, 0, update)[CHANGE] for update in (one, other)]
    assert torch.equal(*rows)


# -- what the server makes of the sums -------------------------------------------------------------
def finalised(half, state, updates, clip):
    private = private_half(half, Mechanism(clip, 1e-3 / clip, float(len(updates))), None)
    total = Total()
    for client, update in enumerate(updates):
        total.add(private.statistic(state, client, update))
    return private.finalise(state, total.value())


@pytest.mark.parametrize("rule", [pytest.param(RULES[0], marks=pytest.mark.slow), *RULES[1:]])
def test_without_clipping_centroids_are_those_of_equal_clients(rule):
    draw = torch.Generator().manual_seed(5)
    half, state = half_of("pfedvmp", {"centroid": rule}, draw)
    updates = [update_of(half, state, draw, 0.3) for _ in range(60)]
    found, dim = finalised(half, state, updates, 100.0), state.centroids.shape[1]
    for k in range(CLASSES):
        whole, shift = torch.zeros(dim, dim).double(), torch.zeros(dim).double()
        for update in updates:
            row = class_rows(half, state, update)
            row = row[k * len(row) // CLASSES : (k + 1) * len(row) // CLASSES]
            at, own = 0, torch.zeros(dim, dim).double()
            for i in range(dim):
                if rule == "precision":
                    for j in range(i, dim):
                        own[i, j] = own[j, i] = row[at] / (1 if i == j else math.sqrt(2))
                        at += 1
                else:
                    own[i, i] = row[i] if rule == "diag" else row[0]
            whole, shift = whole + own, shift + own @ update.means[k].double()
        expected = torch.linalg.solve(whole, shift)
        torch.testing.assert_close(found.centroids[k].double(), expected, rtol=2e-3, atol=2e-3)
    assert bool(found.known.all())
    for name, value in found.params.items():
        mean = sum(update.params[name].double() for update in updates) / len(updates)
        torch.testing.assert_close(value.double(), mean, rtol=1e-4, atol=1e-4)


def test_without_clipping_the_mask_ranks_standardised_variances():
    draw = torch.Generator().manual_seed(6)
    half, state = half_of("fedbps", {"personal_share": 0.5}, draw)
    updates = [update_of(half, state, draw, 10.0**i) for i in range(-4, 1)]
    found, names = finalised(half, state, updates, 300.0), sorted(state.mask)
    total = [math.fsum(column) for column in zip(*map(score_rows, updates), strict=True)]
    highest = sorted(range(len(total)), key=lambda i: -total[i])[: (len(total) + 1) // 2]
    mask = torch.cat([found.mask[name].reshape(-1) for name in names])
    same = set(mask.nonzero()[:, 0].tolist()) & set(highest)
    assert int(mask.sum()) == len(highest)
    assert len(same) >= len(highest) - 1  # one pair at the threshold may be nearly equal
    for name, value in found.params.items():
        mean = sum(update.params[name].double() for update in updates) / len(updates)
        kept = torch.where(state.mask[name], state.params[name].double(), mean)
        torch.testing.assert_close(value.double(), kept, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(("method", "settings"), CASES)
def test_noise_is_as_declared_and_leaves_a_state_that_can_be_used(
    method, settings, fixed, monkeypatch
):
    """Nobody takes part: the sums are noise alone."""
    draw = torch.Generator().manual_seed(8)
    half, state = half_of(method, settings, draw)
    seen = []
    original = type(half).restored
    monkeypatch.setattr(
        type(half), "restored", lambda *given: seen.append(given[2:]) or original(*given)
    )
    z = 40.0
    private, news = private_half(half, Mechanism(C, z, 4.0), Entropy()), 0
    for _ in range(30):
        found = private.finalise(state, {})
        assert all(bool(one.isfinite().all()) for one in flatten(found).values())
        if method == "fedbps":
            wanted = math.floor(half.config.personal_share * len(seen[-1][0]["scores"]) + 0.5)
            assert sum(int(mask.sum()) for mask in found.mask.values()) == wanted
        else:
            news += int(found.known[2])
    assert news <= 3  # a class that nobody sent stays unknown, nearly always
    (name,) = half.portions
    drawn = torch.cat([sums[name] for sums, _ in seen])
    declared = z * C / math.sqrt(half.portions[name])
    assert {noise[name] for _, noise in seen} == {declared}
    assert float(drawn.std()) == pytest.approx(declared, rel=0.06)
    sent = half.sent_entries(state)
    moved = torch.cat(
        [
            (found.params[n] - state.params[n])[sent[n] if sent else ...].reshape(-1)
            for n in sorted(found.params)
        ]
    )
    spread = z * C / math.sqrt(1 - half.portions[name]) / 4
    assert float(moved.double().std()) == pytest.approx(spread, rel=0.06)


@pytest.mark.parametrize("rule", RULES)
def test_centroids_through_noise_stay_near_those_that_were_sent(rule):
    """Steps are shortened, and precisions have floors: no centroid goes far for a little trace."""
    draw, dim = torch.Generator().manual_seed(9), 8
    wide = {"precision": 36, "diag": 8}.get(rule, 1)
    sent = torch.randn(1, dim, generator=draw)
    heard = 0
    for _ in range(400):
        noise = torch.randn(1, wide + dim, generator=draw).double()
        noise[0, :wide] += 1.0
        found = restored_classes(rule, noise.reshape(-1), 1.0, sent)
        if not found:
            continue
        heard += 1
        precision, shift = found["precision/0"], found["shift/0"]
        if rule == "precision":
            whole = torch.zeros(dim, dim).double()
            whole[tuple(torch.triu_indices(dim, dim))] = precision
            whole = whole + whole.triu(1).T
            assert float(torch.linalg.eigvalsh(whole).min()) >= 4.0 - 1e-9  # √(2·8)
            centroid = torch.linalg.solve(whole, shift)
        else:
            assert float(precision.min()) >= 2.0
            centroid = shift / precision
        step = noise[0, wide:] * math.sqrt(dim)
        assert float((centroid - sent[0].double()).norm()) <= float(step.norm()) / 2
    assert 0 < heard < 250


# -- settings and runs -----------------------------------------------------------------------------
def test_what_is_refused():
    named = [row.name for row in methods.ROWS if row.server.portions and not row.private]
    assert named == ["pfedvmp", "pfedvmp-avg", "fedbps"]
    for name in named:
        with pytest.raises(ConfigError, match=f"dp=local is not for {name} without masks"):
            parse(name, {"dp": "local"})
        assert parse(name, {"dp": "local", "secure": "sum"}).privacy.hides_clients
    with pytest.raises(ConfigError, match="dp=client is not for fedbps with ranking=balanced"):
        parse("fedbps", {"dp": "client", "ranking": "balanced"})
    assert parse("fedbps", {"secure": "sum", "ranking": "balanced"}).privacy.on


def carried(method, engine, out=None, resume=None, **settings):
    ready = prepare(parse(method, {**BASE, **settings}), engine)
    return run_to_result(ready, out, resume=resume)


@pytest.mark.parametrize("method", ["pfedvmp", pytest.param("fedbps", marks=pytest.mark.slow)])
def test_fused_and_loop_run_with_the_same_bits_and_the_accountants_epsilon(method, fixed):
    settings = {"dp": "client", "dp_noise": 2.0, "dp_epsilon": 50.0, "rounds": 2}
    if method == "fedbps":
        settings["model"] = "linear"
    ours, theirs = (carried(method, engine, **settings) for engine in ("fused", "loop"))
    assert ours["final"]["personal"]["nll"] == theirs["final"]["personal"]["nll"]
    assert ours["privacy"] == theirs["privacy"]
    assert ours["privacy"]["epsilon"] == accounting.epsilon(2.0, 2, 1e-5)
    assert theirs["faults"] == []


@pytest.mark.parametrize(
    "method", [pytest.param("pfedvmp", marks=pytest.mark.slow), "pfedvmp-avg", "fedbps"]
)
def test_secure_sums_with_noise_of_the_clients(method):
    settings = {"dp": "client", "dp_noise": 3.0, "dp_epsilon": 50.0, "secure": "sum", "rounds": 1}
    model = "linear" if method == "fedbps" else "mlp"
    found = carried(method, "loop", model=model, **settings)
    assert found["faults"] == []
    assert found["privacy"]["noise_from"] == "clients"
    assert found["privacy"]["epsilon"] == accounting.epsilon(3.0, 1, 1e-5)
    assert math.isfinite(found["final"]["personal"]["nll"])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["pfedvmp", "fedbps"])
@pytest.mark.parametrize("engine", ["fused", "loop"])
@pytest.mark.parametrize("secure", ["off", "sum"])
def test_a_run_stops_at_its_budget_and_cannot_be_resumed(method, engine, secure, tmp_path):
    budget = accounting.epsilon(4.0, 2, 1e-5) * 1.01
    settings = {"dp": "client", "dp_noise": 4.0, "dp_epsilon": budget, "secure": secure}
    found = carried(method, engine, tmp_path, rounds=5, **settings)
    assert len(found["rounds"]) == 2
    assert found["privacy"]["epsilon"] <= budget
    assert "dp: stopped after 2 rounds" in found["remark"]
    saved = checkpoint.to_resume(tmp_path, parse(method, {**BASE, "rounds": 5, **settings}))
    with pytest.raises(ConfigError, match="privacy budget of this run is spent"):
        carried(method, engine, tmp_path, saved, rounds=5, **settings)
