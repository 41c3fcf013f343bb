"""One client without stacking: train a round, adapt, test. Every engine except the fused one uses
this.

The results depend on the arguments only: batches, noise and the numbers of random layers (dropout)
are drawn from (seed, client, round). torch's own generator is seeded in the same way, for networks
that use it in a way that `stacked/randomly.py` does not know.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import metrics
from ..contract import ClientHalf, Purpose, Survey, Work
from ..data import ClientData, batches
from ..errors import BayflowerError
from ..maths.gradients import plainly
from ..maths.tops import Topped
from ..networks.mixing import try_out
from ..networks.model import Batch, Model
from ..recipes import step as recipes
from ..recipes.rates import at_share
from ..stacked import chance
from ..tree import Tensors, map_tree
from .steps import step_of, taker

log = logging.getLogger("bayflower")
CHUNK = 1024  # test samples in one forward pass


class Samples(NamedTuple):
    """A client's data on its device."""

    train: Batch
    test: Batch
    held: Batch | None = None  # training samples held out for calibration

    @property
    def num_held(self) -> int:
        """Return the number of samples held out for calibration."""
        return 0 if self.held is None else len(self.held.y)


class Trained(NamedTuple):
    """The result of one round of one client."""

    state: Any
    update: Any
    loss: float  # mean over all samples seen


def samples(data: ClientData, device: torch.device, dtype: torch.dtype) -> Samples:
    """Return the client's data as tensors."""

    def batch(x: np.ndarray, y: np.ndarray) -> Batch:
        labels = targets(y, device, dtype)
        mask = torch.ones(len(y), dtype=dtype, device=device)
        return Batch(moved(x, device, dtype), labels, mask)

    held = None
    if data.x_held is not None and data.y_held is not None:
        held = batch(data.x_held, data.y_held)
    return Samples(batch(data.x_train, data.y_train), batch(data.x_test, data.y_test), held)


