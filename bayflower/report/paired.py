"""Paired differences between two methods on the same clients with the same seeds: estimate,
interval, test, and the number of seeds that a difference of one point would take.

d[s, i] is the difference of client i with seed s. The estimate is the mean over seeds of the mean
over clients. Its interval depends on who the clients are:

* The same clients in every seed (natural sites; crossed). d[s, i] = μ + seed + client + rest, all
  random. With V_s the variance of the seeds' means over S, V_c that of the clients' means over N,
  and V_e the rest's share, the variance of the estimate is V_s + V_c − V_e (analysis of variance),
  here taken at least as large as V_s and V_c. The interval is Student's with
  V² / (V_s²/(S−1) + V_c²/(N−1)) degrees of freedom (Satterthwaite), at least min(S, N) − 1. It says
  what other seeds and other sites like these would give.
* Other clients in every seed (a partition that is drawn; nested). A seed's mean has the chance of
  the seed and of its clients in it, so Student's interval of the seeds' means has both.
* One seed: Student's interval over its clients. It cannot show what another seed would change.

A bootstrap of so few seeds and clients would be too narrow; tests/cli/test_paired.py measures both.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

LEVEL = 0.95
POWER = 0.8
MOST = 1000  # seeds; more are not worth naming


class Site(NamedTuple):
    """The difference of one client, over the seeds in which it took part."""

    id: str
    mean: float
    low: float | None  # 95 % interval over seeds; None for fewer than 3
    high: float | None
    seeds: int


class Difference(NamedTuple):
    """A paired difference, in the units of what was compared."""

    mean: float
    low: float | None  # 95 % interval; None if there is nothing to take it over
    high: float | None
    p: float | None  # of the test that the difference is 0, by the same Student distribution
    freedom: float | None
    over: str  # what the interval is over: "seeds and clients", "seeds", "clients" or "nothing"
    these: tuple[float, float] | None  # 95 % interval over seeds for just these clients
    seeds: int
    clients: int  # clients that differ; drawn ones count once a seed
    sites: tuple[Site, ...]  # every client, best first
    better: int  # clients whose mean is above 0
    worse: int
    sign_p: float | None  # sign test over the clients; None if these depend on their seed
    sd_seeds: float | None  # standard deviation of a seed's mean
    parts: tuple[float, float, float] | None  # crossed: variances of seeds, clients and rest


def paired(values: Mapping[tuple[int, str], float]) -> Difference:
    """Return the difference in `values`, by (seed, identity of the client)."""
    seeds = sorted({seed for seed, _ in values})
    ids = sorted({client for _, client in values})
    by_seed = {s: [v for (seed, _), v in values.items() if seed == s] for s in seeds}
    by_client = {i: [v for (_, client), v in values.items() if client == i] for i in ids}
    means = [statistics.fmean(by_seed[seed]) for seed in seeds]
    mean = statistics.fmean(means)
    crossed = len(seeds) > 1 and any(len(some) > 1 for some in by_client.values())
    of_seeds = statistics.variance(means) / len(seeds) if len(seeds) > 1 else None
    variance, freedom, over, parts = None, None, "nothing", None
    if of_seeds is None:
        if len(ids) > 1:
            variance = statistics.variance(values.values()) / len(ids)
            freedom, over = float(len(ids) - 1), "clients"
    elif crossed and len(ids) > 1:
        variance, freedom, parts = crossed_variance(values, seeds, ids, mean, of_seeds)
        over = "seeds and clients"
    else:
        variance, freedom = of_seeds, float(len(seeds) - 1)
        over = "seeds" if crossed or len(ids) == 1 else "seeds and clients"
    low, high, p = interval(mean, variance, freedom)
    these = interval(mean, of_seeds, float(len(seeds) - 1))[:2] if of_seeds is not None else None
    sites = [site(client, by_client[client]) for client in ids]
    better, worse = sum(one.mean > 0 for one in sites), sum(one.mean < 0 for one in sites)
    return Difference(
        mean,
        low,
        high,
        p,
        freedom,
        over,
        None if these is None or these[0] is None or these[1] is None else (these[0], these[1]),
        len(seeds),
        len(ids),
        tuple(sorted(sites, key=lambda one: (-one.mean, one.id))),
        better,
        worse,
        sign_test(better, worse) if crossed or len(seeds) == 1 else None,
        statistics.stdev(means) if len(seeds) > 1 else None,
        parts,
    )


def crossed_variance(
    values: Mapping[tuple[int, str], float],
    seeds: list[int],
    ids: list[str],
    mean: float,
    of_seeds: float,
) -> tuple[float, float, tuple[float, float, float]]:
    """Return the variance of the mean over seeds and clients, both random, its degrees of freedom,
    and the variances of seeds, clients and rest. Clients may be missing in some seeds.
    """
    count = {seed: sum(s == seed for s, _ in values) for seed in seeds}
    weight = {key: 1 / (len(seeds) * count[key[0]]) for key in values}
    pulls = {i: 0.0 for i in ids}  # how far each client moves the mean
    for (seed, client), value in values.items():
        pulls[client] += weight[seed, client] * (value - mean)
    spread = len(ids) / (len(ids) - 1)
    of_clients = spread * math.fsum(pull**2 for pull in pulls.values())
    rest = residual(values, seeds, ids)
    of_rest = rest * math.fsum(one**2 for one in weight.values())
    variance = max(of_seeds + of_clients - of_rest, of_seeds, of_clients)
    below = of_seeds**2 / (len(seeds) - 1) + of_clients**2 / (len(ids) - 1)
    least = float(min(len(seeds), len(ids)) - 1)
    freedom = max(variance**2 / below, least) if below else least
    return (
        variance,
        freedom,
        (
            max(0.0, (of_seeds - of_rest) * len(seeds)),
            max(0.0, (of_clients - of_rest) * len(ids)),
            rest,
        ),
    )


def residual(values: Mapping[tuple[int, str], float], seeds: list[int], ids: list[str]) -> float:
    """Return the mean square that seeds and clients leave unexplained (least squares); 0 if they
    explain everything.
    """
    freedom = len(values) - len(seeds) - len(ids) + 1
    if freedom < 1:
        return 0.0
    design = np.zeros((len(values), len(seeds) + len(ids)))
    for row, (seed, client) in enumerate(values):
        design[row, seeds.index(seed)] = design[row, len(seeds) + ids.index(client)] = 1
    y = np.array(list(values.values()))
    left = y - design @ np.linalg.lstsq(design, y, rcond=None)[0]
    return float(left @ left) / freedom


def interval(
    mean: float, variance: float | None, freedom: float | None
) -> tuple[float | None, float | None, float | None]:
    """Return (low, high, p) of Student's interval and test."""
    if variance is None or freedom is None:
        return None, None, None
    from scipy import special  # scipy.stats takes a second to import

    error = math.sqrt(variance)
    half = float(special.stdtrit(freedom, (1 + LEVEL) / 2)) * error
    if error == 0:
        return mean, mean, 1.0 if mean == 0 else 0.0
    return mean - half, mean + half, float(2 * special.stdtr(freedom, -abs(mean) / error))


