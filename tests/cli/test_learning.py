"""A run that ended too early or too late says so; one that has settled does not."""

from __future__ import annotations

import numpy as np
import pytest
from typer.testing import CliRunner

import bayflower
from bayflower.cli import app
from bayflower.report.learning import EARLY, LATE, ending


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
    assert bool(ending(result(losses.tolist()))) == still


def test_noise_is_no_fall():
    """Curves of noise alone: fewer than one in fifty is named."""
    rng = np.random.default_rng(0)
    named = [ending(result((0.5 + 0.1 * rng.normal(size=24)).tolist())) for _ in range(500)]
    assert sum(map(bool, named)) < 10


def test_missing_and_infinite_losses_are_no_curve():
    for value in (None, float("nan"), float("inf")):
        assert ending(result([2.0, 1.9, value, 1.7, 1.6, 1.5, 1.4, 1.3])) is None
    assert ending({}) is None


@pytest.mark.parametrize(
    ("nlls", "said"),
    [
        ([1.05, 1.1, 1.3, 1.7, 2.2], LATE),
        ([0.9, 0.7, 0.6, 0.5, 0.4], EARLY),
        ([0.9, 0.5, 0.4, 0.41, 0.405], EARLY),  # within noise of the lowest
        ([0.9, 0.7, 0.6, 0.5, 0.6], None),  # one test later does not say which
        ([0.5, 0.48, 0.49, 0.5, 0.52], None),
    ],
)
def test_more_rounds_are_not_advised_where_tests_became_worse(nlls, said):
    ran = result((2.3 - 0.03 * TIMES).tolist())
    for record, number in zip(ran["rounds"], range(1, 41), strict=True):
        record["round"] = number
    for nll, record in zip(nlls, ran["rounds"][7::8], strict=True):
        record["personal"] = {"nll": nll}
    found = ending(ran)
    assert (found and found.short) == said
    if said == LATE:
        assert str(found) == f"{LATE} (from 1.05 in round 8 to 2.2 in round 40)"


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
    assert (EARLY in " ".join(done.output.split())) == said
    assert run.invoke(app, ["report", str(out), "--html", str(page)]).exit_code == 0
    assert (EARLY in page.read_text()) == said


@pytest.mark.slow
def test_a_notebook_says_it():
    found = [
        bayflower.fit("fedavg", "digits", num_clients=3, **FEW, **how) for how in (SHORTLY, LONG)
    ]
    assert [EARLY in one._repr_html_() for one in found] == [True, False]
