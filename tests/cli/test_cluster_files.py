"""The files for Slurm and Kubernetes say what they should, and their commands can be parsed."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import yaml

from bayflower.config import parse

FOLDER = Path(__file__).parents[2] / "examples" / "cluster"
# stand-ins that print what they are given: a dry run, as Slurm would do it on the first machine
SCONTROL = '#!/bin/sh\n[ "$1 $2" = "show hostnames" ] && printf "first\\nsecond\\n"\n'
SRUN = '#!/bin/sh\nfor word in "$@"; do printf "%s\\n" "$word"; done\n'


def checked(words: list[str]) -> dict[str, str]:
    """Return the options of a `bayflower run`, whose settings must be valid."""
    assert words[:3] == ["bayflower", "run", "fedmap"]
    pairs = list(zip(words[3::2], words[4::2], strict=False))
    given = dict(value.split("=") for name, value in pairs if name == "--set")
    options = dict(pairs)
    given |= {"workers": options["--workers"], "dataset": options["--dataset"]}
    run = parse("fedmap", {**given, "rounds": options["--rounds"]})
    assert run.settings.workers == "auto"
    assert run.settings.checkpoint_every == 5
    assert run.settings.worker_block > 0  # more than sixteen workers
    return options


def dry_run(folder: Path) -> list[str]:
    """Return the words that srun is given."""
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    job = {"JOB_NODELIST": "first,second", "JOB_NUM_NODES": "2", "CPUS_PER_TASK": "8"}
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "OUT": str(folder / "run")}
    env |= {f"SLURM_{name}": value for name, value in job.items()}
    script = str(FOLDER / "slurm.sh")
    done = subprocess.run(["bash", script], env=env, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_the_slurm_script_starts_ray_on_all_machines_and_one_run(tmp_path):
    subprocess.run(["bash", "-n", str(FOLDER / "slurm.sh")], check=True)
    words = dry_run(tmp_path)
    ray, run = words[: words.index("--")], words[words.index("--") + 1 :]
    assert ray[:2] == ["--nodes=2", "--ntasks-per-node=1"]
    assert ray[2:6] == ["ray", "symmetric-run", "--address", "first:6379"]
    assert ray[ray.index("--min-nodes") + 1] == "2"
    assert ray[ray.index("--num-cpus") + 1] == "8"
    assert run[:2] == ["env", "RAY_ADDRESS=first:6379"]
    checked(run[2:])
    assert run[-1] != "--resume"


def test_a_slurm_job_that_is_submitted_again_goes_on(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint.safetensors").touch()
    assert dry_run(tmp_path)[-1] == "--resume"


def test_the_kuberay_manifest_is_a_job_with_workers(tmp_path):
    job, claim = yaml.safe_load_all((FOLDER / "kuberay.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    images = {
        one["image"] for group in (head, workers) for one in group["template"]["spec"]["containers"]
    }
    assert len(images) == 1
    (volume,) = head["template"]["spec"]["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    shell = shlex.split(job["spec"]["entrypoint"])
    assert shell[:2] == ["sh", "-c"]
    checked(shlex.split(shell[2]))
    subprocess.run(["sh", "-n", "-c", shell[2]], check=True)


def test_the_manifest_names_the_ray_that_is_installed_here():
    pins = (FOLDER.parents[1] / "constraints.txt").read_text().splitlines()
    (pin,) = [line.partition("==")[2] for line in pins if line.startswith("ray==")]
    job, _ = yaml.safe_load_all((FOLDER / "kuberay.yaml").read_text())
    assert job["spec"]["rayClusterSpec"]["rayVersion"] == pin.split()[0]
