"""The record of a buffered run: who was asked when, and which replies made each step. A run can be
replayed from it to the same bits, on another engine too.

The file is `<out>/arrivals.jsonl`. Its first line says whose record it is; then there is one line a
step:

    {"step": 7, "asked": [0, 4], "used": [[4, 6], [1, 7]], "left_out": [[2, 3]]}

`asked` are the clients that were sent the model before the step, in a message of round `step`.
`used` and `left_out` are pairs (client, round of its message).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ConfigError

FILE = "arrivals.jsonl"
FORMAT = "bayflower-arrivals-1"
SAME = ("method", "seed", "staleness", "rate")  # what a replay must have in common with its record
Pair = tuple[int, int]


class Step(NamedTuple):
    """One step: who was asked before it, whose replies it used, and whose it did not use."""

    step: int
    asked: list[int]
    used: list[Pair]
    left_out: list[Pair]

    def line(self) -> str:
        """Return the step as a line of the file."""
        return json.dumps(self._asdict())


class Record:
    """The file that a run writes, in a folder or not at all."""

    def __init__(self, folder: Path | None, facts: dict[str, Any], done: int) -> None:
        """Begin a file with `facts` in its first line; of an earlier one keep the first `done`
        steps, with which the run goes on.
        """
        self.path = None if folder is None else folder / FILE
        if self.path is None:
            return
        kept = []
        if done and self.path.exists():
            kept = [step for step in read(self.path)[1].values() if step.step <= done]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"format": FORMAT, **facts}), *(step.line() for step in kept)]
        new = self.path.with_suffix(".new")
        new.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        os.replace(new, self.path)

    def add(self, step: Step) -> None:
        """Write a step."""
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(step.line() + "\n")


def read(path: Path) -> tuple[dict[str, Any], dict[int, Step]]:
    """Return (the facts, the steps by number) of a record; a line that a crash cut off is left out.
    Raise if it is none.
    """
    try:
        first, *rest = path.read_text(encoding="utf-8").splitlines()
        facts = json.loads(first)
        if facts["format"] != FORMAT:
            raise ValueError
    except FileNotFoundError:
        raise ConfigError(f"replay: {path} does not exist; give an {FILE} of a run") from None
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"replay: {path} is not a record of arrivals ({FILE} of a run)") from None
    steps: dict[int, Step] = {}
    for place, line in enumerate(rest):
        try:
            found = json.loads(line)
            pairs = [[(int(a), int(b)) for a, b in found[name]] for name in ("used", "left_out")]
            step = Step(int(found["step"]), [int(one) for one in found["asked"]], *pairs)
        except (ValueError, KeyError, TypeError):
            if place == len(rest) - 1:
                break
            raise ConfigError(f"replay: line {place + 2} of {path} cannot be read") from None
        steps[step.step] = step
    return facts, steps


def to_replay(path: Path, facts: dict[str, Any]) -> dict[int, Step]:
    """Return the steps of a record; raise if it is that of another kind of run."""
    known, steps = read(path)
    for name in SAME:
        if known.get(name) != facts[name]:
            raise ConfigError(
                f"replay: {path} has {name}={known.get(name)}, this run {name}={facts[name]}; use "
                "the settings of the recorded run"
            )
    return steps
