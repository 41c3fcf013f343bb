"""The suite that runs the workloads of other simulators at their published numbers of rounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .cases import WARM_UP, Options, Say, described, free, loaded, timed, why
from .races import RACES

PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "tf32": {"tf32": True},
    "bf16": {"tf32": True, "bf16": True},
}


def raced(options: Options, say: Say) -> Iterator[dict[str, Any]]:
    """Yield a row a workload, method and precision: the seconds of all rounds after the warm-up."""
    precisions = ("tf32", "bf16") if options.tf32 else ("float32",)
    for workload in options.workloads or tuple(RACES):
        if workload not in RACES:
            yield {"case": workload, "failed": f"not a race; those are {', '.join(RACES)}"}
            continue
        race = RACES[workload]
        rounds = options.rounds or race.rounds
        for method in options.methods or ("fedavg",):
            for precision in precisions:
                case = f"{method} on {workload}, {precision}"
                row: dict[str, Any] = {
                    "case": case,
                    "workload": workload,
                    "method": method,
                    "precision": precision,
                    "rival": race.rival or None,
                }
                try:
                    more = {"stacking": "yes", **PRECISIONS[precision]}
                    values = options.values(workload, WARM_UP + rounds, **more)
                    prepared = loaded(method, values, workload=workload)
                    say(f"{case}: {WARM_UP} + {rounds} rounds")
                    found = timed(prepared, WARM_UP, options.seconds)
                    row |= found.row()
                    del row["round_ms"]  # thousands of numbers
                    taken = sum(found.seconds[WARM_UP:])
                    epochs = race.settings["local_epochs"]
                    samples = row["num_rounds"] * race.sampled * race.samples * epochs
                    row |= {
                        "total": taken,
                        "wanted": rounds,
                        "samples_per_second": round(samples / taken),
                        "data": described(prepared.federation),
                        "failed": None,
                    }
                    say(f"{case}: {taken:.2f} s for {row['num_rounds']} rounds")
                except Exception as error:  # one case that cannot run must not end the others
                    row |= {"failed": why(error)}
                free()
                yield row
