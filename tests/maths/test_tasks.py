"""Tasks against scipy's densities, autograd's second derivatives and loops over samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import average_precision_score, roc_auc_score
from torch.func import grad, jacrev, vmap

from bayflower import metrics
from bayflower.errors import ConfigError
from bayflower.tasks import TASKS, Task, make
from bayflower.tasks.choice import likelihood_of
from bayflower.tasks.classes import Classification, Ordinal
from bayflower.tasks.counts import NegativeBinomial, Poisson
from bayflower.tasks.labels import SeveralLabels
from bayflower.tasks.numbers import Gaussian, StudentT, moments, standardising
from bayflower.tasks.survival import Cox, Hazards

N = 40
DRAW = torch.Generator().manual_seed(5)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=DRAW, dtype=torch.float64)


def uniform(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=DRAW, dtype=torch.float64)


EDGES = (0.5, 1.0, 2.0, 4.0)
REAL = 3 + 2 * normal(N)
COUNTS = torch.poisson(3 * uniform(N), generator=DRAW)
LEVELS = torch.randint(0, 4, (N,), generator=DRAW)
TIMES = torch.stack([5 * uniform(N), (uniform(N) < 0.6).double()], -1)
MARKS = torch.randint(-1, 2, (N, 3), generator=DRAW).double()
# each task with outputs and targets
CASES: dict[str, tuple[Task, torch.Tensor]] = {
    "classes": (Classification(4), LEVELS),
    "two classes": (Classification(2, single=True), LEVELS % 2),
    "gaussian known": (Gaussian("known", 1.5, 3.0, 2.0), REAL),
    "gaussian global": (Gaussian("global", 1.0, 3.0, 2.0), REAL),
    "gaussian input": (Gaussian("input", 1.0, 3.0, 2.0), REAL),
    "student": (StudentT("client", 1.0, 3.0, 2.0, 5), REAL),
    "poisson": (Poisson(), COUNTS),
    "negative binomial": (NegativeBinomial(), COUNTS),
    "ordinal": (Ordinal(4), LEVELS),
    "labels": (SeveralLabels(3), MARKS),
    "hazard": (Hazards(EDGES), TIMES),
    "cox": (Cox(EDGES), TIMES),
}
ONES = torch.ones(N, dtype=torch.float64)


def outputs(task: Task) -> torch.Tensor:
    return 0.7 * normal(N, task.outputs)


def scipy_nll(name: str, task: Task, out: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return −log p of each sample by scipy, or by the definition."""
    if name.startswith("gaussian"):
        s = np.log(1.5 / 2) if name.endswith("known") else out[:, 1]
        return -stats.norm.logpdf((y - 3) / 2, out[:, 0], np.exp(s))
    if name == "student":
        return -stats.t.logpdf((y - 3) / 2, 5, out[:, 0], np.exp(out[:, 1]))
    if name == "poisson":
        return -stats.poisson.logpmf(y, np.exp(out[:, 0]))
    if name == "negative binomial":
        mean, size = np.exp(out[:, 0]), np.exp(out[:, 1])
        return -stats.nbinom.logpmf(y, size, size / (size + mean))
    if name == "ordinal":
        cuts = np.cumsum(np.concatenate([out[:, 1:2], np.exp(out[:, 2:])], 1), 1) - out[:, :1]
        below = np.pad(stats.logistic.cdf(cuts), ((0, 0), (1, 1)), constant_values=((0, 0), (0, 1)))
        return -np.log(np.diff(below, axis=1)[np.arange(N), y])
    if name == "labels":
        each = -stats.bernoulli.logpmf(np.maximum(y, 0), 1 / (1 + np.exp(-out)))
        return (each * (y >= 0)).sum(1)
    if name == "hazard":
        found = []
        for logits, (time, event) in zip(out, y, strict=True):
            hazard = 1 / (1 + np.exp(-logits) / (2 ** (1 / len(EDGES)) - 1))
            place = sum(time > edge for edge in EDGES)
            nll = -np.log(1 - hazard[:place]).sum()
            found.append(nll - np.log(hazard[place]) if event and place < len(EDGES) else nll)
        return np.array(found)
    if name == "cox":
        score, (time, event) = out[:, 0], y.T
        return np.array(
            [event[i] * (np.log(np.exp(score[time >= time[i]]).sum()) - score[i]) for i in range(N)]
        )
    logits = np.concatenate([0 * out, out], 1) if out.shape[1] == 1 else out
    return -np.log((np.exp(logits) / np.exp(logits).sum(1, keepdims=True))[np.arange(N), y])


