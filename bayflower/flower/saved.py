"""What a client saved of a reply, as Flower's records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flwr.app import ConfigRecord, MetricRecord, RecordDict

from ..contract import ClientHalf
from ..files.store import Saved
from ..tree import Tensors, flatten
from . import records
from .continuing import said


def test_records(done: Saved) -> RecordDict:
    """Return the saved reply to a test request, or to one to calibrate, as records."""
    content = RecordDict({records.METRICS: MetricRecord(dict(done.numbers))})
    content[records.HEADER] = ConfigRecord(said(done))
    if done.tally:
        content[records.TALLY] = records.to_arrays(done.tally)
    if done.update:
        content[records.CALIBRATION] = records.to_arrays(done.update)
    return content


def numbers_of_test(tally: Any, half: ClientHalf) -> dict[str, Any]:
    """Return the personal model's metrics for Flower's functions that aggregate metrics."""
    number, task = int(tally.num_examples), half.model.task
    if not task.classes:
        found = task.summarise({0: tally})
        return {records.NUM_EXAMPLES: number, **{key: found[key] or 0.0 for key in task.curve}}
    return {
        records.NUM_EXAMPLES: number,
        "accuracy": float(tally.correct) / max(number, 1),
        "nll": float(tally.nll) / max(number, 1),
    }


def flat_tallies(views: dict[str, Any]) -> Tensors:
    """Return the tallies by "view/field"."""
    return {
        f"{view}/{name}": leaf
        for view, tally in views.items()
        for name, leaf in flatten(tally).items()
    }


def reply_records(saved: Saved, order: Sequence[str] = ()) -> RecordDict:
    """Return the saved reply as records; with `order`, only the arrays of these names."""
    update = saved.update
    if order:
        own = {name.split("/", 1)[1]: value for name, value in update.items() if "/" in name}
        update = {name: own[name] for name in order}
    content = RecordDict(
        {
            records.UPDATE: records.to_arrays(update),
            records.METRICS: MetricRecord(dict(saved.numbers)),
            records.HEADER: ConfigRecord(said(saved)),
        }
    )
    if saved.tally and not order:
        content[records.TALLY] = records.to_arrays(saved.tally)
    return content
