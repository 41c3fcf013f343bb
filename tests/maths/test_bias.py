"""The class bias of affine scaling, and how much of it a client uses."""

from __future__ import annotations

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


@pytest.mark.parametrize(("heat", "want"), [(0.4, 1.0), (2.5, 2.0)])
def test_a_model_that_is_nearly_sure_needs_more_than_its_bias(heat: float, want: float) -> None:
    """A model that all clients share says softmax(heat · log p), where p is right for even classes.
    The client has few samples of two classes. The oracle tries each share and temperature.
    """
    draw = torch.Generator().manual_seed(3)
    number, wanted = 4000, torch.tensor([0.48, 0.48, 0.02, 0.02], dtype=torch.float64)
    y = torch.multinomial(wanted, number, replacement=True, generator=draw)
    x = 1.5 * torch.eye(K, dtype=torch.float64)[y]
    x = x + torch.randn(number, K, generator=draw, dtype=torch.float64)
    logits = heat * 1.5 * x  # of Gaussians at 1.5 times the unit vectors, with unit variance
    counts = torch.bincount(y, minlength=K).double()
    bias = curves.bias_of(counts, logits.softmax(-1).sum(0))
    floor = curves.floor_of(number)
    folds = curves.tables(logits, {}, bias, floor, y, torch.ones(number))
    own = curves.Sums(number, *(part.sum(0) for part in folds))
    slow = {}
    for share in curves.SHARES:
        for one in curves.temperatures():
            probs = (logits.log_softmax(-1) / one + share * bias).softmax(-1)
            probs = (1 - floor) * probs + floor / K
            slow[share, float(one)] = float(-probs.gather(1, y[:, None]).log().mean())
    share, temperature = min(slow, key=lambda place: slow[place])
    chosen = curves.choose(own, own, [], "client")
    assert chosen.share == share == want
    assert chosen.temperature == pytest.approx(temperature, rel=0.1)
    assert chosen.calibrated == pytest.approx(slow[share, temperature], abs=1e-3)
