"""The fused engine: all clients of a round are trained together, as one stack of parameters under `torch.func.vmap`.

No Flower object is made; bytes are computed from the shapes that would travel. Clients of unequal size are sorted by their number
of steps, so that those still training are always a prefix of the stack: a client that has finished is set aside and cannot move.
Within a step shorter batches are padded and masked. Networks whose layers couple the samples of a batch (BatchNorm) get no
padding: clients are grouped by batch size instead. Networks that draw their own random numbers (dropout) are trained one by one.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from . import metrics, sampling, solo
from .checkpoint import Checkpoint, make, server_state, write
from .config import Run
from .data import ClientData, Federation, batches
from .exact import Total
from .halves import Halves
from .outcome import Outcome, Progress, RoundRecord, Views, curve_point
from .protocol import (
    BROADCAST,
    HEADER,
    METRICS,
    TALLY,
    UPDATE,
    content_bytes,
    reply_header,
    reply_numbers,
    request_header,
    shapes,
)
from .tree import map_tree, put, stack, take, to, unflatten
from .types import Batch, Phase, Purpose, Work

log = logging.getLogger("bayflower")
ONE_BY_ONE = "clients were trained one by one because the model draws its own random numbers (dropout)"
SMALL_MODEL = 100_000  # parameters; below it a CPU's second thread waits more than it works, most of all on a busy machine


class Stacked(NamedTuple):
    """The data of many clients, padded to the largest: x (C, N, …), y and mask (C, N)."""

    train: Batch
    test: Batch


class Fused:
    """All clients of one kind (training, or new), their data resident on the device."""

    def __init__(self, halves: Halves, clients: Sequence[ClientData], run: Run) -> None:
        settings = run.settings
        self.half, self.per_client = halves.client, halves.server.per_client
        self.device, self.dtype, self.seed = settings.torch_device(), settings.torch_dtype(), settings.seed
        self.clients = tuple(data.client for data in clients)
        self.row = {client: row for row, client in enumerate(self.clients)}
        self.sizes = np.array([len(data.y_train) for data in clients])
        parts = [solo.samples(data, torch.device("cpu"), self.dtype) for data in clients]
        self.data = Stacked(*(to(pad([part[i] for part in parts]), self.device) for i in (0, 1)))
        fresh = halves.client.init(*(to(tree, self.device) for tree in halves.initial))
        self.states = map_tree(lambda leaf: leaf.expand(len(clients), *leaf.shape).clone(), to(fresh, self.device))
        self.together = not halves.model.stochastic

    def chunks(self, chosen: Sequence[int], most: int) -> list[list[int]]:
        """Return `chosen` in pieces of at most `most` clients, largest clients first so that equals train together."""
        ordered = sorted(chosen, key=lambda client: (-self.sizes[self.row[client]], client))
        most = most or len(ordered)
        return [ordered[start : start + most] for start in range(0, len(ordered), most)]

    def train(self, chosen: list[int], broadcast: Any, round: int) -> tuple[Any, list[float]]:
        """Return (the stacked updates, the mean losses) of `chosen` after one round; their states are replaced."""
        index, state, data = self._rows(chosen)
        if not self.together:
            parts = [self._alone(client, broadcast, position, round) for position, client in enumerate(chosen)]
            state, update, losses = stack([part.state for part in parts]), stack([part.update for part in parts]), [p.loss for p in parts]
        else:
            work = self._map(self.half.begin, (0, self._axis, 0))(state, broadcast, data)
            work, losses = self._phases(work, chosen, data, "train", round)
            state, update = self._map(self.half.finish, (0, 0, 0))(state, work, data)
        self.states = put(self.states, index, state)
        return update, losses

    def test(self, chosen: list[int], broadcast: Any, round: int, purpose: Purpose) -> dict[str, dict[int, metrics.Tally]]:
        """Return every view's tally of every client in `chosen`, after the adaptation of `purpose`."""
        index, state, data = self._rows(chosen)
        test = take(self.data.test, index)
        if self.half.phases(purpose):
            state = self._adapt(chosen, state, broadcast, data, purpose, round)
        noise = self._noise("predict", "predict", solo.CHUNK, chosen, round, 0)
        result: dict[str, dict[int, metrics.Tally]] = {}
        with torch.no_grad():
            for view in self.half.views():
                tally: Any = None
                for start in range(0, test.y.shape[1], solo.CHUNK):
                    part = map_tree(lambda leaf, start=start: leaf[:, start : start + solo.CHUNK], test)

                    def one(state: Any, broadcast: Any, part: Batch, noise: Any, view: str = view) -> metrics.Tally:
                        return metrics.tally(self.half.predict(view, state, broadcast, part.x, noise), part.y, part.mask)

                    piece = self._map(one, (0, self._axis, 0, 0))(state, broadcast, part, noise)
                    tally = piece if tally is None else metrics.add(tally, piece)
                found = to(tally, "cpu")
                result[view] = {client: take(found, position) for position, client in enumerate(chosen)}
        return result

    # -- inside ------------------------------------------------------------------------------------------------------
    @property
    def _axis(self) -> int | None:
        return 0 if self.per_client else None

    def _map(self, fn: Callable[..., Any], axes: tuple[int | None, ...]) -> Callable[..., Any]:
        return vmap(fn, in_dims=axes)

    def _rows(self, chosen: list[int]) -> tuple[Tensor, Any, Batch]:
        index = torch.tensor([self.row[client] for client in chosen], device=self.device)
        return index, take(self.states, index), take(self.data.train, index)

    def _adapt(self, chosen: list[int], state: Any, broadcast: Any, data: Batch, purpose: Purpose, round: int) -> Any:
        if not self.together:
            return stack([
                solo.adapt(self.half, take(state, i), take(broadcast, i) if self.per_client else broadcast, self._own_data(client),
                           purpose, seed=self.seed, client=client, round=round)
                for i, client in enumerate(chosen)
            ])  # fmt: skip
        work = self._map(lambda s, b, d: self.half.adapt(s, b, d, purpose), (0, self._axis, 0))(state, broadcast, data)
        work, _ = self._phases(work, chosen, data, purpose, round)
        return self._map(lambda s, w, d: self.half.adapted(s, w, d, purpose), (0, 0, 0))(state, work, data)

    def _alone(self, client: int, broadcast: Any, position: int, round: int) -> solo.Trained:
        own = take(broadcast, position) if self.per_client else broadcast
        state = take(self.states, self.row[client])
        return solo.train(self.half, state, own, self._own_data(client), seed=self.seed, client=client, round=round)

    def _own_data(self, client: int) -> Batch:
        row = self.row[client]
        return map_tree(lambda leaf: leaf[row, : self.sizes[row]], self.data.train)

    def _phases(self, work: Work, chosen: list[int], data: Batch, purpose: Purpose, round: int) -> tuple[Work, list[float]]:
        """Return the stacked work after all phases, and each client's mean loss."""
        total = torch.zeros(len(chosen), dtype=torch.float64, device=self.device)
        seen = np.zeros(len(chosen))
        for phase in self.half.phases(purpose):
            work = vmap(lambda one, phase=phase: solo.fresh_optimizer(phase, one))(work)
            coupled = self.half.model.coupled
            plans = [
                batches.plan(int(self.sizes[self.row[client]]), phase, seed=self.seed, client=client, round=round, purpose=purpose,
                             coupled=coupled)
                for client in chosen
            ]  # fmt: skip
            seen += [sum(len(rows) for groups in plan for rows in groups) for plan in plans]
            run = self._coupled_phase if coupled else self._padded_phase
            work, losses = run(phase, work, chosen, data, plans, f"{purpose}/{phase.name}", round)
            total += losses
        return work, (total.cpu().numpy() / np.maximum(seen, 1)).tolist()

    def _step(self, phase: Phase) -> Callable[..., Any]:
        return vmap(lambda work, groups, noise: self.half.step(phase, work, groups, noise))

    def _padded_phase(
        self, phase: Phase, work: Work, chosen: list[int], data: Batch, plans: list[Any], stage: str, round: int
    ) -> tuple[Work, Tensor]:
        """Run one phase: clients sorted by steps, those still training a prefix, batches padded and masked."""
        order = sorted(range(len(chosen)), key=lambda i: -len(plans[i]))
        index = torch.tensor(order, device=self.device)
        work, data = take(work, index), take(data, index)
        rows, real = (torch.as_tensor(array, device=self.device) for array in padded_plan([plans[i] for i in order], phase))
        lengths = [len(plans[i]) for i in order]
        losses = torch.zeros(len(order), dtype=torch.float64, device=self.device)
        step, aside = self._step(phase), []
        active = len(order)
        for t in range(lengths[0] if lengths else 0):
            still = sum(1 for length in lengths[:active] if length > t)
            if still < active:
                aside.append(map_tree(lambda leaf, still=still: leaf[still:], work))
                work = map_tree(lambda leaf, still=still: leaf[:still], work)
                data = map_tree(lambda leaf, still=still: leaf[:still], data)
                active = still
            groups = tuple(gather(data, rows[:active, t, g], real[:active, t, g]) for g in range(phase.batches))
            noise = self._noise(phase.name, stage, phase.batch_size, [chosen[i] for i in order[:active]], round, t)
            work, info = step(work, groups, noise)
            losses[:active] += info["loss"].detach().double() * torch.stack([group.mask.sum(1) for group in groups]).sum(0).double()
        work = map_tree(lambda *pieces: torch.cat(pieces), work, *reversed(aside)) if aside else work
        back = torch.argsort(index)
        return solo.detach(take(work, back)), losses[back]

    def _coupled_phase(
        self, phase: Phase, work: Work, chosen: list[int], data: Batch, plans: list[Any], stage: str, round: int
    ) -> tuple[Work, Tensor]:
        """Run one phase without padding: at each step, clients whose batches have equal sizes go together."""
        losses = torch.zeros(len(chosen), dtype=torch.float64, device=self.device)
        step = self._step(phase)
        for t in range(max(map(len, plans), default=0)):
            alike: dict[tuple[int, ...], list[int]] = {}
            for i, plan in enumerate(plans):
                if t < len(plan):
                    alike.setdefault(tuple(len(rows) for rows in plan[t]), []).append(i)
            for sizes, members in alike.items():
                index = torch.tensor(members, device=self.device)
                part, own = take(work, index), take(data, index)
                groups = []
                for g in range(phase.batches):
                    rows = torch.as_tensor(np.stack([plans[i][t][g] for i in members]), device=self.device)
                    groups.append(gather(own, rows, torch.ones_like(rows, dtype=torch.bool)))
                noise = self._noise(phase.name, stage, phase.batch_size, [chosen[i] for i in members], round, t)
                part, info = step(part, tuple(groups), noise)
                work = put(work, index, solo.detach(part))
                losses[index] += info["loss"].detach().double() * sum(sizes)
        return work, losses

    def _noise(self, name: str, stage: str, batch_size: int, chosen: list[int], round: int, step: int) -> dict[str, Tensor]:
        shapes = self.half.noise(name, batch_size)
        if not shapes:
            return {}
        draws = [
            batches.noise(shapes, seed=self.seed, client=client, round=round, stage=stage, step=step, dtype=self.dtype) for client in chosen
        ]
        return to(stack(draws), self.device)