@pytest.mark.parametrize("name", CASES)
def test_likelihoods_equal_scipys(name: str) -> None:
    task, y = CASES[name]
    out = outputs(task)
    np.testing.assert_allclose(
        task.nll(out, y, ONES),
        scipy_nll(name, task, out.numpy(), y.numpy()),
        rtol=1e-10,
        atol=1e-12,
    )


def expected(name: str, task: Task, out: torch.Tensor) -> torch.Tensor:
    """Return E_y[∂²(−log p)/∂f²] at one output, by autograd and a sum or integral over y."""
    mask = torch.ones(1, dtype=torch.float64)

    def second(y: torch.Tensor) -> torch.Tensor:
        return jacrev(grad(lambda f: task.nll(f[None], y[None], mask)[0]))(out)

    def chance(y: torch.Tensor) -> torch.Tensor:
        return torch.exp(-task.nll(out[None], y[None], mask)[0])

    if isinstance(task, Gaussian):  # over z, of which y = 3 + 2z
        z = torch.linspace(-60, 60, 6001, dtype=torch.float64) * math.exp(
            float(task.log_scale(out))
        )
        weights = vmap(chance)(3 + 2 * (z + out[0]))
        return (vmap(second)(3 + 2 * (z + out[0])) * weights[:, None, None]).sum(0) * (z[1] - z[0])
    values = torch.arange(400.0, dtype=torch.float64) if isinstance(task, Poisson) else None
    if values is None:
        values = torch.arange(4)
    return (vmap(second)(values) * vmap(chance)(values)[:, None, None]).sum(0)


@pytest.mark.parametrize(
    "name", [name for name in CASES if name not in ("hazard", "cox", "labels")]
)
def test_the_curvature_is_the_fisher_information(name: str) -> None:
    task, y = CASES[name]
    out = outputs(task)[:2]
    if name == "two classes":
        p = torch.sigmoid(out)
        want = (p * (1 - p))[..., None]
    else:
        want = torch.stack([expected(name, task, one) for one in out])
    found = task.curvature(out, y[:2], ONES[:2])
    torch.testing.assert_close(found, want, rtol=2e-5, atol=2e-6)
    columns = task.factor(out, y[:2], ONES[:2])
    torch.testing.assert_close(torch.einsum("cbi,cbj->bij", columns, columns), found)


@pytest.mark.parametrize("name", ["hazard", "labels", "cox"])
def test_where_the_second_derivative_does_not_depend_on_the_event_it_is_the_curvature(
    name: str,
) -> None:
    task, y = CASES[name]
    out = outputs(task)
    whole = jacrev(grad(lambda f: task.nll(f, y, ONES).sum()))(out)
    own = torch.stack([whole[i, :, i] for i in range(N)])
    torch.testing.assert_close(task.curvature(out, y, ONES), own)


