"""`bayflower.fit`: train one method on clients' data with one's own network, on any engine."""

from __future__ import annotations

import inspect
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .. import methods
from ..config import ENGINES, parse
from ..engines import Prepared
from ..errors import ConfigError
from ..files import checkpoint, place
from ..files.records import Progress
from ..files.trackers import Wanted, tracked
from ..files.tracking import together
from ..networks import own
from .handed import data_in, network_of
from .method import Method, check_settings, method_of
from .progress import Shown, bar, is_hidden
from .result import Result
from .trackers import wanted
from .training import Job, carried_out
from .watching import SHARE, Patience, Watcher, Which, callbacks_of, keep, rounds_by
from .words import spoken


def fit(
    method: str | Method,
    data: Any,
    *,
    model: Any = "auto",
    rounds: int | None = None,
    seed: int | None = None,
    device: str | None = None,
    engine: str = "fused",
    workers: int | str | None = None,
    target: str | Sequence[str] | None = None,
    site: str | None = None,
    test: Any = None,
    num_classes: int | None = None,
    standardise: bool = False,
    name: str = "data",
    callbacks: Any = None,
    patience: int | None = None,
    monitor: str = "accuracy",
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Shown = "auto",
    verbose: bool = False,
    port: int = 0,
    tensorboard: bool = False,
    mlflow: str | Path = "",
    wandb: str = "",
    **settings: Any,
) -> Result:
    """Train a method and return its result: metrics, curves, personal models and a report.

    method       a name (`bayflower methods`), or `bayflower.Method(name, …)` with settings
    data         clients' data: a list or dict of clients, each (x, y), a training and a test part,
                 a torch Dataset, a DataLoader or a data frame; one data frame with a column of
                 sites; a Hugging Face Dataset; a Flower partitioner; paths; or a data set's name
    model        a network: the class of a torch.nn.Module or a function that returns one (given
                 `input_shape`, `num_classes` and `num_outputs` if it has such parameters), a
                 module, a name of `bayflower models`, or "package.module:factory"
    rounds       rounds of training [50]
    seed         seed of partition, initialisation, batches and client sampling [0]
    device       cpu, cuda, cuda:N or auto
    engine       fused, loop, ray or deployment; the last two import the network by its name
    workers      fused: processes that share the clients, a number or auto [0: none]; needs Ray
    target       data frames and files: column of the target, or a list of columns
    site         data frames and files: column of the sites, each of which is a client
    test         test samples: a column that marks them, a file, or a share of each client's [0.2]
    num_classes  arrays: number of classes, if some do not occur
    standardise  arrays (N, D): each client standardises its columns, and NaN is missing
    name         what to call data that are given as objects
    callbacks    a function of (round, numbers) or (round, numbers, run), or several; one that
                 returns True ends the run
    patience     early stopping: rounds without a better one on validation samples, which are held
                 out of the training samples of training clients (setting `validation`, 0.2). The
                 rounds found are then trained on all training samples
    monitor      what early stopping looks at: accuracy, balanced_accuracy_mean or nll
    out          folder for result.json, checkpoints and models, as the command line writes it; None
                 = a temporary one, which lasts as long as the result
    resume       go on with the run in `out`; a finished one is returned, none is started
    overwrite    replace the run in `out`
    progress     a bar: auto = at a terminal or in a notebook
    verbose      show the log
    port         ray and deployment: port of the SuperLink on loopback; 0 = any free one
    tensorboard  write each round's numbers to the folder `tensorboard` of the run
    mlflow       track in MLflow: a tracking URI, or a folder for a database of its own
    wandb        track in Weights & Biases: the name of a project
    settings     any setting of `bayflower settings METHOD`, e.g. lr, local_epochs, head
    """
    with spoken(verbose):
        chosen = method_of(method)
        check_settings(chosen.name, settings, tuple(inspect.signature(fit).parameters))
        if engine not in ENGINES:
            raise ConfigError(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}")
        hidden, functions = is_hidden(progress), callbacks_of(callbacks)
        trackers = wanted(tensorboard, mlflow, wandb)
        usual = {"rounds": rounds, "seed": seed, "device": device, "workers": workers}
        given = shared(settings, **usual) | chosen.settings
        given["model"], known = network_of(given.pop("model", model), engine)
        share = given.pop("validation", SHARE) if patience is not None else None
        home, folder = folder_for(out)
        how = {"target": target, "site": site, "test": test, "num_classes": num_classes}
        whole = own.is_own(given["model"])
        with (
            own.given(known),
            data_in(
                folder, data, given, **how, standardise=standardise, whole=whole, name=name
            ) as given,
        ):
            most = parse(chosen.name, given).settings.rounds  # raises if a setting is invalid
            if out is not None and not (resume or overwrite):
                refuse(folder)
            choice: dict[str, Any] = {}
            if patience is not None:
                limit = Patience(patience, monitor, float(share))  # type: ignore[arg-type]
                watch = searching(methods.get(chosen.name).title, most, hidden)
                given, choice = rounds_by(limit, chosen.name, given, engine, folder, watch, port)
            run = parse(chosen.name, given)
            which = Which(chosen.label, chosen.name, run.settings.seed, folder)
            watcher = Watcher(functions, which)
            there = place.held(folder) if resume else None
            if there is not None and there.finished and there.round >= run.settings.rounds:
                checkpoint.to_resume(folder, run)  # raises if it is another run
                return Result(folder, known, home)
            job = Job(
                run=run,
                given=given,
                engine=engine,
                folder=folder,
                watch=lambda prepared: watching(prepared, watcher, hidden, trackers, folder),
                refuse=lambda: refuse(folder),
                resume=there is not None,
                overwrite=overwrite,
                port=port,
            )
            watcher.finish(carried_out(job)["rounds"])
            if choice:  # a run that was replaced has lost it
                keep(folder, choice)
        return Result(folder, known, home)


