"""What `fit` returns: a run's folder with its metrics, curves, personal models and report."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..data.identity import whose
from ..errors import ConfigError
from ..files import checkpoint, place
from ..files.texts import write_json
from ..files.tracking import flat as numbers_of
from ..networks import own
from ..report import flat, write_report
from ..report.collect import Found, Group, load
from ..report.learning import ending
from ..report.text import BLOCKS, number, percent
from ..report.verdict import leading
from .words import spoken

if TYPE_CHECKING:
    from ..personal import Personal
    from ..personal.runs import Opened

MOST = 20  # clients shown in a notebook


def table(rows: list[dict[str, Any]], what: str) -> Any:
    """Return rows as a pandas data frame."""
    try:
        import pandas
    except ImportError:
        raise ConfigError(
            f"{what} is a pandas data frame, and pandas is not installed; pip install pandas, or "
            f"take {what}_rows, a list of dicts"
        ) from None
    return pandas.DataFrame(rows)


class Result:
    """A finished run.

    folder   where it is, as the command line writes it
    result   the content of result.json
    metrics  a data frame: one row for each client of each tested model
    curves   a data frame: one row for each round
    models   the personal models, by the client's name
    """

    def __init__(
        self, folder: str | Path, network: own.Named | None = None, home: Any = None
    ) -> None:
        """Take the folder of a run. `network` is a network that cannot be imported, `home` a
        temporary folder that lasts as long as this object.
        """
        self.folder, self.network, self._home = Path(folder), network, home
        self.result: dict[str, Any] = load(self.folder / place.RESULT)
        self._loaded: dict[int, Personal] = {}

    @classmethod
    def load(cls, folder: str | Path, model: Any = None) -> Result:
        """Return the result of a run in a folder, written by `fit` or by the command line; `model`
        is its network, if that cannot be imported by its name.
        """
        with spoken():
            home = place.the_run(Path(folder))
            if not (home / place.RESULT).exists():
                raise ConfigError(f"{folder} has no finished run; give the `out` of one")
            found = cls(home)
            if model is not None:
                name = found.result["config"]["model"]
                found.network = own.named(model)._replace(name=name, only_here="it was given")
            return found

    # -- numbers -----------------------------------------------------------------------------------
    @property
    def metrics_rows(self) -> list[dict[str, Any]]:
        """Return the rows of `metrics` as dicts."""
        return flat.of_clients([self.found])

    @property
    def metrics(self) -> Any:
        """Return one row for each client of each tested model, as a data frame."""
        return table(self.metrics_rows, "metrics")

    @property
    def curves_rows(self) -> list[dict[str, Any]]:
        """Return the rows of `curves` as dicts; they have the same keys."""
        rows = [numbers_of(record) for record in self.result["rounds"]]
        keys = dict.fromkeys(key for row in rows for key in row)
        return [{key: row.get(key) for key in keys} | {"round": int(row["round"])} for row in rows]

    @property
    def curves(self) -> Any:
        """Return one row for each round, as a data frame: losses, seconds, bytes, and the metrics
        of the rounds that were tested.
        """
        return table(self.curves_rows, "curves")

    @property
    def accuracy(self) -> float:
        """Return the personal models' accuracy on the clients' test samples."""
        name, value = self.leading
        if name != "accuracy":
            raise ConfigError(f"this run has no classes; its {name} is in result.leading")
        return value

    @property
    def leading(self) -> tuple[str, float]:
        """Return the metric by which runs of this task are compared, and its value: accuracy, or
        the RMSE of numbers.
        """
        block = self.result["final"]["personal"]
        name = leading([Group("", (self.found,))])
        return name, float(block[name]) if block.get(name) is not None else math.nan

    @cached_property
    def found(self) -> Found:
        """Return the run as reports see it."""
        return Found(self.folder, self.result)

    @property
    def clients(self) -> dict[int, str]:
        """Return the clients' names by number."""
        return {client: known.name for client, known in self.found.clients.items()}

    # -- models ------------------------------------------------------------------------------------
    @cached_property
    def _opened(self) -> Opened:
        from ..personal.runs import open_run

        with own.given(self.network):
            return open_run(self.folder)

    def number_of(self, client: int | str) -> int:
        """Return the number of a client that is given by its number or name."""
        names = self.clients
        if isinstance(client, int) and client in names:
            return client
        found = whose(str(client), names)
        if len(found) != 1:
            known = ", ".join(list(names.values())[:10]) + (", …" if len(names) > 10 else "")
            raise ConfigError(f"there is no client {client!r}; there are {known}")
        return found[0]

    def personal(self, client: int | str) -> Personal:
        """Return a client's own model, by its number or name: what `load_personal` returns. It is
        kept in the folder `personal` of the run.
        """
        from ..personal import load_personal
        from ..personal.runs import export_one, finished

        with spoken():
            number = self.number_of(client)
            if number not in self._loaded:
                into, formats = self.folder / "personal", ("safetensors",)
                with own.given(self.network):
                    if finished(self._opened, number, into, formats) is None:
                        export_one(self._opened, number, into / f"client-{number}", formats)
                    name = str(self.result["config"]["model"])
                    factory = own.factory_of(name) if own.is_own(name) else None
                self._loaded[number] = load_personal(into / f"client-{number}", factory)
            return self._loaded[number]

    @property
    def models(self) -> Models:
        """Return the personal models of all clients by name, each made when it is asked for."""
        return Models(self)

    # -- files -------------------------------------------------------------------------------------
    def report(self, file: str | Path | None = None, features: str = "auto") -> Path:
        """Write the report, one HTML page, and return its path; default: report.html in the run's
        folder.
        """
        path = Path(file) if file is not None else self.folder / "report.html"
        with spoken(), own.given(self.network):
            write_report([self.folder], path, features)
        return path

    def save(self, out: str | Path) -> Path:
        """Copy the run to a folder, which must not exist or be empty, and return it; from then on
        the result belongs to it.
        """
        target = Path(out)
        if target.exists() and any(target.iterdir()):
            raise ConfigError(f"{target} is not empty; save to another folder")
        shutil.copytree(self.folder, target, dirs_exist_ok=True)
        before, after = str(self.folder.resolve()), str(target.resolve())
        dataset = str(self.result["config"]["dataset"])
        if dataset.startswith((before, str(self.folder))):
            inside = Path(dataset).resolve().relative_to(before)
            config = {**self.result["config"], "dataset": str(Path(after) / inside)}
            write_json(target / place.RESULT, {**self.result, "config": config})
            if saved := checkpoint.read(target):
                moved = {**saved.config, "dataset": config["dataset"]}
                checkpoint.write(target, saved._replace(config=moved))
            self.result["config"] = config
        self.folder, self._home = target, None
        for name in ("found", "_opened"):
            self.__dict__.pop(name, None)
        return target

    # -- for a person ------------------------------------------------------------------------------
    def __repr__(self) -> str:
        result, rounds = self.result, len(self.result["rounds"])
        return (
            f"<Result of {result['method']} on {result['dataset']}: {result['num_clients']} "
            f"clients, {rounds} rounds, {self._shown()}, in {self.folder}>"
        )

    def _shown(self) -> str:
        name, value = self.leading
        return f"{name} {value:.1%}" if name == "accuracy" else f"{name.upper()} {value:.4f}"

    def _repr_html_(self) -> str:
        result, final = self.result, self.result["final"]
        head = (
            f"{result['method']} on {result['dataset']}: {result['num_clients']} clients, "
            f"{len(result['rounds'])} rounds, seed {result['seed']}, engine {result['engine']}"
        )
        keys: tuple[str, ...] = ("accuracy", "balanced_accuracy", "nll")
        heads: tuple[str, ...] = ("accuracy %", "balanced %", "NLL")
        if self.leading[0] != "accuracy":
            keys, heads = ("rmse", "nll", "crps"), ("RMSE", "NLL", "CRPS")
        models = [
            (title, *(final[view].get(key) for key in keys))
            for view, title in BLOCKS.items()
            if final.get(view)
        ]
        columns = ("model", *heads)
        some = final["personal"]["per_client"]
        each = [
            (row.get("name") or row["client"], *(row.get(k) for k in (keys[0], "nll")))
            for row in some[:MOST]
        ]
        more = f"<p>… and {len(some) - MOST} more clients</p>" if len(some) > MOST else ""
        note = ending(result)
        return (
            f"<div><b>{escape(head)}</b>{html_table(columns, models)}"
            f"{f'<p>Note: {escape(str(note))}.</p>' if note else ''}"
            f"<details><summary>clients</summary>"
            f"{html_table(('client', heads[0], 'NLL'), each)}{more}</details>"
            f"<small>{escape(str(self.folder))}</small></div>"
        )


def html_table(columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    """Return a small table for a notebook; columns with % are shares."""
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    lines = []
    for first, *rest in rows:
        shown = [
            percent(value) if name.endswith("%") else number(value)
            for name, value in zip(columns[1:], rest, strict=True)
        ]
        cells = "".join(f"<td>{escape(str(one))}</td>" for one in (first, *shown))
        lines.append(f"<tr>{cells}</tr>")
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


class Models(Mapping[str, "Personal"]):
    """Personal models by the client's name or number, each made when it is asked for."""

    def __init__(self, result: Result) -> None:
        self.result = result

    def __getitem__(self, client: int | str) -> Personal:
        try:
            return self.result.personal(client)
        except ConfigError as error:
            if "there is no client" in str(error):
                raise KeyError(str(error)) from None
            raise

    def __iter__(self) -> Iterator[str]:
        return iter(self.result.clients.values())

    def __len__(self) -> int:
        return len(self.result.clients)

    def __repr__(self) -> str:
        return f"<personal models of {', '.join(self)}>"
