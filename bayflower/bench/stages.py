"""The suites that look into a round of the fused engine: where its time goes, and what one training
step costs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.func import vmap

from ..contract import ClientHalf
from ..data import batches
from ..engines import Prepared
from ..fused.meter import Mark, Meter
from ..fused.phases import StackedPhase, segments
from ..fused.run import SMALL_MODEL, FusedRun
from ..stacked import chance
from ..stacked.replay import Replay
from .cases import WARM_UP, Options, Say, described, free, loaded, why

COUNTS = (50, 40, 30, 20, 10, 5, 2, 1)
PASSES = 5  # of which the median is taken
KERNELS = 12  # that are listed by name
HOW = (
    "stages: clocks around the parts of the engine's own round, on a GPU the device's (a stage "
    "includes the time the device waits in it); "
    "gathering, forward and backward, optimiser: all steps of a round timed as they are, without "
    "the update, and without the gradient, and "
    "the differences taken, so that a small negative number is noise"
)


class Clock:
    """Laps of a round, by name; on a GPU read from the device when all is done."""

    def __init__(self, device: torch.device) -> None:
        self.meter = Meter(device)
        self.last: Mark | None = None
        self.laps: list[tuple[str, Mark, Mark]] = []

    def lap(self, name: str) -> None:
        """What was done since the last lap was `name`."""
        now = self.meter.mark()
        if self.last is not None:
            self.laps.append((name, self.last, now))
        self.last = now

    def milliseconds(self) -> dict[str, float]:
        """Return the sum of the laps by name."""
        found: dict[str, float] = {}
        for name, begin, end in self.laps:
            found[name] = found.get(name, 0.0) + 1000 * self.meter.between(begin, end)
        return found


class Rounds(FusedRun):
    """The fused engine, round by round, with a clock between its stages."""

    def __init__(self, prepared: Prepared) -> None:
        run, _, federation, halves = prepared
        run.settings.refuse_workers("this suite", "bench methods, which times whole rounds")
        tf32 = run.settings.tf32
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
        self.clock: Clock | None = None
        self.done = 0
        # tests are timed by themselves
        run = replace(run, settings=replace(run.settings, evaluate_every=0))
        super().__init__(run, federation, halves, lap=self.told)

    def told(self, stage: str) -> None:
        """Tell the clock that a stage has ended, if there is one."""
        if self.clock is not None:
            self.clock.lap(stage)

    def next(self) -> None:
        """Do the next round, and draw the batches of the one after it."""
        self.done += 1
        self.round(self.done)

    def test_everyone(self) -> None:
        """Test every client, adapted as the method says."""
        self.test(self.engine, self.everyone, self.done, "finetune")

    def phases(self) -> list[StackedPhase]:
        """Return the stretches of training of a round."""
        return [one for key, one in self.engine.stacked_phases.items() if key[0] == "train"]

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


STAGES = {
    "states": "take and keep clients' states",
    "begin": "begin: what a client starts from",
    "gather": "data: gather the batches of steps",
    "gradient": "forward and backward",
    "optimiser": "optimiser: update, loss, finished clients",
    "rest": "training: set-up of its steps",
    "messages": "messages: survey and finish",
    "aggregation": "aggregation",
    "drawing": "data: draw the next round's batches, not hidden",
    "records": "records: losses, bytes",
    "other": "other",
}


def profile(options: Options, say: Say) -> Iterator[dict[str, Any]]:
    """Yield a row a stage of a round; evaluation, and a sum of kernels on a GPU, come last."""
    for case, row, rounds in engines(options, say):
        if rounds is None:
            yield row
            continue
        try:
            rows = list(stages(rounds, options.rounds or 5, row, say, case))
        except Exception as error:  # one case that cannot run must not end the others
            rows = [row | {"failed": why(error)}]
        yield from rows


def stages(
    rounds: Rounds, count: int, row: dict[str, Any], say: Say, case: str
) -> Iterator[dict[str, Any]]:
    """Yield the stages of steady rounds."""
    rounds.wait()
    rounds.clock = Clock(rounds.device)
    rounds.clock.lap("start")
    for _ in range(count):
        rounds.next()
    rounds.wait()
    found = {name: total / count for name, total in rounds.clock.milliseconds().items()}
    rounds.clock = None
    whole = sum(found.values())
    say(f"{case}: {whole:.2f} ms a round")
    how = HOW
    training = found.pop("training", 0.0)
    try:
        data, gradient, full = (
            sum(part)
            for part in zip(*(split(stacked, rounds) for stacked in rounds.phases()), strict=True)
        )
        found |= {
            "gather": data,
            "gradient": gradient - data,
            "optimiser": full - gradient,
            "rest": training - full,
        }
    except Exception as error:  # the coarse picture is worth having without the fine one
        found["gradient"] = training
        how = (
            "training is shown as one stage (forward and backward): it could not be split "
            f"({why(error)})"
        )
    base = row | {"failed": None, "num_rounds": count, "how": how}
    for stage, title in STAGES.items():
        if stage in found:
            yield base | {"stage": title, "ms": found[stage], "percent": 100 * found[stage] / whole}
    yield base | {"stage": "a round", "ms": whole, "percent": 100.0}
    hidden = wall(lambda: draw_anew(rounds))
    yield base | {
        "stage": "of the host, while the device works: draw batches"
        if rounds.device.type == "cuda"
        else "of it: draw batches",
        "ms": hidden,
        "percent": None,
    }
    rounds.test_everyone()
    rounds.test_everyone()
    rounds.wait()
    yield base | {
        "stage": "evaluation of all clients, not in a round",
        "ms": wall(rounds.test_everyone, rounds.wait),
        "percent": None,
    }
    if rounds.device.type == "cuda":
        try:
            yield base | kernels(rounds, whole)
        except Exception as error:  # a machine without the profiler's library
            yield base | {"case": f"{case}, kernels", "failed": why(error)}


def split(stacked: StackedPhase, rounds: Rounds) -> tuple[float, float, float]:
    """Return milliseconds of all steps of a phase: only gathering data, with the gradient, and as
    they are.
    """
    if type(stacked.half).step is not ClientHalf.step:
        raise NotImplementedError("the method has a step of its own")
    assert stacked.plan is not None
    pieces = segments((stacked.plan[1][:, :, 0, 0] >= 0).sum(0), stacked.sizes)

    def gathered(size: int) -> tuple[Any, ...]:
        groups = stacked.groups(size)
        noise = {
            name: batches.normal(
                keys[:size], stacked.at[0], stacked.shapes[name], stacked.stack.dtype
            )
            for name, keys in stacked.keys.items()
        }
        return groups, noise

    def data(size: int) -> None:
        gathered(size)
        stacked.at += 1

    def gradient(size: int) -> None:
        assert stacked.work is not None
        vmap(chance.within(partial(stacked.half.gradient, stacked.phase)))(
            stacked.step_keys(size), stacked.work.part(size), *gathered(size)
        )
        stacked.at += 1

    def passed(replay: Replay) -> float:
        def once() -> None:
            stacked.at.zero_()
            for size, count in pieces:
                replay(size, count)

        for _ in range(2):  # the first compiles, the second records
            once()
        rounds.wait()
        return statistics.median(wall(once, rounds.wait) for _ in range(PASSES))

    graphs = rounds.engine.graphs
    return passed(Replay(data, graphs)), passed(Replay(gradient, graphs)), passed(stacked.replay)


def draw_anew(rounds: Rounds) -> None:
    """Draw the batches of a round that were not drawn yet."""
    for stacked in rounds.phases():
        stacked.plan = None
    rounds.engine.prefetch(rounds.clients_of(rounds.done + 1), rounds.done + 1, ())


def kernels(rounds: Rounds, whole: float) -> dict[str, Any]:
    """Return the time the device computed in one round, and the kernels that took longest, as
    torch.profiler saw them.
    """
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as seen:
        rounds.next()
        rounds.wait()
    spent = sorted(
        (
            (event.key, event.self_device_time_total / 1000, event.count)
            for event in seen.key_averages()
        ),
        key=lambda e: -e[1],
    )
    busy = sum(taken for _, taken, _ in spent)
    top = [
        {"kernel": name[:120], "ms": round(taken, 4), "calls": calls}
        for name, taken, calls in spent[:KERNELS]
    ]
    return {
        "stage": "the device computing (torch.profiler, all kernels)",
        "ms": busy,
        "percent": 100 * busy / whole,
        "kernels": top,
    }


def steps(options: Options, say: Say) -> Iterator[dict[str, Any]]:
    """Yield a row a number of clients: the time of one recorded training step of all of them."""
    for case, row, rounds in engines(options, say):
        if rounds is None:
            yield row
            continue
        for stacked in rounds.phases():
            for clients in options.clients or COUNTS:
                if clients > len(stacked.losses):
                    continue
                try:
                    taken = step_ms(stacked, clients, rounds)
                    yield row | {
                        "failed": None,
                        "phase": stacked.phase.name,
                        "clients": clients,
                        "ms": taken,
                        "us_per_client": 1000 * taken / clients,
                    }
                    say(f"{case}: {taken:.3f} ms a step of {clients}")
                except Exception as error:  # one case that cannot run must not end the others
                    yield row | {"case": f"{case}, {clients} clients", "failed": why(error)}


def step_ms(stacked: StackedPhase, clients: int, rounds: Rounds) -> float:
    """Return the milliseconds of a step with the first `clients`, the largest."""
    times = min(stacked.steps, 20)

    def once() -> None:
        stacked.at.zero_()
        stacked.replay(clients, times)

    once()
    once()
    rounds.wait()
    return statistics.median(wall(once, rounds.wait) for _ in range(PASSES)) / times


def engines(options: Options, say: Say) -> Iterator[tuple[str, dict[str, Any], Rounds | None]]:
    """Yield (case, what a row begins with, the engine after its warm-up); the engine is None and
    the row has the reason if it failed.
    """
    for workload in options.chosen_workloads():
        for method in options.methods or ("fedper",):
            case = f"{method} on {workload}"
            row: dict[str, Any] = {"case": case, "workload": workload, "method": method}
            try:
                more = {"stacking": "yes", "tf32": options.tf32}
                values = options.values(workload, 1000, **more)
                prepared = loaded(method, values, workload=workload)
                say(f"{case}: {WARM_UP} rounds to warm up")
                if not options.gpu and prepared.halves.model.num_parameters < SMALL_MODEL:
                    torch.set_num_threads(1)  # as the engine does with small networks
                rounds = Rounds(prepared)
                for _ in range(WARM_UP):
                    rounds.next()
                rounds.wait()
                if rounds.engine.one_by_one_because:
                    raise NotImplementedError(rounds.engine.one_by_one_because)
            except Exception as error:  # one case that cannot run must not end the others
                yield case, row | {"failed": why(error)}, None
                continue
            yield (
                case,
                row
                | {
                    "data": described(prepared.federation),
                    "precision": "tf32" if options.tf32 else "float32",
                },
                rounds,
            )
            del rounds
            free()


def wall(fn: Callable[[], Any], wait: Callable[[], None] = lambda: None) -> float:
    """Return the milliseconds of a call, its work on the device included."""
    begun = time.perf_counter()
    fn()
    wait()
    return 1000 * (time.perf_counter() - begun)
