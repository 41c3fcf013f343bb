"""Tallies against torchmetrics, scikit-learn and loops; tallies add up."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from functools import reduce
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import vmap

from bayflower.data.vision import prepare_torchvision
from bayflower.metrics import (
    AT_ONCE,
    NUM_BINS,
    SCORE_BINS,
    Tally,
    add,
    by_chance,
    debiased,
    possible,
    squared_error,
    summarise,
    tally,
    zero,
)


def needed(module: str, name: str) -> Callable[..., Any]:
    """Return an oracle that is imported by the first call: each takes as long as torch."""

    def oracle(*args: Any, **more: Any) -> Any:
        prepare_torchvision()  # torchmetrics imports torchvision where there is one
        return getattr(import_module(module), name)(*args, **more)

    return oracle


balanced_accuracy_score = needed("sklearn.metrics", "balanced_accuracy_score")
log_loss = needed("sklearn.metrics", "log_loss")
CLASSES = "torchmetrics.functional.classification"
multiclass_accuracy = needed(CLASSES, "multiclass_accuracy")
binary_calibration_error = needed(CLASSES, "binary_calibration_error")
multiclass_calibration_error = needed(CLASSES, "multiclass_calibration_error")


def sample(
    n: int, c: int, seed: int = 0, dtype: torch.dtype = torch.float64, sharp: float = 2.0
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(c, (n,), generator=generator)
    logits = sharp * torch.randn(n, c, generator=generator, dtype=torch.float64)
    logits[torch.arange(n), y] += 1.0
    return logits.softmax(-1).to(dtype), y


def ones(n: int) -> Tensor:
    return torch.ones(n)


def bins_by_loop(p: list[float], hit: list[bool]) -> list[tuple[int, float, int]]:
    """Return (count, Σp, hits) of each bin, p given in float64."""
    out = [[0, 0.0, 0] for _ in range(NUM_BINS)]
    edges = torch.linspace(0, 1, NUM_BINS + 1, dtype=torch.float64).tolist()
    for value, right in zip(p, hit, strict=True):
        index = next((i for i in range(NUM_BINS) if edges[i] <= value < edges[i + 1]), NUM_BINS - 1)
        out[index][0] += 1
        out[index][1] += value
        out[index][2] += right
    return [(a, b, c) for a, b, c in out]


@pytest.mark.parametrize(("n", "c"), [(500, 10), (300, 2), (1, 5), (7, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_torchmetrics_and_sklearn(n: int, c: int, dtype: torch.dtype) -> None:
    probs, y = sample(n, c, seed=n, dtype=dtype)
    out = summarise({3: tally(probs, y, ones(n))})
    assert out["num_examples"] == n
    assert out["accuracy"] == pytest.approx(
        multiclass_accuracy(probs, y, c, average="micro").item(), abs=1e-6
    )
    # scikit-learn warns of float32 rows that do not add up to 1
    rows = probs.double() / probs.double().sum(-1, keepdim=True)
    assert out["nll"] == pytest.approx(log_loss(y, rows, labels=list(range(c))), rel=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # predicted classes that are absent from y
        assert out["balanced_accuracy"] == pytest.approx(
            balanced_accuracy_score(y, probs.argmax(-1))
        )
    tolerance = 1e-6  # torchmetrics goes to float32; the loop below is the tight oracle
    assert out["ece"] == pytest.approx(
        multiclass_calibration_error(probs, y, c, n_bins=10, norm="l1").item(), abs=tolerance
    )
    assert out["mce"] == pytest.approx(
        multiclass_calibration_error(probs, y, c, n_bins=10, norm="max").item(), abs=tolerance
    )
    # all N×C probabilities as so many binary predictions
    one_hot = torch.nn.functional.one_hot(y, c)
    for name, norm in (("ece_allclass", "l1"), ("mce_allclass", "max")):
        want = binary_calibration_error(
            probs.flatten(), one_hot.flatten(), n_bins=10, norm=norm
        ).item()
        assert out[name] == pytest.approx(want, abs=tolerance)


@pytest.mark.parametrize("number", [200, AT_ONCE + 100])  # at once, and a bin at a time
def test_bins_by_loop(number: int) -> None:
    probs, y = sample(number, 4, seed=5)
    t = tally(probs, y, ones(number))
    confidence, predicted = probs.max(-1)
    for fields, p, hit in (
        (t[5:8], confidence, predicted == y),
        (t[8:11], probs.flatten(), torch.nn.functional.one_hot(y, 4).flatten() == 1),
    ):
        for i, (count, total, hits) in enumerate(bins_by_loop(p.tolist(), hit.tolist())):
            assert int(fields[0][i]) == count
            assert float(fields[1][i]) == pytest.approx(total, abs=1e-7, rel=1e-9)
            assert int(fields[2][i]) == hits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_edges(dtype: torch.dtype) -> None:
    edges = torch.linspace(0, 1, NUM_BINS + 1, dtype=dtype)
    for i, p in enumerate(edges):
        row = torch.stack([p, 1 - p])[None]
        t = tally(row, torch.tensor([0]), ones(1))
        assert int(t.all_count.sum()) == 2
        # p on an edge: the upper bin; p = 1: the last
        assert int(t.all_count[min(i, NUM_BINS - 1)]) >= 1
        assert int(t.all_correct.nonzero()[0]) == min(i, NUM_BINS - 1)
    below = torch.nextafter(edges[3], torch.tensor(0.0, dtype=dtype))
    t = tally(torch.stack([below, 1 - below])[None], torch.tensor([0]), ones(1))
    assert int(t.all_correct.nonzero()[0]) == 2


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 87.4), (torch.float64, 708.4)])
def test_probability_zero_and_not_finite(dtype: torch.dtype, most: float) -> None:
    probs = torch.tensor([[1.0, 0.0], [math.nan, 0.5], [math.nan, math.nan]], dtype=dtype)
    y = torch.tensor([1, 0, 0])
    t = tally(probs, y, ones(3))
    assert float(t.nll) == pytest.approx(3 * most, rel=1e-3)
    assert int(t.correct) == 0
    assert t.bin_count.tolist() == [2] + [0] * 8 + [1]
    json.dumps(summarise({0: t}), allow_nan=False)
    assert math.isclose(float(tally(probs[:1], torch.tensor([0]), ones(1)).nll), 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_classes_by_loops(dtype: torch.dtype) -> None:
    """Scores, AUROC, sensitivity, specificity and confusion against loops over samples and pairs;
    thresholds at the edges of bins are exact.
    """
    probs, y = sample(300, 2, seed=4, dtype=dtype, sharp=1.0)
    probs[7, 1] = torch.linspace(0, 1, SCORE_BINS + 1, dtype=dtype)[13]  # on an edge
    mask = ones(300)
    mask[::7] = 0
    parts = [tally(probs[i : i + 90], y[i : i + 90], mask[i : i + 90]) for i in range(0, 300, 90)]
    t = reduce(add, parts)
    assert possible(t)
    rows = [(float(p), int(k)) for p, k, m in zip(probs[:, 1], y, mask, strict=True) if m]
    edges = torch.linspace(0, 1, SCORE_BINS + 1, dtype=dtype).tolist()
    for k in (0, 1):
        for i, edge in enumerate(edges[:-1]):
            want = sum(one == k and p >= edge for p, one in rows)
            assert int(t.scores[k, i:].sum()) == want

    def place(p: float) -> int:
        return max(i for i in range(SCORE_BINS) if edges[i] <= p)

    won = [
        0.5 * (place(p) == place(q)) + (place(p) > place(q))
        for p, one in rows
        for q, other in rows
        if one == 1 and other == 0
    ]
    out = summarise({0: t})
    assert out["auroc"] == pytest.approx(sum(won) / len(won), abs=1e-12)
    exact = needed("sklearn.metrics", "roc_auc_score")([k for _, k in rows], [p for p, _ in rows])
    assert out["auroc"] == pytest.approx(exact, abs=0.01)
    confusion = [[sum((p > 0.5) == j and k == i for p, k in rows) for j in (0, 1)] for i in (0, 1)]
    assert out["confusion"] == out["per_client"][0]["confusion"] == confusion
    assert out["sensitivity"] == confusion[1][1] / sum(confusion[1])
    assert out["specificity"] == confusion[0][0] / sum(confusion[0])
    moved = t.scores.clone()
    moved[0, 0], moved[1, 0] = moved[0, 0] + 1, moved[1, 0] - 1
    assert not possible(t._replace(scores=moved))
    assert "auroc" not in summarise({0: tally(*sample(9, 3), ones(9))})
    single = tally(probs[y == 1], y[y == 1], ones(int((y == 1).sum())))
    assert summarise({0: single})["auroc"] is None


def test_absent_class() -> None:
    probs, _ = sample(50, 5, seed=2)
    # classes 0, 3 and 4 have no samples
    y = torch.randint(1, 3, (50,), generator=torch.Generator().manual_seed(0))
    t = tally(probs, y, ones(50))
    assert t.class_total[[0, 3, 4]].tolist() == [0, 0, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert summarise({0: t})["balanced_accuracy"] == pytest.approx(
            balanced_accuracy_score(y, probs.argmax(-1))
        )


def test_masks_vmap_and_sums_agree_to_the_bit() -> None:
    for classes in (6, 2):
        masks_vmap_and_sums(classes)


def masks_vmap_and_sums(c: int) -> None:
    counts = [40, 1, 0, 17]
    size = 40
    whole = [sample(n, c, seed=n) for n in counts]
    # padding may hold anything
    probs = torch.full((len(counts), size, c), math.nan, dtype=torch.float64)
    y = torch.full((len(counts), size), -1)
    mask = torch.zeros(len(counts), size)
    for i, (p, labels) in enumerate(whole):
        rows = torch.randperm(size, generator=torch.Generator().manual_seed(i))[: counts[i]]
        probs[i, rows], y[i, rows], mask[i, rows] = p, labels, 1.0
    stacked = vmap(tally)(probs, y, mask)
    total = zero(c)
    for i, (p, labels) in enumerate(whole):
        alone = tally(p, labels, ones(counts[i]))
        for name, got, want in zip(Tally._fields, stacked, alone, strict=True):
            assert (
                got.dtype
                == want.dtype
                == (
                    torch.float64
                    if name in ("nll", "bin_confidence", "all_confidence")
                    else torch.int64
                )
            )
            assert torch.equal(got[i], want), name
        total = add(alone, total)
    together = tally(
        torch.cat([p for p, _ in whole]),
        torch.cat([labels for _, labels in whole]),
        ones(sum(counts)),
    )
    for name, got, want in zip(Tally._fields, total, together, strict=True):
        assert torch.equal(got, want), name
    assert all(torch.equal(a, b) for a, b in zip(tally(*whole[2], ones(0)), zero(c), strict=True))


def test_summary_over_clients() -> None:
    sizes = {7: 30, 2: 11, 5: 0, 9: 4}
    data = {client: sample(n, 3, seed=client) for client, n in sizes.items()}
    out = summarise({client: tally(p, y, ones(len(y))) for client, (p, y) in data.items()})
    assert [row["client"] for row in out["per_client"]] == [2, 5, 7, 9]
    assert out["per_client"][1] == {
        "client": 5,
        "num_examples": 0,
        "accuracy": None,
        "balanced_accuracy": None,
        "nll": None,
        "ece": None,
    }
    accuracies, balanced = [], []
    for row in out["per_client"]:
        p, y = data[row["client"]]
        if not len(y):
            continue
        accuracies.append((p.argmax(-1) == y).double().mean().item())
        balanced.append(balanced_accuracy_score(y, p.argmax(-1)))
        assert row["num_examples"] == len(y)
        assert row["accuracy"] == pytest.approx(accuracies[-1])
        assert row["balanced_accuracy"] == pytest.approx(balanced[-1])
        assert row["nll"] == pytest.approx(log_loss(y, p, labels=[0, 1, 2]))
        assert row["ece"] == pytest.approx(multiclass_calibration_error(p, y, 3, n_bins=10).item())
    p, y = torch.cat([p for p, _ in data.values()]), torch.cat([y for _, y in data.values()])
    mean = sum(accuracies) / 3
    std = (sum((a - mean) ** 2 for a in accuracies) / 3) ** 0.5
    assert std > 0
    for name, want in {
        "num_examples": 45,
        "num_clients": 3,
        "accuracy": (p.argmax(-1) == y).double().mean().item(),
        "accuracy_mean": mean,
        "balanced_accuracy": balanced_accuracy_score(y, p.argmax(-1)),
        "balanced_accuracy_mean": sum(balanced) / 3,
        "nll": log_loss(y, p, labels=[0, 1, 2]),
        "fairness_std": std,
        "fairness_cv": std / mean,
        "worst_client_accuracy": min(accuracies),
    }.items():
        assert out[name] == pytest.approx(want), name
    bars = out["reliability"]["top_label"]
    assert len(bars) == NUM_BINS
    assert sum(bar["count"] for bar in bars) == 45
    gap = (
        sum(bar["count"] * abs(bar["accuracy"] - bar["confidence"]) for bar in bars if bar["count"])
        / 45
    )
    assert out["ece"] == pytest.approx(gap)
    assert sum(bar["count"] for bar in out["reliability"]["all_class"]) == 45 * 3
    assert json.loads(json.dumps(out, allow_nan=False)) == out  # plain numbers only


def test_nothing_to_summarise() -> None:
    for tallies in ({}, {1: zero(4), 0: zero(4)}):
        out = summarise(tallies)
        assert out["num_examples"] == out["num_clients"] == 0
        assert (
            out["accuracy"]
            is out["accuracy_mean"]
            is out["ece"]
            is out["fairness_cv"]
            is out["worst_client_accuracy"]
            is None
        )
        assert len(out["per_client"]) == len(tallies)
    wrong = tally(torch.tensor([[0.0, 1.0]]), torch.tensor([0]), ones(1))
    assert summarise({0: wrong})["fairness_cv"] is None  # 0/0
    json.dumps(summarise({0: wrong}), allow_nan=False)


def test_overconfident_softmax_has_two_calibration_errors() -> None:
    """E-V9: with many classes the all-class error is far below the top-label one, which is how
    published values can be 0.1 %.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4000, 100, generator=generator, dtype=torch.float64) * 2
    y = torch.distributions.Categorical(logits=logits).sample()
    out = summarise({0: tally((2.5 * logits).softmax(-1), y, ones(4000))})
    assert out["ece"] > 0.2
    assert out["ece_allclass"] < 0.01


