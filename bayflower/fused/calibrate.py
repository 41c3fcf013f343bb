"""The uncertainty of all clients on one device: the steps of `rounds/uncertain.py`, stacked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from ..contract import Purpose, Survey
from ..data import DataSettings
from ..networks.model import Batch
from ..rounds import deciding, solo, uncertain
from ..rounds.calibrated import Calibrated, One, tests_of
from ..rounds.deciding import Choice, Held
from ..rounds.uncertain import Fitted, Uncertain
from ..stacked.replay import Graphs
from ..tree import map_tree, stack, take, to
from .engine import Fused
from .phases import StackedPass
from .spread import Running
from .stack import Ragged, ragged

KEPT = 2**28  # numbers of fitted models that are kept between passes; beyond, they are made again


class Calibration:
    """The clients of one engine (training or new) with their fitted models."""

    def __init__(
        self,
        fused: Fused,
        chunks: list[list[int]],
        broadcast_to: Callable[[list[int]], Any],
        round: int,
        purpose: Purpose,
        settings: DataSettings,
    ) -> None:
        self.fused, self.chunks, self.broadcast_to = fused, chunks, broadcast_to
        self.round, self.purpose, self.settings = round, purpose, settings
        self.alone = bool(fused.one_by_one_because)
        half = fused.unstacked if self.alone else fused.half
        self.uncertain = Uncertain(half, settings.sets == "class")
        self.kept: dict[int, Any] = {}  # fitted models by chunk
        self.own: dict[int, Held] = {}

    # -- the steps ---------------------------------------------------------------------------------
    def hold(self) -> Held | None:
        """Return the summed tables of all clients' held-out samples."""
        for number, chunk in enumerate(self.chunks):
            self.fused.hold(chunk)
            fitted = self.fitted(number)
            if self.alone:
                for client, one in zip(chunk, fitted, strict=True):
                    held = self.fused.stack.held_of(client)
                    self.own[client] = uncertain.hold_alone(self.uncertain, one, held)
                continue
            found = self.over(self.fused.stack.held, chunk, self.uncertain.hold, fitted)
            for place, client in enumerate(chunk):
                self.own[client] = to(take(found, place), "cpu")
        return self.summed() if self.own else None

    def summed(self) -> Held:
        """Return the sums of all clients."""
        found: Held = uncertain.added([deciding.whole(own) for own in self.own.values()])
        return found

    def score(self, total: Held) -> Held:
        """Return the sums with the histograms of all clients' calibrated scores."""
        how, names = self.settings.calibration, tuple(self.uncertain.kinds)
        for number, chunk in enumerate(self.chunks):
            self.fused.hold(chunk)
            fitted = self.fitted(number)
            if self.alone:
                for client, one in zip(chunk, fitted, strict=True):
                    held = self.fused.stack.held_of(client)
                    self.own[client] = uncertain.score_alone(
                        self.uncertain, one, self.own[client], total, held, how
                    )
                continue
            own = [self.own[client] for client in chunk]
            choices = [deciding.decide(one, total, names, how)[1] for one in own]
            folds = [deciding.decide_folds(one, total, names, how) for one in own]
            scored = self.over(
                self.fused.stack.held,
                chunk,
                self.uncertain.score,
                fitted,
                self.there(choices),
                self.there(folds),
            )
            for place, client in enumerate(chunk):
                one = to(take(scored, place), "cpu")
                self.own[client] = self.own[client]._replace(**one._asdict())
        return self.summed()

    def judge(self, total: Held) -> dict[int, One]:
        """Return every client with what it uses and its tallies."""
        found: dict[int, One] = {}
        for number, chunk in enumerate(self.chunks):
            self.fused.hold(chunk)
            fitted = self.fitted(number)
            if self.alone:
                for client, one in zip(chunk, fitted, strict=True):
                    found[client] = self._judge_alone(client, one, total)
            else:
                found.update(self._judge_stacked(chunk, fitted, total))
        return found

    def _judge_alone(self, client: int, fitted: Fitted, total: Held) -> One:
        data, own = self.fused.stack, self.own[client]
        settings, held = self.settings, self.fused.stack.held_of(client)
        chosen, choice = uncertain.settled(
            self.uncertain, fitted, own, total, held, settings.calibration, settings.coverage
        )
        tests = tests_of(
            data.alone(client, test=True),
            self.uncertain.model,
            seed=self.fused.seed,
            client=client,
        )
        judged = uncertain.judge_alone(self.uncertain, fitted, choice, tests)
        return One(int(own.rows.sum()), chosen, judged, choice)

    def _judge_stacked(self, chunk: list[int], fitted: Any, total: Held) -> dict[int, One]:
        settings, data = self.settings, self.fused.stack
        names, chosen, choices = tuple(self.uncertain.kinds), [], []
        for client in chunk:
            own = self.own[client]
            how = settings.calibration
            both = deciding.decide(own, total, names, how)
            one, choice = deciding.with_sets(both, own, total, how, settings.coverage)
            chosen.append(one)
            choices.append(choice)
        rows = self.rows_over(data.held, chunk, fitted, self.there(choices))
        for place, client in enumerate(chunk):
            measured = rows[place, : data.held_size(client)].cpu()
            choices[place] = choices[place]._replace(alarms=deciding.thresholds(measured))
        there = self.there(choices)
        judged: dict[int, dict[str, Any]] = {client: {} for client in chunk}
        for name, samples in self.tests(chunk).items():
            one_test = self.over(samples, chunk, self.uncertain.judge, fitted, there, rows="part")
            for place, client in enumerate(chunk):
                judged[client][name] = to(take(one_test, place), "cpu")
        return {
            client: One(
                int(self.own[client].rows.sum()), chosen[place], judged[client], choices[place]
            )
            for place, client in enumerate(chunk)
        }

    # -- inside ------------------------------------------------------------------------------------
    def fitted(self, number: int) -> Any:
        """Return the fitted models of a chunk: a stack, or a list if clients are not stacked."""
        if number in self.kept:
            return self.kept[number]
        chunk = self.chunks[number]
        made = self._fit(chunk)
        sizes = sum(leaf.numel() for leaf in leaves(made)) * len(self.chunks)
        if sizes <= KEPT:
            self.kept[number] = made
        return made

    def _fit(self, chunk: list[int]) -> Any:
        fused, broadcast = self.fused, self.broadcast_to(chunk)
        states = fused.bank.take(chunk)
        if fused.half.phases(self.purpose):
            states = fused._adapted(chunk, states, broadcast, self.purpose, self.round)
        if self.alone:
            with solo.one_thread():
                return [
                    uncertain.fit_alone(
                        self.uncertain,
                        take(states, place),
                        take(broadcast, place) if fused.per_client else broadcast,
                        fused.stack.alone(client),
                        fused.stack.held_size(client),
                    )
                    for place, client in enumerate(chunk)
                ]
        axis = 0 if fused.per_client else None
        first = fused.stack.train.of(fused.stack.index(chunk))
        x = first.x[first.start][:, None]
        with torch.no_grad():
            numbers = vmap(self.uncertain.numbers, in_dims=(0, axis, 0))(states, broadcast, x)
            labels, seen = self.over(fused.stack.train, chunk, self._see, *numbers)
            rows = fused.stack.held.size[fused.stack.index(chunk)]
            return vmap(self.uncertain.fit, in_dims=(0, 0, axis, 0, 0, 0))(
                *numbers, broadcast, labels, seen, rows
            )

    def _see(self, params: Any, buffers: Any, batch: Batch) -> Any:
        return self.uncertain.see(params, buffers, batch)

    def over(
        self,
        data: Ragged,
        chunk: Sequence[int],
        fn: Callable[..., Any],
        *args: Any,
        rows: str = "all",
    ) -> Any:
        """Return the sum of fn over each client's samples, stacked; `rows`: "part" if the data are
        those of the chunk only.
        """
        return self._pass(data, chunk, lambda *given: Survey(fn(*given), {}), args, rows).total

    def rows_over(self, data: Ragged, chunk: Sequence[int], fitted: Any, there: Choice) -> Tensor:
        """Return the measures of each client's samples (clients, N, 3)."""

        def measures(one: Fitted, choice: Choice, batch: Batch) -> Survey:
            return Survey({}, {"rows": self.uncertain.measures(one, choice, batch)})

        found: Tensor = self._pass(data, chunk, measures, (fitted, there), "all").each["rows"]
        return found

    def _pass(
        self, data: Ragged, chunk: Sequence[int], fn: Any, args: tuple[Any, ...], rows: str
    ) -> Survey:
        device = self.fused.device
        index = (
            self.fused.stack.index(chunk)
            if rows == "all"
            else torch.arange(len(chunk), device=device)
        )
        sizes: np.ndarray = data.size[index].cpu().numpy()
        one = StackedPass(
            fn,
            data,
            max(int(sizes.max()), 1),
            len(chunk),
            uncertain.PIECE,
            Graphs(device, False),
            adopt=True,
        )
        return one.run(index, sizes, *args)

    def tests(self, chunk: Sequence[int]) -> dict[str, Ragged]:
        """Return the test samples of a chunk as they are and with each shift."""
        data = self.fused.stack
        parts: dict[str, list[Any]] = {}
        for client in chunk:
            batch = data.alone(client, test=True)
            for name, one in tests_of(
                batch, self.uncertain.model, seed=self.fused.seed, client=client
            ).items():
                parts.setdefault(name, []).append((one.x, one.y))
        return {name: ragged(found, data.device, data.dtype) for name, found in parts.items()}

    def there(self, choices: list[Choice]) -> Choice:
        """Return the choices stacked on the device."""
        return to(stack(choices), self.fused.device)


def leaves(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree or of a list of trees."""
    found: list[Tensor] = []
    for one in tree if isinstance(tree, list) else [tree]:
        map_tree(lambda leaf: found.append(leaf), one)
    return found


def calibrated_classes(run: Running, newcomers: Fused | None, round: int) -> Calibrated:
    """Return the uncertainty of all clients after the last round."""

    def clients(fused: Fused, chosen: Sequence[int], purpose: Purpose) -> Calibration:
        chunks = fused.chunks(chosen, run.broadcast_to)
        return Calibration(fused, chunks, run.broadcast_to, round, purpose, run.run.data)

    own = clients(run.engine, run.tested, "finetune")
    total = own.hold()
    assert total is not None
    total = own.score(total)
    found, kinds = own.judge(total), own.uncertain.kinds
    others: dict[int, One] = {}
    if newcomers is not None:
        new = clients(newcomers, run.tested_new, "new")
        new.hold()
        new.score(total)
        others = new.judge(total)
    return Calibrated(found, others, total, kinds)
