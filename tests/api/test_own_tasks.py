"""A network of one's own for numbers, times and labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

import bayflower
from bayflower.errors import ConfigError


class Net(nn.Module):
    """A network that is told how many outputs the task needs."""

    def __init__(self, num_outputs: int, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.first = nn.Linear(input_shape[0], 8)
        self.head = nn.Linear(8, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.first(x).tanh())
        return found


class Three(nn.Module):
    """A network of three outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(x)
        return found


def clients(kind: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return two clients' samples of a kind of target."""
    draw, found = np.random.default_rng(2), []
    for _ in range(2):
        x = draw.normal(size=(40, 2)).astype(np.float32)
        y: Any = x[:, 0] * 3 + 0.3 * draw.normal(size=40)
        if kind == "survival":
            y = np.stack([draw.exponential(np.exp(-x[:, 0])), draw.random(40) < 0.7], -1)
        if kind == "labels":
            y = (x + 0.5 * draw.normal(size=(40, 2)) > 0).astype(np.float32)
        found.append((x, y.astype(np.float32)))
    return found


SETTINGS: dict[str, dict[str, Any]] = {
    "regression": {"noise": "client"},
    "survival": {"likelihood": "hazard", "intervals": 4},
    "labels": {},
}


@pytest.mark.parametrize("task", SETTINGS)
def test_it_trains_and_comes_home(task: str, tmp_path: Path) -> None:
    usual: dict[str, Any] = {"task": task, "model": Net, "engine": "loop", **SETTINGS[task]}
    data = clients(task)
    found = bayflower.fit("fedavg", data, rounds=2, lr=0.05, out=tmp_path, **usual)
    assert found.result["task"]["name"] == task
    model = found.personal(0)
    said = model.predict(data[0][0])
    assert np.isfinite(said).all()
    assert len(said) == 40


def test_the_wrong_number_of_outputs_is_one_line(tmp_path: Path) -> None:
    for task, said in (
        ("regression", "layer 'head' of model .* has 3 outputs, but task=regression with noise="),
        ("survival", "has 3 outputs, but task=survival with likelihood=hazard needs 4"),
        ("labels", "has 3 outputs, but task=labels with 2 labels needs 2; give it 2"),
    ):
        with pytest.raises(ConfigError, match=said):
            bayflower.fit(
                "fedavg",
                clients(task),
                model=Three,
                task=task,
                out=tmp_path / task,
                **SETTINGS[task],
            )
