"""The records of a run's rounds and its outcome, from which `result.json` is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..tasks import Task
from .texts import write_json as write_json  # part of what this module offers

CURVE = ("accuracy", "balanced_accuracy_mean", "nll")  # of classes
Views = dict[str, dict[int, Any]]  # tallies of the task, by view and client


class RoundRecord(dict[str, Any]):
    """One entry of result.json's "rounds"."""

    @classmethod
    def make(
        cls,
        round: int,
        seconds: float,
        up: int,
        down: int,
        losses: Mapping[int, tuple[int, float]],
        report: Mapping[str, float],
    ) -> RoundRecord:
        """Return the record of a round; `losses` holds (samples, mean loss) of each client that
        trained.
        """
        weight = sum(count for count, _ in losses.values())
        loss = (
            sum(
                count * losses[client][1]
                for client in sorted(losses)
                for count in [losses[client][0]]
            )
            / weight
            if weight
            else None
        )
        return cls(
            round=round,
            seconds=seconds,
            bytes_up=up,
            bytes_down=down,
            train_loss=loss,
            num_clients=len(losses),
            **report,
        )


Progress = Callable[[list[RoundRecord]], None]


class Outcome(NamedTuple):
    """All rounds, the tallies of the final test (training clients by view, new clients by view),
    and the last states.
    """

    rounds: list[RoundRecord]
    views: Views
    new_clients: Views
    server_state: Any
    client_states: dict[int, Any]
    faults: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()  # notes for the user on how the run was executed
    # seconds by part of a round, peak memory, utilisation of the device
    usage: Mapping[str, Any] | None = None
    # the clients' calibrated uncertainty (`rounds/calibrated.py`); None if calibration is off
    calibrated: Any = None
    # what was spent of the privacy budget (`privacy/budget.py`); None without one
    privacy: Mapping[str, Any] | None = None


def curve_point(views: Views, task: Task) -> dict[str, Any]:
    """Return a point of the accuracy curve: metrics of the tested clients' personal models, and of
    their models before local training.
    """
    found = {view: task.summarise(views[view]) for view in ("personal", "before") if view in views}
    return {
        view: {key: summary[key] for key in (*task.curve, "num_clients")}
        for view, summary in found.items()
    }
