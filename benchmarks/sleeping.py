"""Buffered rounds with clients that really sleep: the check of `buffered.py`'s simulated clock.

    python benchmarks/sleeping.py run [--seeds 100 101 102]   writes results/sleeping.jsonl
    python benchmarks/sleeping.py page                        writes results/sleeping.md

The same federation, settings, seeds and target as "digits-alike" of `buffered.py`, whose results
must be there. Ten clients are ten threads. A client that gets a message sleeps for its seconds, and
then trains. The server is the one of `ray` and `deployment`: it takes replies as they arrive, asks
every 0.2 s for them, and knows nothing of the clients' seconds. A run ends at the target.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from buffered import AIM, COMMON, RESULTS, SETS, TIMES, Curve, all_tests, ending, interval, reached
from buffered import FILE as SIMULATED
from flwr.app import Message

from bayflower.config import parse
from bayflower.engines import prepare
from bayflower.files.store import MemoryStore
from bayflower.flower.loop import FIRST_NODE, InProcessGrid, contexts, federation_app, make_strategy
from bayflower.flower.records import to_arrays

FILE = RESULTS / "sleeping.jsonl"
NAME = "digits-alike"
MOST = 60  # steps, if the target is not reached
WAYS = ("rounds", "rounds, stragglers", "buffered", "buffered, stragglers")


class Reached(Exception):  # noqa: N818 (not an error)
    """The target is reached."""


class Sleeping(InProcessGrid):
    """Clients in threads, which sleep before they train; one trains at a time."""

    def __init__(self, app: Any, nodes: Any, seconds: dict[int, float], usual: float = 1.0) -> None:
        super().__init__(app, nodes)
        self.seconds, self.usual, self.lock = seconds, usual, threading.Lock()
        self.pool = ThreadPoolExecutor(len(list(self.contexts)))
        self.under_way: dict[str, Future[Message | None]] = {}
        self.begun: float | None = None  # when the first message to train was sent

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Let clients begin at once."""
        ids = list(super().push_messages(messages))
        for number in ids:
            message = self.inbox.pop(number)
            trains = message.metadata.message_type.startswith("train")
            if trains and self.begun is None:
                self.begun = time.monotonic()
            client = message.metadata.dst_node_id - FIRST_NODE
            wait = self.seconds.get(client, self.usual) if trains else 0.0
            self.under_way[number] = self.pool.submit(self.work, message, wait)
        return ids

    def work(self, message: Message, seconds: float) -> Message | None:
        """Return a reply, after some time."""
        time.sleep(seconds)
        with self.lock:
            return self._answer(message)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that are there."""
        there = [one for one in message_ids if one in self.under_way and self.under_way[one].done()]
        found = [self.under_way.pop(one).result() for one in there]
        return [one for one in found if one is not None]


def course(settings: dict[str, Any], seconds: dict[int, float], target: float) -> Curve:
    """Return the curve of a run up to the target, in seconds that have passed."""
    run = parse("fedavg", settings)
    ready = prepare(run, "loop")
    federation, halves = ready.federation, ready.halves
    x, y = all_tests(ready)
    app = federation_app(run, federation, halves, MemoryStore())
    grid = Sleeping(app, contexts(one.client for one in federation.clients), seconds)
    curve: Curve = []

    def look(strategy: Any, round: int, forced: bool) -> None:
        assert grid.begun is not None
        now = time.monotonic() - grid.begun
        state = strategy.state
        logits, _ = halves.model.forward(state.params, state.buffers, x, train=False)
        curve.append((now, float((logits.argmax(-1) == y).double().mean()), math.nan))
        if curve[-1][1] >= target:
            raise Reached

    strategy = make_strategy(run, after_round=look, quiet=True, keep_personal=False)
    params, buffers = halves.initial
    try:
        strategy.start(grid, to_arrays({**params, **buffers}), num_rounds=run.settings.rounds)
    except Reached:
        pass
    finally:
        grid.pool.shutdown(wait=True, cancel_futures=True)
    return curve


def simulated(seed: int) -> dict[str, Any]:
    """Return what `buffered.py` has found."""
    for line in SIMULATED.read_text().splitlines():
        found: dict[str, Any] = json.loads(line)
        if (found["data"], found["seed"]) == (NAME, seed):
            return found
    raise SystemExit(f"{SIMULATED.name} has no seed {seed}: python benchmarks/buffered.py run")


def measure(seed: int) -> dict[str, Any]:
    """Return real and simulated seconds to the target, and the curves."""
    known = simulated(seed)
    target = 0.95 * ending(known["rounds"], math.inf)
    settings = {**COMMON, **SETS[NAME], "seed": seed, "rounds": MOST}
    late = {one: float(TIMES) for one in known["slow"]}
    curves = {}
    for way in WAYS:
        more = {"aggregation": "buffered"} if way.startswith("buffered") else {}
        seconds = late if way.endswith("stragglers") else {}
        curves[way] = course({**settings, **more}, seconds, target)
    clock = {
        "rounds": reached(known["rounds"], target),
        "rounds, stragglers": reached(known["rounds"], target, TIMES),
        "buffered": reached(known["buffered"], target),
        "buffered, stragglers": reached(known["buffered_stragglers"], target),
    }
    return {
        "seed": seed,
        "target": target,
        "simulated": clock,
        "real": {way: reached(curves[way], target) for way in WAYS},
        "steps": {way: len(curves[way]) for way in WAYS},
        "curves": {way: [[round(n, 4) for n in one[:2]] for one in curves[way]] for way in WAYS},
        "load": [round(one, 1) for one in os.getloadavg()[:2]],
        "machine": f"cpu ({platform.machine()})",
        "torch": torch.__version__,
    }


def page() -> str:
    """Return the page."""
    found = [json.loads(line) for line in FILE.read_text().splitlines()]
    lines = [
        "# Stragglers that really sleep",
        "",
        "[buffered.md](buffered.md) has a simulated clock. Here time passes: the same ten clients",
        "with alike digits, settings, seeds and target, but each client is a thread. It sleeps one",
        "second before it trains, and three of the ten sleep ten. The server takes replies as they",
        "arrive, as with `ray` and `deployment`; it asks every 0.2 s for them. A run ends at the",
        "target. Written by `benchmarks/sleeping.py`; every curve is in `sleeping.jsonl`.",
        "",
        "| server | simulated seconds to the target | real seconds | real ÷ simulated |",
        "|---|---|---|---|",
    ]
    for way in WAYS:
        clock, real = ([one[kind][way] for one in found] for kind in ("simulated", "real"))
        both = interval([b / a for a, b in zip(clock, real, strict=True)])
        title = way.replace("stragglers", "30 % ten times slower")
        lines.append(f"| {title} | {interval(clock)} | {interval(real)} | {both} |")
    real = [one["real"] for one in found]
    ratio = interval([one["buffered, stragglers"] / one["rounds"] for one in real])
    gain = interval([one["rounds, stragglers"] / one["buffered, stragglers"] for one in real])
    order = sum(sorted(WAYS, key=one["real"].get)[-1] == "rounds, stragglers" for one in found)
    lines += [
        "",
        f"Seeds: {len(found)}. Intervals are 95 %, by Student's t. With stragglers, buffered steps",
        f"need {ratio} times the real seconds of rounds without stragglers (the aim",
        f"was {AIM}), and rounds {gain} times those of buffered steps. Rounds with",
        f"stragglers were the slowest of the four for {order} of {len(found)} seeds, as on the",
        "simulated clock. Real seconds are longer by the server's polls, the training itself and",
        "whatever else the machine did (load "
        f"{min(one['load'][0] for one in found)} to {max(one['load'][0] for one in found)}).",
        "",
        f"{found[0]['machine']}, torch {found[0]['torch']}.",
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure, or write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "page"))
    parser.add_argument("--seeds", nargs="+", type=int, default=[100, 101, 102])
    given = parser.parse_args()
    if given.what == "page":
        (RESULTS / "sleeping.md").write_text(page())
        return
    torch.set_num_threads(1)
    for seed in given.seeds:
        found = measure(seed)
        print(seed, found["simulated"], found["real"], flush=True)
        with FILE.open("a") as file:
            file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