def site(client: str, values: list[float]) -> Site:
    """Return one client's difference; its interval is over seeds."""
    mean = statistics.fmean(values)
    low = high = None
    if len(values) > 2:
        low, high, _ = interval(mean, statistics.variance(values) / len(values), len(values) - 1.0)
    return Site(client, mean, low, high, len(values))


def sign_test(better: int, worse: int) -> float:
    """Return the probability of a split at least as uneven if both sides were equally likely."""
    number, most = better + worse, max(better, worse)
    tail = sum(math.comb(number, k) for k in range(most, number + 1)) / 2**number
    return min(1.0, 2 * tail)


def holm(ps: list[float | None]) -> list[float | None]:
    """Return p-values adjusted for their number (Holm); None stays."""
    known = sorted((p, place) for place, p in enumerate(ps) if p is not None)
    found: list[float | None] = [None] * len(ps)
    highest = 0.0
    for rank, (p, place) in enumerate(known):
        highest = max(highest, min(1.0, (len(known) - rank) * p))
        found[place] = highest
    return found


def seeds_for(found: Difference, wanted: float, beyond: bool = True) -> int | None:
    """Return how many seeds show a difference of `wanted` with probability 80 % at level 5 %, by
    the variances seen here; None if a thousand do not, or if one seed was run. With `beyond` the
    clients are random too, where the same ones take part in every seed; else just these count.
    """
    if found.sd_seeds is None:
        return None
    for number in range(2, MOST + 1):
        if found.parts is not None and beyond:
            of_seed, of_client, rest = found.parts
            ours = of_seed / number + rest / (number * found.clients)
            theirs = of_client / found.clients + rest / (number * found.clients)
            both = rest / (number * found.clients)
            variance = ours + theirs - both
            below = ours**2 / (number - 1) + theirs**2 / (found.clients - 1)
            freedom = variance**2 / below if below else number - 1.0
        else:
            variance, freedom = found.sd_seeds**2 / number, number - 1.0
        if power(wanted, variance, freedom) >= POWER:
            return number
    return None


def power(wanted: float, variance: float, freedom: float) -> float:
    """Return the probability that Student's test at level 5 % sees a difference."""
    from scipy import special

    if variance == 0:
        return 1.0
    edge = float(special.stdtrit(freedom, (1 + LEVEL) / 2))
    shift = wanted / math.sqrt(variance)
    below = special.nctdtr(freedom, shift, -edge)
    return float(1 - special.nctdtr(freedom, shift, edge) + below)
