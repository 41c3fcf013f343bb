"""Trackers of each round's metrics: TensorBoard, or any function of (round, numbers)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError

Track = Callable[[int, dict[str, float]], None]


def each_round(track: Track) -> Callable[[list[Any]], None]:
    """Return a `progress` function for a strategy or an engine. It calls track(round, numbers) with
    the new numbers of each round.

    The test of round r arrives with the replies of round r + 1, so its numbers come later than the
    losses; they are reported under round r.
    """
    told: dict[int, set[str]] = {}

    def progress(records: list[Any]) -> None:
        for record in records[-2:]:
            known = told.setdefault(int(record["round"]), set())
            numbers = {
                name: value
                for name, value in flat(record).items()
                if name not in known and name != "round"
            }
            if numbers:
                known.update(numbers)
                track(int(record["round"]), numbers)

    return progress


def flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of a record, nested ones as "personal/accuracy"."""
    found: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found[prefix + name] = float(value)
    return found


def together(*progresses: Callable[[list[Any]], None]) -> Callable[[list[Any]], None]:
    """Return a progress function that calls all of these."""

    def progress(records: list[Any]) -> None:
        for one in progresses:
            one(records)

    return progress


class TensorBoard:
    """A tracker that writes TensorBoard's files to a folder; a context manager. Needs the extra
    `tensorboard`.
    """

    def __init__(self, folder: Path | str) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError:
            raise ConfigError(
                "TensorBoard is not installed; install it with: pip install "
                "'bayflower[tensorboard]'"
            ) from None
        self.writer: Any = SummaryWriter(str(folder))  # type: ignore[no-untyped-call]

    def __call__(self, round: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, round)
        self.writer.flush()

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, *_: object) -> None:
        self.writer.close()