def pad(parts: list[Batch]) -> Batch:
    """Return one stack of the clients' samples, padded with zeros of mask 0 to the longest."""
    longest = max(len(part.y) for part in parts)

    def grow(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor.new_zeros(longest - len(tensor), *tensor.shape[1:])])

    return stack([map_tree(grow, part) for part in parts])


def padded_plan(plans: list[list[tuple[np.ndarray, ...]]], phase: Phase) -> tuple[np.ndarray, np.ndarray]:
    """Return (rows, whether real), each (C, T, batches, B), of plans of unequal length and batch size."""
    steps = max(map(len, plans), default=0)
    width = max((len(rows) for plan in plans for groups in plan for rows in groups), default=1)
    rows = np.zeros((len(plans), steps, phase.batches, width), np.int64)
    real = np.zeros(rows.shape, bool)
    for i, plan in enumerate(plans):
        for t, groups in enumerate(plan):
            for g, chosen in enumerate(groups):
                rows[i, t, g, : len(chosen)] = chosen
                real[i, t, g, : len(chosen)] = True
    return rows, real


def gather(data: Batch, rows: Tensor, real: Tensor) -> Batch:
    """Return the samples at rows (C, B) of every client; those not `real` have mask 0."""
    client = torch.arange(len(rows), device=rows.device)[:, None]
    return Batch(data.x[client, rows], data.y[client, rows], data.mask[client, rows] * real)


