"""MLflow and Weights & Biases beside TensorBoard: each run of ours is one run there, with its
numbers, settings, tags and files. A run that is resumed goes on there too.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from .. import __version__
from ..config import Run
from ..errors import BayflowerError, ConfigError, in_one_line
from .place import RESULT
from .texts import read_json, write_json
from .tracking import TensorBoard, each_round, flat

FILE = "trackers.json"  # the ids of a run in other tools, by tool
EXPERIMENT = "bayflower"
LIBRARIES = {"tensorboard": "TensorBoard", "mlflow": "MLflow", "wandb": "Weights & Biases"}
BATCH = 100  # parameters that MLflow takes at a time


@dataclass(frozen=True)
class Wanted:
    """The trackers of a run or study. `mlflow` is a tracking URI or a folder, `wandb` a project,
    `group` the name of the study. `report` writes a report of a run's folder to a file.
    """

    tensorboard: bool = False
    mlflow: str = ""
    wandb: str = ""
    group: str = ""
    report: Callable[[Path, Path], Any] | None = None

    def check(self) -> None:
        """Raise if a library is missing, or nobody is logged in."""
        for name, title in LIBRARIES.items():
            if getattr(self, name) and importlib.util.find_spec(name) is None:
                raise ConfigError(
                    f"{title} is not installed; install it with: pip install 'bayflower[{name}]'"
                )
        if self.wandb and not os.environ.get("WANDB_MODE"):
            import wandb

            if wandb.api.api_key is None:
                raise ConfigError(
                    "Weights & Biases knows no API key; log in with: wandb login, or keep the runs "
                    "on this machine with: WANDB_MODE=offline"
                )

    def words(self) -> list[str]:
        """Return the options of `bayflower run` that ask for the same."""
        found = ["--tensorboard"] if self.tensorboard else []
        found += ["--mlflow", located(self.mlflow)] if self.mlflow else []
        found += ["--wandb", self.wandb] if self.wandb else []
        return [*found, "--track-group", self.group] if found and self.group else found


class Tracker(Protocol):
    """One run in another tool."""

    def __call__(self, round: int, numbers: dict[str, float]) -> None:
        """Take numbers of a round."""

    def finish(self, final: dict[str, float], files: list[Path]) -> None:
        """Take the final numbers and the files of a run that has ended well."""

    def close(self, failed: bool) -> None:
        """End the run there."""


def located(target: str) -> str:
    """Return MLflow's tracking URI of a target: a folder gets a database in it."""
    if "://" in target or target in ("databricks", "uc"):
        return target
    folder = Path(target).resolve()
    return f"sqlite:///{folder / 'mlflow.db'}"


class MLflow:
    """A run in MLflow."""

    def __init__(self, target: str, name: str, about: Mapping[str, Any], tags: Mapping[str, str]):
        from mlflow.entities import Metric, Param
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        self.metric, uri = Metric, located(target)
        store = Path(uri.removeprefix("sqlite:///")).parent if uri != target else None
        if store is not None:
            store.mkdir(parents=True, exist_ok=True)
        try:
            self.client = MlflowClient(tracking_uri=uri)
            self.old: dict[str, set[int]] | None = None
            known = tags.get("id")
            if known:
                self.id, self.old = known, {}
                self.client.update_run(known, "RUNNING")
                return
            found = self.client.get_experiment_by_name(EXPERIMENT)
            if found is None:
                try:
                    where = store and (store / "artifacts").as_uri()
                    number = self.client.create_experiment(EXPERIMENT, artifact_location=where)
                except MlflowException:  # another process made it just now
                    number = self.client.get_experiment_by_name(EXPERIMENT).experiment_id
            else:
                number = found.experiment_id
            self.id = self.client.create_run(number, run_name=name, tags=dict(tags)).info.run_id
            settings = [Param(key, str(value)) for key, value in about.items()]
            for start in range(0, len(settings), BATCH):
                self.client.log_batch(self.id, params=settings[start : start + BATCH])
        except MlflowException as error:
            raise BayflowerError(
                f"MLflow at {uri} does not take the run ({in_one_line(error)}); check --mlflow"
            ) from None

    def __call__(self, round: int, numbers: dict[str, float]) -> None:
        import time

        now = int(time.time() * 1000)
        fresh = [
            self.metric(name, value, now, round)
            for name, value in numbers.items()
            if round not in self.steps(name)
        ]
        self.client.log_batch(self.id, metrics=fresh)

    def steps(self, name: str) -> set[int]:
        """Return the rounds of a number that a resumed run has there already."""
        if self.old is None:
            return set()
        if name not in self.old:
            self.old[name] = {one.step for one in self.client.get_metric_history(self.id, name)}
        return self.old[name]

    def finish(self, final: dict[str, float], files: list[Path]) -> None:
        """Take the final numbers and the files of a run that has ended well."""
        for name, value in final.items():
            self.client.log_metric(self.id, f"final/{name}", value)
        for file in files:
            self.client.log_artifact(self.id, str(file))

    def close(self, failed: bool) -> None:
        """End the run there."""
        self.client.set_terminated(self.id, "FAILED" if failed else "FINISHED")


