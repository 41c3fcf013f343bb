"""What malicious clients do to every method, and what `robust=gate` leaves of it.

    python -m benchmarks.poisoning --out FILE      all methods, one and three attackers, three
                                                   seeds: hours on one core; started again, it goes
                                                   on where FILE ends
    python -m benchmarks.poisoning --epochs 5 --methods fedivon,feddc --bad 1 --out FILE
                                                   methods that one epoch a round leaves half
                                                   trained, with five
    python -m benchmarks.poisoning --others --methods fedavg,scaffold --bad 1 --out FILE
                                                   attacks that keep within an honest size
    python -m benchmarks.poisoning_cost            what the defence costs honest federations
    python -m benchmarks.poisoning_page FILES      take printed rows over, and write the page

Ten clients on digits; one or three of them attack, in the last of twenty rounds or in all of them.
The clients of the fused engine train honestly; the attackers' updates are changed before they reach
the server, as `tests/engines/test_robust.py` does on the loop engine. Displacement: how far the
shared model after the attack is from the one without it, in steps of that round (the norm of its
change without an attack). Accuracy: of the honest clients' personal models.

Clients that start a round from the same bits train to the same bits, so each such round is trained
once, whatever the attack (`Trained`).
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from bayflower.config import parse
from bayflower.engines import prepare
from bayflower.errors import BayflowerError
from bayflower.flower import bounds
from bayflower.fused.run import FusedRun
from bayflower.methods import METHODS
from bayflower.rounds.parts import named, with_leaves
from bayflower.tree import digest, flatten, map_tree, take

ABSENT = "absent"  # no attack: the attackers do not take part
ATTACKS = ("random", "flip", "scaled", "count", "certainty")
# the changes of an attacker that keeps within an honest size, or nearly
OTHERS = ("longer flip", "noise", "nothing", "against mean", "little", "shift", "one entry")
ROUNDS, CLIENTS = 20, 10
DIGITS = {
    "dataset": "digits",
    "num_clients": CLIENTS,
    "rounds": ROUNDS,
    "local_epochs": 1,
    "batch_size": 32,
    "lr": 0.02,
    "evaluate_every": 0,
    "checkpoint_every": 0,
    "calibration": "off",
    "device": "cpu",
}
VERSION = 6  # of the gate, in each row: 5 = opposing clients must stand apart; 6 = FedDC's moves


def attacked(half: Any, state: Any, updates: Any, rows: Sequence[int], attack: str) -> Any:
    """Return stacked updates with those of the attackers' rows changed."""
    fields, kinds, known = {}, half.update_fields, state._asdict()
    draw = torch.Generator().manual_seed(7)
    coded = any(leaf.dtype == torch.int16 for leaf in flatten(updates).values())
    for field, value in updates._asdict().items():
        leaves = {n: leaf.clone() for n, leaf in named(value).items()}
        kind = kinds.get(field, "other")
        own = known.get(field)
        sent = own if isinstance(own, dict) else half.shared(state)
        for name, leaf in leaves.items():
            for row in rows:
                if field == "num_examples" and attack == "count":
                    leaf[row] = 100_000_000
                if leaf.dtype == torch.int16:  # a change in few bits, whose size comes beside it
                    leaf[row] = recoded(attack, leaf[row], draw)
                if not leaf.is_floating_point() or not leaf.numel():
                    continue
                if coded:
                    leaf[row] *= 100 if kind != "buffers" and attack in ("random", "scaled") else 1
                    continue
                zero = torch.zeros_like(leaf[row])
                base = sent.get(name, zero) if kind in ("model", "buffers") else zero
                if kind == "buffers":
                    continue
                step = leaf[row] - base
                if kind not in ("model", "slope", "rows", "factor"):
                    if attack == "certainty":
                        leaf[row] = certain(kind, name, leaf[row])
                    continue
                honest = [one for one in range(len(leaf)) if one not in rows]
                leaf[row] = base + poison(attack, step, draw, leaf[honest] - base)
        fields[field] = with_leaves(value, leaves)
    return updates._replace(**fields)


def certain(kind: str, name: str, value: torch.Tensor) -> torch.Tensor:
    """Return a certainty that counts for far more than it should."""
    if kind == "log_weight":
        return torch.zeros_like(value)
    if kind == "other" and not bool((value > 0).all()):  # MetaVD: log alpha falls, the weight rises
        return torch.full_like(value, -5.0)
    lies = kind != "claimed" or name in ("weight", "precision")
    return value * 1e4 if lies else value


