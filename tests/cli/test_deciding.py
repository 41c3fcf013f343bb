"""The deciding experiments: verdicts against intervals by hand, the driver on a small table, and
the time that a run is expected to take.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from bayflower.errors import ConfigError
from bayflower.report.paired import paired
from bayflower.reproduce import Cache, find, load_tables
from bayflower.reproduce.cache import resolved
from bayflower.reproduce.collect import line, take
from bayflower.reproduce.sweep import Plan, expected, jobs
from bayflower.reproduce.verdict import decide, judged, plain, sentences

ROOT = Path(__file__).parents[2]
T2 = 4.302653  # Student's 97.5 % quantile of 2 degrees of freedom


def result(accuracy: float, device: str = "cpu (x86_64)", seconds: float = 1.0) -> dict:
    block = {"accuracy": accuracy, "accuracy_mean": accuracy, "balanced_accuracy_mean": accuracy}
    names = ("personal", "before", "global", "new_clients")
    return {
        "device": device,
        "seconds": seconds,
        "rounds": 10,
        "curve": [],
        "last": {},
        "final": {name: block for name in names},
    }


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([2.0, 2.1, 1.9], "reproduced"),
        ([-2.0, -2.1, -1.9], "refuted"),
        ([0.2, 0.3, 0.4], "level"),
        ([-0.1, 0.1, 0.0], "level"),
        ([3.0, -1.0, 2.0], "undecided"),
        ([5.0], "undecided"),
        ([], "undecided"),
    ],
)
def test_a_verdict_is_that_of_the_interval(values, verdict):
    """By the formula mean ± t s/√n with the table's t, at three seeds."""
    found = paired({(seed, ""): value for seed, value in enumerate(values)}) if values else None
    assert judged(found, "%") == verdict
    if len(values) == 3:
        assert found is not None
        half = T2 * statistics.stdev(values) / 3**0.5
        assert found.low == pytest.approx(statistics.mean(values) - half, rel=1e-5)
        assert found.high == pytest.approx(statistics.mean(values) + half, rel=1e-5)
    if verdict == "level":
        assert judged(found, "nats") != "level"


def test_claims_are_decided_from_the_runs_of_both_rows(tmp_path):
    """Five seeds of FedMAP and of training alone; a sixth number without a partner does not count;
    the words have the numbers.
    """
    table, plan = find("decide-fedmap"), Plan(data_dir=str(tmp_path))
    cache = Cache(tmp_path / "runs")
    mine = [0.80, 0.82, 0.81, 0.83, 0.84]
    other = [0.75, 0.76, 0.78, 0.77, 0.79]
    for job in jobs(table, plan):
        values = job.spec.values()
        if values["scenario"] != "label":
            continue
        if job.spec.method == "fedmap" and values["sigma2"] == 15.0:
            cache.put(job.spec, job.seed, result(mine[job.seed]), 0)
        if job.spec.method == "local" and values["rounds"] == 1 and job.seed < 4:
            cache.put(job.spec, job.seed, result(other[job.seed]), 0)
    found = decide(table, plan, cache)
    assert len(found) == len(table.claims) * 3
    one = found[0]
    differences = [100 * (a - b) for a, b in zip(mine[:4], other[:4], strict=True)]
    assert one.difference is not None
    assert one.difference.mean == pytest.approx(statistics.mean(differences))
    assert (one.difference.seeds, one.verdict) == (4, "reproduced")
    lines = sentences(found)
    assert lines[0].startswith(f"* {table.claims[0].text}, label skew: +5.00 % (95 % interval +")
    assert lines[0].endswith("4 seeds: **reproduced**.")
    assert "no seed in common: **undecided**" in lines[1]
    assert lines[-1] == "* Claims: 1 reproduced, 11 undecided."
    assert plain(found)[0]["verdict"] == "reproduced"


def test_every_deciding_table_has_claims_and_a_claim_names_rows_of_its_table():
    deciding = [table for table in load_tables().values() if table.id.startswith("decide-")]
    assert len(deciding) == 5
    assert all(table.claims for table in deciding)
    assert not any(table.claims for table in load_tables().values() if table not in deciding)


def test_the_time_of_a_run_is_that_of_runs_with_the_same_network_data_and_device(tmp_path):
    """A GPU's runs, another network's and other data's do not count; no run like it: None."""
    cache = Cache(tmp_path / "runs")
    (job,) = [
        one
        for one in jobs(find("decide-metavd"), Plan(seeds=1))
        if one.spec.values().get("adapt_steps") == 0 and one.spec.values()["beta"] == 0.5
    ]
    record = {
        "runner": "engine",
        "method": job.spec.method,
        "config": resolved(job.spec, 0)[0],
        "result": result(0.5, seconds=20.0),
    }
    config = record["config"]
    strange = [
        {**record, "config": {**config, "model": "cnn3-256"}, "result": result(0.5, seconds=900.0)},
        {**record, "config": {**config, "dataset": "fmnist"}, "result": result(0.5, seconds=900.0)},
        {**record, "result": result(0.5, "NVIDIA H200", 900.0)},
    ]
    assert expected(job, strange, "cpu") is None
    assert expected(job, [*strange, record], "cpu") == pytest.approx(20.0 / 10 * 300)
    assert expected(job, [*strange, record], "cuda") == pytest.approx(900.0 / 10 * 300)
    other = {**record, "method": "fedavg", "result": result(0.5, seconds=40.0)}
    assert expected(job, [other], "cpu") == pytest.approx(40.0 / 10 * 300)
    assert expected(job, [other, record], "cpu") == pytest.approx(20.0 / 10 * 300)
    assert not cache.everything()


@pytest.mark.slow
def test_the_driver_runs_what_is_missing_and_its_lines_are_taken(tmp_path):
    """One process without Flower and typer: small runs of FedMAP's table, a second call that finds
    them, and the lines brought into another cache; a broken line is left out.
    """
    block = tmp_path / "block"
    block.mkdir()
    for name in ("flwr", "typer", "rich"):
        (block / f"{name}.py").write_text(f"raise ModuleNotFoundError({name!r})")
    out = tmp_path / "out" / "runs.jsonl"
    call = [sys.executable, str(ROOT / "experiments" / "deciding.py"), "--quick", "--cpu-jobs", "1"]
    call += ["--tables", "decide-fedmap", "--device", "cpu", "--out", str(out)]
    call += ["--results", str(tmp_path / "a" / "runs")]
    environment = {**os.environ, "PYTHONPATH": f"{block}{os.pathsep}{ROOT}"}
    said = [
        subprocess.run(
            call, capture_output=True, text=True, check=True, env=environment, cwd=tmp_path
        ).stdout
        for _ in range(2)
    ]
    assert "9 runs, 9 to do" in said[0]
    assert "9 runs, 0 to do" in said[1]
    texts = out.read_text().splitlines()
    assert len(texts) == 9
    out.write_text("\n".join([*texts[:8], texts[8][:-40], '{"name": "../x"}']))
    heard: list[str] = []
    cache = Cache(tmp_path / "b" / "runs")
    assert take(cache, [out], heard.append) == 8
    assert heard[:2] == [f"{out}, line {number} is broken and left out" for number in (9, 10)]
    records = [json.loads(text) for text in texts[:8]]
    assert [line(name, cache.named(name) or {}) for name in sorted(r["name"] for r in records)] == [
        text + "\n" for text in sorted(texts[:8], key=lambda text: json.loads(text)["name"])
    ]
    with pytest.raises(ConfigError, match="cannot be read"):
        take(cache, [tmp_path / "none"], heard.append)
