"""Settings of the short runs of tests of differential privacy."""

from __future__ import annotations

BASE = {
    "dataset": "digits",
    "model": "mlp",
    "num_clients": 6,
    "rounds": 3,
    "local_epochs": 1,
    "calibration": "off",
    "evaluate_every": 0,
    "device": "cpu",
    "stacking": "no",
}