def test_the_debiased_error_of_a_perfect_model_is_zero_on_average() -> None:
    """The plain ECE of a perfectly calibrated model is the one by chance; of a model that claims
    0.1 too much it is hidden in it, and the debiased error finds it.
    """
    draw = np.random.default_rng(7)
    plain, chance, squares, over = [], [], [], []
    for _ in range(400):
        p = draw.uniform(0.62, 0.98, 60)
        y = torch.as_tensor((draw.uniform(size=60) > p).astype(np.int64))  # class 0 with p
        for claim, found in ((p, squares), (np.minimum(p + 0.1, 0.999), over)):
            probs = torch.as_tensor(np.stack([claim, 1 - claim], 1))
            out = summarise({0: tally(probs, y, ones(60))})
            found.append(squared_error(out["reliability"]["top_label"]))
            if found is squares:
                plain.append(out["ece"])
                chance.append(by_chance(out["reliability"]["top_label"]))
    assert np.mean(plain) == pytest.approx(np.mean(chance), rel=0.05)
    assert np.mean(plain) > 0.07
    assert abs(np.mean(squares)) < 3 * np.std(squares) / 20 + 5e-4
    assert debiased(squares) < 0.03
    assert debiased(over) == pytest.approx(0.09, abs=0.015)


def test_the_debiased_error_by_hand() -> None:
    bars = [
        {"count": 4, "accuracy": 0.75, "confidence": 0.5},
        {"count": 1, "accuracy": 0.0, "confidence": 0.9},
        {"count": 0, "accuracy": None, "confidence": None},
        {"count": 6, "accuracy": 0.5, "confidence": 0.6},
    ]
    want = (4 * (0.0625 - 0.1875 / 3) + 6 * (0.01 - 0.25 / 5)) / 10
    assert squared_error(bars) == pytest.approx(want)
    parts = [4 * math.sqrt(2 * 0.25 / 4), math.sqrt(2 * 0.09), 6 * math.sqrt(2 * 0.24 / 6)]
    assert by_chance(bars) == pytest.approx(sum(parts) / math.sqrt(math.pi) / 11)
    assert debiased([want, None, 0.5]) == pytest.approx(math.sqrt((want + 0.5) / 2))
    assert debiased([want]) == 0
    assert squared_error(bars[1:3]) is debiased([None]) is by_chance(bars[2:3]) is None
