"""The class bias of affine scaling, and how much of it a client uses."""

from __future__ import annotations

import math

import pytest
import torch

from bayflower.calibration import curves

K = 4


def test_the_bias_moves_the_mean_prediction_to_the_clients_classes() -> None:
    classes = torch.tensor([900.0, 100.0, 0.0, 0.0], dtype=torch.float64)
    predicted = torch.full((K,), 250.0, dtype=torch.float64)
    bias = curves.bias_of(classes, predicted)
    shown = (torch.full((1, K), 0.25, dtype=torch.float64).log() + bias).softmax(-1)[0]
    want = (classes + curves.SMOOTHING / K) / (1000 + curves.SMOOTHING)
    assert torch.allclose(shown, want, atol=1e-9)
    assert torch.allclose(curves.bias_of(predicted, predicted), torch.zeros(K).double())


@pytest.mark.parametrize(("heat", "want", "more"), [(0.4, 1.0, 1.0), (2.5, 1.0, 2.0)])
def test_a_model_that_is_nearly_sure_needs_more_than_its_bias(
    heat: float, want: float, more: float
) -> None:
    """A model that all clients share says softmax(heat · log p), where p is right for even classes.
    The client has few samples of two classes. The oracle tries each side and temperature;
    `more` is the share if a high temperature leads to even classes.
    """
    draw = torch.Generator().manual_seed(3)
    number, wanted = 4000, torch.tensor([0.48, 0.48, 0.02, 0.02], dtype=torch.float64)
    y = torch.multinomial(wanted, number, replacement=True, generator=draw)
    x = 1.5 * torch.eye(K, dtype=torch.float64)[y]
    x = x + torch.randn(number, K, generator=draw, dtype=torch.float64)
    logits = heat * 1.5 * x  # of Gaussians at 1.5 times the unit vectors, with unit variance
    counts = torch.bincount(y, minlength=K).double()
    predicted = logits.softmax(-1).sum(0)
    bias, mean = curves.bias_of(counts, predicted), curves.mean_of(predicted)
    floor = curves.floor_of(number)
    folds = curves.tables(logits, {}, bias, mean, floor, y, torch.ones(number))
    own = curves.Sums(number, *(part.sum(0) for part in folds))
    slow = {}
    for rest, share in curves.SIDES:
        for one in curves.temperatures():
            added = rest * (1 - 1 / one) * mean + share * bias
            probs = (logits.log_softmax(-1) / one + added).softmax(-1)
            probs = (1 - floor) * probs + floor / K
            slow[rest, share, float(one)] = float(-probs.gather(1, y[:, None]).log().mean())
    rest, share, temperature = min(slow, key=lambda place: slow[place])
    chosen = curves.choose(own, own, [], "client")
    assert share == want
    assert min((nll, one) for (r, one, _), nll in slow.items() if r == 0)[1] == more
    assert chosen.share == pytest.approx(share, abs=0.05)
    assert chosen.rest == pytest.approx(rest, abs=0.05)
    assert chosen.temperature == pytest.approx(temperature, rel=0.1)
    assert chosen.calibrated == pytest.approx(slow[rest, share, temperature], abs=1e-3)


@pytest.mark.parametrize("seed", [0, 1])
def test_few_samples_of_a_rare_class_lead_to_the_mean_prediction(seed: int) -> None:
    """Logits say nothing of the label, one of seven samples is of the rare class, and the model is
    too sure. The oracle sums the posterior over a dense grid, a place at a time.
    """
    draw = torch.Generator().manual_seed(seed)
    number = 60
    y = (torch.rand(number, generator=draw) < 1 / 7).long()
    logits = torch.stack([torch.full((number,), 2.0), torch.zeros(number)], 1).double()
    logits = logits + 2 * torch.randn(number, 2, generator=draw, dtype=torch.float64)
    bias = torch.zeros(2, dtype=torch.float64)
    mean = curves.mean_of(logits.softmax(-1).sum(0))
    floor = curves.floor_of(number)
    folds = curves.tables(logits, {}, bias, mean, floor, y, torch.ones(number))
    own = curves.Sums(number, *(part.sum(0) for part in folds))
    chosen = curves.choose(own, own, [], "client")
    total, heats, rests = 0.0, 0.0, 0.0
    for rest in (0.0, 1.0):
        for heat in torch.linspace(math.log(0.1), math.log(10), 500, dtype=torch.float64):
            added = rest * (1 - torch.exp(-heat)) * mean
            probs = (logits.log_softmax(-1) * torch.exp(-heat) + added).softmax(-1)
            probs = (1 - floor) * probs + floor / 2
            nll = float(-probs.gather(1, y[:, None]).log().sum())
            weight = math.exp(-nll - float(heat) ** 2 / (2 * curves.WIDE**2))
            total, rests = total + weight, rests + rest * weight
            heats += float(heat) * weight
    assert math.log(chosen.temperature) == pytest.approx(heats / total, abs=0.02)
    assert chosen.rest == pytest.approx(rests / total, abs=0.01)
    assert chosen.rest > 0.6

    def rare(rest: float) -> float:
        """Return how likely the rare class is on average at this temperature."""
        heat = torch.tensor(chosen.temperature)
        added = curves.offset_of(heat, rest, 0.0, bias, mean)
        return float(curves.scaled(logits.log_softmax(-1), heat, added).exp()[:, 1].mean())

    assert rare(1.0) < rare(0.0) - 0.05


def test_finer_curves_pass_through_the_table_and_follow_a_cubic() -> None:
    x = torch.arange(curves.FINEST, dtype=torch.float64)
    near = torch.arange((curves.FINEST - 1) * curves.FINER + 1, dtype=torch.float64) / curves.FINER
    found = curves.finer(0.1 * x**2 - x)
    assert torch.allclose(found[:: curves.FINER], 0.1 * x**2 - x)
    inside = slice(curves.FINER, -curves.FINER)
    assert torch.allclose(found[inside], (0.1 * near**2 - near)[inside])