class Wandb:
    """A run in Weights & Biases; with WANDB_MODE=offline in the folder of the run."""

    def __init__(
        self, project: str, name: str, about: Mapping[str, Any], tags: Mapping[str, str], at: Path
    ) -> None:
        import wandb

        self.wandb, self.name = wandb, name
        settings = wandb.Settings(console="off", quiet=True, silent=True)
        self.run = wandb.init(
            project=project,
            name=name,
            id=tags.get("id"),
            resume="allow",
            group=tags.get("group"),
            tags=[tags["method"], f"seed-{tags['seed']}", tags["engine"], tags["dataset"]],
            config=dict(about),
            dir=str(at),
            reinit="create_new",
            settings=settings,
        )
        self.id = self.run.id
        self.run.define_metric("*", step_metric="round")

    def __call__(self, round: int, numbers: dict[str, float]) -> None:
        self.run.log({**numbers, "round": round})

    def finish(self, final: dict[str, float], files: list[Path]) -> None:
        """Take the final numbers and the files of a run that has ended well."""
        for name, value in final.items():
            self.run.summary[f"final/{name}"] = value
        artifact = self.wandb.Artifact(f"run-{self.id}", type="result")
        for file in files:
            artifact.add_file(str(file))
        self.run.log_artifact(artifact)

    def close(self, failed: bool) -> None:
        """End the run there."""
        self.run.finish(exit_code=int(failed))


@contextmanager
def tracked(
    wanted: Wanted, run: Run, engine: str, folder: Path
) -> Iterator[Callable[[list[Any]], None]]:
    """Give a progress function that sends each round's numbers to all trackers. They are opened
    with the first round, so that a run that is refused leaves nothing there.
    """
    opened: list[Tracker] = []
    progress: list[Callable[[list[Any]], None]] = []
    before = (folder / RESULT).exists()

    def see(records: list[Any]) -> None:
        if records and not progress:
            opened.extend(opened_for(wanted, run, engine, folder))
            progress.extend(each_round(one) for one in opened)
        for one in (*progress, *shown):
            one(records)

    board = TensorBoard(folder / "tensorboard") if wanted.tensorboard else None
    shown = [each_round(board)] if board else []
    failed = True
    try:
        yield see
        failed = False
        result = read_json(folder / RESULT)
        if result and (progress or not before):
            for number in range(1, len(result["rounds"]) + 1):  # what was missed, if any
                see(result["rounds"][:number])
        files = [folder / RESULT] if result else []
        if opened and result and wanted.report is not None:
            wanted.report(folder, folder / "report.html")
            files.append(folder / "report.html")
        for tracker in opened:
            tracker.finish(flat(result.get("final", {})), files)
    finally:
        if board is not None:
            board.__exit__()
        for tracker in opened:
            tracker.close(failed)


def opened_for(wanted: Wanted, run: Run, engine: str, folder: Path) -> list[Tracker]:
    """Return the trackers of a run; one that goes on has its ids in its folder."""
    about = {name: value for name, value in run.flat().items()}
    seed, dataset = str(run.settings.seed), Path(run.data.dataset).name
    name = f"{run.method}-{dataset}-{seed}"
    tags = {"method": run.method, "seed": seed, "engine": engine, "dataset": dataset}
    tags |= {"bayflower": __version__, **({"group": wanted.group} if wanted.group else {})}
    ids = read_json(folder / FILE)

    def told(tool: str, target: str) -> dict[str, str]:
        """Return the tags, with the id of a run that the same place has already."""
        there = ids.get(tool, {})
        return {**tags, **({"id": there["id"]} if there.get("at") == target else {})}

    found: list[Any] = []
    if wanted.mlflow:
        uri = located(wanted.mlflow)
        found.append(MLflow(wanted.mlflow, name, about, told("mlflow", uri)))
        ids["mlflow"] = {"at": uri, "id": found[-1].id}
    if wanted.wandb:
        found.append(Wandb(wanted.wandb, name, about, told("wandb", wanted.wandb), folder))
        ids["wandb"] = {"at": wanted.wandb, "id": found[-1].id}
    if found:
        write_json(folder / FILE, ids)
    return found
