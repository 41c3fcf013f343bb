"""The privacy budget of a run: what was spent, what is left, and when the run must stop.

Every round is written to `<out>/privacy.json` before it begins. A run that is resumed from an older
checkpoint repeats rounds with new noise; both count.

Whose data:    a whole client (dp=client, dp=local), or one sample of a client (dp=sample), which
               is in one noisy sum in every epoch of local training.
Who samples:   without secure sums the server, from secret bits, each client by itself (Poisson);
               then sampling is part of what hides a client. In secure sums everybody knows who
               takes part, so every client's rounds are counted and sampling hides nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..contract import ServerHalf
from ..errors import BayflowerError, ConfigError
from ..files.texts import read_json, write_json
from ..recipes import Training
from ..recipes.secrecy import Privacy
from .accounting import affordable, epsilon, noise_for
from .discrete import Entropy
from .noisy import Mechanism, local_half, private_half
from .session import more_than

log = logging.getLogger("bayflower")
FILE = "privacy.json"
KEY = "privacy"  # in the memory of a checkpoint


def for_card(report: Mapping[str, Any] | None, client: int) -> dict[str, Any] | None:
    """Return what a client's card says of a run's block `privacy`."""
    if not report:
        return None
    own = (report.get("per_client") or {}).get(str(client), report["epsilon"])
    keys = ("level", "delta", "noise", "clip", "rounds")
    return {"epsilon": own, **{key: report[key] for key in keys}}


class Budget:
    """What the rounds of a run may spend and have spent."""

    def __init__(
        self,
        privacy: Privacy,
        rounds: int,
        share: float,
        folder: Path | None = None,
        epochs: int = 1,
    ) -> None:
        self.privacy, self.folder = privacy, folder
        self.rounds, self.fraction = rounds, share
        self.sums = epochs if privacy.dp == "sample" else 1  # noisy sums of a client in a round
        # whether the server samples in secret, and adds the noise
        self.secret = privacy.dp == "client" and not privacy.on
        self.share = share if self.secret else 1.0
        self.entropy, self.chance = Entropy(), Entropy()  # of noise, of sampling
        self.done = 0  # rounds that were begun
        self.counts: dict[int, int] = {}  # by client: rounds for which it was chosen
        self.stopped: str | None = None
        self._chosen: dict[int, list[int]] = {}
        self._noise: float | None = privacy.dp_noise or None

    @property
    def noise(self) -> float:
        """Return the noise multiplier; one that was found once stays the same in a resumed run."""
        if self._noise is None:
            known = (self.rounds * self.sums, self.privacy.dp_delta, self.share)
            self._noise = noise_for(self.privacy.dp_epsilon, *known)
        return self._noise

    @classmethod
    def of(
        cls,
        privacy: Privacy,
        rounds: int,
        share: float,
        folder: Path | None,
        memory: Mapping[str, Any] | None,
        epochs: int = 1,
    ) -> Budget | None:
        """Return the budget of a run, None if it has none; raise if nothing is left of it. `memory`
        is that of the checkpoint that the run goes on from.
        """
        if not privacy.private:
            return None
        made = cls(privacy, rounds, share, folder, epochs)
        if memory is not None:
            made.remember(memory)
        made.start()
        return made

    @property
    def local(self) -> bool:
        """Return whether each client makes its own update noisy, and it is sent without masks."""
        return self.privacy.dp == "local" and not self.privacy.on

    # -- what is spent -----------------------------------------------------------------------------
    def cost(self, rounds: int) -> float:
        """Return the ε of so many rounds."""
        return epsilon(self.noise, rounds * self.sums, self.privacy.dp_delta, self.share)

    @property
    def most(self) -> int:
        """Return the rounds that count: those of the client that took part in most of them."""
        return self.done if self.secret else max(self.counts.values(), default=0)

    @property
    def spent(self) -> float:
        """Return the ε that is spent."""
        return self.cost(self.most)

    def allows(self) -> bool:
        """Return whether one more round stays within the budget; else note why the run stops."""
        if (next_one := self.cost(self.most + 1)) <= self.privacy.dp_epsilon:
            return True
        self.stopped = (
            f"dp: stopped after {self.done} rounds with ε = {self.spent:.3g} of "
            f"{self.privacy.dp_epsilon:g} spent; one more round would make it {next_one:.3g}"
        )
        return False

    def start(self) -> None:
        """Raise unless there is budget for a round."""
        if self.allows():
            return
        if self.done:
            raise ConfigError(
                f"the privacy budget of this run is spent: ε = {self.spent:.3g} of "
                f"{self.privacy.dp_epsilon:g} after {self.done} rounds; it cannot be resumed; "
                "start a new run, whose budget adds to this one's"
            )
        raise ConfigError(
            f"one round with dp_noise={self.noise:g} spends ε = {self.cost(1):.3g}, more than "
            f"dp_epsilon={self.privacy.dp_epsilon:g}; raise dp_noise, or leave it out"
        )

    def spend(self, clients: Iterable[int]) -> None:
        """Count a round of some clients, on disk before anything of it is sent."""
        self.done += 1
        for client in clients:
            self.counts[client] = self.counts.get(client, 0) + 1
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(self.folder / FILE, self.memory()[KEY])

    # -- who takes part ----------------------------------------------------------------------------
    def choose(self, round: int, clients: Iterable[int], usual: list[int]) -> list[int]:
        """Return the clients of a round: each by itself with probability `fraction_train`, by
        secret bits; `usual` where sampling is not secret, or nobody is sampled.
        """
        if not self.secret or self.fraction >= 1:
            return usual
        if round not in self._chosen:
            known = sorted(clients)
            drawn = self.chance.chosen(self.fraction, len(known))
            self._chosen = {round: [one for one, yes in zip(known, drawn, strict=True) if yes]}
        return self._chosen[round]

    def mechanism(self, people: float, shares: int = 1) -> Mechanism:
        """Return how sums over so many expected clients are made private."""
        return Mechanism(self.privacy.dp_clip, self.noise, max(1.0, people), shares)

    def least(self, clients: int) -> int:
        """Return how many shares of the noise are enough in a secure sum of so many clients; with
        dp=local one alone hides its client.
        """
        local = self.privacy.dp == "local"
        return 1 if local else more_than(self.privacy.secure_threshold, clients)

    def server_half(self, half: ServerHalf, members: int) -> ServerHalf:
        """Return the half with private sums for so many training clients. The server adds the noise
        unless clients do, in secure sums; with dp=sample clients add it while they train.
        """
        if not self.privacy.hides_clients:
            return half
        mechanism = self.mechanism(self.fraction * members)
        if self.local:
            return local_half(half, mechanism, None)
        return private_half(half, mechanism, self.entropy if self.secret else None)

    def training(self, training: Training) -> Training:
        """Return the settings of local training, with noise for dp=sample."""
        if self.privacy.hides_clients:
            return training
        return replace(training, sample_clip=self.privacy.dp_clip, sample_noise=self.noise)

    # -- what a resumed run needs, and what people see ---------------------------------------------
    def memory(self) -> dict[str, Any]:
        """Return what a resumed run needs, in JSON types."""
        counts = {str(client): count for client, count in sorted(self.counts.items())}
        return {KEY: {"noise": self.noise, "done": self.done, "counts": counts}}

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's memory and the file of the folder, whichever spent more."""
        found = [dict(memory.get(KEY, {}))]
        if self.folder is not None and (self.folder / FILE).exists():
            try:
                found.append(dict(read_json(self.folder / FILE)))
            except (ValueError, TypeError) as error:
                raise BayflowerError(
                    f"{self.folder / FILE} cannot be read ({error!r:.60}), so what was spent is "
                    "not known; start a new run"
                ) from None
        for one in found:
            if "noise" in one:
                self._noise = float(one["noise"])
            self.done = max(self.done, int(one.get("done", 0)))
            for client, count in one.get("counts", {}).items():
                self.counts[int(client)] = max(self.counts.get(int(client), 0), int(count))

    def remark(self) -> str:
        """Return what a person is told at the end."""
        whole = (
            f"dp={self.privacy.dp}: ε = {self.spent:.3g} of {self.privacy.dp_epsilon:g} is spent"
        )
        whole += (
            f" at δ = {self.privacy.dp_delta:g}, by models alone: not by losses and test results"
        )
        return f"{whole}; {self.stopped}" if self.stopped else whole

    def shown(self) -> dict[str, float]:
        """Return what a round's record shows."""
        return {"epsilon": round(self.spent, 6)}

    def report(self) -> dict[str, Any]:
        """Return the block `privacy` of result.json."""
        privacy = self.privacy
        known = (privacy.dp_epsilon, self.noise, privacy.dp_delta, self.share)
        within = affordable(*known, self.sums * max(self.rounds, self.most + 1)) // self.sums
        every = {str(client): self.cost(count) for client, count in sorted(self.counts.items())}
        return {
            "level": privacy.dp,
            "noise_from": "server" if self.secret else "clients",
            "sums_per_round": self.sums,
            "epsilon": self.spent,
            "delta": privacy.dp_delta,
            "budget": privacy.dp_epsilon,
            "left": max(0.0, privacy.dp_epsilon - self.spent),
            "rounds": self.done,
            "rounds_left": max(0, within - self.most),
            "noise": self.noise,
            "clip": privacy.dp_clip,
            "sampling": {True: "poisson", False: "none"}[self.share < 1],
            # with secret sampling nobody is to know who took part
            "per_client": None if self.secret else every,
        }
