"""`make gpu`: what its files hold, and the page that is made of them."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bayflower import bench

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu

    return gpu


def stage(gpu, name):
    return next(one for one in gpu.STAGES if one.name == name)


def test_what_pytest_says_is_counted(gpu, tmp_path):
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_fine(): pass\n"
        "@pytest.mark.parametrize('a', ['x'])\n"
        "def test_bad(a): assert a == 'y'\n"
    )
    call = [sys.executable, "-m", "pytest", "-q", "-rf", "-p", "no:cacheprovider", "test_some.py"]
    assert gpu.followed([*call, "--rootdir", str(tmp_path)], tmp_path / "none.log", 60)
    done = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, check=False)
    found = gpu.told(done.stdout, True, 1.0)
    assert found["counts"] == {"passed": 2, "failed": 1}
    assert found["not_passed"] == ["test_some.py::test_bad[x]"]
    assert found["complete"]
    assert not gpu.told(done.stdout, False, 1.0)["complete"]  # the time ended it
    assert not gpu.told("5 skipped in 0.01s", True, 1.0)["complete"]  # no GPU


def test_networks_go_on_where_they_stopped(gpu):
    rows = [{"network": "cnn", "method": name, "ms": 1} for name in gpu.METHODS]
    before = {"rows": [*rows, {"network": "vit", "method": "fedmap", "ms": 1}]}
    wanted = [name for name in gpu.NETWORKS if name != "cnn"]
    for at_once in (1, 4, 100):
        shares = gpu.remaining(stage(gpu, "networks"), before, at_once)
        assert len(shares) == min(at_once, len(wanted))
        words = [word for share in shares for word in share.split() if word != "--workload"]
        assert sorted(words) == sorted([*wanted, *["networks"] * len(shares)])
    now = {"rows": [{"network": "vit", "method": "fedmap", "ms": 2}]}
    both = gpu.together(stage(gpu, "networks"), before, now)["rows"]
    assert [row["ms"] for row in both] == [1] * len(gpu.METHODS) + [2]
    assert gpu.together(stage(gpu, "races"), before, now) == now


def test_every_stage_is_a_suite_with_known_words(gpu):
    for one in gpu.STAGES[1:]:
        suite, *words = one.words.split()
        assert suite in bench.SUITES
        named = {key: [] for key in ("--workload", "--method")}
        for key, value in itertools.pairwise(words):
            named.get(key, []).append(value)
        bench.Options(methods=tuple(named["--method"]), workloads=tuple(named["--workload"]))


def test_the_page_has_the_numbers_of_the_files(gpu, tmp_path):
    names = ("fedper", "fedavg")
    options = bench.Options("cpu", methods=names, workloads=("digits",), rounds=1, one_by_one=False)
    quick = bench.run("methods", options, tmp_path / "methods.json", lambda line: None)
    raced = json.loads((ROOT / "benchmarks" / "results" / "races_h200.json").read_text())
    (tmp_path / "races.json").write_text(json.dumps(raced | {"complete": False}))
    of_ten = [row for row in raced["rows"] if row["workload"] == "cnn3-10"]
    of_ten += [{"case": "metavd on cnn3-10", "method": "metavd", "failed": "no memory"}]
    of_ten += [row | {"method": "reptile", "ms": 2 * row["ms"]} for row in of_ten[:1]]
    (tmp_path / "overheads.json").write_text(json.dumps(raced | {"rows": of_ten}))
    found = gpu.page(tmp_path)
    for row in quick["rows"]:
        assert (
            f"| {row['method']} | float32 | {row['ms']:.1f} | {row['fedper_ratio']:.2f} |" in found
        )
    for row in raced["rows"]:
        assert (
            f"| {row['total']:.2f} s | {row['ms']:.2f} | {row['samples_per_second']:,} |" in found
        )
    assert f"| {of_ten[0]['samples_per_second']:,} | 0.50 |" in found  # half of Reptile's time
    assert "Not measured: metavd on cnn3-10: no memory" in found
    assert found.count("Not complete") == 1


def test_the_page_has_steps_of_clients_one_by_one(gpu, tmp_path):
    options = bench.Options("cpu", workloads=("digits",), rounds=1)
    quick = bench.run("single", options, tmp_path / "single.json", lambda line: None)
    (row,) = quick["rows"]
    found = gpu.page(tmp_path)
    assert f"| fedavg | float32 | plain | {row['ms']:.1f} | {row['ms_a_step']:.3f} |" in found
    assert "1 ms a step" in found


def test_pages_say_why_numbers_differ(gpu, tmp_path):
    file = ROOT / "benchmarks" / "results" / "gpu_h200" / "networks.json"
    content = json.loads(file.read_text())
    (tmp_path / "networks.json").write_text(json.dumps(content))
    assert "Hardswish" in gpu.page(tmp_path)
    fine = [row for row in content["rows"] if (row.get("apart") or 0) < 1e-9]
    (tmp_path / "networks.json").write_text(json.dumps(content | {"rows": fine}))
    assert "Hardswish" not in gpu.page(tmp_path)


def test_the_page_names_the_kernels_of_a_round(gpu, tmp_path):
    file = ROOT / "benchmarks" / "results" / "gpu_h200" / "profile.json"
    (tmp_path / "profile-ten.json").write_text(file.read_text())
    found, listed = gpu.page(tmp_path), 0
    for row in json.loads(file.read_text())["rows"]:
        assert (
            f"| {row['method']} | {row['precision']} | {row['stage']} | {row['ms']:.2f} |" in found
        )
        for kernel in row.get("kernels", ()):
            listed += 1
            assert f"{kernel['calls']} times | {kernel['ms']:.2f} | |" in found
    assert listed > 0
