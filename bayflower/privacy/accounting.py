"""What noisy sums cost: the (ε, δ) of differential privacy, by Google's library dp-accounting.

    z       noise           standard deviation of the noise, in units of the clipping norm
    T       count           noisy sums that a client took part in
    q       share           probability with which a client takes part in a sum; 1 = it always does

A sum hides a client whose part of norm C may be replaced by nothing. Without sampling, T sums with
noise z cost as much as one with noise z/√T. With secret sampling the distribution of the privacy
loss of one sum is composed T times (privacy loss distributions, rounded up).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from ..errors import ConfigError

STEP = 5e-3  # of the discretised privacy loss; it is rounded up
LOUD = 0.1  # noise below which a formula does
EXACT = 1e-3  # relative error of the noise that is found
MISSING = "dp needs the package dp-accounting; pip install 'bayflower[privacy]'"


def library() -> Any:
    """Return dp-accounting's module of privacy loss distributions."""
    try:
        from dp_accounting.pld import privacy_loss_distribution
    except ImportError:
        raise ConfigError(MISSING) from None
    return privacy_loss_distribution


@lru_cache(maxsize=4096)
def epsilon(noise: float, count: int, delta: float, share: float = 1.0) -> float:
    """Return the ε at `delta` of `count` noisy sums."""
    if count == 0:
        return 0.0
    together = noise / math.sqrt(count)
    # far beyond any budget: a bound by zero-concentrated privacy
    if (together if share >= 1 else noise) < LOUD:
        rate = 1 / (2 * together**2)
        return rate + 2 * math.sqrt(rate * math.log(1 / delta))
    step: dict[str, Any] = {"value_discretization_interval": STEP}
    if share >= 1:
        found = library().from_gaussian_mechanism(together, **step)
    else:
        one = library().from_gaussian_mechanism(noise, sampling_prob=share, **step)
        found = one.self_compose(count)
    return float(found.get_epsilon_for_delta(delta))


def noise_for(budget: float, count: int, delta: float, share: float = 1.0) -> float:
    """Return the least noise with which `count` sums stay within the budget."""
    low, high = 1e-3, 1.0
    while epsilon(high, count, delta, share) > budget:
        low, high = high, 2 * high
    while high / low > 1 + EXACT:
        middle = math.sqrt(low * high)
        if epsilon(middle, count, delta, share) > budget:
            low = middle
        else:
            high = middle
    return high


def affordable(budget: float, noise: float, delta: float, share: float, most: int) -> int:
    """Return how many sums, at most `most`, stay within the budget."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if epsilon(noise, middle, delta, share) > budget:
            high = middle - 1
        else:
            low = middle
    return low
