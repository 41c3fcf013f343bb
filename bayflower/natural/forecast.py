"""Predictions of trained models: every client's own, on any samples, as plain arrays.

point        the personal model, with the 90 % statement of its likelihood
temperature  the same with one temperature (of numbers: one factor of the variance) for all
             clients, fitted to everyone's held-out samples
calibrated   with Bayflower's posterior, calibration and conformal statement
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..calibration import conformal, intervals
from ..config import Run
from ..contract import ClientHalf
from ..data import Federation, batches
from ..fused.engine import Fused
from ..fused.run import FusedRun
from ..networks.model import Batch
from ..rounds import solo
from ..rounds.deciding import Held, whole
from ..rounds.halves import halves_for
from ..rounds.spread import Spread
from ..rounds.uncertain import Uncertain, added, fit_alone, hold_alone, score_alone, settled
from ..tasks import Task
from ..tree import take
from .scores import nll

LEVEL = 0.9
FORMS = ("point", "temperature", "calibrated")
# of temperatures, and of factors of a variance
HEATS = np.exp(np.linspace(np.log(0.2), np.log(10.0), 79))


class Said(NamedTuple):
    """What is predicted of some samples: probabilities (N, C), or mean and variance (N, 2), or the
    survival function at the edges (N, K); and the 90 % statement: a set of classes (N, C) or an
    interval (N, 2), if it is not that of the prediction itself.
    """

    value: np.ndarray
    stated: np.ndarray | None = None


Forecast = Callable[[np.ndarray], Said]


class Trained(NamedTuple):
    """The forecasts of training clients and of new ones, in their order, and the bytes sent."""

    old: list[Forecast]
    new: list[Forecast]
    num_bytes: int
    task: Task


class Member(NamedTuple):
    """One client after the last round."""

    half: ClientHalf
    state: Any
    broadcast: Any
    data: solo.Samples
    seed: int
    client: int
    round: int


class Keeping(FusedRun):
    """A run that keeps its adapted clients instead of testing the new ones."""

    members: tuple[list[Member], list[Member]] = ([], [])

    def test_new_clients(self, newcomers: Fused | None, round: int) -> Any:
        """Keep all clients; nothing is tested."""
        old = self._members(self.engine, self.everyone, round, "finetune")
        new = []
        if newcomers is not None:
            new = self._members(newcomers, sorted(newcomers.stack.clients), round, "new")
        self.members = old, new
        return {}

    def calibrate(self, newcomers: Fused | None, round: int) -> Any:
        """Calibrate nothing: it is done with the kept clients."""
        return None

    def _members(
        self, fused: Fused, chosen: Sequence[int], round: int, purpose: Any
    ) -> list[Member]:
        found = []
        for chunk in fused.chunks(list(chosen), self.broadcast_to):
            broadcast, states = self.broadcast_to(chunk), fused.bank.take(chunk)
            if fused.half.phases(purpose):
                states = fused._adapted(chunk, states, broadcast, purpose, round)
            for place, client in enumerate(chunk):
                own = take(broadcast, place) if fused.per_client else broadcast
                data = solo.Samples(
                    fused.stack.alone(client),
                    fused.stack.alone(client, test=True),
                    fused.stack.held_of(client),
                )
                state = take(states, place)
                known = (self.settings.seed, client, round)
                found.append(Member(fused.unstacked, state, own, data, *known))
        return sorted(found, key=lambda one: one.client)  # chunks are in the order of sizes


def trained(run: Run, there: Federation, form: str = "point", how: str = "shrunk") -> Trained:
    """Return the forecasts after a run; `how` is the calibration of numbers and classes."""
    with solo.one_thread():
        kept = Keeping(run, there, halves_for(run, there))
        outcome = kept.execute()
        old, new = kept.members
        task = kept.halves.model.task
        sent = sum(one["bytes_up"] + one["bytes_down"] for one in outcome.rounds)
        if form == "calibrated" and run.data.calibrated and can_be(kept.halves.client):
            make = classes_of if task.classes else numbers_of
            pair = make(old, new, how)
        else:
            pair = [plain(one) for one in old], [plain(one) for one in new]
            if form == "temperature":
                heat = fitted_heat(old, pair[0], task)
                first, second = ([heated(one, task, heat) for one in some] for some in pair)
                pair = first, second
    return Trained(*pair, sent, task)


def can_be(half: ClientHalf) -> bool:
    """Return whether a personal model can be calibrated: one network, of classes or numbers."""
    return half.one_network and (half.model.task.classes or intervals.has_factors(half.model.task))


def tensor_of(x: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """Return inputs as the model takes them."""
    return solo.moved(x, like.device, like.dtype if like.is_floating_point() else torch.float32)


# -- the personal model ----------------------------------------------------------------------------
def plain(one: Member) -> Forecast:
    """Return the forecast of a personal model as it is."""
    keys: dict[str, Any] = {"seed": one.seed, "client": one.client, "round": one.round}
    shapes = one.half.noise("predict", solo.CHUNK)
    dtype = one.data.train.mask.dtype
    noise = batches.noise(shapes, **keys, stage="predict", step=0, dtype=dtype)

    def say(x: np.ndarray) -> Said:
        inputs = tensor_of(x, one.data.train.x)
        with torch.no_grad(), solo.seeded(one.seed, one.client, one.round):
            parts = [
                one.half.predict("personal", one.state, one.broadcast, part, noise).double()
                for part in inputs.split(solo.CHUNK)
            ]
        return Said(torch.cat(parts).numpy())

    return say


def fitted_heat(old: Sequence[Member], said: Sequence[Forecast], task: Task) -> float:
    """Return the temperature of everyone's held-out samples; 1 if there are none."""
    pairs = []
    for one, forecast in zip(old, said, strict=True):
        if one.data.held is not None and len(one.data.held.y):
            value = forecast(one.data.held.x.numpy()).value
            pairs.append((value, one.data.held.y.numpy()))
    if not pairs:
        return 1.0
    value, y = (np.concatenate(some) for some in zip(*pairs, strict=True))
    losses = [float(nll(warm(value, task, heat), y, task).mean()) for heat in HEATS]
    return float(HEATS[int(np.argmin(losses))])


