"""A run of the fused engine: all rounds, checkpoints, and the final test."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import Run
from ..contract import Purpose
from ..data import Federation
from ..files.checkpoint import Checkpoint, make, server_state, write
from ..files.records import Outcome, Progress, RoundRecord, Views, curve_point
from ..rounds import sampling, solo
from ..rounds.halves import Halves
from ..tree import stack, to, unflatten
from . import traffic
from .bank import DeviceBank, DiskBank
from .engine import SMALL_MODEL, Fused, Totals
from .meter import Meter
from .pending import Ledger

log = logging.getLogger("bayflower")


def run_fused(
    run: Run,
    federation: Federation,
    halves: Halves,
    progress: Progress | None = None,
    out: Path | None = None,
    resume: Checkpoint | None = None,
) -> Outcome:
    """Return the outcome of all rounds and the final test; checkpoints go to `out`."""
    if (
        run.settings.torch_device().type == "cpu"
        and halves.model.num_parameters < SMALL_MODEL
        and torch.get_num_threads() > 1
    ):
        with solo.one_thread():
            return run_fused(run, federation, halves, progress, out, resume)
    if resume and run.settings.stacking in ("auto", "measured"):
        run = replace(
            run, settings=replace(run.settings, stacking=resume.config.get("stacking", "auto"))
        )
    settings, server = run.settings, halves.server
    device = settings.torch_device()
    meter = Meter(device)
    bank = None
    if settings.client_states == "disk":
        fresh = halves.client.init(*halves.initial)
        bank = DiskBank(
            (out or Path("runs")) / "states", fresh, device, resume.round if resume else None
        )
    engine = Fused(halves, federation.clients, run, bank)
    if engine.apart:
        log.warning(engine.apart)
    everyone = tuple(sorted(engine.stack.clients))
    state = to(server.init(*halves.initial, everyone), device)
    records: list[RoundRecord] = []
    name, first = uuid.uuid4().hex, 1
    if resume:
        state, records, name, first = (
            server_state(resume, server.state_type),
            resume.records,
            resume.run,
            resume.round + 1,
        )
        state = to(state, device)
        if isinstance(engine.bank, DeviceBank) and resume.clients:
            engine.bank.load(
                {
                    client: unflatten(halves.client.state_type, known)
                    for client, known in resume.clients.items()
                }
            )

    def due(round: int) -> bool:
        every = settings.checkpoint_every
        return out is not None and every > 0 and (round % every == 0 or round == settings.rounds)

    def save(round: int) -> None:
        assert out is not None
        # what a measurement decided is written down: after a restart it could turn out otherwise
        decided = replace(run, settings=replace(settings, stacking="no" if engine.apart else "yes"))
        write(out, make(decided, name, round, state, dict(engine.bank.states()), records, []))
        engine.bank.tidy()

    def sent(chunk: list[int]) -> Any:
        if not server.per_client:
            return server.broadcast(state, chunk[0])
        return stack([server.broadcast(state, client) for client in chunk])

    def tested(fused: Fused, chosen: Sequence[int], round: int, purpose: Purpose) -> Views:
        views: Views = {}
        with meter.time("evaluation"):
            for chunk in fused.chunks(chosen, sent):
                for view, tallies in fused.test(chunk, sent(chunk), round, purpose).items():
                    views.setdefault(view, {}).update(tallies)
        return views

    def chosen_for(round: int) -> list[int]:
        return sampling.choose(everyone, settings.fraction_train, seed=settings.seed, round=round)

    ledger = Ledger(records, meter, progress)
    for round in range(first, settings.rounds + 1):
        chosen = chosen_for(round)
        before: Views = {}
        if round > 1 and settings.evaluate_every and (round - 1) % settings.evaluate_every == 0:
            ledger.flush()  # tests are not training
            before = tested(engine, chosen, round - 1, "finetune")
            records[-1].update(curve_point(before))
        begin = ledger.begin()
        # one by one, the bits are those of the loop engine
        totals = Totals(halves, fast=not engine.apart)
        losses: dict[int, Tensor] = {}
        count = traffic.Count(run, name, round, before)
        chunks = engine.chunks(chosen, sent)
        for chunk in chunks:
            with meter.time("training"):
                message = sent(chunk)
                updates, chunk_losses = engine.train(chunk, message, round)
            last = chunk is chunks[-1]
            if last and round < settings.rounds:
                engine.prefetch(chosen_for(round + 1), round + 1)  # while the device trains
            with meter.time("aggregation"):
                totals.add(state, chunk, updates)
                if last:
                    state = server.finalise(state, totals.value(device))
            losses.update(zip(chunk, chunk_losses.unbind(), strict=True))
            count.add(
                chunk,
                halves,
                message,
                updates,
                {client: engine.stack.size(client) for client in chunk},
            )
        ledger.add(round, losses, count, partial(server.report, state), begin)
        if due(round):
            ledger.flush()
            save(round)
    ledger.flush()
    views = tested(engine, everyone, settings.rounds, "finetune")
    records[-1].update(curve_point(views))
    new: Views = {}
    if federation.new_clients:
        newcomers = Fused(halves, federation.new_clients, run, apart=engine.apart)
        new = tested(newcomers, sorted(newcomers.stack.clients), settings.rounds, "new")
        newcomers.close()
    if progress:
        progress(records)
    engine.close()
    remarks = (engine.apart,) if engine.apart else ()
    return Outcome(
        records,
        views,
        new,
        to(state, "cpu"),
        dict(engine.bank.states()),
        remarks=remarks,
        usage=meter.report(),
    )
