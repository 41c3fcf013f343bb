"""Nothing is ever overwritten: folders of runs, and studies that are killed, resumed and mixed."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prefork import bayflower

from bayflower.config import parse
from bayflower.engines import prepare, run_to_result
from bayflower.errors import ConfigError
from bayflower.files import checkpoint, place
from bayflower.study import plan
from bayflower.study.runs import jobs_of

SETS = {"keep": 0.1, "local_epochs": 1, "device": "cpu", "calibration": "off"}
QUICK = ["--clients", "3", *(word for k, v in SETS.items() for word in ("--set", f"{k}={v}"))]


def prints(folder: Path) -> dict[str, str]:
    """Return a fingerprint of every file below a folder, and when it was written."""
    return {
        str(path.relative_to(folder)): f"{hashlib.sha256(path.read_bytes()).hexdigest()} "
        f"{path.stat().st_mtime_ns}"
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def unchanged(before: dict[str, str], folder: Path) -> bool:
    now = prints(folder)
    return bool(before) and all(now.get(name) == text for name, text in before.items())


# -- one run -------------------------------------------------------------------------------------
def test_a_finished_run_is_refused_with_three_ways_on(tmp_path):
    words = ["run", "local", "--rounds", "1", *QUICK]
    first = bayflower(*words, "--out", "runs/a", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    before = prints(tmp_path)
    done = bayflower(*words, "--out", "runs/a", cwd=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "runs/a holds a finished run" in line
    assert "--rounds 2 --out runs/a --resume" in line
    assert "--out runs/a-2" in line
    assert "--overwrite" in line
    assert unchanged(before, tmp_path)
    assert not (tmp_path / "runs" / "a-2").exists()
    # each of the three commands works as it is printed
    on = line.split("go on from it: ")[1].split("; ")[0].split()[1:]
    new = line.split("a new folder: ")[1].split("; ")[0].split()[1:]
    assert bayflower(*new, cwd=tmp_path).returncode == 0
    assert unchanged(before, tmp_path)
    assert bayflower(*on, cwd=tmp_path).returncode == 0
    assert len(json.loads((tmp_path / "runs/a/result.json").read_text())["rounds"]) == 2
    assert bayflower(*words, "--out", "runs/a", "--overwrite", cwd=tmp_path).returncode == 0
    assert len(json.loads((tmp_path / "runs/a/result.json").read_text())["rounds"]) == 1


def test_other_settings_have_no_command_that_goes_on(tmp_path):
    assert bayflower("run", "local", "--rounds", "1", *QUICK, "--out", str(tmp_path / "a")).stdout
    run = parse("local", {**SETS, "num_clients": 3, "rounds": 1, "lr": 0.5})
    with pytest.raises(ConfigError, match=r"a finished run .*; a new folder: .*; or --overwrite"):
        place.check_free(tmp_path / "a", run, "fused")
    with pytest.raises(ConfigError) as refused:
        place.check_free(tmp_path / "a", run, "fused")
    assert "--resume" not in str(refused.value)


def test_default_folders_tell_settings_apart(tmp_path):
    some = [
        {},
        {"rounds": 3},
        {"rounds": 3, "lr": 0.1},
        {"rounds": 3, "lr": 0.2},
        {"seed": 1},
        {"rounds": 3, "lr": 0.1, "beta": 0.1, "num_clients": 4},
        {"rounds": 3, "lr": 0.1, "beta": 0.1, "num_clients": 5},
        {"dataset": "a/x.npz"},
        {"dataset": "b/x.npz"},
        {"calibration": "off"},
    ]
    names = [place.usual_folder(parse("fedmap", given)).name for given in some]
    assert len(set(names)) == len(names)
    assert names[:3] == [
        "fedmap-digits-0",
        "fedmap-digits-0-rounds3",
        "fedmap-digits-0-rounds3-lr0.1",
    ]
    assert all(place.plain(name) == name and len(name) < 100 for name in names)
    one = parse("fedmap", {"rounds": 3})
    assert place.usual_folder(one, "loop").name == "fedmap-digits-0-rounds3-loop"
    # where it is computed is no other run
    elsewhere = parse("fedmap", {"rounds": 3, "device": "cpu", "data_dir": "other"})
    assert place.usual_folder(elsewhere) == place.usual_folder(one)


@pytest.mark.parametrize(
    "words",
    [
        ["run", "fedmap", "--dataset", "none.npz"],
        ["run", "fedmap", "--set", "partition=natural"],
        ["run", "fedmap", "--out", "deep/er/x", "--set", "min_size=100000"],
        ["compare", "fedmap", "local", "--seeds", "2", "--dataset", "none.npz"],
        ["compare", "fedmap", "local", "--seeds", "0"],
    ],
)
def test_a_refused_run_leaves_no_folder(tmp_path, words):
    done = bayflower(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_made_or_is_no_run_is_one_line(tmp_path):
    (tmp_path / "result.json").write_text("[]")
    run = parse("local", {})
    with pytest.raises(ConfigError, match="is not the result of a run"):
        place.check_free(tmp_path, run, "fused")
    with pytest.raises(RuntimeError), place.making(tmp_path / "a" / "b"):
        raise RuntimeError
    assert not (tmp_path / "a").exists()

    def written() -> None:
        with place.making(tmp_path / "a" / "b"):
            (tmp_path / "a" / "b" / "kept").write_text("")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        written()
    assert (tmp_path / "a" / "b" / "kept").exists()


def test_the_only_run_below_a_folder_is_found(tmp_path):
    for name in ("fedmap/seed-0", "local/seed-0", "local/seed-1"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "result.json").write_text("{}")
    assert place.the_run(tmp_path / "fedmap") == tmp_path / "fedmap" / "seed-0"
    assert place.the_run(tmp_path / "local" / "seed-1") == tmp_path / "local" / "seed-1"
    with pytest.raises(ConfigError, match=r"holds 2 runs; name one: .*seed-0, .*seed-1"):
        place.the_run(tmp_path / "local")
    assert place.the_run(tmp_path / "none") == tmp_path / "none"


def test_python_is_refused_too(tmp_path):
    ready = prepare(parse("local", {**SETS, "num_clients": 3, "rounds": 1}), "fused")
    first = run_to_result(ready, tmp_path)
    before = prints(tmp_path)
    with pytest.raises(ConfigError, match="holds a run; give another folder"):
        run_to_result(ready, tmp_path)
    assert prints(tmp_path) == before
    assert run_to_result(ready, tmp_path, overwrite=True)["final"] == first["final"]


# -- studies -------------------------------------------------------------------------------------
def compare(folder: Path, seeds: str, *more: str) -> subprocess.CompletedProcess:
    words = ["compare", "fedavg", "local", "--rounds", "1", "--jobs", "1", *QUICK]
    return bayflower(*words, "--seeds", seeds, "--out", "s", *more, cwd=folder)


def test_two_studies_in_one_folder_and_another_list_of_seeds(tmp_path):
    assert compare(tmp_path, "2").returncode == 0
    first = prints(tmp_path)
    assert sum(name.endswith("result.json") for name in first) == 4
    again = compare(tmp_path, "2")
    assert "4 of 4 runs are there already" in again.stdout
    assert prints(tmp_path) == first
    other = compare(tmp_path, "1,5")  # another list: one seed of it is there
    assert "2 of 4 runs are there already" in other.stdout
    assert unchanged(first, tmp_path)
    second = prints(tmp_path)
    assert compare(tmp_path, "2", "--set", "lr=0.1").returncode == 0  # another study
    assert unchanged(second, tmp_path)
    assert sum(name.endswith("result.json") for name in prints(tmp_path)) == 10
    assert {path.name[:6] for path in (tmp_path / "s" / "local").iterdir()} == {
        "seed-0",
        "seed-1",
        "seed-5",
    }
    third = prints(tmp_path)
    assert compare(tmp_path, "2", "--set", "lr=0.1").stdout.count("4 of 4 runs are there") == 1
    assert prints(tmp_path) == third


@pytest.mark.slow
def test_two_studies_at_the_same_time_do_each_run_once(tmp_path):
    """While one process holds a folder, another does not write to it; a lock ends with its
    process.
    """
    run = ["run", "local", "--rounds", "1", *QUICK, "--out", "s/local/seed-0"]
    with place.making(tmp_path / "s" / "local" / "seed-0"):
        refused = bayflower(*run, cwd=tmp_path)
        assert refused.returncode == 2
        assert "another process is doing the run" in refused.stderr
        assert f"(process {os.getpid()} on {socket.gethostname()}: " in refused.stderr
        words = ["compare", "local", "--rounds", "1", "--jobs", "1", *QUICK, "--seeds", "2"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
        second = subprocess.Popen(
            [sys.executable, "-m", "bayflower", *words, "--out", "s"],
            cwd=tmp_path,
            env=env,
            stdout=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + 100
        other = tmp_path / "s" / "local" / "seed-1" / "result.json"
        while not other.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert other.exists()  # it did the other run and waits for this one
        given = {**SETS, "num_clients": 3, "rounds": 1}
        run_to_result(prepare(parse("local", given), "fused"), tmp_path / "s" / "local" / "seed-0")
        before = prints(tmp_path / "s" / "local" / "seed-0")
        assert before.pop(".running")
    out, _ = second.communicate(timeout=100)
    assert second.returncode == 0
    assert "waiting" in out
    assert prints(tmp_path / "s" / "local" / "seed-0") == before
    assert not list(tmp_path.rglob(".running"))


def study_file(folder: Path, **top: object) -> Path:
    lines = [f"{key} = {json.dumps(value)}" for key, value in top.items()]
    settings = {**SETS, "num_clients": 2, "checkpoint_every": 1, "evaluate_every": 0}
    settings |= {"model": "mlp", "keep": 0.05}
    lines += ["[settings]", *(f"{key} = {json.dumps(value)}" for key, value in settings.items())]
    path = folder / "study.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_study_goes_on_and_changes_no_finished_run(tmp_path, jobs):
    """SIGKILL while the second run is under way."""
    path = study_file(tmp_path, methods=["local"], seeds=[0, 3, 5], out="s", jobs=jobs)
    text = path.read_text().replace("[settings]", "[settings]\nrounds = 15")
    path.write_text(text)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    victim = subprocess.Popen(
        [sys.executable, "-m", "bayflower", "study", "study.toml"],
        cwd=tmp_path,
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def under_way() -> list[Path]:
        return [
            one.parent
            for one in tmp_path.rglob(checkpoint.FILE)
            if not (one.parent / "result.json").exists()
        ]

    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        finished = list(tmp_path.rglob("result.json"))
        if finished and under_way():
            break
        time.sleep(0.01)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    time.sleep(0.5 if jobs > 1 else 0)  # its children end with it
    finished = sorted(one.parent for one in tmp_path.rglob("result.json"))
    assert 1 <= len(finished) < 3
    before = {folder: prints(folder) for folder in finished}
    stopped = {folder: checkpoint.read(folder).round for folder in under_way()}
    assert stopped
    time.sleep(0.3)
    assert stopped == {folder: checkpoint.read(folder).round for folder in stopped}
    done = bayflower("study", "study.toml", "--jobs", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{len(finished)} of 3 runs are there already" in done.stdout
    assert all(prints(folder) == files for folder, files in before.items())
    # the run that was killed ends with the numbers of one that was not
    (killed, *_) = stopped
    runs = {one.folder.name: one.run for one in plan.planned(plan.read(path))}
    peace = run_to_result(prepare(runs[killed.name], "fused"), tmp_path / "peace")
    assert json.loads((killed / "result.json").read_text())["final"] == peace["final"]


def test_a_study_file_has_presets_tuned_values_and_variants(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tuned.toml").write_text(
        "[fedmap]\ntrials = 2\n[fedmap.values]\nlr = 0.125\nsigma2 = 7.0\n"
    )
    (tmp_path / "study.toml").write_text(
        'seeds = [4, 2]\npreset = "paper"\ntuned = "tuned.toml"\n'
        "[settings]\nrounds = 3\nsigma2 = 9\n[methods.local]\n[methods.fedmap]\nbatch_size = 5\n"
        '[methods."wide prior"]\nmethod = "fedmap"\nsigma2 = 500\ntuned = ""\n'
    )
    study = plan.read(Path("study.toml"))
    assert (study.seeds, study.out) == ((4, 2), Path("runs/study"))
    runs = {one.entry.label: one.run for one in plan.planned(study) if one.run.settings.seed == 4}
    own, wide = runs["fedmap"], runs["wide prior"]
    # [settings] wins over tuned values, these over the preset
    assert (own.training.lr, own.options.sigma2, own.training.batch_size) == (0.125, 9.0, 5)
    paper = parse("fedmap", {"preset": "paper"})
    assert (wide.options.sigma2, wide.training.lr) == (500.0, paper.training.lr)
    assert runs["local"].settings.rounds == 3
    folders = {str(one.folder) for one in plan.planned(study)}
    assert "runs/study/wide_prior/seed-2" in folders
    assert len(folders) == 6


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("methods = [", "cannot be read"),
        ("methods = []", "names no methods"),
        ('methods = ["fedmop"]', "fedmop"),
        ('method = ["fedmap"]', "did you mean 'methods'"),
        ('methods = ["fedmap"]\nrounds = 3', "settings belong below"),
        ('methods = ["fedmap"]\nseeds = [1, 1]', "seeds must be"),
        ('methods = ["fedmap"]\nseeds = true', "seeds must be"),
        ('methods = ["fedmap"]\nengine = "fast"', "engine must be one of"),
        ('methods = ["fedmap"]\njobs = "many"', "cannot be used"),
        ('methods = ["fedmap"]\ntuned = "none.toml"', "not a file written by `bayflower tune`"),
        ('methods = ["fedmap"]\n[settings]\nseed = 3', "give seeds instead"),
        ('methods = ["fedmap"]\n[settings]\nsigme2 = 3', "did you mean 'sigma2'"),
        ('[methods.fedmap]\nlr = "fast"', "lr must be a number"),
        ('[methods."a b"]\nmethod = "local"\n[methods.a_b]\nmethod = "local"', "is there twice"),
    ],
)
def test_a_study_file_that_cannot_be_used_is_one_line(tmp_path, text, words):
    (tmp_path / "study.toml").write_text(text)
    with pytest.raises(ConfigError, match=words) as refused:
        plan.read(tmp_path / "study.toml")
    assert "\n" not in str(refused.value)


def test_how_many_runs_at_a_time(monkeypatch):
    from bayflower.study import runs

    def jobs(seeds: str, engine: str = "fused", wanted: int = 0, **more: str) -> int:
        entries = plan.of_methods(["fedavg", "local"], {"device": "cpu", **more})
        study = plan.Study(entries, plan.seeds_of(seeds), Path("nowhere"), engine, wanted)
        return jobs_of(study, plan.planned(study))

    monkeypatch.setattr(runs, "cores", lambda: 6)
    monkeypatch.setattr(runs, "free_memory", lambda: 2**40)
    assert [jobs("1"), jobs("2"), jobs("9"), jobs("9", "ray"), jobs("9", wanted=3)] == [
        1,
        4,
        6,
        1,
        3,
    ]
    assert jobs("9", workers="2") == 1
    monkeypatch.setattr(runs, "free_memory", lambda: 5 * 2**30)
    assert jobs("9") == 2
