"""The linear Gaussian hierarchy, dense and slow: y_k = X_k theta_k + noise, theta_k ~ N(gamma, S).

y_k ~ N(X_k gamma, X_k S X_kᵀ + s² 1)
theta_k | y_k ~ N(gamma + S X_kᵀ C⁻¹ (y_k − X_k gamma), S − S X_kᵀ C⁻¹ X_k S),  C = Cov(y_k)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Client(NamedTuple):
    """Inputs with a column of ones last, and targets."""

    x: np.ndarray
    y: np.ndarray


def posterior(
    client: Client, gamma: np.ndarray, wide: np.ndarray, noise: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and covariance of theta_k."""
    x, y = client
    gain = wide @ x.T @ np.linalg.inv(x @ wide @ x.T + noise**2 * np.eye(len(y)))
    return gamma + gain @ (y - x @ gamma), wide - gain @ x @ wide


def log_marginal(clients: list[Client], gamma: np.ndarray, wide: np.ndarray, noise: float) -> float:
    """Return Σ_k log p(y_k)."""
    total = 0.0
    for x, y in clients:
        cover = x @ wide @ x.T + noise**2 * np.eye(len(y))
        left = y - x @ gamma
        _, logdet = np.linalg.slogdet(cover)
        total -= 0.5 * (left @ np.linalg.solve(cover, left) + logdet + len(y) * np.log(2 * np.pi))
    return total


def drawn(seed: int, sizes: list[int], stds: list[float], noise: float) -> list[Client]:
    """Return clients of a hierarchy with two inputs: one of a sample, one of the client."""
    draw = np.random.default_rng(seed)
    found = []
    for number in sizes:
        theta = np.array([-0.6, 0.7, 1.2]) + draw.normal(size=3) * np.array(stds)
        x = np.c_[
            draw.integers(0, 2, number), np.full(number, draw.normal()), np.ones(number)
        ].astype(float)
        found.append(Client(x, x @ theta + noise * draw.normal(size=number)))
    return found