@pytest.mark.parametrize("name", CASES)
def test_padding_changes_nothing_and_vmap_gives_the_same(name: str) -> None:
    task, y = CASES[name]
    out = outputs(task)
    mask = ONES.clone()
    mask[30:] = 0
    whole, part = task.nll(out, y, mask)[:30], task.nll(out[:30], y[:30], ONES[:30])
    torch.testing.assert_close(whole, part)
    stacked = vmap(lambda o, t, m: task.tally(task.predict(o), t, m))(
        *(torch.stack([one, one]) for one in (out, y, mask))
    )
    alone = task.tally(task.predict(out), y, mask)
    cut = task.tally(task.predict(out[:30]), y[:30], ONES[:30])
    assert all(torch.equal(a, b) for a, b in zip(alone, cut, strict=True))
    assert all(torch.equal(a[1], b) for a, b in zip(stacked, alone, strict=True))
    slope = grad(lambda f: (task.nll(f, y, mask) * mask).sum())(out)
    assert slope.isfinite().all()
    assert not slope[30:].any()
    assert slope[:30].any()
    assert task.possible(alone)
    assert task.possible(task.zero())
    assert [leaf.shape for leaf in task.zero()] == [leaf.shape for leaf in alone]
    assert [leaf.dtype for leaf in task.zero()] == [leaf.dtype for leaf in alone]
    summary = task.summarise({3: alone, 5: task.zero()})
    assert summary["num_examples"] == 30
    assert set(task.curve) <= set(summary)
    assert summary["per_client"][1]["nll"] is None
    assert not task.possible(alone._replace(num_examples=alone.num_examples * 0 - 1))


def test_tallies_of_chunks_add_up_to_the_bit() -> None:
    for name, (task, y) in CASES.items():
        if task.coupled:
            continue
        said = task.predict(outputs(task))
        parts = [task.tally(said[a:b], y[a:b], ONES[a:b]) for a, b in ((0, 7), (7, 30), (30, N))]
        whole = metrics.add(metrics.add(parts[2], parts[0]), parts[1])
        one = task.tally(said, y, ONES)
        assert all(torch.equal(a, b) for a, b in zip(whole, one, strict=True)), name


@pytest.mark.parametrize("dof", [None, 4, 5])
def test_numbers_are_judged_by_the_predictive_distribution(dof: int | None) -> None:
    kept = ("input", 1.0, 3.0, 2.0)
    task = Gaussian(*kept) if dof is None else StudentT(*kept, dof)
    law = stats.norm if dof is None else stats.t(dof)
    out = outputs(task)
    said = task.predict(out)
    mean, scale = said[:, 0].numpy(), said[:, 1].sqrt().numpy()
    np.testing.assert_allclose(mean, 3 + 2 * out[:, 0])
    np.testing.assert_allclose(scale, 2 * out[:, 1].exp())
    y = REAL.numpy()
    found = task.summarise({0: task.tally(said, REAL, ONES)})

    t = np.linspace(-400, 400, 160001)
    below = law.cdf(t)

    def crps(one: float) -> float:
        return float(np.trapezoid(np.where(t < one, below, 1 - below) ** 2, t))

    r = (y - mean) / scale
    want = {
        "rmse": np.sqrt(np.mean((y - mean) ** 2)),
        "mae": np.mean(np.abs(y - mean)),
        "nll": -np.mean(law.logpdf(r) - np.log(scale)),
        "crps": np.mean([s * crps(one) for one, s in zip(r, scale, strict=True)]),
        "coverage_50": np.mean(np.abs(r) <= law.ppf(0.75)),
        "width_90": np.mean(2 * scale * law.ppf(0.95)),
    }
    for key, value in want.items():
        assert found[key] == pytest.approx(value, abs=1e-3 if key == "crps" else 2e-7), key
    assert found["pit"] == np.histogram(law.cdf(r), 10, (0, 1))[0].tolist()
    np.testing.assert_allclose(task.quantile(said, 0.8), mean + scale * law.ppf(0.8))
    many = said[:1].expand(40000, 2)
    drawn = task.sample(many, torch.Generator().manual_seed(1)).numpy()
    assert stats.kstest((drawn - mean[0]) / scale[0], law.cdf).pvalue > 1e-3
    # a mixture has the mean and the variance of its parts
    mixed = task.mixed(torch.stack([said, said + torch.tensor([1.0, 2.0])]))
    np.testing.assert_allclose(mixed, torch.stack([said[:, 0] + 0.5, said[:, 1] + 1.25], -1))


