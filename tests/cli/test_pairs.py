"""Published pairs and findings: verdicts on made-up runs, and texts without typed numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bayflower.cli import app
from bayflower.reproduce import Cache, find, load_tables
from bayflower.reproduce.findings import findings, questions
from bayflower.reproduce.pairs import levels, pairs, share_decided
from bayflower.reproduce.sweep import Plan
from bayflower.reproduce.tables import Spec

NAMES = ("CIFAR-10", "sigma² = 15")  # what a text may name


class Made(Cache):
    """Runs whose accuracy is given by method and seed."""

    def __init__(self, scores):
        self.scores = scores

    def get(self, spec: Spec, seed, data_dir="", curve=False):
        value = self.scores.get(spec.method, {}).get(seed)
        if value is None:
            return None
        return {"final": {"personal": {"accuracy_mean": value}}, "rounds": 1}


def plan():
    return Plan("full", 3, {}, {}, "", "cpu", "fused", 0.0, (1, 1), (), "")


@pytest.mark.parametrize(
    ("own", "other", "state"),
    [
        ((0.95, 0.96, 0.97), (0.90, 0.91, 0.92), "reproduced"),  # the paper: FedBPS above LG-FedAvg
        ((0.90, 0.91, 0.92), (0.95, 0.96, 0.97), "refuted"),
        ((0.950, 0.951, 0.952), (0.951, 0.951, 0.951), "level"),
        ((0.99, 0.90, 0.95), (0.93, 0.96, 0.90), "undecided"),
        ((0.95, 0.96, None), (0.90, 0.91, 0.92), "too few seeds"),
        ((0.70, 0.71, 0.72), (0.60, 0.61, 0.62), "untrained"),
        ((0.95, 0.96, 0.97), (None, None, None), "not run"),
    ],
)
def test_the_order_that_a_paper_prints_is_held_against_the_runs(own, other, state):
    table = find("fedbps-1")
    scores = {"fedbps": dict(enumerate(own)), "lgfedavg": dict(enumerate(other))}
    cache = Made(scores)
    level = levels([table], plan(), cache)
    found = [pair for pair in pairs(table, plan(), cache, level) if pair.other == "LG-FedAvg"]
    mnist = next(pair for pair in found if pair.where == "MNIST")
    assert mnist.published == pytest.approx(96.87 - 96.44)
    assert mnist.state == state
    decided, trained = share_decided([mnist])
    assert decided == (state in ("reproduced", "refuted", "level"))
    assert trained == (state not in ("untrained", "not run"))


def test_texts_of_findings_have_no_number_and_their_comparisons_exist():
    for one in questions():
        text = one["question"] + one["text"]
        for name in NAMES:
            text = text.replace(name, "")
        assert not re.search(r"\d", text), text
    found = findings(load_tables(), plan(), Made({}))
    assert len(found) == len(questions()) >= 12
    assert {one.answer for one in found} == {"Undecided"}  # nothing was run
    assert all(finding.evidence for finding in found)


@pytest.mark.slow
def test_the_pages_are_what_the_runs_give(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    done = CliRunner().invoke(app, ["reproduce", "--all", "--check"])
    assert done.exit_code == 0, done.output