def poison(
    attack: str, step: torch.Tensor, draw: torch.Generator, others: torch.Tensor
) -> torch.Tensor:
    """Return the change that an attacker sends in place of its own; `others` are those of the
    honest clients.
    """
    if attack in ("random", "noise"):
        wild = torch.randn(step.shape, generator=draw, dtype=step.dtype)
        times = 100 if attack == "random" else 1
        return times * step.norm() / wild.norm().clamp(min=1e-30) * wild
    if attack == "scaled":
        return 100 * step
    if attack == "longer flip":
        return -1.7 * step
    if attack == "nothing":
        return torch.zeros_like(step)
    if attack == "against mean":
        return -1.5 * others.mean(0)
    if attack == "little":
        return others.mean(0) - 1.5 * others.std(0)
    if attack == "shift":
        return torch.full_like(step, float(step.norm()) / math.sqrt(step.numel()))
    if attack == "one entry":
        found = step.flatten().clone()
        found[found.abs().argmax()] = -1.5 * step.norm()
        return found.reshape(step.shape)
    return -step  # flip; lies about counts and certainties come with it


def recoded(attack: str, codes: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """Return the quantised change that an attacker sends; `random`: its numbers in another order,
    with other signs.
    """
    if attack == "random":
        order = torch.randperm(codes.numel(), generator=draw)
        signs = 2 * torch.randint(2, (codes.numel(),), generator=draw) - 1
        return (codes.flatten()[order] * signs).to(codes.dtype).reshape(codes.shape)
    return codes if attack == "scaled" else -codes


class Trained:
    """What clients gave back, by all that their training starts from."""

    def __init__(self) -> None:
        self.known: dict[tuple[Any, ...], Any] = {}

    def __call__(self, engine: Any, chosen: list[int], broadcast: Any, round: int) -> Any:
        """Return what `chosen` give back in a round, trained once."""
        key = (round, tuple(chosen), digest(broadcast), digest(engine.bank.take(chosen)))
        if key not in self.known:
            got = type(engine).train(engine, chosen, broadcast, round)
            self.known[key] = copied(got)
        return copied(self.known[key])


def copied(got: Any) -> Any:
    """Return a copy of what clients gave back, which nobody writes to."""
    states, updates = (map_tree(torch.clone, one) for one in (got.states, got.updates))
    return got._replace(states=states, updates=updates, losses=got.losses.clone())


class Poisoned(FusedRun):
    """A run some of whose clients attack in some rounds."""

    attack = ""
    bad: tuple[int, ...] = ()
    rounds: tuple[int, ...] = ()
    trained = Trained()
    gone = 0  # of the attackers' updates, how many were left out

    def round(self, round: int) -> None:
        """Do a round as usual, but for the attackers' updates."""

        def changed(chosen: list[int], broadcast: Any, number: int) -> Any:
            got = self.trained(self.engine, chosen, broadcast, number)
            there, updates = got.clients, got.updates
            rows = [there.index(client) for client in self.bad if client in there]
            if round in self.rounds and self.attack and rows:
                lies = attacked(self.server, self.state, updates, rows, self.attack)
                rows = [row for row in rows if not self.refused(there[row], take(lies, row))]
                updates = map_tree(partial(mixed, rows), updates, lies)
            return got._replace(updates=updates)

        self.engine.train = changed  # type: ignore
        super().round(round)
        self.gone += len(self.limiter.left & set(self.bad))

    def clients_of(self, round: int) -> list[int]:
        """Return the clients that train in a round; attackers may stay away."""
        gone = self.bad if self.attack == ABSENT and round in self.rounds else ()
        return [client for client in super().clients_of(round) if client not in gone]

    def refused(self, client: int, update: Any) -> bool:
        """Return whether the server refuses an update, as it would over the network; such a client
        counts as honest here.
        """
        server, state, run = self.server, self.state, self.run
        try:
            got = server.unpack(state, self.halves.client.pack(update))
        except BayflowerError:
            return True
        why = server.check(state, client, got)
        rest = (run.limits.max_examples, run.limits, run.training)
        return bool(why or bounds.problem(server, state, client, got, *rest))


def mixed(rows: Sequence[int], honest: torch.Tensor, lie: torch.Tensor) -> torch.Tensor:
    """Return the honest stack with the liars' rows."""
    found = honest.clone()
    for row in rows:
        found[row] = lie[row]
    return found


class Measured:
    """A method under a rule: its clean run, and attacks on it."""

    def __init__(self, method: str, robust: str, bad: int, data: Any = None) -> None:
        self.method, self.robust, self.bad, self.data = method, robust, bad, data or DIGITS
        self.last = ROUNDS
        self.trained = Trained()
        self.job = self.make()
        for round in range(1, self.last):
            self.job.round(round)
        self.saved = (self.job.state, dict(self.job.engine.bank.states()), self.job.limiter)
        self.start = self.job.state
        self.clean, self.end = self.once("")

    def make(self) -> Poisoned:
        """Return a run that has not begun."""
        torch.manual_seed(0)
        run = parse(self.method, {**self.data, "robust": self.robust})
        prepared = prepare(run, "fused")
        job = Poisoned(prepared.run, prepared.federation, prepared.halves)
        job.trained = self.trained
        sizes = {client: job.engine.stack.size(client) for client in job.everyone}
        job.bad = tuple(sorted(sizes, key=lambda one: -sizes[one])[: self.bad])  # the largest
        return job

    def once(self, attack: str) -> tuple[float, Any]:
        """Return (accuracy of honest clients, the server's state) after a last round with an
        attack.
        """
        state, clients, limiter = self.saved
        self.job.state, self.job.limiter = state, copy.deepcopy(limiter)
        bank: Any = self.job.engine.bank
        bank.load(clients)
        self.job.attack, self.job.rounds = attack, (self.last,)
        self.job.round(self.last)
        return self.accuracy(self.job), self.job.state

    def apart(self, one: Any, other: Any) -> float:
        """Return the distance of two states' shared models, over what is shared in both."""
        half, total = self.job.server, 0.0
        sent, also = half.sent_entries(one), half.sent_entries(other)
        for name, value in half.shared(one).items():
            if value.is_floating_point():
                away = (value.double() - half.shared(other)[name].double()).square()
                if name in sent:
                    away = away * (sent[name] & also[name])
                total += float(away.sum())
        return math.sqrt(total)

    def always(self, attack: str) -> tuple[float, int]:
        """Return the accuracy of honest clients after an attack in every round, and how many of the
        attackers' updates were left out.
        """
        job = self.make()
        job.attack, job.rounds = attack, tuple(range(1, self.last + 1))
        try:
            for round in job.rounds:
                job.round(round)
            return self.accuracy(job), job.gone
        except (BayflowerError, ArithmeticError, ValueError):  # numbers that are none
            return 0.0, job.gone

    def same_as_flip(self) -> bool:
        """Return whether no field of an update is a certainty, so that there is none to lie of."""
        chosen, state = self.job.clients_of(self.last), self.job.state
        got = self.trained(self.job.engine, chosen, self.job.broadcast_to(chosen), self.last)
        lies = (
            attacked(self.job.server, state, got.updates, [0], a) for a in ("flip", "certainty")
        )
        return digest(next(lies)) == digest(next(lies))

    def accuracy(self, job: Poisoned) -> float:
        """Return the accuracy of the honest clients' personal models."""
        views = job.test(job.engine, job.everyone, self.last, "finetune")["personal"]
        honest = {client: tally for client, tally in views.items() if client not in job.bad}
        return float(job.halves.model.task.summarise(honest)["accuracy"])


def table(
    names: Sequence[str],
    bad: int,
    rules: Sequence[str],
    seed: int,
    epochs: int,
    out: Path | None,
    attacks: Sequence[str] = (*ATTACKS, ABSENT),
) -> None:
    """Measure one row a method, rule and attack; more than one epoch a round is noted in a row."""
    done = known(out, "method", "robust", "attackers", "attack", "seed", "epochs")
    longer = {"epochs": epochs} if epochs > 1 else {}
    for method, rule in product(names, rules):
        if (method, rule, bad, attacks[-1], seed, longer.get("epochs")) in done:
            continue
        one = Measured(method, rule, bad, {**DIGITS, "local_epochs": epochs, "seed": seed})
        step = one.apart(one.end, one.start)
        rows: dict[str, dict[str, Any]] = {}
        for attack in attacks:
            row = {"method": method, "robust": rule, "attackers": bad, "attack": attack}
            row |= {"seed": seed, "version": VERSION, "clean": one.clean, **longer}
            if attack == "certainty" and one.same_as_flip():
                row = {**rows["flip"], **row, "same": "flip"}
            else:
                accuracy, moved = one.once(attack)
                always, gone = one.always(attack)
                row |= {"moved": one.apart(moved, one.end) / step if step else 0.0}
                row |= {"once": accuracy, "always": always, "out": gone}
            rows[attack] = row
        for row in rows.values():
            told(row, out)


def told(row: dict[str, Any], out: Path | None) -> None:
    """Print a row, and add it to a file."""
    print(json.dumps(row), flush=True)
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")


def known(out: Path | None, *names: str) -> set[tuple[Any, ...]]:
    """Return what the rows of a file are about."""
    lines = out.read_text().splitlines() if out is not None and out.exists() else []
    return {tuple(json.loads(line).get(name) for name in names) for line in lines}


def main() -> None:
    """Measure, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", default="")
    parser.add_argument("--bad", default="1,3")
    parser.add_argument("--rules", default="gate")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--epochs", type=int, default=1, help="local epochs of a round")
    parser.add_argument("--others", action="store_true", help=", ".join(OTHERS))
    parser.add_argument(
        "--out", default="", help="a file for JSON lines; rows that it has are skipped"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    shared = sorted(name for name in METHODS if not METHODS[name].server.shares_nothing)
    names = given.methods.split(",") if given.methods else shared
    out = Path(given.out) if given.out else None
    for bad, seed in product(given.bad.split(","), given.seeds.split(",")):
        attacks = OTHERS if given.others else (*ATTACKS, ABSENT)
        table(names, int(bad), given.rules.split(","), int(seed), given.epochs, out, attacks)


if __name__ == "__main__":
    main()