def request_bytes(run: Run, name: str, round: int, test: bool, broadcast: Any) -> int:
    """Return the bytes of the message a client would be sent."""
    head = request_header(
        method=run.method, run=name, round=round, seed=run.settings.seed, evaluate=test, purpose="finetune", instructions=run.instructions()
    )
    return content_bytes({BROADCAST: shapes(broadcast)}, {HEADER: head}, {})


def reply_bytes(method: str, name: str, round: int, client: int, update: Any, views: dict[str, Any], number: int, loss: float) -> int:
    """Return the bytes of the reply a client would give, the test of the model before it included."""
    head = reply_header(method=method, run=name, round=round, client=client)
    arrays = {UPDATE: shapes(update), **({TALLY: shapes(views)} if views else {})}
    return content_bytes(arrays, {HEADER: head}, {METRICS: reply_numbers(number, loss)})


def run_fused(
    run: Run, federation: Federation, halves: Halves, progress: Progress | None = None, out: Path | None = None,
    resume: Checkpoint | None = None,
) -> Outcome:  # fmt: skip
    """Return the outcome of all rounds and the final test; checkpoints go to `out`."""
    if run.settings.torch_device().type == "cpu" and halves.model.num_parameters < SMALL_MODEL and torch.get_num_threads() > 1:
        with solo.one_thread():
            return run_fused(run, federation, halves, progress, out, resume)
    settings, server = run.settings, halves.server
    engine = Fused(halves, federation.clients, run)
    if not engine.together:
        log.warning(ONE_BY_ONE)
    state = to(server.init(*halves.initial, engine.clients), "cpu")
    records: list[RoundRecord] = []
    name, first = uuid.uuid4().hex, 1
    if resume:
        state, records, name, first = server_state(resume, server.state_type), resume.records, resume.run, resume.round + 1
        known: list[Any] = [unflatten(halves.client.state_type, resume.clients[client]) for client in engine.clients]
        engine.states = to(stack(known), engine.device)

    def save(round: int) -> None:
        every = settings.checkpoint_every
        if out is not None and every and (round % every == 0 or round == settings.rounds):
            clients = {client: take(engine.states, row) for client, row in engine.row.items()}
            write(out, make(run, name, round, state, clients, records, []))

    def sent(chunk: list[int]) -> Any:
        if not server.per_client:
            return to(server.broadcast(state, chunk[0]), engine.device)
        return to(stack([server.broadcast(state, client) for client in chunk]), engine.device)

    def tested(fused: Fused, chosen: Sequence[int], round: int, purpose: Purpose) -> dict[str, dict[int, metrics.Tally]]:
        views: dict[str, dict[int, metrics.Tally]] = {}
        for chunk in fused.chunks(chosen, settings.max_fused):
            for view, tallies in fused.test(chunk, sent(chunk), round, purpose).items():
                views.setdefault(view, {}).update(tallies)
        return views

    for round in range(first, settings.rounds + 1):
        chosen = sampling.choose(engine.clients, settings.fraction_train, seed=settings.seed, round=round)
        before: Views = {}
        if round > 1 and settings.evaluate_every and (round - 1) % settings.evaluate_every == 0:
            before = tested(engine, chosen, round - 1, "finetune")
            records[-1].update(curve_point(before))
        started = time.perf_counter()  # tests are not training
        total, losses, up, down = Total(), {}, 0, 0
        for chunk in engine.chunks(chosen, settings.max_fused):
            message = sent(chunk)
            updates, chunk_losses = engine.train(chunk, message, round)
            updates = to(updates, "cpu")
            for position, client in enumerate(chunk):
                update = take(updates, position)
                total.add(server.statistic(state, client, update))
                total.drop(server.negligible(total.names()))
                losses[client] = (int(update.num_examples), chunk_losses[position])
                own = {view: tallies[client] for view, tallies in before.items()}
                up += reply_bytes(run.method, name, round, client, update, own, *losses[client])
                down += request_bytes(run, name, round, bool(before), server.broadcast(state, client))
        state = server.finalise(state, total.value())
        records.append(RoundRecord.make(round, time.perf_counter() - started, up, down, losses, server.report(state)))
        save(round)
        if progress:
            progress(records)
    views = tested(engine, engine.clients, settings.rounds, "finetune")
    records[-1].update(curve_point(views))
    new: dict[str, dict[int, metrics.Tally]] = {}
    if federation.new_clients:
        newcomers = Fused(halves, federation.new_clients, run)
        new = tested(newcomers, newcomers.clients, settings.rounds, "new")
    if progress:
        progress(records)
    states = {client: take(engine.states, row) for client, row in engine.row.items()}
    return Outcome(records, views, new, state, states, remarks=() if engine.together else (ONE_BY_ONE,))
