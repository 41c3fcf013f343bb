"""One call for every engine: load the data, make the halves, run, write what came out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import outcome as outcomes
from .config import ENGINES, Run
from .data import Federation, load_federation
from .halves import Halves, make_halves
from .outcome import Outcome, Progress
from .types import ConfigError


class Prepared(NamedTuple):
    """Everything that was checked before the first round."""

    run: Run
    engine: str
    federation: Federation
    halves: Halves


def prepare(run: Run, engine: str = "fused") -> Prepared:
    """Return the run with its data and halves; whatever is wrong with them is found here."""
    if engine not in ENGINES:
        raise ConfigError(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}")
    federation = load_federation(run.data, run.settings.seed)
    halves = make_halves(run, federation.input_shape, federation.num_classes)
    return Prepared(run, engine, federation, halves)


def execute(prepared: Prepared, progress: Progress | None = None) -> Outcome:
    """Return the outcome of a prepared run."""
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    run, engine, federation, halves = prepared
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = run.settings.tf32
    if engine == "fused":
        from .fused import run_fused

        return run_fused(run, federation, halves, progress)
    from .loop import run_loop  # needs flwr, which the fused engine does not

    return run_loop(run, federation, halves, progress)


def run_to_result(prepared: Prepared, out: Path | None = None, progress: Progress | None = None) -> dict[str, Any]:
    """Return result.json's content, written to `out`/result.json if given."""
    outcome = execute(prepared, progress)
    content = outcomes.result(prepared.run, prepared.engine, prepared.federation, prepared.halves, outcome)
    if out is not None:
        outcomes.write_json(out / "result.json", content)
    return content