def heated(forecast: Forecast, task: Task, heat: float) -> Forecast:
    """Return a forecast at a temperature."""
    return lambda x: Said(warm(forecast(x).value, task, heat))


def warm(value: np.ndarray, task: Task, heat: float) -> np.ndarray:
    """Return probabilities ∝ p^(1/T), a variance times T, or a survival function whose hazards have
    logits divided by T.
    """
    if task.classes:
        logs = np.log(value.clip(1e-30)) / heat
        some = np.exp(logs - logs.max(-1, keepdims=True))
        return some / some.sum(-1, keepdims=True)
    if task.events:
        before = np.concatenate([np.ones_like(value[:, :1]), value[:, :-1]], 1)
        stays = (value / before.clip(1e-30)).clip(1e-12, 1 - 1e-12)
        logit = np.log(stays / (1 - stays)) / heat
        return np.cumprod(1 / (1 + np.exp(-logit)), 1)
    return np.stack([value[:, 0], value[:, 1] * heat], 1)


def mixed(several: Sequence[Forecast], task: Task) -> Forecast:
    """Return the forecast of an ensemble: the mixture; of numbers the Gaussian with its moments."""

    def say(x: np.ndarray) -> Said:
        values = np.stack([forecast(x).value for forecast in several])
        if task.classes or task.events:
            return Said(values.mean(0))
        mean = values[..., 0].mean(0)
        return Said(np.stack([mean, values[..., 1].mean(0) + values[..., 0].var(0)], 1))

    return say


# -- calibrated ------------------------------------------------------------------------------------
def classes_of(
    old: list[Member], new: list[Member], how: str
) -> tuple[list[Forecast], list[Forecast]]:
    """Return calibrated forecasts of classes, with conformal sets."""
    known = [Uncertain(one.half, False) for one in (*old, *new)]
    every = [*old, *new]
    fitted = [
        fit_alone(u, one.state, one.broadcast, one.data.train, one.data.num_held)
        for u, one in zip(known, every, strict=True)
    ]
    own = [
        hold_alone(u, fit, one.data.held) for u, fit, one in zip(known, fitted, every, strict=True)
    ]
    total: Held = added([whole(held) for held in own[: len(old)]])
    scored = [
        score_alone(u, fit, held, total, one.data.held, how)
        for u, fit, held, one in zip(known, fitted, own, every, strict=True)
    ]
    total = added([whole(held) for held in scored[: len(old)]])
    found = []
    for u, fit, held, one in zip(known, fitted, scored, every, strict=True):
        choice = settled(u, fit, held, total, one.data.held, how, LEVEL)[1]
        found.append(calibrated_classes(u, fit, choice, one.data.train))
    return found[: len(old)], found[len(old) :]


def calibrated_classes(known: Uncertain, fitted: Any, choice: Any, like: Batch) -> Forecast:
    """Return one client's calibrated forecast of classes."""

    def say(x: np.ndarray) -> Said:
        with torch.no_grad():
            out = known.outputs(fitted, tensor_of(x, like.x))
            logs = known.calibrated(fitted, choice, out)
            inside = conformal.sets(logs, choice.lowest)
        return Said(logs.exp().numpy(), inside.numpy())

    return say


def numbers_of(
    old: list[Member], new: list[Member], how: str
) -> tuple[list[Forecast], list[Forecast]]:
    """Return calibrated forecasts of numbers, with conformal intervals."""
    every = [*old, *new]
    known = [Spread(one.half) for one in every]
    fitted = [
        spread.fit(one.state, one.broadcast, one.data.train)
        for spread, one in zip(known, every, strict=True)
    ]
    own = [
        spread.hold(fit, one.data.held)
        for spread, fit, one in zip(known, fitted, every, strict=True)
    ]
    total = added(own[: len(old)])
    found = [
        calibrated_numbers(spread, fit, spread.settled(held, total, how), one.data.train)
        for spread, fit, held, one in zip(known, fitted, own, every, strict=True)
    ]
    return found[: len(old)], found[len(old) :]


def calibrated_numbers(known: Spread, fitted: Any, choice: Any, like: Batch) -> Forecast:
    """Return one client's calibrated forecast of numbers."""

    def say(x: np.ndarray) -> Said:
        with torch.no_grad():
            used = known.predictions(fitted, tensor_of(x, like.x))[choice.posterior]
            ends = intervals.interval(known.task, used, LEVEL, choice.factors)
        return Said(used.numpy(), torch.stack(ends, 1).numpy())

    return say
