"""All promises of the contract for one method, as one class of tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ..engines import Prepared, execute
from ..files.records import Outcome
from . import runs
from .bench import PEACE, Bench, small_prepared
from .declared import Declared
from .promises import Promises

SGD: dict[str, Any] = {"optimizer": "sgd", "momentum": 0.9}


class MethodContract(Promises, Declared):
    """Extend this class, name the method, and pytest tests every promise of the contract.

    `settings` are what the method needs to be itself, e.g. a network. Set `returns_one_update` to
    False if one update alone, finalised, is not the next global model; then test your formula. A
    method that rounds what it sends needs a larger `near`: how far a stack may be from the same
    clients one by one.
    """

    method: ClassVar[str]
    settings: ClassVar[Mapping[str, Any]] = {}
    returns_one_update: ClassVar[bool] = True
    near: ClassVar[float] = 2e-5

    @classmethod
    def network(cls, wanted: str) -> str:
        """Return the network of a bench; a method whose settings name one has no other."""
        own = cls.settings.get("model")
        if own is not None and wanted != "mlp":
            pytest.skip(f"the method is tested with model={own} only")
        return str(own or wanted)

    @classmethod
    def prepared(cls, engine: str = "loop", **changes: Any) -> Prepared:
        """Return a run of a few seconds."""
        return small_prepared(cls.method, engine, **{**cls.settings, **changes})

    @pytest.fixture(params=["mlp", "mlp-bn"])
    def bench(self, request: pytest.FixtureRequest) -> Bench:
        """Return the method with some clients' updates; made once a network."""
        return made(type(self), self.network(request.param), "float32")

    def test_a_fast_total_is_the_exact_sum(self) -> None:
        """The sum that the fused engine uses is that of the statistics; so are its broadcasts."""
        bench = made(type(self), self.network("mlp"), "float64")
        runs.check_broadcasts(bench)
        runs.check_fast_total(bench)

    @pytest.mark.parametrize("engine", ["fused", "loop"])
    def test_runs_repeat_to_the_bit(self, engine: str) -> None:
        """The same seed gives the same bits, another seed others."""
        runs.check_repeats(
            whole(type(self), engine), lambda seed: self.prepared(engine, **PEACE, seed=seed)
        )

    @pytest.mark.parametrize("engine", ["fused", "loop"])
    def test_a_run_goes_on_where_it_stopped(self, engine: str, tmp_path: Path) -> None:
        """A run that was stopped and resumed has the bits of one that was left in peace."""

        def run(rounds: int) -> Prepared:
            return self.prepared(engine, **{**PEACE, "checkpoint_every": 1, "rounds": rounds})

        runs.check_goes_on(whole(type(self), engine), run, tmp_path)

    def test_one_float32_round_is_the_same_on_fused_and_loop(self) -> None:
        """States agree to 1e-5, norm-wise."""
        changes: dict[str, Any] = {"optimizer": "sgd", "lr": 0.1, "rounds": 1}
        runs.compare(*runs.outcomes(self.prepared(**changes)), tolerance=1e-5)

    def test_five_float64_rounds_are_the_same_on_fused_and_loop(self) -> None:
        """States agree to 1e-9, norm-wise, with a part of the clients in each round."""
        changes: dict[str, Any] = {**SGD, "lr": 0.05, "dtype": "float64", "evaluate_every": 2}
        prepared = self.prepared(**changes, fraction_train=0.6, rounds=5)
        runs.compare(*runs.outcomes(prepared), tolerance=1e-9)

    def test_halves_do_not_import_flwr(self) -> None:
        """Halves are pure: they run where Flower is not installed."""
        runs.check_no_flwr([self.method])


BENCHES: dict[tuple[Any, ...], Bench] = {}
RUNS: dict[tuple[Any, ...], Outcome] = {}


def made(suite: type[MethodContract], model: str, dtype: str) -> Bench:
    """Return a bench of a suite's method; made once."""
    key = (suite, model, dtype)
    if key not in BENCHES:
        alone, near = suite.returns_one_update, suite.near
        BENCHES[key] = Bench(
            *(suite.method, model, dtype),
            settings=suite.settings,
            returns_one_update=alone,
            near=near,
        )
    return BENCHES[key]


def whole(suite: type[MethodContract], engine: str) -> Outcome:
    """Return three rounds with a part of the clients, left in peace; run once."""
    if (suite, engine) not in RUNS:
        RUNS[suite, engine] = execute(suite.prepared(engine, **PEACE))
    return RUNS[suite, engine]
