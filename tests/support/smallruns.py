"""What test files import from `conftest`: a small federation, and lists of methods and networks."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bayflower.config import Run, parse
from bayflower.engines import Prepared, execute, prepare
from bayflower.files import checkpoint
from bayflower.files.records import Outcome
from bayflower.methods import METHODS
from bayflower.testing import assert_same_bits as assert_same_bits
from bayflower.testing import worst_difference as worst_difference
from bayflower.testing.bench import PEACE as PEACE
from bayflower.testing.bench import SMALL as USERS

# the small federation that users' own methods are tested on, with fewer batches
SMALL = {**USERS, "keep": 0.15, "new_client_epochs": 2}
# what a method needs to be itself: normalisation layers; a prototype of every class
NEEDED = {"fedbn": {"model": "mlp-bn"}, "fedproto": {"min_count": 1}, "fedpac": {"min_count": 1}}
# methods of which `make test` has few promises on one engine; `make test-all` has them all
LATER = {
    "vd",
    "ensemblevd",
    "pfedvmp-avg",
    "perfedavg",
    "moon-ft",
    "fedpa-ft",
    "ditto",
    "fedproto",
    "fedrod",
    "pfedbayes",
    "pvi",
    "fedep",
    "fedep-ft",
    "fedsep",
    "fedpac",
    "pfedbred",
    "pfedme",
    "fedbe",
    "fedala",
    "fedpop",
    "gpfl",
    "fedcp",
    "pfedgp",
    "fedivon",
    "qlsd",
    "qlsd-ft",
}
FEWER = {"fedpa": {"num_samples": 2, "sample_steps": 3}}  # steps that only take time
FEWER["fedpa-ft"] = FEWER["fedpa"]
# methods with states or normalisation layers of their own kind: `make test` has them on both
# networks where the others are on one, and `make test-all` all of them on both
BOTH = {"fedbn", "fedbps", "fedmap", "fednp", "metavd", "pfedvmp"}


def small(method: str, **changes: Any) -> Run:
    """Return a run of a few seconds."""
    own = {**NEEDED.get(method, {}), **FEWER.get(method, {})}
    return parse(method, {**SMALL, **own, "device": "cpu", **changes})


def small_prepared(method: str, engine: str = "loop", **changes: Any) -> Prepared:
    return prepare(small(method, **changes), engine)


class Whole(NamedTuple):
    """A run left in peace, and the checkpoint that it wrote after its second round."""

    outcome: Outcome
    stopped: bytes


@functools.cache
def whole_run(method: str, engine: str) -> Whole:
    """Return three rounds with a part of the clients; made once."""
    written, save = [], checkpoint.save_tensors

    def remember(path: Path, *given: Any, **more: Any) -> None:
        save(path, *given, **more)
        written.append(path.read_bytes())

    prepared = small_prepared(method, engine, **PEACE, checkpoint_every=1)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save_tensors", remember)
        return Whole(execute(prepared, out=Path(folder)), written[1])


def cases(
    first: str, both: Collection[str] = BOTH, only: Collection[str] = frozenset(METHODS) - LATER
) -> list:
    """Return (method, network) for the methods in `only` on the network `first`, and for those in
    `both` on the other one too; the rest is slow.
    """
    return [
        pytest.param(
            (method, model),
            id=f"{method}-{model}",
            marks=() if method in both or (model == first and method in only) else pytest.mark.slow,
        )
        for method in sorted(METHODS)
        for model in ("mlp", "mlp-bn")
    ]


def some(names: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """Return the parameters of a test, of which only those in `kept` are in the default run."""
    return [pytest.param(one, marks=() if one in kept else pytest.mark.slow) for one in names]
