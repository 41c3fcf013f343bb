"""The fused engine: all clients of a round are trained together, as one stack of networks under
`torch.func.vmap`.

No Flower object is made: message sizes are computed from shapes. States and data stay on the
device. `phases.py` has the training itself, `stacked/replay.py` records it for a GPU, `bank.py`
keeps the states. Networks that cannot be stacked (a layer may not support it) are trained one by
one, and the result says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import metrics
from ..config import Run
from ..contract import Purpose, Survey, Work
from ..data import ClientData
from ..errors import in_one_line, unmapped
from ..networks.mixing import try_out
from ..networks.model import Batch
from ..rounds import solo
from ..rounds.halves import Halves
from ..rounds.steps import taking
from ..stacked.mapped import mapped
from ..stacked.replay import Graphs
from ..tree import map_tree, stack, take, to, upload
from . import choice
from .alone import RecordedSteps
from .bank import Bank, DeviceBank
from .phases import StackedPass, StackedPhase
from .replies import Replies
from .stack import stack_of
from .totals import stacked_updates

log = logging.getLogger("bayflower")
TEST_PIECE = 256  # test samples of a client in one forward pass, at most
LATER = "and from then on trained,"
SURVEY_PIECE = 128  # samples of a client in one survey on a GPU; more would be padding
TEST_SAMPLES = 4096  # test samples of all clients in one forward pass
TEST_WEIGHTS = 4e9  # bytes of the weights of all clients in one forward pass, at most


class Fused:
    """All clients of one kind (training or new), with their data and states."""

    def __init__(
        self,
        halves: Halves,
        clients: Sequence[ClientData],
        run: Run,
        bank: Bank | None = None,
        one_by_one_because: str | None = None,
        lap: Callable[[str], None] = lambda stage: None,
    ) -> None:
        settings, self.lap = run.settings, lap
        self.device, self.dtype = settings.torch_device(), settings.torch_dtype()
        self.seed = settings.seed
        self.stack = stack_of(clients, self.device, self.dtype)
        self.unstacked, self.per_client = halves.client, halves.server.per_client
        try_out(halves.model, self.stack.train.x)
        model = halves.model.for_stacks(gpu=self.device.type == "cuda")
        self.half = type(halves.client)(halves.client.config, halves.client.training, model)
        fresh = halves.client.init(*(to(tree, self.device) for tree in halves.initial))
        self.bank = bank or DeviceBank(fresh, self.stack.clients, self.device)
        self.graphs = Graphs(self.device, settings.cuda_graphs)
        self.steps = RecordedSteps(halves.model.manner, self.graphs)  # of clients one by one
        # cap on clients trained together (0 = none), and a number known to fit into memory
        self.most, self.fits = settings.max_fused, 0
        # the reason if clients are not stacked
        self.one_by_one_because = one_by_one_because or halves.model.unstackable
        self.measured = settings.stacking == "measured"
        self.undecided = (
            not self.one_by_one_because
            and self.device.type == "cpu"
            and settings.stacking in ("auto", "measured")
        )
        if settings.stacking == "no":
            self.one_by_one_because = (
                self.one_by_one_because or "clients were trained one by one because stacking=no"
            )
        self.failed: dict[int, str] = {}  # clients of this round whose training failed, and why
        self.stacked_phases: dict[Any, StackedPhase] = {}
        self.stacked_passes: dict[Any, StackedPass] = {}
        self.trainer: Callable[..., Any] = self.phase_of  # `beside.py` puts several runs together

    def chunks(self, chosen: Sequence[int], sent: Callable[[list[int]], Any]) -> list[list[int]]:
        """Return `chosen` in chunks that fit into memory, largest clients first, so that clients of
        similar size train together.
        """
        ordered = self.stack.order(chosen)
        if not self.most and not self.one_by_one_because and len(ordered) > self.fits:
            self.most = choice.clients_that_fit(self, ordered, sent)
            self.fits = len(ordered)
        most = self.most or len(ordered)
        return [ordered[start : start + most] for start in range(0, len(ordered), most)]

    def test_chunks(
        self, chosen: Sequence[int], sent: Callable[[list[int]], Any]
    ) -> list[list[int]]:
        """Return `chosen` in chunks to test together: a test needs less of a client than training,
        but comes to many more clients at once.
        """
        each = 3 * self.half.model.num_parameters * self.stack.train.x.element_size()
        most = max(1, int(TEST_WEIGHTS / each))
        return [
            chunk[start : start + most]
            for chunk in self.chunks(chosen, sent)
            for start in range(0, len(chunk), most)
        ]

    # -- one round --------------------------------------------------------------------------------
    def train(self, chosen: list[int], broadcast: Any, round: int) -> Replies:
        """Return what `chosen` give back after one round; `keep` stores their new states."""
        self.lap("other")
        self.failed = {}
        self.hold(chosen)
        before = states = self.bank.take(chosen)
        self.lap("states")
        if self.undecided:
            self.undecided = False
            self.one_by_one_because = choice.why_one_by_one(self, states, broadcast, chosen, round)
        args = (chosen, states, broadcast, round)
        found = self._stacked("trained", lambda: self._together(*args))
        states, updates, losses = self._one_by_one(*args) if found is None else found
        self.lap("messages")
        done = [client for client in chosen if client not in self.failed]
        return Replies(done, states, updates, losses, self.failed, before)

    def keep(self, replies: Replies, round: int) -> None:
        """Store the new states of clients that trained; those of others stay as they were."""
        if replies.clients:
            self.bank.put(replies.clients, replies.states, round)
        self.lap("states")

    def _stacked(self, what: str, fn: Callable[[], Any]) -> Any:
        """Return fn(), which works on a stack; None if clients go on one by one."""
        if self.one_by_one_because:
            return None
        try:
            return fn()
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, NotImplementedError) as error:
            log.debug("the stack failed", exc_info=True)
            if self.half.model.seen.again(error):
                self.close()
                return self._stacked(what, fn)
            self.one_by_one_because = (
                f"clients were {what} one by one because the network cannot be stacked "
                f"({unmapped(error)})"
            )
            log.warning(self.one_by_one_because)
        return None

    def _together(
        self, chosen: list[int], states: Any, broadcast: Any, round: int
    ) -> tuple[Any, Any, Tensor]:
        data = self.stack.whole(chosen)
        work = mapped(self.half.begin, (0, self._axis, 0))(states, broadcast, data)
        self.lap("begin")
        work, losses = self._phases(work, chosen, "train", round)
        self.lap("training")
        if self.half.survey_size:
            work = work._replace(survey=self._survey(work, chosen))
        states, updates = mapped(self.half.finish)(states, work, data)
        return states, updates, losses

    def _one_by_one(
        self, chosen: list[int], states: Any, broadcast: Any, round: int
    ) -> tuple[Any, Any, Tensor]:
        parts = []
        for place, client in enumerate(chosen):
            own = take(broadcast, place) if self.per_client else broadcast
            data, keys = self.stack.alone(client), {"client": client, "round": round}
            try:
                with solo.one_thread(), taking(self.steps):
                    mine = take(states, place)
                    parts.append(
                        solo.train(self.unstacked, mine, own, data, seed=self.seed, **keys)
                    )
            except torch.linalg.LinAlgError as error:  # numbers that are none, in a matrix
                self.failed[client] = f"the client failed: {in_one_line(error, 120)}"
                if len(self.failed) == len(chosen):
                    raise
        losses = torch.tensor([part.loss for part in parts], dtype=torch.float64)
        return (
            stack([part.state for part in parts]),
            stacked_updates([part.update for part in parts]),
            losses,
        )

    def hold(self, chosen: Sequence[int]) -> None:
        """Bring the samples of some clients to the device, if they are not there."""
        if self.stack.hold(chosen):
            self.close()

    def prefetch(self, chosen: Sequence[int], round: int, training: Sequence[int]) -> None:
        """Draw the batches of a coming round and read its states while the device is busy with
        those that are `training`.
        """
        ordered = self.stack.order(chosen)
        self.bank.ahead(ordered, training)
        for (purpose, _, number), stacked in self.stacked_phases.items():
            if purpose == "train" and number == len(ordered):
                # samples that move are not there yet
                (stacked.draw if self.stack.moving else stacked.prepare)(ordered, round)

    def close(self) -> None:
        """Free the device's memory."""
        owners: list[StackedPhase | StackedPass] = [*self.stacked_phases.values()]
        for owner in (*owners, *self.stacked_passes.values()):
            owner.replay.close()
        self.steps.known.clear()
        self.stacked_phases.clear()
        self.stacked_passes.clear()

    # -- tests ------------------------------------------------------------------------------------
    def test(
        self, chosen: list[int], broadcast: Any, round: int, purpose: Purpose
    ) -> dict[str, dict[int, Any]]:
        """Return every view's tally of each client, after the adaptation of `purpose`."""
        return self.adapted_test(chosen, broadcast, round, purpose)[1]

    def adapted_test(
        self, chosen: list[int], broadcast: Any, round: int, purpose: Purpose
    ) -> tuple[Any, dict[str, dict[int, Any]]]:
        """Return the states after the adaptation of `purpose`, stacked or (one by one) as a list,
        and their `test`.
        """
        self.hold(chosen)
        states = self.bank.take(chosen)
        if self.half.phases(purpose):
            states = self._adapted(chosen, states, broadcast, purpose, round)
        args = (chosen, states, broadcast, round)
        found = self._stacked(f"tested, {LATER}", lambda: self._test_together(*args, purpose))
        return states, self._test_one_by_one(*args) if found is None else found

    def _test_together(
        self, chosen: list[int], states: Any, broadcast: Any, round: int, purpose: Purpose
    ) -> dict[str, dict[int, Any]]:
        noise = self._predict_noise(chosen, round)
        shared = (
            broadcast
            if self.per_client
            else map_tree(lambda leaf: leaf.expand(len(chosen), *leaf.shape), broadcast)
        )
        own, task = [self.stack.row[client] for client in chosen], self.half.model.task
        passes = {"test": (task.tally, self.stack.test, self.stack.test_sizes)}
        if task.tallies_training:
            passes["train"] = (task.tally_training, self.stack.train, self.stack.sizes)
        result: dict[str, dict[int, Any]] = {}
        for view in self.half.views():
            found: Any = None
            for kind, (tally, data, sizes) in passes.items():
                key = (kind, view, purpose, len(chosen))
                if key not in self.stacked_passes:
                    longest, few = max(int(sizes.max()), 1), TEST_SAMPLES // len(chosen)
                    piece = solo.CHUNK if noise else min(TEST_PIECE, max(few, 1))
                    self.stacked_passes[key] = StackedPass(
                        self._tally(view, tally),
                        data,
                        longest,
                        len(chosen),
                        piece,
                        self.graphs,
                        adopt=False,
                    )
                args = (self.stack.index(chosen), sizes[own], states, shared, noise)
                part = to(self.stacked_passes[key].run(*args).total, "cpu")
                found = part if found is None else metrics.add(found, part)
            result[view] = {
                client: map_tree(lambda leaf, place=place: leaf[place].clone(), found)
                for place, client in enumerate(chosen)
            }
        return result

    def _test_one_by_one(
        self, chosen: list[int], states: Any, broadcast: Any, round: int
    ) -> dict[str, dict[int, Any]]:
        result: dict[str, dict[int, Any]] = {view: {} for view in self.unstacked.views()}
        for place, client in enumerate(chosen):
            own = take(broadcast, place) if self.per_client else broadcast
            with solo.one_thread():
                found = solo.test(
                    self.unstacked,
                    take(states, place),
                    own,
                    self.stack.alone(client, test=True),
                    self.stack.alone(client),
                    seed=self.seed,
                    client=client,
                    round=round,
                )
            for view, tally in found.items():
                result[view][client] = tally
        return result

    def _tally(self, view: str, tally: Callable[..., Any]) -> Any:
        def one(state: Any, broadcast: Any, noise: Any, batch: Batch) -> Survey:
            said = self.half.predict(view, state, broadcast, batch.x, noise)
            return Survey(tally(said, batch.y, batch.mask), {})

        return one

    # -- inside -----------------------------------------------------------------------------------
    @property
    def _axis(self) -> int | None:
        return 0 if self.per_client else None

    def phase_of(self, phase: Any, purpose: str, number: int) -> StackedPhase:
        """Return a phase of `number` clients, made on first use."""
        key = (purpose, phase.name, number)
        if key not in self.stacked_phases:
            self.stacked_phases[key] = StackedPhase(
                self.half, phase, purpose, self.stack, number, self.seed, self.graphs
            )
        return self.stacked_phases[key]

    def _phases(
        self, work: Work, chosen: list[int], purpose: Purpose, round: int
    ) -> tuple[Work, Tensor]:
        """Return the stacked work after all phases, and each client's mean loss."""
        total = torch.zeros(len(chosen), dtype=torch.float64, device=self.device)
        seen = np.zeros(len(chosen))
        for phase in self.half.phases(purpose):
            work = solo.fresh_optimizer(phase, work, (len(chosen),))
            trainer = self.trainer(phase, purpose, len(chosen))
            work, losses, count = trainer.run(work, chosen, round)
            total += losses
            seen += count
        return work, total / upload(np.maximum(seen, 1), self.device)

    def _survey(self, work: Work, chosen: list[int]) -> Survey:
        """Return the pass over all training data, its rows cut to the longest client."""
        key = ("survey", len(chosen))
        counts = self.stack.sizes[[self.stack.row[client] for client in chosen]]
        if key not in self.stacked_passes:
            longest = int(self.stack.sizes.max())
            adopt = bool(self.half.phases("train"))  # then the work stays in the phase's tensors
            self.stacked_passes[key] = StackedPass(
                self.half.survey,
                self.stack.train,
                longest,
                len(chosen),
                min(self.half.survey_size, SURVEY_PIECE if self.device.type == "cuda" else longest),
                self.graphs,
                adopt,
            )
        found = self.stacked_passes[key].run(self.stack.index(chosen), counts, work)
        each = map_tree(lambda leaf: leaf[:, : counts.max()].contiguous(), found.each)
        return Survey(found.total, each)

    def _adapted(
        self, chosen: list[int], states: Any, broadcast: Any, purpose: Purpose, round: int
    ) -> Any:
        args = (chosen, states, broadcast, purpose, round)
        found = self._stacked(f"adapted, {LATER}", lambda: self._adapted_together(*args))
        if found is not None:
            return found
        keys: dict[str, Any] = {"seed": self.seed, "round": round}
        with taking(self.steps):
            return [  # no stack: a state may grow with the client's samples
                solo.adapt(
                    self.unstacked,
                    take(states, i),
                    take(broadcast, i) if self.per_client else broadcast,
                    self.stack.alone(client),
                    purpose,
                    client=client,
                    **keys,
                )
                for i, client in enumerate(chosen)
            ]

    def _adapted_together(
        self, chosen: list[int], states: Any, broadcast: Any, purpose: Purpose, round: int
    ) -> Any:
        data = self.stack.whole(chosen)
        adapt = mapped(lambda s, b, d: self.half.adapt(s, b, d, purpose), (0, self._axis, 0))
        work = adapt(states, broadcast, data)
        work, _ = self._phases(work, chosen, purpose, round)
        finish = mapped(lambda s, w, d: self.half.finish_adapting(s, w, d, purpose))
        return finish(states, work, data)

    def _predict_noise(self, chosen: list[int], round: int) -> dict[str, Tensor]:
        shapes = self.half.noise("predict", solo.CHUNK)
        where: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        stage: dict[str, Any] = {"seed": self.seed, "round": round, "stage": "predict", "step": 0}
        drawn = (
            [solo.batches.noise(shapes, client=client, **stage, **where) for client in chosen]
            if shapes
            else []
        )
        return stack(drawn) if shapes else {}