def moved(x: np.ndarray, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return inputs on a device; numbers in `dtype`, whole numbers such as tokens as they are."""
    found = torch.as_tensor(x)
    return found.to(device, dtype) if found.is_floating_point() else found.to(device)


def targets(y: np.ndarray, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return targets on the device: whole numbers as they are, others in `dtype`."""
    known = torch.as_tensor(y)
    return known.to(device, dtype) if known.is_floating_point() else known.to(device)


def train(
    half: ClientHalf, state: Any, broadcast: Any, data: Batch, *, seed: int, client: int, round: int
) -> Trained:
    """Return the client's state, update and loss after one round."""
    keys = {"seed": seed, "client": client, "round": round}
    state, broadcast = begun(half.model, data, state, broadcast)

    def trained() -> Trained:
        with seeded(**keys):
            begun = half.begin(state, broadcast, data)
            work, loss = run_phases(half, begun, data, "train", **keys)
            new_state, update = half.finish(state, surveyed(half, work, data), data)
        return Trained(detach(new_state), detach(update), loss)

    return differentiated(half.model, trained)


def adapt(
    half: ClientHalf,
    state: Any,
    broadcast: Any,
    data: Batch,
    purpose: Purpose,
    *,
    seed: int,
    client: int,
    round: int,
) -> Any:
    """Return the state used for predictions: adapted for `purpose`, or `state` itself if the method
    has no such adaptation.
    """
    if not half.phases(purpose):
        return state
    keys = {"seed": seed, "client": client, "round": round}
    state, broadcast = begun(half.model, data, state, broadcast)

    def adapted() -> Any:
        with seeded(**keys):
            work = half.adapt(state, broadcast, data, purpose)
            work, _ = run_phases(half, work, data, purpose, **keys)
            return detach(half.finish_adapting(state, work, data, purpose))

    return differentiated(half.model, adapted)


def begun(model: Model, data: Batch, *given: Any) -> tuple[Any, ...]:
    """Return what training starts from, when the network is tried: copies for a network that
    changes parameters in forward(), since those given belong to others, too.
    """
    try_out(model, data.x)
    return tuple(map_tree(torch.clone, one) if model.manner.changes else one for one in given)


def differentiated(model: Model, fn: Callable[[], Any]) -> Any:
    """Return fn(), whose gradients are those of `torch.func`; where that cannot differentiate the
    network, those of plain autograd, from then on.
    """
    if not model.seen.plain:
        try:
            return fn()
        except (torch.OutOfMemoryError, torch.linalg.LinAlgError):  # not for want of a derivative
            raise
        except (RuntimeError, NotImplementedError) as error:
            before = error
        try:
            with plainly(True):
                found = fn()
        except (RuntimeError, NotImplementedError) as error:
            raise error from before
        model.seen.plain = True
        log.info("gradients by plain autograd, since torch.func has none: %s", before)
        return found
    with plainly(True):
        return fn()


def test(
    half: ClientHalf,
    state: Any,
    broadcast: Any,
    data: Batch,
    train: Batch | None,
    *,
    seed: int,
    client: int,
    round: int,
) -> dict[str, Any]:
    """Return the tally of every view on `data`, and on the training samples if the task counts
    those too.
    """
    shapes = half.noise("predict", CHUNK)
    noise = batches.noise(
        shapes,
        seed=seed,
        client=client,
        round=round,
        stage="predict",
        step=0,
        dtype=data.mask.dtype,
    )
    noise = {name: value.to(data.x.device) for name, value in noise.items()}
    result = {}
    with torch.no_grad(), seeded(seed, client, round):
        for view in half.views():
            parts, task = [], half.model.task
            passes = [(task.tally, data)]
            if task.tallies_training and train is not None:
                passes.append((task.tally_training, train))
            for tally_of, samples in passes:
                for start in range(0, len(samples.y), CHUNK):
                    part = Batch(*(tensor[start : start + CHUNK] for tensor in samples))
                    probs = half.predict(view, state, broadcast, part.x, noise)
                    parts.append(tally_of(probs, part.y, part.mask))
            tally = parts[0] if parts else task.zero()
            for part_tally in parts[1:]:
                tally = metrics.add(tally, part_tally)
            result[view] = map_tree(lambda leaf: leaf.cpu(), tally)
    return result


def run_phases(
    half: ClientHalf,
    work: Work,
    data: Batch,
    purpose: Purpose,
    *,
    seed: int,
    client: int,
    round: int,
) -> tuple[Work, float]:
    """Return the work after all phases of `purpose`, and the mean loss over the samples seen."""
    total = torch.zeros((), dtype=torch.float64, device=data.x.device)
    seen, steps = 0, taker()
    recipe = recipes.of(half.training, half.model.num_classes)
    weights = recipe.weights_of(data.y)
    for phase in half.phases(purpose):
        work = fresh_optimizer(phase, work)
        shapes = half.noise(phase.name, phase.batch_size)
        keys: dict[str, Any] = {"seed": seed, "client": client, "round": round}
        plan = batches.plan(len(data.y), phase, **keys, purpose=purpose, coupled=half.model.coupled)
        layers = batches.layers_key(stage=f"{purpose}/{phase.name}", **keys)
        own, own_step = 0, step_of(half, phase, recipe)
        if recipe.augments:
            own = batches.layers_key(stage=f"augment/{purpose}/{phase.name}", **keys)
        for step, groups in enumerate(plan):
            chosen = tuple(pick(data, rows) for rows in groups)
            if recipe.augments:
                chosen = recipe.groups(chance.further_number(own, step), chosen)
            noise = batches.noise(
                shapes,
                **keys,
                stage=f"{purpose}/{phase.name}",
                step=step,
                dtype=data.mask.dtype,
                device=data.x.device,
            )
            if work.opt.rate:
                work = at_share(work, recipe.share(purpose, round, step, len(plan)))
            args = (chosen, noise, chance.further_number(layers, step), weights)
            work, info = steps.take((purpose, phase.name), own_step, work, *args)
            count = sum(len(rows) for rows in groups)
            total += info["loss"].detach().double() * count
            seen += count
        work = steps.done(work)
    return work, float(total) / max(seen, 1)


def surveyed(half: ClientHalf, work: Work, data: Batch) -> Work:
    """Return the work with the survey of all training data, if the half needs one."""
    if not half.survey_size:
        return work
    starts = range(0, len(data.y), half.survey_size)
    with torch.no_grad():
        parts = [
            half.survey(work, Batch(*(tensor[start : start + half.survey_size] for tensor in data)))
            for start in starts
        ]
    total = parts[0].total
    for part in parts[1:]:
        total = map_tree(torch.add, total, part.total)
    each = map_tree(lambda *pieces: torch.cat(pieces), *(part.each for part in parts))
    return work._replace(survey=Survey(total, each))


def fresh_optimizer(phase: Any, work: Work, stacked: tuple[int, ...] = ()) -> Work:
    """Return the work with a new optimiser state for the parameters that move in `phase`; of stacks
    of clients, `stacked` is their number.
    """
    moving = {name: work.params[name] for name in phase.moving(work.params)}
    return work._replace(opt=phase.optimizer.init(moving, stacked))


def pick(data: Batch, rows: np.ndarray) -> Batch:
    """Return the samples at `rows`."""
    index = torch.as_tensor(rows, device=data.y.device)
    return Batch(data.x[index], data.y[index], data.mask[index])


def personal_model(half: ClientHalf) -> Model:
    """Return the network of a personal model: the user's, with a `top` where the method has one."""
    top, model = half.top(), half.model
    if top is None:
        return model
    made = Topped(model, top)
    return made.for_stacks(model.stacked) if model.in_stack else made


def numbers(half: ClientHalf, state: Any, broadcast: Any, x: Tensor) -> tuple[Tensors, Tensors]:
    """Return (parameters, buffers) of the personal model: those that `predict` passes through the
    network, or those of the network with its `top`.
    """
    if not half.one_network:
        raise BayflowerError(
            "the personal model is more than the network, so it cannot be exported or calibrated; "
            "use calibration=off"
        )
    if half.top() is not None:
        return half.topped(state, broadcast)
    seen: list[Tensors] = []
    model, watching = copy(half.model), copy(half)

    def forward(
        params: Tensors, buffers: Tensors, x: Tensor, train: bool, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensors]:
        seen.append({**params, **buffers})
        return half.model.forward(params, buffers, x, train, mask)

    model.forward = forward  # type: ignore[method-assign]
    watching.model = model
    with torch.no_grad():
        watching.predict("personal", state, broadcast, x, {})
    if len(seen) != 1:
        raise BayflowerError(
            f"the personal model is {len(seen)} networks, not one; it cannot be exported"
        )
    names = half.model.shapes
    params = {name: seen[0][name] for name in names}
    buffers = {name: value for name, value in seen[0].items() if name not in names}
    return params | half.extra_of(state), buffers


def detach(tree: Any) -> Any:
    """Return the tree detached from the autograd graph."""
    return map_tree(Tensor.detach, tree)


@contextmanager
def seeded(seed: int, client: int, round: int) -> Iterator[None]:
    """Seed torch's own generator for one client and round, and restore it afterwards."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        drawn = int(batches.rng(seed, "torch", client, round).integers(2**62))
        # torch.manual_seed would also write down a stack trace for each device that is not there
        torch.default_generator.manual_seed(drawn)
        if devices:
            torch.cuda.manual_seed(drawn)
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    """Run with one torch thread: with more, sums would be split differently on machines with
    different numbers of cores.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
