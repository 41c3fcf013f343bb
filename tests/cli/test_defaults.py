"""The table of default settings: finished runs are not done again, and its numbers are right."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import defaults
import exchange
import intervals
from defaults import Job


def line(job: Job, accuracy: float) -> dict:
    shown = {"accuracy": accuracy, "balanced": accuracy, "worst": accuracy - 9, "nll": 0.5}
    return {**job._asdict(), "settings": defaults.about(job), **shown}


def test_mean_and_interval_are_students():
    values = [91.0, 93.5, 92.0]
    half = stats.t.ppf(0.975, 2) * np.std(values, ddof=1) / np.sqrt(3)
    assert intervals.spread(values, 2) == f"{np.mean(values):.2f} ± {half:.2f}"
    assert pytest.approx(intervals.STUDENT, abs=1e-3) == stats.t.ppf(0.975, np.arange(1, 20))
    assert intervals.spread([91.0]) == "91.0"


def test_differences_are_paired_by_seed():
    """Seed 2 has no run of training alone and does not count; FedAvg is three points below."""
    runs = [("local", 0, 90.0), ("local", 1, 80.0), ("fedavg", 0, 88.0), ("fedavg", 1, 76.0)]
    found = {
        (job := Job("digits", method, seed, 30)): line(job, accuracy)
        for method, seed, accuracy in [*runs, ("fedavg", 2, 99.0), ("fedmap", 0, 89.0)]
    }
    rows = defaults.rows_of(found, "digits", 30)
    assert list(rows) == ["fedmap", "fedavg", "local"]
    assert rows["fedavg"].differences == [-2.0, -4.0]
    text = defaults.page(found, 30)
    assert "| fedavg | **-3.0 ± 12.7** |" in text
    assert "| fedmap | -1.0 |" in text
    assert "below training alone (bold): fedavg on digits." in text


def test_only_runs_of_todays_settings_count(tmp_path):
    path, job, other = tmp_path / "runs.jsonl", *(Job("digits", m, 0, 1) for m in ("local", "maml"))
    lines = [json.dumps(line(job, 90.0)), json.dumps({**line(other, 90.0), "settings": "old"})]
    path.write_text("\n".join([*lines, lines[0][:40]]))
    assert list(defaults.finished(path)) == [job]
    assert defaults.finished(tmp_path / "none") == {}


def test_measured_lines_outlive_settings_of_how_a_run_is_done():
    """The lines that are kept belong to today's settings, and a hash does not depend on workers."""
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "defaults.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert len(defaults.finished(path)) == len(lines) > 500
    plain, more = {"dataset": "digits"}, {"client_states": "disk", "max_fused": 3}
    assert defaults.hashed("fedavg", plain) == defaults.hashed("fedavg", plain | more)
    assert defaults.hashed("fedavg", plain) != defaults.hashed("fedavg", plain | {"lr": 0.5})
    assert defaults.hashed("fedavg", plain) != defaults.hashed(
        "fedavg", plain | {"fraction_evaluate": 0.5}
    )


def test_a_run_gives_a_line_and_the_page_is_written(tmp_path, monkeypatch):
    results, page = tmp_path / "runs.jsonl", tmp_path / "page.md"
    job = Job("digits", "local", 0, 1)
    results.write_text(json.dumps(defaults.measure(job, tmp_path, "cpu")) + "\n")
    found = defaults.finished(results)[job]
    assert 0 <= found["worst"] < found["accuracy"] <= 100
    given = ["--datasets", "digits", "--methods", "local", "--seeds", "1", "--rounds", "1"]
    paths = ["--data-dir", str(tmp_path), "--results", str(results), "--page", str(page)]
    monkeypatch.setattr(sys, "argv", ["defaults.py", *given, *paths])
    monkeypatch.setattr(defaults, "run_missing", lambda *_: pytest.fail("the run is there"))
    assert defaults.main() == 0
    assert f"| local | {found['accuracy']:.1f} |" in page.read_text()


def test_wrong_names_and_missing_data_are_one_line(tmp_path, monkeypatch):
    for given, words in (
        (["--methods", "fedmip"], "method 'fedmip' is not known"),
        (["--datasets", "heart", "--data-dir", str(tmp_path)], "heart.npz is missing"),
    ):
        monkeypatch.setattr(sys, "argv", ["defaults.py", *given])
        with pytest.raises(SystemExit, match=words):
            defaults.main()


def test_images_and_others_take_turns():
    todo = [Job(name, "local", seed, 1) for name in ("fmnist", "digits") for seed in range(3)]
    found = defaults.mixed([*todo, Job("heart", "local", 0, 1)])
    names = [job.dataset for job in found]
    assert names == ["fmnist", "digits", "fmnist", "digits", "fmnist", "digits", "heart"]


def test_brca_has_two_classes(tmp_path):
    y = np.array([[100.0, 1.0], [50.0, 0.0], [7.0, 1.0]])
    np.savez(tmp_path / "brca.npz", x=np.zeros((3, 2)), y=y, test=np.zeros(3), client=np.arange(3))
    defaults.events(tmp_path)
    with np.load(tmp_path / "brca-event.npz") as made:
        assert made["y"].tolist() == [1, 0, 1]
        assert made["y"].dtype == np.int64


def test_the_model_of_an_exchange_is_found_again_and_not_fitted_to_what_tests_it():
    known = [0.01, 0.001, 3e-9, 1e-8, 4e-10]
    works = [{"bytes": 2600, "kept": 0}, {"bytes": 26_000, "kept": 10**6}]
    works += [{"bytes": 2_300_000, "kept": 0}, {"bytes": 2_300_000, "kept": 150_000_000}]
    lines = [
        {**work, "workers": number, "exchange": exchange.modelled(known, work, number)}
        for work in works
        for number in (1, 2, 4)
    ]
    strange = [{**work, "workers": 8, "exchange": 9.0} for work in works]
    assert exchange.fit([*lines, *strange]) == pytest.approx(known, rel=1e-6)
    by_hand = 0.01 + 0.064 + 2_300_000 * (3e-9 + 6e-8) + 4e-10 * 150_000_000 / 64
    assert exchange.modelled(known, works[3], 64) == pytest.approx(by_hand)