@pytest.mark.parametrize("task", [Poisson(), NegativeBinomial()])
def test_counts_are_judged_by_the_predictive_distribution(task: Poisson) -> None:
    out = outputs(task)
    said, y = task.predict(out), COUNTS.numpy()
    mean = np.exp(out[:, 0].numpy())
    law = stats.poisson(mean)
    if isinstance(task, NegativeBinomial):
        size = np.exp(out[:, 1].numpy())
        law = stats.nbinom(size, size / (size + mean))
    found = task.summarise({0: task.tally(said, COUNTS, ONES)})
    steps = np.arange(400)[:, None]
    low, high = law.ppf(0.05), law.ppf(0.95)
    crps = ((law.cdf(steps) - (steps >= y)) ** 2).sum(0)
    assert found["nll"] == pytest.approx(-np.mean(law.logpmf(y)), abs=1e-7)
    assert found["crps"] == pytest.approx(np.mean(crps), abs=1e-7)
    assert found["coverage_90"] == pytest.approx(np.mean((low <= y) & (y <= high)))
    assert found["width_90"] == pytest.approx(np.mean(high - low))
    np.testing.assert_array_equal(task.quantile(said, 0.7), law.ppf(0.7))
    drawn = task.sample(said[:1].expand(4000, -1), torch.Generator().manual_seed(1))
    assert float(drawn.mean()) == pytest.approx(mean[0], rel=0.1)
    if type(task) is Poisson:
        part = np.where(y > 0, y * np.log(np.maximum(y, 1) / mean), 0) - (y - mean)
        assert found["deviance"] == pytest.approx(2 * np.mean(part), abs=1e-7)


def test_labels_have_an_area_each() -> None:
    task = SeveralLabels(3)
    grid = (torch.randint(0, 50, (400, 3), generator=DRAW).double() + 0.5) / 50
    y = torch.randint(-1, 2, (400, 3), generator=DRAW)
    found = task.summarise({0: task.tally(grid, y, torch.ones(400))})
    areas, precisions = [], []
    for label in range(3):
        used = y[:, label] >= 0
        areas.append(roc_auc_score(y[used, label], grid[used, label]))
        precisions.append(average_precision_score(y[used, label], grid[used, label]))
        assert found["per_label"][label]["auroc"] == pytest.approx(areas[-1])
        assert found["per_label"][label]["auprc"] == pytest.approx(precisions[-1])
    assert found["macro_auroc"] == pytest.approx(np.mean(areas))
    assert found["macro_auprc"] == pytest.approx(np.mean(precisions))
    used = (y >= 0).flatten()
    micro = roc_auc_score(y.flatten()[used], grid.flatten()[used])
    assert found["micro_auroc"] == pytest.approx(micro)


def test_ordered_classes_start_equally_likely_and_stay_in_order() -> None:
    task = Ordinal(5)
    even = torch.tensor([[0.0, *task.extra()]], dtype=torch.float64)
    torch.testing.assert_close(task.predict(even), torch.full((1, 5), 0.2, dtype=torch.float64))
    far = task.nll(torch.tensor([[80.0, *task.extra()]]), torch.tensor([0]), torch.ones(1))
    assert float(far) == pytest.approx(80 - task.extra()[0], rel=1e-3)  # no underflow
    assert task.quantile(task.predict(even), 0.5).tolist() == [2]


def test_moments_of_clients_add_up_to_those_of_all() -> None:
    parts = [moments(part.tolist()) for part in REAL.split(13)]
    mean, std = standardising(parts)
    assert mean == pytest.approx(float(REAL.mean()))
    assert std == pytest.approx(float(REAL.std(correction=0)))
    assert standardising(parts[::-1]) == (mean, std)
    assert standardising([moments([2.5, 2.5])]) == (2.5, 1.0)


def test_tasks_are_made_by_name() -> None:
    for task, (_, likelihoods) in TASKS.items():
        for likelihood in likelihoods:
            assert make(task, likelihood, size=3, edges=EDGES).name == task
        assert likelihood_of(task, "auto") == likelihoods[0]
    for wrong in (
        {"task": "regresion"},
        {"task": "regression", "likelihood": "poisson"},
        {"task": "regression", "noise_std": 0.0},
        {"task": "regression", "likelihood": "student-t", "dof": 2},
        {"task": "survival"},
    ):
        with pytest.raises(ConfigError):
            make(**wrong)  # type: ignore[arg-type]