class Home:
    """A temporary folder that is removed with the last object that has it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="bayflower-"))
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)


def folder_for(out: str | Path | None) -> tuple[Home | None, Path]:
    """Return (a temporary folder if none was given, the folder)."""
    if out is not None:
        return None, Path(out)
    home = Home()
    return home, home.folder


def refuse(folder: Path) -> None:
    """Raise if a folder holds a run."""
    there = place.held(folder)
    if there is None:
        return
    said = f"method {there.config.get('method')}, seed {there.config.get('seed')}"
    state = "a finished run" if there.finished else f"a run that stopped after round {there.round}"
    raise ConfigError(
        f"{folder} holds {state} ({said}); give resume=True to go on with it, overwrite=True to "
        f"replace it, or another out, e.g. {str(place.next_free(folder))!r}"
    )


@contextmanager
def watching(
    prepared: Prepared, watcher: Watcher, hidden: bool, trackers: Wanted, folder: Path
) -> Iterator[Progress]:
    """Give a progress function that shows a bar, tells the trackers and calls the user's
    functions.
    """
    title = methods.get(prepared.run.method).title
    with (
        tracked(trackers, prepared.run, prepared.engine, folder) as track,
        bar(prepared.run.settings.rounds, title, hidden) as shown,
    ):
        yield together(shown, track, watcher.progress)


def searching(title: str, most: int, hidden: bool) -> Any:
    """Return a context that shows a bar while the number of rounds is sought."""

    @contextmanager
    def watch(see: Progress) -> Iterator[Progress]:
        with bar(most, f"{title}: number of rounds", hidden) as shown:
            yield together(shown, see)

    return watch


def shared(settings: Mapping[str, Any], **usual: Any) -> dict[str, Any]:
    """Return settings with those arguments that were given."""
    return {**settings, **{key: value for key, value in usual.items() if value is not None}}
