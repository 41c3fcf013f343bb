"""A run that ends while it still learns says so; one that has settled does not."""

from __future__ import annotations

import numpy as np
import pytest
from typer.testing import CliRunner

import bayflower
from bayflower.cli import app
from bayflower.report.learning import SHORT, still_learning


def result(losses):
    return {"rounds": [{"train_loss": one} for one in losses]}


TIMES = np.arange(40)


@pytest.mark.parametrize(
    ("losses", "still"),
    [
        (2.3 - 0.03 * TIMES, True),  # a straight fall
        (0.2 + 2 * np.exp(-TIMES / 30), True),
        (0.2 + 2 * np.exp(-TIMES / 5), False),  # settled
        (2.0 / np.sqrt(1 + TIMES), False),  # slower and slower
        (0.5 + 0.02 * TIMES, False),  # it rises
        (np.full(40, 0.7), False),
        ((2.3 - 0.03 * TIMES)[:7], False),  # too few rounds
    ],
)
def test_the_end_of_a_curve_tells(losses, still):
    assert bool(still_learning(result(losses.tolist()))) == still


def test_noise_is_no_fall():
    """Curves of noise alone: fewer than one in fifty is named."""
    rng = np.random.default_rng(0)
    named = [still_learning(result((0.5 + 0.1 * rng.normal(size=24)).tolist())) for _ in range(500)]
    assert sum(map(bool, named)) < 10


def test_missing_and_infinite_losses_are_no_curve():
    for value in (None, float("nan"), float("inf")):
        assert still_learning(result([2.0, 1.9, value, 1.7, 1.6, 1.5, 1.4, 1.3])) is None
    assert still_learning({}) is None


FEW = {"keep": 0.2, "evaluate_every": 0, "calibration": "off", "rounds": 8}
SHORTLY, LONG = {"lr": 0.0003, "local_epochs": 2}, {"lr": 0.05, "local_epochs": 30}


@pytest.mark.parametrize(
    ("how", "said"), [(SHORTLY, True), pytest.param(LONG, False, marks=pytest.mark.slow)]
)
def test_the_terminal_and_the_report_say_it(how, said, tmp_path):
    run, out, page = CliRunner(), tmp_path / "run", tmp_path / "report.html"
    given = [f"--set={key}={value}" for key, value in {**FEW, **how}.items()]
    args = ["run", "fedavg", "--clients", "3", "--out", str(out), *given]
    done = run.invoke(app, args)
    assert done.exit_code == 0, done.output
    assert (SHORT in " ".join(done.output.split())) == said
    assert run.invoke(app, ["report", str(out), "--html", str(page)]).exit_code == 0
    assert (SHORT in page.read_text()) == said


@pytest.mark.slow
def test_a_notebook_says_it():
    found = [
        bayflower.fit("fedavg", "digits", num_clients=3, **FEW, **how) for how in (SHORTLY, LONG)
    ]
    assert [SHORT in one._repr_html_() for one in found] == [True, False]
